"""The table from logical axes to the mesh: specs by hand, and every misfit an error with names."""

import jax
import numpy as np
import pytest
import sizes
from jax.sharding import PartitionSpec as P
from steps import layout_of, run_config

from k3jax import config as configs
from k3jax.config import ConfigError, MeshConfig
from k3jax.data import load, stream_hash
from k3jax.model import parameters
from k3jax.parallel import Layout, make_mesh, partition_spec
from k3jax.step import abstract_decoder

SIZES = {"data": 2, "fsdp": 4}


@pytest.mark.parametrize(
    ("shape", "axes", "spec"),
    [
        ((264, 128), ("vocab", "embed"), P(None, "fsdp")),
        ((3, 128, 4, 32), ("layers", "embed", "heads", "head_dim"), P(None, "fsdp", None, None)),
        ((16, 64, 64), ("experts", "latent", "expert_mlp"), P(None, None, "fsdp")),
        ((16, 64, 64), ("experts", "expert_mlp", "latent"), P(None, "fsdp", None)),
        ((48, 4, 48), ("q_lora", "heads", "head_dim"), P("fsdp", None, None)),
        ((128, 48), ("embed", "q_lora"), P("fsdp", None)),  # the spare axis only where no other is split
        ((4, 4, 32), ("conv", "heads", "head_dim"), P(None, None, None)),
        ((128,), ("embed",), P()),
        ((3, 128), ("layers", "embed"), P()),  # a vector per layer
    ],
)
def test_spec(shape, axes, spec):
    assert partition_spec("x", shape, axes, SIZES) == spec


def test_axis_of_one_device_splits_nothing():
    assert partition_spec("x", (7, 5), ("vocab", "embed"), {"data": 8, "fsdp": 1}) == P(None, None)


def test_indivisible_size_is_named():
    with pytest.raises(ConfigError, match=r"blocks\.0\.q: embed of 6 cannot be split over mesh\.fsdp = 4"):
        partition_spec("blocks.0.q", (6, 4, 4), ("embed", "heads", "head_dim"), SIZES)


def test_two_axes_on_one_mesh_axis_are_named():
    rules = {"embed": "fsdp", "mlp": "fsdp"}
    with pytest.raises(ConfigError, match="w1: embed and mlp cannot both be split over mesh axis fsdp"):
        partition_spec("w1", (8, 8), ("embed", "mlp"), SIZES, rules)


def test_names_must_fit_the_shape():
    with pytest.raises(ConfigError, match="w1: 2 axes are called embed"):
        partition_spec("w1", (8, 8), ("embed",), SIZES)


def test_mesh_of_all_devices():
    one = dict.fromkeys(("data", "fsdp", "expert", "context", "tensor"), 1)
    assert dict(make_mesh(MeshConfig(), 8).shape) == one | {"data": 8}
    assert dict(make_mesh(MeshConfig(None, 4), 8).shape) == one | {"data": 2, "fsdp": 4}
    assert dict(make_mesh(MeshConfig(1, 2), 8, jax.devices()[:2]).shape) == one | {"fsdp": 2}
    mixed = make_mesh(MeshConfig(expert=2, tensor=2), 8)
    assert dict(mixed.shape) == one | {"data": 2, "expert": 2, "tensor": 2}
    assert [d.id for d in mixed.devices[0, 0, 0, 0]] == [0, 1]  # neighbours along tensor


@pytest.mark.parametrize(
    ("mesh", "rows", "named"),
    [
        (MeshConfig(3, 2), 6, r"mesh\.data x mesh\.fsdp = 3 x 2 = 6 is not the number of devices, 8"),
        (MeshConfig(None, 3), 8, "is not the number of devices, 8"),
        (MeshConfig(None, 16), 16, "is not the number of devices, 8"),
        (MeshConfig(2, 4), 12, r"12 rows cannot be split over mesh\.data x mesh\.fsdp = 2 x 4 devices"),
    ],
)
def test_bad_mesh(mesh, rows, named):
    with pytest.raises(ConfigError, match=named):
        make_mesh(mesh, rows)


@pytest.mark.parametrize(
    ("name", "fsdp"), [("tiny", 8), ("colab", 32), ("proxy_1b", 64), ("kimi_linear_48b", 128), ("k3_2p8t", 128)]
)
def test_published_sizes_split(name, fsdp):
    """No device holds much more than its share of the parameters, vectors and convolutions included."""
    config, sizes_of_axes = configs.load(f"configs/k3.py:{name}"), {"data": 1, "fsdp": fsdp}
    here = total = 0
    for path, variable in parameters.variables(abstract_decoder(config)).items():
        shape = variable.get_value().shape
        spec = partition_spec(path, shape, variable.get_metadata("logical_axes"), sizes_of_axes)
        total += np.prod(shape)
        here += np.prod(shape) / (fsdp if "fsdp" in spec else 1)
    assert here < 1.3 * total / fsdp


def test_indivisible_model_is_refused_before_it_runs():
    decoder = abstract_decoder(run_config(model=sizes.SMALL))
    with pytest.raises(ConfigError, match="expert_mlp of 14 cannot be split"):
        layout_of(decoder, 1, 4)


def test_rows_are_split():
    layout = layout_of(abstract_decoder(run_config(model=sizes.SPLIT)), 2, 4)
    placed = layout.place({"tokens": np.arange(16, dtype=np.int32).reshape(8, 2)})["tokens"]
    assert {shard.data.shape for shard in placed.addressable_shards} == {(1, 2)}
    np.testing.assert_array_equal(placed, np.arange(16).reshape(8, 2))
    assert isinstance(layout, Layout) and not layout.alone


@pytest.mark.parametrize(("data", "fsdp"), [(1, 1), (2, 1), (2, 2), (8, 1), (1, 8)])
def test_batch_does_not_know_the_mesh(data, fsdp):
    """What the devices hold together is the batch of that step, bit for bit."""
    config = configs.load("configs/k3.py:tiny").data
    corpus = load(config, 264)
    layout = layout_of(abstract_decoder(run_config(model=sizes.SPLIT)), data, fsdp)
    for step in (0, 7):
        batch = corpus.train_batches().batch(step)
        placed = layout.place(batch)
        assert {len(array.addressable_shards) for array in placed.values()} == {data * fsdp}
        assert stream_hash([jax.device_get(placed)]) == stream_hash([batch])
