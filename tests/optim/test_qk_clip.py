"""QK-Clip on the real MLA module: logits shrink by exactly gamma, heads at or below tau keep every bit (k3.md 4.4)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sizes
from flax import nnx
from golden_files import assert_close

from k3jax.model.mla import MLA
from k3jax.optim import qk_clip

NOPE, SHARED, HEADS = 6, 5, 3
FORMS = {"low rank": 7, "one matrix": None}  # q_lora


def model(q_lora):
    changes = {"heads": HEADS, "q_lora": q_lora, "kv_lora": 9, "qk_nope": NOPE, "qk_shared": SHARED, "value_dim": 4}
    return sizes.model(embed=13, init_std=0.5, mla=changes)


def modules(q_lora, count):
    return [MLA(model(q_lora), nnx.Rngs(seed)) for seed in range(count)]


def kernels(module):
    return {".".join(path): np.asarray(value[...]) for path, value in nnx.to_flat_state(nnx.state(module, nnx.Param))}


def logits(module, x):
    """Scaled logits [H,T,T] of x [T,embed] by the formulas of model/mla.py in float64, without the causal mask."""
    p = {path: value.astype(np.float64) for path, value in kernels(module).items()}

    def norm(x, weight):
        return weight * x / np.sqrt(np.mean(x**2, -1, keepdims=True) + 1e-6)

    if "q" in p:
        query = np.einsum("td,dhk->htk", x, p["q"])
    else:
        query = np.einsum("td,dhk->htk", norm(x @ p["q_a"], p["q_norm.weight"]), p["q_b"])
    compressed = x @ p["kv_a"]
    key = np.einsum("td,dhk->htk", norm(compressed[:, :9], p["kv_norm.weight"]), p["k_b"])
    own = np.einsum("htk,hsk->hts", query[..., :NOPE], key)
    return (own + np.einsum("htk,sk->hts", query[..., NOPE:], compressed[:, 9:])) / np.sqrt(NOPE + SHARED)


@pytest.mark.parametrize("form", FORMS)
def test_logits_scale_by_gamma(form):
    """tau between the heads: those above end at tau, every logit of theirs times gamma; the rest keeps all bits."""
    (module,) = modules(FORMS[form], 1)
    x = np.random.default_rng(0).normal(size=(11, 13)).astype(np.float32)
    before = logits(module, x)
    forward = jax.jit(lambda module: module(x[None], None)[1])
    max_logit = forward(module)
    causal = np.where(np.tri(11, dtype=bool), before, -np.inf).max((1, 2))
    assert_close(max_logit, causal, 1e-5, "max_logit")
    low, tau, high = np.sort(np.asarray(max_logit))
    assert 0 < low < tau < high

    old = {f"a.{path}": jnp.asarray(value) for path, value in kernels(module).items()}
    new = jax.jit(lambda old, s: qk_clip(old, s, [("a", None)], tau, NOPE))(old, max_logit[None])
    query, key = ("q" if FORMS[form] is None else "q_b"), "k_b"
    for path, value in old.items():
        name = path.removeprefix("a.")
        if name in (query, key):
            getattr(module, name).set_value(new[path])
            still = np.asarray(max_logit) <= tau  # the head at tau, too
            np.testing.assert_array_equal(np.asarray(new[path])[:, still], np.asarray(value)[:, still])
            assert (np.asarray(new[path])[:, ~still] != np.asarray(value)[:, ~still]).all()
        else:
            assert new[path] is value or np.array_equal(new[path], value), path
    gamma = np.minimum(1, tau / causal)
    assert_close(logits(module, x), gamma[:, None, None] * before, 1e-5, "logits")
    assert_close(forward(module), np.minimum(causal, tau), 1e-5, "max_logit after")


def test_stacked_layers_take_their_rows():
    """A place of three stacked layers between two single ones equals five single ones; both forms of the query."""
    s = np.random.default_rng(1).uniform(20, 300, size=(5, HEADS)).astype(np.float32)
    for q_lora in FORMS.values():
        alone = {f"{at}.{k}": v for at, m in enumerate(modules(q_lora, 5)) for k, v in kernels(m).items()}
        names = {path.split(".", 1)[1] for path in alone}
        stacked = {f"{at}.{name}": alone[f"{at}.{name}"] for at in (0, 4) for name in names}
        stacked |= {f"g.{name}": np.stack([alone[f"{at}.{name}"] for at in (1, 2, 3)]) for name in names}
        one = qk_clip(alone, s, [(str(at), None) for at in range(5)], 100.0, NOPE)
        many = qk_clip(stacked, s, [("0", None), ("g", 3), ("4", None)], 100.0, NOPE)
        assert set(many) == set(stacked)
        for path, value in many.items():
            at, name = path.split(".", 1)
            expected = np.stack([one[f"{i}.{name}"] for i in (1, 2, 3)]) if at == "g" else one[path]
            np.testing.assert_array_equal(value, expected, err_msg=path)
        assert any((many[path] != stacked[path]).any() for path in many if path.startswith("g."))


def test_heads_that_keep_every_bit():
    """No token, no logit above tau, a broken logit, tau itself; negative zeros and tiny numbers stay what they are."""
    (module,) = modules(None, 1)
    params = {f"a.{path}": value for path, value in kernels(module).items()}
    params["a.q"] = params["a.q"].copy()
    params["a.q"][0, :, :2] = -0.0, 3e-38
    for s in (-np.inf, -5.0, 0.0, 7.0, np.inf, np.nan):
        new = qk_clip(params, jnp.full((1, HEADS), s), [("a", None)], 7.0, NOPE)
        for path, value in params.items():
            np.testing.assert_array_equal(np.asarray(new[path]).view(np.int32), value.view(np.int32), err_msg=f"{s}")


def test_frozen_modules_and_wrong_places():
    params = {f"{at}.{k}": v for at, m in enumerate(modules(None, 2)) for k, v in kernels(m).items()}
    s, places = jnp.full((2, HEADS), 200.0), [("0", None), ("1", None)]
    for path in ("0.q", "0.k_b"):
        new = qk_clip(params, s, places, 100.0, NOPE, frozen=frozenset({path}))
        assert {path for path in params if not np.array_equal(new[path], params[path])} == {"1.q", "1.k_b"}
    assert qk_clip(params, s[:0], [], 100.0, NOPE) == params
    with pytest.raises(ValueError, match="places name 1 layers, max_logit has 2"):
        qk_clip(params, s, places[:1], 100.0, NOPE)
    with pytest.raises(KeyError, match="nowhere"):
        qk_clip(params, s, [("0", None), ("nowhere", None)], 100.0, NOPE)


def test_few_equations():
    """25 layers in 9 places, about those of the 93-layer model, cost fewer than 10 equations a place."""
    shapes = {"s.q_b": (7, HEADS, NOPE + SHARED), "s.k_b": (9, HEADS, NOPE)}
    shapes |= {f"g{at}.{path[2:]}": (3, *shape) for at in range(8) for path, shape in shapes.items()}
    params = {path: jax.ShapeDtypeStruct(shape, jnp.float32) for path, shape in shapes.items()}
    places = [("s", None), *((f"g{at}", 3) for at in range(8))]
    s = jax.ShapeDtypeStruct((25, HEADS), jnp.float32)
    jaxpr = jax.make_jaxpr(lambda params, s: qk_clip(params, s, places, 100.0, NOPE))(params, s)
    assert len(jaxpr.eqns) < 10 * len(places)
