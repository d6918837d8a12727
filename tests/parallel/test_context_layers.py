"""KDA and MLA layers on rows cut into pieces over `context`, against the same layer on whole rows.

Outputs 1e-5, gradients of the input on every device and of every parameter 1e-4. Rows hold documents that cross one or
several cuts, pieces of padding only, and cuts that are no multiple of any chunk.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sizes
from flax import nnx
from jax.sharding import PartitionSpec as P
from meshes import assert_close, mesh_of, on

from k3jax.model.kda import KDA
from k3jax.model.mla import MLA
from k3jax.parallel import context
from pallas_kernels.kda import short_conv

EMBED = 24
CONFIG = sizes.model(
    embed=EMBED,
    kda={"heads": 2, "key_dim": 8, "value_dim": 12},
    mla={"heads": 2, "q_lora": 20, "kv_lora": 16, "qk_nope": 8, "qk_shared": 4, "value_dim": 10},
)
ROWS = [  # runs (segment id, share of the row in 64ths)
    [(1, 64)],
    [(1, 5), (2, 30), (0, 2), (2, 3), (3, 1), (4, 23)],  # a document goes on behind padding
    [(0, 17), (7, 20), (0, 27)],  # padding fills whole pieces at both ends
    [(3, 7), (0, 20), (3, 37)],  # and lies inside a document
]


def segments(length):
    rows = []
    for runs in ROWS:
        ids = np.repeat([i for i, _ in runs], [n for _, n in runs])
        rows.append(ids[np.arange(length) * 64 // length])
    return np.array(rows, np.int32)


def layer(kind):
    made = kind(CONFIG, nnx.Rngs(3))
    graphdef, state = nnx.split(made)
    # Far from the start: decays, gates and norms that matter.
    leaves, structure = jax.tree.flatten(state)
    noise = jax.random.split(jax.random.key(5), len(leaves))
    return graphdef, jax.tree.unflatten(
        structure, [x + 0.1 * jax.random.normal(k, x.shape) for x, k in zip(leaves, noise, strict=True)]
    )


def results(kind, length, pieces, documents):
    """(y, statistic, gradients of x, gradients of the parameters) of a loss on all outputs."""
    graphdef, state = layer(kind)
    x = jax.random.normal(jax.random.key(1), (len(ROWS), length, EMBED))
    probe = jax.random.normal(jax.random.key(2), x.shape)
    ids = segments(length) if documents else np.ones((len(ROWS), length), np.int32)

    def run(state, x, probe, ids):
        around = context.around(ids)

        def loss(state, x):
            y, statistic = nnx.merge(graphdef, state)(x, ids, around)
            return jnp.sum(y * probe), (y, statistic)

        (_, (y, statistic)), (of_state, of_x) = jax.value_and_grad(loss, (0, 1), has_aux=True)(state, x)
        if pieces > 1:
            of_state = jax.lax.psum(of_state, "context")
            if kind is MLA:
                statistic = jax.lax.pmax(statistic, "context")
        return y, statistic, of_x, of_state

    row = P(None, "context")
    statistic = P() if kind is MLA else row
    specs = (P(), row, row, row), (row, statistic, row, P())
    return on(mesh_of(context=pieces), run, *specs)(state, x, probe, ids)


@pytest.fixture(scope="module")
def whole():
    found = {}

    def of(kind, length, documents):
        key = kind, length, documents
        if key not in found:
            found[key] = results(kind, length, 1, documents)
        return found[key]

    return of


DEFAULT = [(8, 64), (4, 100)]  # pieces of 8 tokens, and more pieces than heads; pieces of 25
ALL = [(2, 64), (4, 64), (8, 24), (2, 70), (8, 200), (4, 12)]


def check(whole, kind, pieces, length, documents):
    found, wanted = results(kind, length, pieces, documents), whole(kind, length, documents)
    assert np.abs(wanted[2]).max() > 1e-3
    assert_close(found[:2], wanted[:2], 1e-5, "outputs")
    assert_close(found[2:], wanted[2:], 1e-4, "gradients")


@pytest.mark.parametrize("kind", [KDA, MLA])
@pytest.mark.parametrize(("pieces", "length"), DEFAULT)
def test_pieces_are_the_row(whole, kind, pieces, length):
    check(whole, kind, pieces, length, True)


@pytest.mark.slow
@pytest.mark.parametrize("documents", [True, False])
@pytest.mark.parametrize("kind", [KDA, MLA])
@pytest.mark.parametrize(("pieces", "length"), [*DEFAULT, *ALL])
def test_pieces_are_the_row_on_every_cut(whole, kind, pieces, length, documents):
    check(whole, kind, pieces, length, documents)


@pytest.mark.parametrize(("pieces", "length"), [(8, 64), (4, 12), (8, 16)])
def test_halo(pieces, length):
    """The convolution's three tokens are those before the piece, over padding and pieces of padding, and no others."""
    x = jax.random.normal(jax.random.key(7), (len(ROWS), length, 6))
    weight = jax.random.normal(jax.random.key(8), (4, 6))
    ids = segments(length)

    def run(x, weight, ids):
        around = context.around(ids)
        left = {} if around is None else {"left": context.halo(x, around), "left_segment_ids": around.before_ids}
        return short_conv(x, weight, segment_ids=ids, **left)[0]

    row = P(None, "context")
    found = on(mesh_of(context=pieces), run, (row, P(), row), row)(x, weight, ids)
    np.testing.assert_allclose(found, _convolved(np.asarray(x), np.asarray(weight), ids), rtol=1e-5, atol=1e-5)


def _convolved(x, weight, ids):
    """Token by token: the last tokens of its document that are not padding, itself included."""
    y = np.zeros(x.shape)
    for row in range(x.shape[0]):
        kept = []
        for t in range(x.shape[1]):
            if ids[row, t]:
                kept.append(t)
                seen = [s for s in kept[-4:] if ids[row, s] == ids[row, t]]
                for back, s in enumerate(reversed(seen)):
                    y[row, t] += weight[3 - back] * x[row, s]
    return y


def test_nothing_comes_from_later_pieces():
    """NaN in later pieces, and in padding, reaches no earlier piece of a document."""
    graphdef, state = layer(KDA)
    length, pieces = 64, 4
    ids = np.ones((1, length), np.int32)
    x = np.asarray(jax.random.normal(jax.random.key(1), (1, length, EMBED)))
    row = P(None, "context")

    def run(state, x, ids):
        return nnx.merge(graphdef, state)(x, ids, context.around(ids))[0]

    mapped = on(mesh_of(context=pieces), run, (P(), row, row), row)
    spoiled = x.copy()
    spoiled[:, 33:] = np.nan
    clean, found = mapped(state, x, ids), mapped(state, spoiled, ids)
    np.testing.assert_array_equal(found[:, :33], clean[:, :33])
    assert np.isnan(found[:, 33:]).all()
