"""Runs that start from weights: Hugging Face folders, checkpoints, frozen parameters; and runs that go wrong."""

import jax
import numpy as np
import pytest
from flax import nnx
from runs import SMALL, exact, run, write_corpus

from k3jax import checkpoint, hf
from k3jax import config as configs
from k3jax.model import parameters
from k3jax.model.decoder import Decoder


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A Hugging Face folder of the small model, with router biases that are not 0, and its decoder."""
    folder = tmp_path_factory.mktemp("hf") / "model"
    model = configs.load("configs/k3.py:tiny", [f"--config.{flag}" for flag in SMALL]).model
    decoder = Decoder(model, rngs=nnx.Rngs(7))
    decoder.set_router_bias(np.array([[0.25, -0.125, 0.5, -0.625]], np.float32))
    hf.save(decoder, folder)
    return folder, decoder


def restored(workdir):
    """Parameters and router bias of a run's last checkpoint."""
    config = configs.load("configs/k3.py:tiny", [f"--config.{flag}" for flag in SMALL])
    decoder = nnx.eval_shape(lambda: Decoder(config.model, rngs=nnx.Rngs(0)))
    like = {"params": parameters.values(decoder), "router_bias": jax.ShapeDtypeStruct((1, 4), np.float32)}
    return checkpoint.read_parameters(workdir, like)


def test_starts_from_published_weights(published, corpus, tmp_path):
    """With a rate of 0 for all but the head, everything else is the published weight bit for bit."""
    folder, decoder = published
    flags = (f"init_from={folder}", "optim.rate_scale=*=0,lm_head=0.5", "model.moe.balancing=none", "train.steps=2")
    assert run(tmp_path, corpus, *flags) == 0
    found, weights = restored(tmp_path), parameters.values(decoder)
    np.testing.assert_array_equal(found["router_bias"], decoder.router_bias())
    for path, value in weights.items():
        assert np.array_equal(found["params"][path], value) == (path != "lm_head"), path


def test_frozen_parameters_stay(published, corpus, tmp_path):
    folder, decoder = published
    flags = (f"init_from={folder}", "optim.frozen=embed,*.attention,*norm.weight", "train.steps=2")
    assert run(tmp_path, corpus, *flags) == 0
    found, weights = restored(tmp_path)["params"], parameters.values(decoder)
    still = {path for path, value in weights.items() if np.array_equal(found[path], value)}
    frozen = {p for p in weights if p == "embed" or ".attention." in p or p.endswith("norm.weight")}
    assert frozen < set(weights) and still - frozen <= {"blocks.0.head.0.attention_res.query"}
    assert frozen <= still


def test_starts_from_a_checkpoint(published, corpus, tmp_path):
    """A workdir as the start of another run; then that run's own checkpoint counts, not `init_from`."""
    folder, _ = published
    assert run(tmp_path / "first", corpus, f"init_from={folder}", "train.steps=1") == 0
    assert run(tmp_path / "second", corpus, f"init_from={tmp_path / 'first'}", "train.steps=1") == 0
    with_weights = exact(tmp_path / "second")[1]["train/loss"]
    assert with_weights != exact(tmp_path / "first")[1]["train/loss"]
    flags = (f"init_from={tmp_path / 'first' / 'checkpoints' / '1'}", "train.steps=1")
    assert run(tmp_path / "third", corpus, *flags) == 0
    assert exact(tmp_path / "third")[1]["train/loss"] == with_weights


def test_another_model_is_refused(published, corpus, tmp_path, capsys):
    folder, _ = published
    assert run(tmp_path / "a", corpus, f"init_from={folder}", "model.norm_eps=1e-6") == 2
    assert "model.norm_eps" in capsys.readouterr().err.splitlines()[-1]
    assert run(tmp_path / "b", corpus, f"init_from={folder}", "train.steps=1") == 0
    assert run(tmp_path / "c", corpus, f"init_from={tmp_path / 'b'}", "model.embed=24") == 2
    assert "attention.o is float32[1, 8, 16], not float32[1, 8, 24]" in capsys.readouterr().err.splitlines()[-1]


def test_config_of_a_folder(published, corpus, tmp_path):
    """`configs/fine_tune.py:FOLDER` is the folder's model, its weights and its tokenizer."""
    folder, decoder = published
    config = configs.load(f"configs/fine_tune.py:{folder}")
    assert config.init_from == str(folder) and config.data.tokenizer == "bytes"
    assert hf.config.difference(config.model, decoder.config) is None


@pytest.fixture(scope="module")
def poisoned(published, tmp_path_factory):
    """Weights with a NaN in the second layer's value projection."""
    _, decoder = published
    params = dict(parameters.values(decoder))
    params["blocks.1.head.0.attention.v_b"] = params["blocks.1.head.0.attention.v_b"].at[0, 0, 0].set(np.nan)
    folder = tmp_path_factory.mktemp("poisoned")
    saver = checkpoint.Checkpoints(folder, keep=1)
    saver.save(1, {"params": params, "router_bias": decoder.router_bias()}, wait=True)
    saver.close()
    return folder


def test_not_finite_ends_at_the_limit(poisoned, corpus, tmp_path, capsys):
    assert run(tmp_path, corpus, f"init_from={poisoned}", "train.steps=40", "train.max_skipped=3") == 1
    error = capsys.readouterr().err
    assert "3 steps in a row were not finite (train.max_skipped)" in error and "Traceback" not in error
    assert len(exact(tmp_path)) <= 4


def test_run_that_ends_in_skipped_steps_fails(poisoned, corpus, tmp_path, capsys):
    assert run(tmp_path, corpus, f"init_from={poisoned}", "train.steps=2") == 1
    error = capsys.readouterr().err
    assert "2 steps were not finite and changed nothing" in error and "error: the run ends without" in error


def test_debug_names_the_layer(poisoned, corpus, tmp_path, capsys):
    assert run(tmp_path, corpus, f"init_from={poisoned}", "debug.nans=True") == 1
    assert "step 1 was not finite; first at: layer 2 (MLA)" in capsys.readouterr().err
