"""Numbers of every layer, by hand."""

import numpy as np
import pytest
import sizes

from k3jax.metrics import ATTN_RES, health_report

# 11 layers, the first dense, MLA at 4 and 11: 10 with experts, 9 KDA. Four experts, two per token.
CONFIG = sizes.model(layers=11, mla_layers=(4, 11), attn_res_block=4, moe={"routed_experts": 4, "top_k": 2})


def arrays(tokens=6):
    load = np.full((10, 4), tokens // 2)
    load[0] = [6, 4, 2, 0]
    load[3] = [3, 3, 3, 2]  # one token was lost
    bias = np.zeros((10, 4), np.float32)
    bias[1] = [-0.25, 0.0, 0.5, 0.125]
    logits = np.array([[1.5, -2.0, 0.25, 1.0], [3.0, 7.5, -1.0, 0.0]], np.float32)
    weights = np.arange(23 * 4, dtype=np.float32).reshape(23, 4)
    return {
        "tokens": np.int32(tokens),
        "expert_load": load,
        "router_bias": bias,
        "gate_saturation": np.arange(9, dtype=np.float32),
        "max_logit": logits,
        "attnres_weights": weights,
    }


def test_by_hand():
    report = health_report(CONFIG, **arrays())
    assert report["moe/max_violation/02"] == 1.0 and report["moe/max_violation/03"] == 0.0
    assert report["moe/max_violation/05"] == pytest.approx(3 / 2.75 - 1)
    assert (report["moe/load_min/02"], report["moe/load_max/02"]) == (0.0, 2.0)
    assert report["moe/dropped_tokens/05"] == 1.0 and report["moe/dropped_tokens/02"] == 0.0
    assert report["moe/bias_range/03"] == 0.75 and report["moe/bias_range/02"] == 0.0
    assert report["mla/max_logit/04"] == 1.5 and report["mla/max_logit/11"] == 7.5
    assert report["kda/gate_saturation/01"] == 0.0
    assert report["kda/gate_saturation/10"] == pytest.approx(8 / 6)  # the ninth KDA layer
    np.testing.assert_allclose(report[ATTN_RES], np.arange(92).reshape(23, 4) / 6)


def test_every_layer_has_its_name():
    names = set(health_report(CONFIG, **arrays())) - {ATTN_RES}
    with_experts = [f"{layer:02d}" for layer in range(2, 12)]
    expected = {f"moe/{kind}/{layer}" for layer in with_experts for kind in
                ("max_violation", "load_min", "load_max", "dropped_tokens", "bias_range")}  # fmt: skip
    expected |= {f"kda/gate_saturation/{layer:02d}" for layer in (1, 2, 3, 5, 6, 7, 8, 9, 10)}
    assert names == expected | {"mla/max_logit/04", "mla/max_logit/11"}


def test_other_shapes_are_refused():
    given = arrays()
    with pytest.raises(ValueError):
        health_report(CONFIG, **{**given, "gate_saturation": np.zeros(8)})


def test_without_tokens_and_without_kinds():
    empty = {**arrays(0), "expert_load": np.zeros((10, 4), np.int32)}
    report = health_report(CONFIG, **{**empty, "max_logit": np.full((2, 4), -np.inf)})
    assert report["moe/max_violation/02"] == report["moe/load_max/02"] == report["moe/dropped_tokens/02"] == 0.0
    assert report["mla/max_logit/04"] == -np.inf
    plain = sizes.model(layers=2, dense_layers=2, mla_layers=(), attn_res_block=None)
    none = np.zeros((0, 4))
    report = health_report(plain, tokens=3, expert_load=none, router_bias=none, gate_saturation=[3.0, 1.5],
                           max_logit=none, attnres_weights=none)  # fmt: skip
    assert report == {"kda/gate_saturation/1": 1.0, "kda/gate_saturation/2": 0.5}
