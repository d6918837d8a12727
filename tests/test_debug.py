"""The first place that is not finite, by name: one bad weight in every kind of layer, then gradients alone."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sizes
from flax import nnx

from k3jax.debug import first_nonfinite, place
from k3jax.model import parameters
from k3jax.model.decoder import Decoder

# One layer, a scanned group and a second block; two MLA layers with plain residuals, whose gradient compiles quickly.
MODELS = {
    "blocks": sizes.SPLIT,
    "plain": dataclasses.replace(sizes.SMALL, layers=2, mla_layers=(1, 2), attn_res_block=None),
}
HUGE = 3e38  # finite, and its products are not


@functools.cache
def healthy(name):
    """(abstract decoder, parameters); small numbers around 1 for norms and around 0 for the rest."""
    decoder = nnx.eval_shape(lambda: Decoder(MODELS[name], rngs=nnx.Rngs(0)))
    rng = np.random.default_rng(0)
    return decoder, {
        path: rng.normal(float(path.endswith("norm.weight")), 0.1, size=shape.shape).astype(np.float32)
        for path, shape in parameters.values(decoder).items()
    }


def batch():
    tokens = jax.random.randint(jax.random.key(0), (2, 14), 0, 200)
    ids = np.ones((2, 13), np.int32)
    ids[0, 7:], ids[1, 10:] = 2, 0
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "loss_mask": ids > 0, "segment_ids": ids}


def found(name, changes):
    """The answer for a model with some parameters replaced by functions of them."""
    decoder, params = healthy(name)
    changed = {path: change(params[path].copy()) for path, change in changes.items()}
    bound = parameters.bind(decoder, jax.tree.map(jnp.asarray, params | changed))
    return first_nonfinite(bound, batch())


def one(value, row=...):
    """Sets one element of a stacked layer, or of the whole, to `value`; a huge value fills it all."""

    def change(array):
        part = array[row]
        part[(...,) if value == HUGE else (0,) * part.ndim] = value
        return array

    return change


NAN, INF = np.nan, np.inf


@pytest.mark.parametrize(
    "name, path, change, place",
    [
        ("blocks", "embed", lambda x: x * NAN, "embedding"),
        ("blocks", "blocks.0.head.0.attention.q", one(NAN), "layer 1 (KDA)"),
        ("blocks", "blocks.0.head.0.attention_norm.weight", one(INF), "layer 1 (KDA)"),
        ("blocks", "blocks.0.head.0.attention.o", one(HUGE), "layer 1 (KDA)"),
        ("blocks", "blocks.0.head.0.mlp.w2", one(INF), "layer 1 (MLP)"),
        ("blocks", "blocks.0.head.0.mlp_res.query", one(NAN), "layer 1 (MLP)"),
        ("blocks", "blocks.0.groups.kda.attention.dt_bias", one(NAN, 0), "layer 2 (KDA)"),
        ("blocks", "blocks.0.groups.kda.mlp.shared.w2", one(INF, 0), "layer 2 (experts)"),
        ("blocks", "blocks.0.groups.kda.mlp.latent_up", one(NAN, 1), "layer 3 (experts)"),
        ("blocks", "blocks.0.groups.kda.attention.v_conv", one(INF, 2), "layer 4 (KDA)"),
        ("blocks", "blocks.0.groups.mla.attention.kv_a", one(NAN, 0), "layer 5 (MLA)"),
        ("blocks", "blocks.0.groups.mla.mlp.latent_down", one(HUGE, 0), "layer 5 (experts)"),
        ("blocks", "blocks.1.head.0.attention_res.norm.weight", one(NAN), "layer 6 (MLA)"),
        ("blocks", "blocks.1.head.0.attention.v_b", one(HUGE), "layer 6 (MLA)"),
        ("blocks", "blocks.1.head.0.mlp.latent_norm.weight", one(NAN), "layer 6 (experts)"),
        ("blocks", "final.res.query", one(NAN), "final norm"),
        ("blocks", "final.norm.weight", one(INF), "final norm"),
        ("blocks", "lm_head", one(NAN), "loss"),
        ("blocks", "lm_head", one(HUGE), "loss"),
        ("plain", "blocks.0.head.0.attention.k_b", one(INF), "layer 1 (MLA)"),
        ("plain", "blocks.0.head.1.mlp.shared.w2", one(INF), "layer 2 (experts)"),
        ("plain", "final.norm.weight", one(NAN), "final norm"),
    ],
)
def test_one_bad_weight_names_its_layer(name, path, change, place):
    assert found(name, {path: change}) == place


def test_gradients_alone():
    """A finite forward pass whose gradient is not: the place nearest to the loss, and nothing if all is well."""
    assert found("plain", {}) is None
    # What the head multiplies is tiny and the head huge: logits are finite, the gradient that comes out of it is not.
    head = {"lm_head": lambda x: 1e38 * np.sign(x), "final.norm.weight": lambda x: x * 1e-12}
    assert found("plain", head) == "gradient of final.norm.weight"
    # An expert whose score is NaN is never chosen; its gradient 0 * NaN reaches everything below.
    assert found("plain", {"blocks.0.head.1.mlp.router.weight": one(NAN)}).endswith("mlp.router.weight (layer 2)")
    # Values of 2e-38 that the output kernel brings back to 6: the gradient of what makes them is out of range.
    at, sharp = "blocks.0.head.0.attention.", {"lm_head": lambda x: 100 * x}
    tiny = {f"{at}v_b": lambda x: 2e-38 * np.sign(x), f"{at}o": lambda x: 3e38 * np.sign(x)}
    assert found("plain", sharp) is None
    assert found("plain", sharp | tiny) == f"gradient of {at}v_b (layer 1)"


def test_places_in_order():
    """Layers of heads, stacked groups and tails by hand (see test_decoder.py::test_plan), parts of a layer in order."""

    def layers(config, *path, rows=1):
        return [place(config, ("blocks", *path, "mlp", "w1"), row)[0] for row in range(rows)]

    assert layers(sizes.MESH, 0, "head", 2) == [3]
    assert layers(sizes.MESH, 0, "groups", "kda", rows=3) == [5, 6, 7] and layers(sizes.MESH, 0, "groups", "mla") == [8]
    assert layers(sizes.MESH, 1, "groups", "kda", rows=6) == [9, 10, 11, 13, 14, 15]
    assert layers(sizes.MESH, 1, "groups", "mla", rows=2) == [12, 16]
    assert layers(sizes.MESH, 2, "head", 0) == [17]
    tail = dataclasses.replace(sizes.MESH, attn_res_block=None)
    assert layers(tail, 0, "tail", 0) == [17] and layers(tail, 0, "groups", "mla", rows=3) == [8, 12, 16]
    upwards = [("embed",)]
    for at in (0, 1):
        for name in ("attention_res", "attention_norm", "attention", "mlp_res", "mlp_norm", "mlp"):
            upwards.append(("blocks", 0, "head", at, name, "weight"))
    upwards += [("blocks", 2, "head", 0, "mlp", "w1"), ("final", "res", "query"), ("final", "norm", "weight")]
    near = [place(sizes.MESH, path) for path in [*upwards, ("lm_head",)]]
    assert near == sorted(set(near))
