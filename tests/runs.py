"""Whole runs of the command line on a very small model and corpus, in this process and on one device of it."""

import functools
import random
from contextlib import contextmanager

import jax

from k3jax import metrics, train
from k3jax.parallel import make_mesh

SMALL = [
    "model.layers=2", "model.mla_layers=(2,)", "model.attn_res_block=1", "model.embed=16", "model.mlp=16",
    "model.kda.heads=1", "model.kda.key_dim=8", "model.kda.value_dim=8", "model.mla.heads=1", "model.mla.q_lora=8",
    "model.mla.kv_lora=8", "model.mla.qk_nope=8", "model.mla.qk_shared=4", "model.mla.value_dim=8",
    "model.moe.routed_experts=4", "model.moe.top_k=2", "model.moe.latent=8", "model.moe.expert_mlp=8",
    "data.seq_len=32", "data.batch_rows=8", "train.steps=4", "optim.warmup_steps=1", "eval.every=3", "eval.rows=4",
    "sample.tokens=5", "log.health_every=2", "checkpoint.every=100",
]  # fmt: skip
EXACT = ("train/loss", "train/grad_norm", "train/learning_rate", "eval/loss")


def write_corpus(folder):
    """Nine texts to train on and two held out."""
    letters = random.Random(3)
    for part, count in (("train", 9), ("held_out", 2)):
        (folder / part).mkdir()
        for index in range(count):
            text = "".join(letters.choices("abcde \n", k=letters.randint(60, 200)))
            (folder / part / f"{index}.txt").write_text(text)
    return folder


def command(workdir, corpus, *more):
    """argv of a run. `more`: fields, `name=value`; later ones count."""
    sources = [f"data.source={corpus / 'train'}", f"data.held_out={corpus / 'held_out'}"]
    flags = [f"--config.{flag}" for flag in (*SMALL, *sources, *more)]
    return ["train", "--config=configs/k3.py:tiny", f"--workdir={workdir}", *flags]


@contextmanager
def on_devices(count):
    """Meshes are made of the first devices only."""
    real = train.make_mesh
    train.make_mesh = functools.partial(make_mesh, devices=jax.devices()[:count])
    try:
        yield
    finally:
        train.make_mesh = real


def run(workdir, corpus, *more, devices=1):
    """Exit code of a run on the first devices."""
    with on_devices(devices):
        return train.main(command(workdir, corpus, *more))


def exact(workdir):
    """What must be equal of two runs that are the same: step -> numbers."""
    records = metrics.read_jsonl(workdir / "metrics.jsonl")
    return {record["step"]: {name: record[name] for name in EXACT if name in record} for record in records}
