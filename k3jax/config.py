"""From a config file and flags to a frozen, checked RunConfig.

A config file holds `get_config(name) -> ConfigDict`. `load` runs it, applies the `--config.a.b=value` overrides by the
types of the dataclasses below and builds them. Invariant: a RunConfig that exists is one that can be run as far as its
numbers tell; whatever is wrong raises ConfigError, one line that begins with the field's full name.
"""

import dataclasses
import importlib.util
import math
import re
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

PACKAGED = (Path(__file__).parent / "configs", Path(__file__).parent.parent / "configs")  # wheel, checkout


class ConfigError(ValueError):
    """A mistake of the user's, in one line that names the field, flag or file. Command lines exit with 2."""


class MachineError(RuntimeError):
    """What the machine lacks or refuses: disk, memory, a library. One line; command lines exit with 3."""


def _check(holds: bool, name: str, rule: str, value: Any) -> None:
    if not holds:
        raise ConfigError(f"{name} must be {rule}, got {value!r}")


def _positive(prefix: str, config: Any, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        _check(value is None or value > 0, f"{prefix}.{name}", "greater than 0", value)


@dataclass(frozen=True)
class KDAConfig:
    """Kimi Delta Attention (k3.md 2.1). Widths in channels."""

    heads: int
    key_dim: int
    value_dim: int
    output_gate: Literal["full", "low_rank"]
    lower_bound: float | None

    def __post_init__(self):
        _positive("model.kda", self, "heads", "key_dim", "value_dim")
        bound = self.lower_bound
        _check(bound is None or -1e4 < bound < 0, "model.kda.lower_bound", "None or between -1e4 and 0", bound)


@dataclass(frozen=True)
class MLAConfig:
    """Multi-head latent attention without position encoding (k3.md 2.2). Widths in channels."""

    heads: int
    q_lora: int | None
    kv_lora: int
    qk_nope: int
    qk_shared: int
    value_dim: int
    output_gate: bool
    norm_eps: float

    def __post_init__(self):
        _positive("model.mla", self, *(f.name for f in dataclasses.fields(self) if f.name != "output_gate"))


@dataclass(frozen=True)
class MoEConfig:
    """Stable LatentMoE or plain MoE (k3.md 2.4), and how its router bias is balanced (2.5)."""

    routed_experts: int
    top_k: int
    shared_experts: int
    latent: int | None
    expert_mlp: int
    scaling: float
    groups: int
    top_groups: int
    balancing: Literal["quantile", "sign", "none"]
    balancing_ema: float
    sign_rate: float

    def __post_init__(self):
        _positive("model.moe", self, "routed_experts", "top_k", "latent", "expert_mlp", "scaling", "groups")
        _positive("model.moe", self, "top_groups", "sign_rate")
        experts, top_k = self.routed_experts, self.top_k
        _check(self.shared_experts >= 0, "model.moe.shared_experts", "0 or more", self.shared_experts)
        _check(top_k <= experts, "model.moe.top_k", f"at most routed_experts = {experts}", top_k)
        _check(experts % self.groups == 0, "model.moe.groups", f"a divisor of {experts}", self.groups)
        _check(self.top_groups <= self.groups, "model.moe.top_groups", f"<= {self.groups}", self.top_groups)
        _check(0 <= self.balancing_ema < 1, "model.moe.balancing_ema", "in [0, 1)", self.balancing_ema)
        in_reach = experts // self.groups * self.top_groups
        _check(top_k <= in_reach, "model.moe.top_k", f"at most {in_reach} experts of top_groups", top_k)
        if self.groups > 1:
            _check(experts // self.groups >= 2, "model.moe.groups", "groups of two or more", self.groups)
        if self.balancing == "quantile":  # the rule compares with the (k+1)-th expert of all
            _check(top_k < experts, "model.moe.top_k", "below routed_experts with quantile balancing", top_k)
            _check(self.groups == 1, "model.moe.groups", "1 with quantile balancing", self.groups)


@dataclass(frozen=True)
class ModelConfig:
    """Shape of one decoder; K3 and Kimi-Linear are two settings of it (k3.md section 1)."""

    vocab: int
    embed: int
    layers: int
    dense_layers: int
    mlp: int
    mla_layers: tuple[int, ...]
    attn_res_block: int | None
    activation: Literal["situ", "swiglu"]
    situ_beta: float
    situ_linear_beta: float | None
    norm_eps: float
    init_std: float
    kda: KDAConfig
    mla: MLAConfig
    moe: MoEConfig

    def __post_init__(self):
        _positive("model", self, "vocab", "embed", "layers", "mlp", "attn_res_block", "situ_beta")
        _positive("model", self, "situ_linear_beta", "norm_eps", "init_std")
        layers, mla = self.layers, self.mla_layers
        _check(0 <= self.dense_layers <= layers, "model.dense_layers", f"in 0 .. {layers}", self.dense_layers)
        inside = all(1 <= layer <= layers for layer in mla) and list(mla) == sorted(set(mla))
        _check(inside, "model.mla_layers", f"increasing layer numbers in 1 .. {layers}", mla)

    @property
    def kda_layers(self) -> tuple[int, ...]:
        """Numbers, from 1, of the KDA layers."""
        return tuple(layer for layer in range(1, self.layers + 1) if layer not in self.mla_layers)

    @property
    def moe_layers(self) -> int:
        """How many layers route to experts."""
        return self.layers - self.dense_layers


@dataclass(frozen=True)
class DataConfig:
    """Where tokens come from and how rows are cut. seq_len in tokens, batch_rows in rows per optimizer step."""

    source: tuple[str, ...]
    weights: tuple[float, ...]
    held_out: tuple[str, ...]
    tokenizer: str
    chat_template: str | None
    seq_len: int
    batch_rows: int
    seed: int

    def __post_init__(self):
        _positive("data", self, "seq_len", "batch_rows")
        sources, weights = self.source, self.weights
        _check(bool(sources) and all(sources), "data.source", "one source or more", sources)
        _check(len(weights) in (0, len(sources)), "data.weights", f"one number for each of {sources}", weights)
        _check(all(weight > 0 for weight in weights), "data.weights", "greater than 0", weights)
        _check(max(weights, default=1) <= 1e9 * min(weights, default=1), "data.weights", "within 1e9", weights)
        _check(self.seq_len * self.batch_rows < 2**31, "data.batch_rows", "below 2^31 tokens per step", self.batch_rows)
        _check(0 <= self.seed < 2**32, "data.seed", "in 0 .. 2^32 - 1", self.seed)


@dataclass(frozen=True)
class OptimConfig:
    """Muon and AdamW under one schedule (k3.md 4). learning_rate is the peak; steps are optimizer steps."""

    learning_rate: float
    schedule: Literal["cosine", "wsd"]
    warmup_steps: int
    decay_steps: int
    end_fraction: float
    momentum: float
    weight_decay: float
    clip_norm: float | None
    qk_clip: float | None
    frozen: tuple[str, ...]
    rate_scale: tuple[str, ...]

    def __post_init__(self):
        _positive("optim", self, "learning_rate", "clip_norm", "qk_clip")
        for entry in self.rate_scale:
            pattern, _, factor = entry.partition("=")
            fits = bool(pattern) and re.fullmatch(r"\d+(\.\d*)?([eE][-+]?\d+)?", factor) is not None
            fits = fits and math.isfinite(float(factor))
            _check(fits, "optim.rate_scale", "PATTERN=FACTOR with a factor of 0 or more", entry)
        _check(self.learning_rate <= 10, "optim.learning_rate", "at most 10", self.learning_rate)
        _check(self.warmup_steps >= 0, "optim.warmup_steps", "0 or more", self.warmup_steps)
        _check(self.decay_steps >= 0, "optim.decay_steps", "0 or more", self.decay_steps)
        _check(0 <= self.end_fraction <= 1, "optim.end_fraction", "in [0, 1]", self.end_fraction)
        _check(0 <= self.momentum < 1, "optim.momentum", "in [0, 1)", self.momentum)
        _check(self.weight_decay >= 0, "optim.weight_decay", "0 or more", self.weight_decay)
        if self.schedule == "wsd":
            _check(self.decay_steps > 0, "optim.decay_steps", "greater than 0 for wsd", self.decay_steps)


@dataclass(frozen=True)
class TrainConfig:
    """Length of the run in optimizer steps or epochs, how a step is computed, seed of the parameters."""

    steps: int
    epochs: float | None
    accumulate: int
    max_skipped: int
    seed: int
    dtype: Literal["float32", "bfloat16"]

    def __post_init__(self):
        _positive("train", self, "steps", "epochs", "accumulate", "max_skipped")
        _check(self.steps < 2**31, "train.steps", "below 2^31", self.steps)
        _check(0 <= self.seed < 2**32, "train.seed", "in 0 .. 2^32 - 1", self.seed)


@dataclass(frozen=True)
class EvalConfig:
    """When the held-out loss is taken (steps) and on how many rows."""

    every: int
    rows: int

    def __post_init__(self):
        _positive("eval", self, "every", "rows")


@dataclass(frozen=True)
class SampleConfig:
    """The continuation printed after training, and in between. temperature 0 takes the likeliest token."""

    every: int | None
    prompt: str
    tokens: int
    temperature: float

    def __post_init__(self):
        _positive("sample", self, "every")
        _check(self.tokens >= 0, "sample.tokens", "0 or more", self.tokens)
        _check(self.temperature >= 0, "sample.temperature", "0 or more", self.temperature)


@dataclass(frozen=True)
class CheckpointConfig:
    """Steps between checkpoints, and how many of them stay on disk."""

    every: int
    keep: int

    def __post_init__(self):
        _positive("checkpoint", self, "every", "keep")


@dataclass(frozen=True)
class MeshConfig:
    """Devices along each mesh axis (k3jax/parallel/mesh.py). data None takes all that the other axes leave."""

    data: int | None = None
    fsdp: int = 1
    expert: int = 1
    context: int = 1
    tensor: int = 1

    def __post_init__(self):
        _positive("mesh", self, "data", "fsdp", "expert", "context", "tensor")


@dataclass(frozen=True)
class LogConfig:
    """Where numbers go beside metrics.jsonl, and how often those of every layer do (steps)."""

    health_every: int
    tensorboard: bool
    wandb: str | None

    def __post_init__(self):
        _positive("log", self, "health_every")


@dataclass(frozen=True)
class ProfileConfig:
    """Steps `first:behind` whose trace is written."""

    steps: str | None

    def __post_init__(self):
        found = self.span
        _check(found is None or 1 <= found[0] < found[1], "profile.steps", "FIRST:BEHIND, 1 or more", self.steps)

    @property
    def span(self) -> tuple[int, int] | None:
        """The first step of the trace and the one behind it; (0, 0) for a text that is no span."""
        if self.steps is None:
            return None
        found = re.fullmatch(r"(\d+):(\d+)", self.steps)
        return (int(found[1]), int(found[2])) if found else (0, 0)


@dataclass(frozen=True)
class DebugConfig:
    """Help for a sick run."""

    nans: bool


@dataclass(frozen=True)
class MemoryConfig:
    """What the backward pass finds saved; the rest it computes again."""

    policy: Literal["save_all", "recompute_all"] = "save_all"


@dataclass(frozen=True)
class RunConfig:
    """All of one run. `to_dict` is what `config.json` holds; `from_dict` reads it back."""

    name: str
    model: ModelConfig
    data: DataConfig
    optim: OptimConfig
    train: TrainConfig
    eval: EvalConfig
    sample: SampleConfig
    checkpoint: CheckpointConfig
    log: LogConfig
    profile: ProfileConfig
    debug: DebugConfig
    init_from: str | None = None
    mesh: MeshConfig = field(default_factory=MeshConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)

    def __post_init__(self):
        steps, optim = self.train.steps, self.optim
        busy = optim.warmup_steps + (optim.decay_steps if optim.schedule == "wsd" else 0)
        if self.train.epochs is None:  # else the data say how many steps there are
            _check(busy <= steps, "optim.warmup_steps", f"at most train.steps = {steps} with decay_steps", busy)
        rows, parts = self.data.batch_rows, self.train.accumulate
        _check(rows % parts == 0, "train.accumulate", f"a divisor of data.batch_rows = {rows}", parts)

    def to_dict(self) -> dict[str, Any]:
        """Nested plain values, as JSON holds them."""
        return dataclasses.asdict(self)


def _options(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)


def _described(hint: Any) -> str:
    if typing.get_origin(hint) is Literal:
        return " | ".join(typing.get_args(hint))
    names = (str(option) if typing.get_origin(option) else option.__name__ for option in _options(hint))
    return " or ".join("None" if name == "NoneType" else name for name in names)


def _typed(name: str, value: Any, hint: Any) -> Any:
    """`value` as the field's type, or ConfigError. An int serves as a float; nothing else is converted."""
    if dataclasses.is_dataclass(hint):
        return _build(hint, value, name)
    if typing.get_origin(hint) is Literal:
        fits = value in typing.get_args(hint)
    elif typing.get_origin(hint) is tuple:
        item = typing.get_args(hint)[0]
        fits = isinstance(value, list | tuple)
        if fits:
            return tuple(_typed(name, entry, item) for entry in value)
    else:
        kinds = _options(hint)
        if float in kinds and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        fits = isinstance(value, kinds) and (not isinstance(value, bool) or bool in kinds)
        fits = fits and (not isinstance(value, float) or math.isfinite(value))
    if not fits:
        raise ConfigError(f"{name} must be {_described(hint)}, got {value!r}")
    return value


def _build(kind: type, values: Any, prefix: str = "") -> Any:
    if not isinstance(values, Mapping):
        raise ConfigError(f"{prefix or 'config'} must hold fields, got {values!r}")
    hints, dotted = typing.get_type_hints(kind), f"{prefix}." if prefix else ""
    for name in values:
        if name not in hints:
            raise ConfigError(f"{dotted}{name} is no field; there are: {', '.join(hints)}")
    missing = [
        f.name
        for f in dataclasses.fields(kind)
        if f.name not in values and f.default is f.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise ConfigError(f"{dotted}{missing[0]} is missing")
    return kind(**{name: _typed(dotted + name, value, hints[name]) for name, value in values.items()})


def from_dict(values: Mapping[str, Any]) -> RunConfig:
    """A RunConfig from nested mappings (a ConfigDict, or a read `config.json`). Raises ConfigError."""
    return _build(RunConfig, values)


def _parsed(name: str, text: str, hint: Any) -> Any:
    """The text of a flag as the field's type. `None` is None where the field may be; 1e3 is no int."""
    kinds = _options(hint)
    if type(None) in kinds and text == "None":
        return None
    if bool in kinds and text.lower() in ("true", "false"):
        return text.lower() == "true"
    if typing.get_origin(hint) is tuple:
        inside = re.fullmatch(r"\s*(?:\((.*)\)|\[(.*)\])\s*", text)  # with brackets or without
        entries = (inside[1] or inside[2] or "" if inside else text).split(",")
        entries = [entry.strip().strip("'\"") for entry in entries]
        return tuple(_parsed(name, entry, typing.get_args(hint)[0]) for entry in entries if entry)
    for kind in (int, float):
        if kind in kinds:
            try:
                return kind(text)
            except ValueError:
                continue
    return text  # strings and literals; anything else is refused with its type by `_typed`


def _override(values: dict[str, Any], flag: str) -> None:
    name, equals, text = flag.removeprefix("--config.").partition("=")
    if not equals:
        raise ConfigError(f"--config.{name} needs a value: --config.{name}=VALUE")
    hint, at, path = RunConfig, values, name.split(".")
    for depth, part in enumerate(path):
        hints = typing.get_type_hints(hint) if dataclasses.is_dataclass(hint) else {}
        if part not in hints:
            where = ".".join(path[: depth + 1])
            raise ConfigError(f"--config.{where} is no field; there are: {', '.join(hints) or 'none'}")
        hint = hints[part]
        if depth < len(path) - 1:
            at = at.setdefault(part, {})
            if not isinstance(at, dict):
                raise ConfigError(f"{'.'.join(path[: depth + 1])} must hold fields, got {at!r}")
    if dataclasses.is_dataclass(hint):
        raise ConfigError(f"--config.{name} is a group of fields: {', '.join(typing.get_type_hints(hint))}")
    at[path[-1]] = _typed(f"--config.{name}", _parsed(name, text, hint), hint)


def _find(file: str) -> Path:
    tried = [Path(file)]
    for folder in PACKAGED:
        tried.append(folder / Path(file).relative_to("configs") if file.startswith("configs/") else folder / file)
    for path in tried:
        if path.is_file():
            return path.resolve()
    raise ConfigError(f"--config: no file {file} here or among the packaged configs")


def _run_file(path: Path):
    """The config file as a module whose siblings, and then the packaged configs, are reached by `from . import`."""
    package = f"_k3jax_configs_{abs(hash(path.parent))}"
    if package not in sys.modules:
        module = types.ModuleType(package)
        module.__path__ = [str(path.parent), *(str(folder) for folder in PACKAGED)]
        sys.modules[package] = module
    spec = importlib.util.spec_from_file_location(f"{package}.{path.stem}", path)
    if spec is None:
        raise ConfigError(f"--config: {path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ConfigError(f"--config: {path} does not run: {type(error).__name__}: {error}") from error
    if not hasattr(module, "get_config"):
        raise ConfigError(f"--config: {path} has no get_config()")
    return module


def load(spec: str, overrides: Sequence[str] = ()) -> RunConfig:
    """The checked run config of `FILE.py[:NAME]` with `--config.a.b=value` overrides applied.

    FILE is tried as a path, then among the packaged configs. Raises ConfigError, one line naming field, flag or file.
    """
    file, _, name = spec.partition(":") if not re.match(r"^[A-Za-z]:\\", spec) else (spec, "", "")
    module = _run_file(_find(file))
    try:
        config = module.get_config(name) if name else module.get_config()
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"--config={spec}: {error}") from error
    if not hasattr(config, "to_dict") and not isinstance(config, Mapping):
        raise ConfigError(f"--config={spec}: get_config() returned no ConfigDict but {config!r}")
    values = config.to_dict() if hasattr(config, "to_dict") else dict(config)
    for flag in overrides:
        _override(values, flag)
    return from_dict(values)
