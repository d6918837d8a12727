"""Trains a model.

    python -m k3jax.train --config=configs/k3.py:tiny --workdir=runs/tiny [--config.optim.learning_rate=5e-3 ...]

Reads top to bottom: set-up, data, model, state, loop, end. The workdir gets `config.json`, `metrics.jsonl` and
`checkpoints/<step>/`; the same command on the same workdir goes on where it stopped. Exit code 0: trained (or
stopped by Ctrl-C or SIGTERM, with a checkpoint); 1: the run ended without a finite loss; 2: a mistake in flags, config
or input, named in one line.
"""

import json
import math
import signal
import sys
import threading
from pathlib import Path

import jax
import numpy as np
from absl import flags, logging
from rich.console import Console

from k3jax import config as configs
from k3jax import data, metrics
from k3jax.checkpoint import Checkpoints
from k3jax.config import ConfigError, RunConfig
from k3jax.evaluate import make_evaluate
from k3jax.generate import sample
from k3jax.model import parameters
from k3jax.optim import format_table, make_optimizer
from k3jax.step import TrainState, abstract_decoder, init_state, make_train_step

# Fields that a resumed run may change: they alter no number of the steps already taken.
RESUMABLE = ("train.steps", "eval.", "sample.", "checkpoint.", "memory.")
HEALTH = ("grad_norm", "learning_rate", "skipped_steps", "max_violation", "max_logit", "gate_saturation")


def main(argv: list[str]) -> int:
    """Runs the command line `argv` (its first entry is the program) and returns the exit code."""
    try:
        return _train(argv)
    except (ConfigError, flags.Error) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


def _train(argv: list[str]) -> int:
    # ---- set-up -----------------------------------------------------------------------------------------------
    config, workdir = _parse(argv)
    if config is None:
        return 0
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    _check_workdir(workdir, config)
    device = jax.devices()[0]
    console.print(f"{config.name} on {jax.device_count()} x {device.device_kind} ({device.platform}), {workdir}")
    stop = _stop_on_signals()

    # ---- data -------------------------------------------------------------------------------------------------
    tokenizer = data.ByteTokenizer()
    if config.model.vocab < tokenizer.vocab_size:
        needed = tokenizer.vocab_size
        raise ConfigError(f"model.vocab must be at least the tokenizer's {needed}, got {config.model.vocab}")
    documents = data.tokenize(data.StandardLibrary("train"), tokenizer)
    held_out = data.tokenize(data.StandardLibrary("held_out"), tokenizer)
    console.print(f"{documents.report()}; {held_out.report()}")
    rows, width = config.data.batch_rows, config.data.seq_len
    batches = data.Batches(data.TrainRows(documents, width, config.data.seed), rows)

    def evaluation(count: int | None) -> data.Batches:
        return data.Batches(data.EvaluationRows(held_out, width, tokenizer.pad_id, rows, count), rows)

    ngrams = data.ngram_losses(documents, held_out, tokenizer)
    console.print("held-out nats per byte of n-grams: " + _listed(ngrams))

    # ---- model and optimizer ----------------------------------------------------------------------------------
    decoder = abstract_decoder(config)
    optimizer, schedule, table = make_optimizer(config, parameters.variables(decoder))
    total, active = parameters.count(decoder)
    console.print(format_table(table))
    console.print(f"{total:,} parameters, {active:,} active")
    train_step = jax.jit(make_train_step(config, decoder, optimizer, schedule), donate_argnums=0)
    evaluate = make_evaluate(config, decoder)

    # ---- state ------------------------------------------------------------------------------------------------
    checkpoints = Checkpoints(workdir, config.checkpoint.keep)
    # Drawing the parameters runs once: what it costs is its compilation.
    quick = {"xla_backend_optimization_level": 0}
    create = jax.jit(lambda: init_state(config, optimizer), compiler_options=quick)
    first = checkpoints.latest() or 0
    if first > config.train.steps:
        raise ConfigError(f"train.steps = {config.train.steps} is below the checkpoint's step {first} in {workdir}")
    if first:
        sharding = jax.sharding.SingleDeviceSharding(device)
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), jax.eval_shape(create))
        state: TrainState = checkpoints.restore(first, like)
        console.print(f"resumed at step {first}")
    else:
        state = create()

    # ---- loop -------------------------------------------------------------------------------------------------
    (workdir / "config.json").write_text(json.dumps(config.to_dict(), indent=1) + "\n")
    progress = metrics.Progress(config.train.steps, first)
    writers = [metrics.JsonlWriter(workdir / "metrics.jsonl", first), progress]
    meter = metrics.Meter(rows * width)
    progress.message("compiling the step (about a minute on a laptop)")
    stream = batches.iterate(first)
    done, pending = first, None

    def report(step: int, result: dict, held_out: data.Batches | None = None) -> dict[str, float]:
        values = {metrics.LOSS: float(result["loss"])}  # waits for the step
        values |= {f"train/{name}": float(result[name]) for name in HEALTH if name in result} | meter.measure()
        if held_out is not None:
            values[metrics.EVAL_LOSS] = evaluate(state, held_out.iterate())
            meter.restart()
        for writer in writers:
            writer.write(step, values)
        return values

    while done < config.train.steps and not stop.is_set():
        state, result = train_step(state, next(stream))
        done += 1
        if pending is not None:  # one step behind, so that the device never waits for the log
            report(done - 1, pending)
        pending = result
        if done % config.eval.every == 0 and done < config.train.steps:
            report(done, pending, evaluation(config.eval.rows))
            pending = None
    stream.close()

    # ---- end --------------------------------------------------------------------------------------------------
    if done > first:
        jax.block_until_ready(state)
        checkpoints.save(done, state)
    checkpoints.close()
    if done < config.train.steps:
        if pending is not None:
            report(done, pending)
        loss = None
    elif pending is not None:
        progress.message("evaluating on all held-out files")
        loss = report(done, pending, evaluation(None))[metrics.EVAL_LOSS]
    else:
        loss = evaluate(state, evaluation(None).iterate())
    for writer in writers:
        writer.close()
    if loss is None:
        console.print(f"stopped at step {done}; the same command goes on from there")
        return 0
    console.print(f"held-out loss {loss:.4f} nats per byte after {done} steps ({_listed(ngrams)})")
    print(_continuation(config, state, decoder, tokenizer), flush=True)
    console.print(f"checkpoint: {checkpoints.folder / str(done)}")
    if not math.isfinite(loss):
        console.print("error: the held-out loss is not finite; train/skipped_steps in metrics.jsonl tells since when")
        return 1
    return 0


