"""KDA in float64 numpy, token by token, its gradients derived by hand: what the table of cases is measured against.

    D_t = Diag(e^g_t) S_{t-1}     e_t = v_t - D_t^T k_t     S_t = D_t + beta_t k_t e_t^T     o_t = scale * S_t^T q_t

and back, with dS_t the gradient that arrives at S_t:

    dS += scale q do^T      dq = scale S do       dbeta = k^T dS e     dk = beta dS e - D de     dv = de = beta dS^T k
    dD  = dS - k de^T       dg = sum_v dD * D     dS_{t-1} = Diag(e^g) dD
"""

import numpy as np

ARGUMENTS = "query", "key", "value", "log_decay", "beta", "a_log", "dt_bias", "initial_state"


def kda(inputs, d_output, d_state, *, scale=None, lower_bound=None, normalize_qk=False, beta_is_logit=False,
        segment_ids=None, **_):  # fmt: skip
    """-> output, final state, {name: gradient} of sum(output * d_output) + sum(state * d_state).

    Padding may hold NaN.
    """
    raw = {name: np.asarray(x, np.float64) for name, x in inputs.items() if x is not None}
    d_output, d_state = np.asarray(d_output, np.float64), np.asarray(d_state, np.float64)
    batch, length, heads, width = raw["query"].shape
    value_heads, value_width = raw["value"].shape[2:]
    kept = np.ones((batch, length), bool) if segment_ids is None else np.asarray(segment_ids) != 0
    begins = _begins(np.asarray(segment_ids)) if segment_ids is not None else np.zeros((batch, length), bool)
    for name in ARGUMENTS[:5]:
        raw[name] = np.where(kept.reshape(batch, length, *[1] * (raw[name].ndim - 2)), raw[name], 0)
    d_output = np.where(kept[..., None, None], d_output, 0)
    scale = width**-0.5 if scale is None else scale

    # What the recurrence consumes.
    lengths = {name: np.sqrt((raw[name] ** 2).sum(-1, keepdims=True) + 1e-6) for name in ("query", "key")}
    unit = {name: raw[name] / lengths[name] if normalize_qk else raw[name] for name in lengths}
    groups = value_heads // heads
    q, k = (np.repeat(unit[name], groups, axis=2) for name in ("query", "key"))
    v, g, b = raw["value"], raw["log_decay"], raw["beta"]
    if "a_log" in raw:
        gain = np.exp(raw["a_log"])[:, None]
        z = g + raw.get("dt_bias", 0)
        g = -gain * np.logaddexp(0, z) if lower_bound is None else lower_bound * _sigmoid(gain * z)
    if beta_is_logit:
        b = _sigmoid(b)

    state = raw.get("initial_state", np.zeros((batch, value_heads, width, value_width))).copy()
    output = np.zeros(v.shape)
    decayed, errors, states = [], [], []
    for t in range(length):
        on = kept[:, t, None, None, None]
        state = np.where(begins[:, t, None, None, None], 0, state)
        d = np.exp(g[:, t])[..., None] * state
        e = v[:, t] - np.einsum("bhkv,bhk->bhv", d, k[:, t])
        state = np.where(on, d + (b[:, t, :, None] * k[:, t])[..., None] * e[:, :, None], state)
        output[:, t] = np.where(on[..., 0], scale * np.einsum("bhkv,bhk->bhv", state, q[:, t]), 0)
        decayed.append(d), errors.append(e), states.append(state)
    final = state

    dq, dk, dv, dg, db = (np.zeros(x.shape) for x in (q, k, v, g, b))
    ds = d_state.copy()
    for t in reversed(range(length)):
        on = kept[:, t, None, None, None]
        d, e, s, bt = decayed[t], errors[t], states[t], b[:, t, :, None]
        arriving = ds + scale * q[:, t, ..., None] * d_output[:, t, :, None]
        dq[:, t] = scale * np.einsum("bhkv,bhv->bhk", s, d_output[:, t])
        written = np.einsum("bhkv,bhv->bhk", arriving, e)
        db[:, t] = (k[:, t] * written).sum(-1)
        de = bt * np.einsum("bhkv,bhk->bhv", arriving, k[:, t])
        dk[:, t] = bt * written - np.einsum("bhkv,bhv->bhk", d, de)
        dv[:, t] = de
        dd = arriving - k[:, t, ..., None] * de[:, :, None]
        dg[:, t] = (dd * d).sum(-1)
        ds = np.where(on, np.exp(g[:, t])[..., None] * dd, ds)
        ds = np.where(begins[:, t, None, None, None], 0, ds)
    for x in (dq, dk, dv, dg, db):
        x[~kept] = 0

    # Back through gates, normalisation and groups.
    gradients = {"value": dv, "log_decay": dg, "beta": db * b * (1 - b) if beta_is_logit else db, "initial_state": ds}
    for name, x in (("query", dq), ("key", dk)):
        x = x.reshape(batch, length, heads, groups, width).sum(3)
        if normalize_qk:
            x = (x - unit[name] * (unit[name] * x).sum(-1, keepdims=True)) / lengths[name]
        gradients[name] = x
    if "a_log" in raw:
        if lower_bound is None:
            by_gain, by_z = g, -gain * _sigmoid(z)
        else:
            slope = lower_bound * _sigmoid(gain * z) * _sigmoid(-gain * z)
            by_gain, by_z = slope * gain * z, slope * gain
        gradients["a_log"] = (dg * by_gain).sum((0, 1, 3))
        gradients["log_decay"] = dg * by_z
        gradients["dt_bias"] = (dg * by_z).sum((0, 1))
    return output, final, {name: gradients[name] for name in raw}


def _sigmoid(x):
    return np.where(x >= 0, 1 / (1 + np.exp(-np.abs(x))), np.exp(-np.abs(x)) / (1 + np.exp(-np.abs(x))))


def _begins(segment_ids):
    """Where a document begins that is not the row's first."""
    begins = np.zeros(segment_ids.shape, bool)
    for row, ids in enumerate(segment_ids):
        last = 0
        for t, i in enumerate(ids):
            begins[row, t] = i != 0 and last != 0 and i != last
            last = i or last
    return begins
