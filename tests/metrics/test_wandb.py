"""Weights & Biases through a package that only takes notes."""

import logging
import sys
import types

import numpy as np
import pytest

from k3jax.config import MachineError
from k3jax.metrics import WandbWriter


@pytest.fixture
def wandb(monkeypatch):
    """A stand-in for the package; `offline` makes every init without mode="offline" fail."""
    module = types.ModuleType("wandb")
    module.started, module.logged, module.finished, module.offline = [], [], 0, False

    class Run:
        def __init__(self, identity):
            self.id = identity

        def log(self, values, step):
            module.logged.append((step, values))

        def finish(self):
            module.finished += 1

    def init(**options):
        if module.offline and options.get("mode") != "offline":
            raise RuntimeError("api_key not configured (no-tty).\n  call wandb.login()")
        module.started.append(options)
        return Run(options["id"] or f"run{len(module.started)}")

    module.init, module.Image = init, lambda picture: ("image", picture.size)
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def test_numbers_and_pictures(wandb, tmp_path):
    writer = WandbWriter("k3", tmp_path, config={"model": {"layers": 8}}, name="tiny")
    writer.write(1, {"train/loss": np.float32(2.5), "attn_res/weights": np.ones((5, 3))})
    writer.close()
    (options,) = wandb.started
    assert options == {"project": "k3", "name": "tiny", "id": None, "resume": None, "dir": str(tmp_path),
                       "config": {"model": {"layers": 8}}}  # fmt: skip
    assert wandb.logged == [(1, {"train/loss": 2.5, "attn_res/weights": ("image", (384, 512))})]
    assert type(wandb.logged[0][1]["train/loss"]) is float and wandb.finished == 1


def test_a_resumed_run_is_the_same_run(wandb, tmp_path):
    WandbWriter("k3", tmp_path).close()
    WandbWriter("k3", tmp_path, resumed_step=5).close()
    WandbWriter("k3", tmp_path).close()  # anew
    assert [(o["id"], o["resume"]) for o in wandb.started] == [(None, None), ("run1", "allow"), (None, None)]
    assert (tmp_path / "wandb_id").read_text() == "run3\n"


def test_offline(wandb, tmp_path, caplog):
    wandb.offline = True
    with caplog.at_level(logging.WARNING):
        WandbWriter("k3", tmp_path)
    assert wandb.started[0]["mode"] == "offline"
    (record,) = caplog.records
    assert "api_key not configured" in record.message and "wandb sync" in record.message and "\n" not in record.message


def test_a_broken_package(wandb, tmp_path, monkeypatch):
    def refuse(**options):
        raise TypeError("no such argument")

    monkeypatch.setattr(wandb, "init", refuse)
    with pytest.raises(MachineError, match=r"log.wandb: no such argument"):
        WandbWriter("k3", tmp_path)


def test_without_the_package(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(MachineError, match=r"needs the package wandb: pip install 'k3jax\[wandb\]'"):
        WandbWriter("k3", tmp_path)
