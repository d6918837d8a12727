"""Trains a model.

    python -m k3jax.train --config=configs/k3.py:tiny --workdir=runs/tiny [--config.optim.learning_rate=5e-3 ...]

Reads top to bottom: set-up, data, model, state, loop, end. The workdir gets `config.json`, `metrics.jsonl`,
`tensorboard/` and `checkpoints/<step>/`; the same command on the same workdir goes on where it stopped. Exit code 0:
trained (or stopped by Ctrl-C or SIGTERM, with a checkpoint); 1: the run ended without a finite loss; 2: a mistake in
flags, config or input; 3: the machine lacks something; 130: interrupted at once. 2 and 3 come with one line that says
what.
"""

import dataclasses
import functools
import itertools
import logging
import math
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import jax
import numpy as np
from rich.console import Console

from k3jax import checkpoint, command, data, distributed, flops, hardware, hf, metrics
from k3jax import config as configs
from k3jax.config import ConfigError, MachineError, RunConfig
from k3jax.debug import first_nonfinite
from k3jax.evaluate import make_evaluate
from k3jax.generate import sample
from k3jax.hf.config import difference
from k3jax.model import parameters
from k3jax.optim import format_table, make_optimizer
from k3jax.parallel import Layout, make_mesh
from k3jax.parallel.mesh import from_host, in_words
from k3jax.step import TrainState, abstract_decoder, abstract_state, init_state, make_train_step, start_state
from k3jax.workdir import Workdir

FLAGS = {
    "config": "FILE.py[:NAME]; a path, or one of the packaged configs",
    "workdir": "folder of this run; a run found there is continued",
}
SCALARS = ("grad_norm", "learning_rate", "skipped_steps", "max_violation", "max_logit", "gate_saturation")


def main(argv: list[str]) -> int:
    """Runs the command line `argv` (its first entry is the program) and returns the exit code."""
    return command.guarded(_main, argv)


def _main(argv: list[str]) -> int:
    overrides, rest = command.overrides(argv)
    about = f"{__doc__}\nEvery field of a config, with its meaning: configs/base.py; --config.FIELD=VALUE sets one."
    found = command.parse(rest, about, FLAGS)
    if found is None:
        return 0
    with ExitStack() as stack:
        return _train(configs.load(found["config"], overrides), Path(found["workdir"]).expanduser(), stack)


