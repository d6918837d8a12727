"""The table of where parameters live, against the arrays of a real state on eight devices."""

import collections
import dataclasses

import jax
import pytest
import sizes
from steps import run_config

from k3jax.config import ConfigError, MeshConfig
from k3jax.estimate import __main__ as command_line
from k3jax.estimate import draw, format_table, shares
from k3jax.model import parameters
from k3jax.optim import make_optimizer
from k3jax.parallel import Layout, make_mesh
from k3jax.step import abstract_decoder, init_state


def on(data, fsdp, **axes):
    return dataclasses.replace(run_config(model=sizes.SPLIT), mesh=MeshConfig(data, fsdp, **axes))


def held(config):
    """Bytes that the first device holds of parameters, and of parameters and optimizer state: of arrays that exist."""
    decoder = abstract_decoder(config)
    variables = parameters.variables(decoder)
    mesh = make_mesh(config.mesh, 8)
    layout = Layout.of(mesh, variables)
    optimizer, _, _ = make_optimizer(config, variables, spread=layout.spread)
    create = lambda: init_state(config, optimizer)  # noqa: E731
    quick = {"compiler_options": {"xla_backend_optimization_level": 0}}
    state = jax.jit(create, out_shardings=layout.shardings(jax.eval_shape(create)), **quick)()
    sums = collections.Counter()
    for name, tree in (("params", state.params), ("state", (state.params, state.opt_state))):
        for leaf in jax.tree.leaves(tree):
            counted = leaf.ndim > 0  # the optimizer's counters belong to no parameter
            shards = [shard for shard in leaf.addressable_shards if shard.device == mesh.devices.flat[0]]
            sums[name] += counted * shards[0].data.nbytes
    return sums["params"], sums["state"]


@pytest.mark.parametrize("axes", [{"data": 1, "fsdp": 8}, {"data": 2, "fsdp": 1, "expert": 2, "tensor": 2}])
def test_bytes_are_those_of_real_arrays(axes):
    config = on(**axes)
    mesh, found = shares(config)
    assert {name: size for name, size in mesh.shape.items() if name in axes or size > 1} == axes
    assert (sum(x.parameter_bytes for x in found), sum(x.state_bytes for x in found)) == held(config)
    assert sum(x.count for x in found) == sum(
        value.shape[0] if ".groups." in path else 1 for path, value in init_values(config).items()
    )


def init_values(config):
    decoder = abstract_decoder(config)
    return {path: variable.get_value() for path, variable in parameters.variables(decoder).items()}


def test_rows():
    """Two kinds by hand: output kernels in fp32 with momentum, split in 4, and a norm, whole, with Adam's two."""
    config = on(2, 4)
    kinds = {share.name: share for share in shares(config)[1]}
    output, norm = kinds["*.attention.o"], kinds["final.norm.weight"]
    assert output.spec == (None, None, "fsdp") and output.axes == ("heads", "head_dim", "embed")
    size = output.count * output.shape[0] * output.shape[1] * output.shape[2]
    assert output.parameter_bytes == size and output.state_bytes == 2 * size  # 4 bytes over 4 devices
    assert norm.spec == (None,) and norm.state_bytes == 3 * 4 * config.model.embed
    text = "\n".join(str(cell) for column in format_table([output]).columns for cell in column.cells)
    assert "embed[fsdp]" in text and "all" in text


def test_indivisible_sizes_are_named():
    with pytest.raises(ConfigError, match=r"cannot be split over mesh\.fsdp = 7"):
        shares(on(1, 7))


def test_picture():
    png = draw(shares(on(1, 8))[1], "small")
    assert png[:8] == b"\x89PNG\r\n\x1a\n" and len(png) > 10_000


def test_command_line(tmp_path, capsys):
    run = lambda *flags: command_line.main(["estimate", "--config=configs/k3.py:tiny", *flags])  # noqa: E731
    assert run("--config.mesh.fsdp=4", f"--picture={tmp_path}/shares.png") == 0
    out = capsys.readouterr().out
    assert out.startswith("tiny on 4 devices (data 1 x fsdp 4)") and (tmp_path / "shares.png").exists()
    mistakes = {
        "--config.mesh.fsdp=7": "cannot be split over mesh.fsdp = 7",
        "--show=time": "--show=time: there is: sharding",
        f"--picture={tmp_path}/none/x.png": "must be a .png in a folder that is there",
        "--config.mesh.fspd=2": "mesh.fspd is no field",
    }
    for flag, message in mistakes.items():
        assert run(flag) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1