def _parse(argv: list[str]) -> tuple[RunConfig | None, Path]:
    known = flags.FlagValues()
    about = {
        "config": "FILE.py[:NAME]; a path, or one of the packaged configs",
        "workdir": "folder of this run; a run found there is continued",
    }
    for name, text in about.items():
        flags.DEFINE_string(name, None, text, flag_values=known)
    flags.DEFINE_bool("help", False, "show this help", short_name="h", flag_values=known)
    overrides = [argument for argument in argv[1:] if argument.startswith("--config.")]
    rest = known([argv[0], *(argument for argument in argv[1:] if argument not in overrides)])
    if known.help:
        print(f"{__doc__}\n{known.get_help()}\nFields of a config, with their meaning: configs/base.py")
        return None, Path()
    if len(rest) > 1:
        raise ConfigError(f"unknown argument {rest[1]!r}")
    for name in about:
        if not known[name].value:
            raise ConfigError(f"--{name} is missing")
    return configs.load(known.config, overrides), Path(known.workdir)


def _check_workdir(workdir: Path, config: RunConfig) -> None:
    """Holds the config against the one of a run found there. Nothing is written before a run begins."""
    file, ours = workdir / "config.json", json.loads(json.dumps(config.to_dict()))
    try:
        workdir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--workdir={workdir}: {error}") from error
    if not file.exists():
        return
    try:
        theirs = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
    if not isinstance(theirs, dict):
        raise ConfigError(f"{file} holds no config")
    found = [(name, old, new) for name, old, new in _differences(theirs, ours) if not name.startswith(RESUMABLE)]
    if found:
        changed = "; ".join(f"{name}: {old!r} -> {new!r}" for name, old, new in found)
        raise ConfigError(f"{file} is of another run: {changed}")


def _differences(old: dict, new: dict, prefix: str = "") -> list[tuple[str, object, object]]:
    found = []
    for name in sorted(old.keys() | new.keys()):
        a, b = old.get(name), new.get(name)
        if isinstance(a, dict) and isinstance(b, dict):
            found += _differences(a, b, f"{prefix}{name}.")
        elif a != b:
            found.append((prefix + name, a, b))
    return found


def _stop_on_signals() -> threading.Event:
    """An event that Ctrl-C and SIGTERM set, so that a step is never torn."""
    stop = threading.Event()
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: stop.set())
    return stop


def _listed(losses: dict[str, float]) -> str:
    return ", ".join(f"{name} {loss:.3f}" for name, loss in losses.items())


def _continuation(config: RunConfig, state: TrainState, decoder, tokenizer) -> str:
    bound = state.to_decoder(decoder, config.train.dtype)
    prompt = tokenizer.encode(config.sample.prompt, eos=False)
    ids = sample(
        bound,
        prompt,
        tokens=config.sample.tokens,
        window=config.data.seq_len,
        vocab=tokenizer.vocab_size,
        stop=tokenizer.eos_id,
        temperature=config.sample.temperature,
        seed=config.train.seed,
    )
    return tokenizer.decode(np.concatenate([prompt, np.asarray(ids, prompt.dtype)]))


if __name__ == "__main__":
    logging.set_verbosity(logging.WARNING)
    sys.exit(main(sys.argv))