def _train(config: RunConfig, folder: Path, stack: ExitStack) -> int:
    # ---- set-up -----------------------------------------------------------------------------------------------
    distributed.join()
    distributed.same("the config", config.to_dict())
    speaks = distributed.first()
    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True, quiet=not speaks)
    if config.init_from is not None and not Path(config.init_from).expanduser().is_dir():
        raise ConfigError(f"init_from={config.init_from}: no such folder")
    with distributed.agreed("the workdir"):
        workdir = stack.enter_context(Workdir(folder, config.to_dict())) if speaks else None
    mesh = make_mesh(config.mesh, config.data.batch_rows // config.train.accumulate, seq_len=config.data.seq_len)
    kind, device = mesh.devices.flat[0].device_kind, hardware.lookup(mesh.devices.flat[0].device_kind)
    many = f" in {distributed.count()} processes" if distributed.count() > 1 else ""
    console.print(f"{config.name} on {mesh.size} x {kind} ({in_words(mesh)}){many}, {folder}")
    if device is not None and device.bf16 is None and config.train.dtype == "bfloat16":
        console.print(f"{kind} has no bfloat16: computing in float32")
        config = _replaced(config, "train", dtype="float32")

    # ---- model and optimizer ----------------------------------------------------------------------------------
    decoder = abstract_decoder(config)
    variables = parameters.variables(decoder)
    layout = Layout.of(mesh, variables)
    optimizer, schedule, table = make_optimizer(config, variables, spread=layout.spread)
    total, active = parameters.count(decoder)
    console.print(format_table(table))
    console.print(f"{total:,} parameters, {active:,} active")

    # ---- data -------------------------------------------------------------------------------------------------
    with distributed.agreed("the data"):
        corpus = data.load(config.data, config.model.vocab)
        if workdir is not None:
            workdir.check_data(corpus.fingerprints)
    distributed.same("the data", [dict(corpus.fingerprints), corpus.steps_per_epoch])
    for line in corpus.lines():
        console.print(line)
    if config.train.epochs is not None:
        steps = max(1, math.ceil(config.train.epochs * corpus.steps_per_epoch))
        config = _replaced(config, "train", steps=steps, epochs=None)
        optimizer, schedule, _ = make_optimizer(config, variables, spread=layout.spread)
        console.print(f"{steps:,} steps")
    prompt = _prompt(config, corpus.tokenizer)
    ngrams, unit = (speaks and corpus.ngrams()) or {}, "byte" if config.data.tokenizer == "bytes" else "token"
    if ngrams:
        console.print(f"held-out nats per {unit} of n-grams: {_listed(ngrams)}")

    # ---- state ------------------------------------------------------------------------------------------------
    like = abstract_state(config, optimizer, layout)
    shardings = jax.tree.map(lambda x: x.sharding, like)
    checkpoints = checkpoint.Checkpoints(folder, config.checkpoint.keep, report=console.print)
    stack.push(functools.partial(_finish_saving, checkpoints, console))
    saved, last = checkpoints.steps(), config.train.steps
    first = max(saved, default=0)
    if first > last:
        raise ConfigError(f"train.steps = {last} is below the checkpoint's step {first} in {folder}")
    room = config.checkpoint.keep + 1 - len(saved)  # the oldest goes when a new one is complete
    coming = -(-last // config.checkpoint.every) - first // config.checkpoint.every
    with distributed.agreed("the disk"):
        if first < last and speaks:
            checkpoint.require_space(folder, min(max(room, 1), coming) * checkpoint.state_bytes(like))
    # Drawing the parameters runs once: what it costs is its compilation.
    quick = {"out_shardings": shardings}
    if mesh.devices.flat[0].platform == "cpu":
        quick["compiler_options"] = {"xla_backend_optimization_level": 0}
    if first:
        with distributed.agreed("the restored state"):
            state: TrainState = checkpoints.restore(first, like)
        if int(state.step) != first:
            raise ConfigError(f"checkpoint {checkpoints.folder / str(first)} is of step {int(state.step)}, not {first}")
        console.print(f"resumed at step {first}")
    elif config.init_from is not None:
        with distributed.agreed("the first weights"):
            params, bias = _weights(config, like)
        start = jax.jit(functools.partial(start_state, config, optimizer), donate_argnums=0, **quick)
        state = distributed.compiled(start, params, bias)(params, bias)
        del params, bias
        console.print(f"weights from {config.init_from}")
    else:
        state = distributed.compiled(jax.jit(functools.partial(init_state, config, optimizer), **quick))()
    evaluate = make_evaluate(config, decoder, layout)

    # ---- writers ----------------------------------------------------------------------------------------------
    writers: list[metrics.Writer] = []
    reached, has_looked, say = 0, True, console.print
    with distributed.agreed("the log"):
        if workdir is not None:
            workdir.begin()
            jsonl = metrics.JsonlWriter(folder / "metrics.jsonl", first)
            progress = metrics.Progress(last, first)
            reached, has_looked, say = jsonl.reached, metrics.EVAL_LOSS in jsonl.last, progress.message
            writers += [jsonl, progress]
            if config.log.tensorboard:
                writers.append(metrics.TensorBoardWriter(folder / "tensorboard", first))
            if config.log.wandb:
                writers.append(metrics.WandbWriter(config.log.wandb, folder, first, config.to_dict(), config.name))
    for writer in writers:
        stack.callback(writer.close)
    reached, has_looked = distributed.told("the log", [reached, has_looked])
    rows, width = config.data.batch_rows, config.data.seq_len
    peak = None if device is None else device.peak(config.train.dtype)
    meter = metrics.Meter(
        rows * width, flops.train_step(config.model, width, rows), None if peak is None else peak * mesh.size
    )
    profiler = metrics.Profiler(folder / "profile", config.profile.span if speaks else None, first, last, say)
    stack.callback(profiler.close)
    watch = _Watch(config, meter, writers)

    def evaluation(count: int | None) -> float | None:
        """The held-out loss, or None if the run is asked to stop meanwhile."""
        with meter.aside("evaluation"):
            batches = corpus.evaluation_batches(count).iterate()
            loss = evaluate(state, itertools.takewhile(lambda _: not stops(), batches))
            batches.close()
        return None if stops() else loss

    def show_sample() -> None:
        with meter.aside("sampling"):
            text = _continuation(config, state, decoder, corpus.tokenizer, prompt)
            if speaks:
                print(text, flush=True)

    # ---- loop -------------------------------------------------------------------------------------------------
    asked, vote = stack.enter_context(_stop_on_signals()), distributed.Vote(mesh)

    def stops() -> bool:
        """Whether the run ends here, in all processes."""
        return vote(asked.is_set())

    train_step = None
    if first < last:
        say("compiling the step (about a minute on a laptop)")
        with meter.aside("compilation"):
            step_of = make_train_step(config, decoder, optimizer, schedule, layout)
            jitted = jax.jit(step_of, donate_argnums=0, out_shardings=(shardings, layout.repeated))
            train_step = distributed.compiled(jitted, like, layout.batch_shapes(rows, width))
    stream = corpus.train_batches().iterate(first)
    stack.callback(stream.close)
    meter.start(first, reached)
    done = first
    cut_off = 0 < first < last and first % config.eval.every == 0 and not has_looked
    if cut_off and (loss := evaluation(config.eval.rows)) is not None:  # the run was stopped in this evaluation
        watch.write(first, {metrics.EVAL_LOSS: loss})
    try:
        while done < last and not stops():
            profiler.before(done + 1)
            batch = next(stream)
            state, result = train_step(state, layout.place(batch))
            done += 1
            profiler.after(done, result["loss"])
            evaluates, samples, saves = (
                every is not None and done % every == 0 and done < last
                for every in (config.eval.every, config.sample.every, config.checkpoint.every)
            )
            watch.step(done, result)
            if evaluates or samples or saves or config.debug.nans or done == first + 1:
                watch.catch_up()
            if config.debug.nans and watch.skipped:
                where = first_nonfinite(state.to_decoder(decoder, config.train.dtype), batch)
                console.print(f"error: step {done} was not finite; first at: {where or 'the update'}")
                return 1
            if watch.skipped >= config.train.max_skipped:
                checkpoints.wait()
                latest = checkpoints.latest()
                resort = f"the last checkpoint is of step {latest}" if latest else "there is no checkpoint"
                console.print(
                    f"error: {watch.skipped} steps in a row were not finite (train.max_skipped), seen at step {done}; "
                    f"{resort}; see --config.debug.nans"
                )
                return 1
            if evaluates and (loss := evaluation(config.eval.rows)) is not None:
                watch.write(done, {metrics.EVAL_LOSS: loss})
            if samples:
                show_sample()
            if saves or checkpoints.check():  # behind the record of its step, which a kill must not lose
                watch.catch_up()
                with meter.aside("saving"):
                    checkpoints.save(done, state)
        watch.catch_up()
    except checkpoint.SaveFailed:
        raise
    except (ConfigError, MachineError, OSError):  # of the data, a log or a sample: the state is good
        if done > first and distributed.count() == 1:  # else the others do not know, and would not save with it
            checkpoints.save(done, state, wait=True)
            console.print(f"saved step {done}")
        raise

    # ---- end --------------------------------------------------------------------------------------------------
    # A scheduler that stopped one process of many must see that the run has not come to its end.
    stopped = distributed.STOPPED if distributed.count() > 1 else 0
    with meter.aside("saving"):
        if done > first:
            checkpoints.save(done, state, wait=True)
        checkpoints.close()
    if done < last:
        console.print(f"stopped at step {done}; the same command goes on from there")
        return stopped
    say("evaluating on all held-out files")
    looked, loss = evaluation(config.eval.rows), evaluation(None)
    if looked is None or loss is None:
        console.print(f"stopped behind the last step, {done}, without its held-out loss; the same command takes it")
        return stopped
    watch.write(done, {metrics.EVAL_LOSS: looked, metrics.EVAL_LOSS_ALL: loss})
    beside = f" ({_listed(ngrams)})" if ngrams else ""
    console.print(f"held-out loss {loss:.4f} nats per {unit} after {done} steps{beside}")
    show_sample()
    console.print(meter.summary())
    console.print(f"checkpoint: {checkpoints.folder / str(done)}")
    if watch.skipped_in_all:
        console.print(f"{watch.skipped_in_all} steps were not finite and changed nothing (train/skipped_steps)")
    if watch.skipped or not math.isfinite(loss):
        console.print(
            "error: the run ends without a finite loss; train/skipped_steps in metrics.jsonl tells since when"
        )
        return 1
    return 0


class _Watch:
    """Hands the numbers of each step to the writers, one step late, so that the device never waits for the log."""

    def __init__(self, config: RunConfig, meter: metrics.Meter, writers: list[metrics.Writer]):
        self.config, self.meter, self.writers = config, meter, writers
        self.skipped = self.skipped_in_all = 0  # non-finite steps, those in a row and all, as of the last one written
        self._pending: tuple[int, dict] | None = None

    def step(self, step: int, result: dict) -> None:
        """A step was dispatched; the one before it is written."""
        self.catch_up()
        self._pending = step, result

    def catch_up(self) -> None:
        """Waits for the last dispatched step and writes it."""
        if self._pending is None:
            return
        (step, result), self._pending = self._pending, None
        values = {metrics.LOSS: float(result["loss"])}  # waits for the step
        self.skipped, self.skipped_in_all = int(result["skipped_in_a_row"]), int(result["skipped_steps"])
        values |= {f"train/{name}": float(result[name]) for name in SCALARS if name in result}
        values |= self.meter.measure(productive=not self.skipped)
        if step % self.config.log.health_every == 0:
            values |= metrics.health_report(self.config.model, **jax.device_get(result["health"]))
        self.write(step, values)

    def write(self, step: int, values: dict) -> None:
        for writer in self.writers:
            writer.write(step, values)


def _replaced(config: RunConfig, group: str, **fields) -> RunConfig:
    return dataclasses.replace(config, **{group: dataclasses.replace(getattr(config, group), **fields)})


def _weights(config: RunConfig, like: TrainState) -> tuple[dict[str, jax.Array], jax.Array]:
    """Parameters and router bias of `init_from`, placed as `like`. Raises ConfigError for another model."""
    path = Path(config.init_from).expanduser()
    if not any(path.glob("*.safetensors*")):
        found = checkpoint.read_parameters(path, {"params": like.params, "router_bias": like.router_bias})
        return found["params"], found["router_bias"]
    decoder = hf.load(path, dtype="float32")
    if different := difference(config.model, decoder.config):
        raise ConfigError(f"init_from={path} is another model: {different}")
    params = {path: from_host(value, like.params[path].sharding) for path, value in parameters.values(decoder).items()}
    return params, from_host(decoder.router_bias(), like.router_bias.sharding)


@contextmanager
def _stop_on_signals() -> Iterator[threading.Event]:
    """An event that Ctrl-C and SIGTERM set, so that a step is never torn. A second signal ends the program at once."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.getsignal(number) for number in command.stop_signals()}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def ask(*_) -> None:
        stop.set()
        restore()
        if distributed.first():
            os.write(2, b"\nstopping: this step is finished and saved; once more to stop at once\n")

    for number in before:
        signal.signal(number, ask)
    try:
        yield stop
    finally:
        restore()


def _listed(losses: dict[str, float]) -> str:
    return ", ".join(f"{name} {loss:.3f}" for name, loss in losses.items())


def _finish_saving(checkpoints: checkpoint.Checkpoints, console: Console, kind: type | None, *_: object) -> None:
    """However a run ends, the save that is being written comes to its end; a failure is said, and hides no other.

    Of several processes one that fails does not wait: it cannot be written without the others.
    """
    if kind is not None and distributed.count() > 1:
        return
    try:
        checkpoints.close()
    except MachineError as error:
        console.print(f"error: {error}")


def _prompt(config: RunConfig, tokenizer: data.Tokenizer) -> np.ndarray:
    """The ids of sample.prompt. Raises ConfigError for a text that is none to the tokenizer."""
    try:
        return tokenizer.encode(config.sample.prompt, eos=False)
    except (data.BadDocument, UnicodeError) as error:
        raise ConfigError(f"sample.prompt: {getattr(error, 'reason', error)}") from error


def _continuation(config: RunConfig, state: TrainState, decoder, tokenizer, prompt: np.ndarray) -> str:
    bound = state.to_decoder(decoder, config.train.dtype)
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
    logging.getLogger().setLevel(logging.WARNING)
    sys.stdout.reconfigure(errors="replace")  # a sample may hold what the terminal cannot show
    distributed.run(main, sys.argv)
