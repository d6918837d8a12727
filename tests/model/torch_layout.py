"""Published tensor names and layouts, written out for the tests apart from k3jax.hf: path -> (name, layout)."""

import numpy as np
from flax import nnx

LINEAR, VECTOR, CONV = "linear", "vector", "conv"

KDA = {
    **{
        kernel: (f"{kernel}_proj.weight", LINEAR)
        for kernel in ("q", "k", "v", "g", "g_a", "g_b", "f_a", "f_b", "b", "o")
    },
    **{f"{kernel}_conv": (f"{kernel}_conv1d.weight", CONV) for kernel in "qkv"},
    "a_log": ("A_log", VECTOR),
    "dt_bias": ("dt_bias", VECTOR),
    "o_norm.weight": ("o_norm.weight", VECTOR),
}
MLA = {
    **{kernel: (f"{kernel}_proj.weight", LINEAR) for kernel in ("q", "q_a", "q_b", "g", "o")},
    "kv_a": ("kv_a_proj_with_mqa.weight", LINEAR),
    "q_norm.weight": ("q_a_layernorm.weight", VECTOR),
    "kv_norm.weight": ("kv_a_layernorm.weight", VECTOR),
    "k_b": ("kv_b_proj.weight", "key rows"),
    "v_b": ("kv_b_proj.weight", "value rows"),
}
MLP = {"w1": ("gate_proj.weight", LINEAR), "w3": ("up_proj.weight", LINEAR), "w2": ("down_proj.weight", LINEAR)}
MOE = {
    "router.weight": ("gate.weight", LINEAR),
    "router.bias": ("gate.e_score_correction_bias", VECTOR),
    **{w: (f"experts.{{}}.{w}.weight", "experts") for w in ("w1", "w2", "w3")},
    "latent_down": ("routed_expert_down_proj.weight", LINEAR),
    "latent_norm.weight": ("routed_expert_norm.weight", VECTOR),
    "latent_up": ("routed_expert_up_proj.weight", LINEAR),
    **{f"shared.{path}": (f"shared_experts.{name}", layout) for path, (name, layout) in MLP.items()},
}
ATTN_RES = {"norm.weight": ("norm.weight", VECTOR), "query": ("proj.weight", VECTOR)}


def _under(prefix: str, published: str, table: dict) -> dict:
    return {f"{prefix}.{path}": (published + name, layout) for path, (name, layout) in table.items()}


def layer(attention: dict, mlp: dict, mlp_name: str) -> dict:
    """The table of a whole decoder layer."""
    res = {"norm.weight": ("_norm.weight", VECTOR), "query": ("_proj.weight", VECTOR)}
    return {
        "attention_norm.weight": ("input_layernorm.weight", VECTOR),
        "mlp_norm.weight": ("post_attention_layernorm.weight", VECTOR),
        **_under("attention_res", "self_attention_res", res),
        **_under("mlp_res", "mlp_res", res),
        **_under("attention", "self_attn.", attention),
        **_under("mlp", f"{mlp_name}.", mlp),
    }


def ours(arrays: dict, prefix: str, name: str, layout: str, shape: tuple[int, ...]) -> np.ndarray:
    """The published tensor `prefix + name` of `arrays` as our array of `shape`."""
    if layout == "experts":
        return np.stack([arrays[prefix + name.format(e)].T for e in range(shape[0])])
    tensor = np.asarray(arrays[prefix + name])
    if layout == CONV:
        return tensor[:, 0].T.reshape(shape)
    if layout in ("key rows", "value rows"):
        rank, heads, width = shape
        rows = tensor.reshape(heads, -1, rank)
        rows = rows[:, :width] if layout == "key rows" else rows[:, -width:]
        return rows.transpose(2, 0, 1)
    return tensor.reshape(shape) if layout == VECTOR else tensor.T.reshape(shape)


def variables(module: nnx.Module) -> dict[str, nnx.Variable]:
    """Dotted path -> variable."""
    return {".".join(map(str, path)): v for path, v in nnx.to_flat_state(nnx.state(module))}


def load(module: nnx.Module, table: dict, arrays: dict, prefix: str = "w.") -> nnx.Module:
    """A copy of the module with the published weights."""
    graphdef, state = nnx.split(module)
    flat = {}
    for path, variable in nnx.to_flat_state(state):
        name, layout = table[".".join(map(str, path))]
        flat[path] = variable.replace(ours(arrays, prefix, name, layout, variable.get_value().shape))
    return nnx.merge(graphdef, nnx.from_flat_state(flat))


def check_gradients(
    gradients: nnx.Module | nnx.State, table: dict, arrays: dict, tolerance: float, prefix="dw."
) -> None:
    """Every parameter's gradient against the published one."""
    from golden_files import assert_close

    for path, variable in nnx.to_flat_state(gradients):
        path, value = ".".join(map(str, path)), np.asarray(variable.get_value())
        if path.endswith("router.bias"):
            continue
        name, layout = table[path]
        assert_close(value, ours(arrays, prefix, name, layout, value.shape), tolerance, path)
