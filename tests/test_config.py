"""Configs: sizes, overrides by type, one-line errors that name the field (O20)."""

import dataclasses
import json

import pytest

from k3jax import config as configs
from k3jax.config import ConfigError

SIZES = ("tiny", "colab", "proxy_1b", "kimi_linear_48b", "k3_2p8t")


@pytest.mark.parametrize("name", SIZES)
def test_sizes_survive_json(name):
    config = configs.load(f"configs/k3.py:{name}")
    assert config.name == name
    assert configs.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_published_shapes():
    """A few numbers of the published configs (k3.md section 1)."""
    k3, linear = (configs.load(f"configs/k3.py:{name}").model for name in ("k3_2p8t", "kimi_linear_48b"))
    assert len(k3.mla_layers) == 24 and len(k3.kda_layers) == 69 and k3.mla_layers[-2:] == (92, 93)
    assert (k3.moe.routed_experts, k3.moe.top_k, k3.moe.latent, k3.attn_res_block) == (896, 16, 3584, 12)
    assert linear.kda.lower_bound is None and linear.mla.q_lora is None and linear.attn_res_block is None
    assert linear.moe.scaling == 2.446 and linear.activation == "swiglu" and not linear.mla.output_gate


@pytest.mark.parametrize(
    ("flag", "field", "value"),
    [
        ("optim.clip_norm=0.1", "clip_norm", 0.1),
        ("optim.clip_norm=None", "clip_norm", None),
        ("optim.clip_norm=2", "clip_norm", 2.0),
        ("optim.learning_rate=3e-4", "learning_rate", 3e-4),
        ("optim.weight_decay=0", "weight_decay", 0.0),
        ("optim.schedule=cosine", "schedule", "cosine"),
    ],
)
def test_override(flag, field, value):
    found = getattr(configs.load("configs/k3.py", [f"--config.{flag}"]).optim, field)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a.txt", ("a.txt",)),
        ("a.txt, b[0-9]", ("a.txt", "b[0-9]")),
        ("('a.txt',)", ("a.txt",)),
        ('["a b.txt", "c.txt"]', ("a b.txt", "c.txt")),
        ("[ab].txt", ("[ab].txt",)),
    ],
)
def test_override_of_sources(text, value):
    assert configs.load("configs/k3.py", [f"--config.data.source={text}"]).data.source == value


def test_override_of_tuples_bools_and_strings():
    flags = [
        "model.mla_layers=(2, 4)",
        "model.mla.output_gate=False",
        "sample.prompt=class A=",
        "model.attn_res_block=None",
    ]
    config = configs.load("configs/k3.py:tiny", [f"--config.{flag}" for flag in flags])
    assert config.model.mla_layers == (2, 4) and config.model.mla.output_gate is False
    assert config.sample.prompt == "class A=" and config.model.attn_res_block is None
    assert config.model.kda_layers == (1, 3, 5, 6, 7, 8)


@pytest.mark.parametrize(
    ("flag", "named"),
    [
        ("no_such_key=1", "no_such_key"),
        ("model.no_such_key=1", "model.no_such_key"),
        ("model=1", "model"),
        ("model.layers", "model.layers"),
        ("train.steps=1e3", "train.steps"),
        ("train.steps=3.5", "train.steps"),
        ("train.steps=0", "train.steps"),
        ("train.steps=None", "train.steps"),
        ("train.dtype=float16", "train.dtype"),
        ("model.mla.output_gate=2", "model.mla.output_gate"),
        ("optim.learning_rate=nan", "optim.learning_rate"),
        ("optim.learning_rate=inf", "optim.learning_rate"),
        ("optim.learning_rate=fast", "optim.learning_rate"),
        ("optim.clip_norm=0", "optim.clip_norm"),
        ("optim.warmup_steps=501", "optim.warmup_steps"),
        ("optim.schedule=wsd", "optim.decay_steps"),
        ("model.kda.lower_bound=5", "model.kda.lower_bound"),
        ("model.kda.lower_bound=0", "model.kda.lower_bound"),
        ("model.moe.top_k=17", "model.moe.top_k"),
        ("model.moe.top_k=16", "model.moe.top_k"),
        ("model.moe.groups=3", "model.moe.groups"),
        ("model.mla_layers=(4, 9)", "model.mla_layers"),
        ("model.mla_layers=(8, 4)", "model.mla_layers"),
        ("model.mla_layers=(4, x)", "model.mla_layers"),
        ("model.attn_res_block=0", "model.attn_res_block"),
        ("model.dense_layers=9", "model.dense_layers"),
        ("data.seq_len=0", "data.seq_len"),
        ("data.seed=-1", "data.seed"),
        ("data.seed=18446744073709551616", "data.seed"),
        ("train.seed=1099511627776", "train.seed"),
        ("optim.learning_rate=1e30", "optim.learning_rate"),
        ("memory.policy=some", "memory.policy"),
    ],
)
def test_mistakes_are_one_line_with_the_name(flag, named):
    with pytest.raises(ConfigError) as caught:
        configs.load("configs/k3.py:tiny", [f"--config.{flag}"])
    assert named in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (None, "absent.py"),
        ("def get_config(:", "SyntaxError"),
        ("import no_such_module", "no_such_module"),
        ("x = 1", "get_config"),
        ("def get_config(): return {'name': 'a'}", "model"),
        ("def get_config(): raise KeyError('lost')", "lost"),
        ("def get_config(): return 3", "get_config"),
    ],
)
def test_broken_files(tmp_path, text, named):
    path = tmp_path / ("absent.py" if text is None else "broken.py")
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=named):
        configs.load(str(path))


def test_own_file_builds_on_ours(tmp_path, monkeypatch):
    """A config elsewhere may import the packaged ones; packaged ones are found from any folder."""
    text = "from . import k3\ndef get_config(name):\n  c = k3.get_config(name)\n  c.train.steps = 7\n  return c\n"
    (tmp_path / "mine.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    assert configs.load("mine.py:colab", ["--config.optim.warmup_steps=1"]).train.steps == 7
    assert configs.load("configs/k3.py:tiny").name == "tiny"
    with pytest.raises(ConfigError, match="huge"):
        configs.load("configs/k3.py:huge")


def test_frozen_and_typed():
    config = configs.load("configs/k3.py:tiny")
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.name = "other"
    values = config.to_dict()
    values["model"]["kda"]["heads"] = "4"
    with pytest.raises(ConfigError, match=r"model\.kda\.heads"):
        configs.from_dict(values)
    del values["model"]["kda"]
    with pytest.raises(ConfigError, match=r"model\.kda is missing"):
        configs.from_dict(values)
