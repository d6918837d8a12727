"""One training pass of a whole small model, ours beside that of `transformers`, on this machine's CPUs.

    python benchmarks/model.py

Model: Kimi-Linear form, 4 layers (KDA, KDA, KDA, MLA), width 512, 8 heads of 64, each layer with 8 experts (2 chosen,
1 shared) of inner width 512, vocabulary 8,192. Work: 1 row of 512 tokens, fp32, loss and gradients of all parameters;
no optimizer. Both sides hold the same weights, written by `k3jax.hf` and read by transformers' KimiLinearForCausalLM,
so that loss and gradient norm agree; their passes alternate in one process, and a pass' time is the median.

Printed: both times, their ratio, FLOP/s by `k3jax/flops.py` (model FLOPs only: what is computed twice counts once), and
those as a share of the rate of an fp32 product of two 1,024 x 1,024 matrices, measured in the same rounds. Without
torch and transformers (pip install torch transformers) ours stands alone. Takes a minute; any other load on the
machine shows in the figures.
"""

import argparse
import dataclasses
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

from k3jax import config as configs
from k3jax import flops, hf
from k3jax.config import RunConfig
from k3jax.model import parameters
from k3jax.model.decoder import Decoder
from k3jax.step import abstract_decoder, init_state, loss_sum

ROWS, TOKENS = 1, 512
SIDE = 1_024  # of the square matrices whose product gives the ceiling
ROUNDS = 9
PAUSE = 0.1  # seconds between two sides, in which the threads of one come to rest
Pass = Callable[[], tuple[float, float]]  # -> (loss in nats per target, norm of all gradients)


def run_config() -> RunConfig:
    """The run whose model and loss are timed."""
    run = configs.load("configs/k3.py:kimi_linear_48b")
    kimi = run.model
    model = dataclasses.replace(
        kimi,
        vocab=8_192,
        embed=512,
        layers=4,
        dense_layers=0,
        mla_layers=(4,),
        kda=dataclasses.replace(kimi.kda, heads=8, key_dim=64, value_dim=64),
        mla=dataclasses.replace(kimi.mla, heads=8, kv_lora=128, qk_nope=64, qk_shared=32, value_dim=64),
        moe=dataclasses.replace(kimi.moe, routed_experts=8, top_k=2, expert_mlp=512),
    )
    train, memory = dataclasses.replace(run.train, dtype="float32"), dataclasses.replace(run.memory, policy="save_all")
    return dataclasses.replace(run, model=model, train=train, memory=memory)


def our_pass(run: RunConfig, decoder: Decoder, tokens: np.ndarray) -> Pass:
    """Forward and backward of the loss that training uses. decoder holds the weights, tokens [B,T]."""
    abstract, params, bias = abstract_decoder(run), parameters.values(decoder), decoder.router_bias()
    mask = np.ones(tokens.shape, bool)
    mask[:, -1] = False  # the last token has no next one
    batch = {"tokens": tokens, "targets": np.roll(tokens, -1, axis=1), "loss_mask": mask}
    batch["segment_ids"] = np.ones_like(tokens)
    batch = jax.tree.map(jnp.asarray, batch)

    @jax.jit
    def both(params):
        def loss(params):
            total, (targets, _) = loss_sum(abstract, run, params, bias, batch)
            return total / targets

        value, gradients = jax.value_and_grad(loss)(params)
        return value, gradients, optax.tree.norm(gradients)

    def run_once() -> tuple[float, float]:
        value, _, norm = jax.block_until_ready(both(params))
        return float(value), float(norm)

    return run_once


def their_pass(decoder: Decoder, tokens: np.ndarray) -> Pass:
    """The same of KimiLinearForCausalLM, as transformers sets it up by default: on CPUs, KDA in plain PyTorch.

    Raises:
        ImportError: no torch, no transformers, or one without this class.
    """
    import torch
    from transformers import KimiLinearForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    # The class' own special tokens lie outside this vocabulary.
    special = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    with tempfile.TemporaryDirectory() as folder:
        hf.save(decoder, Path(folder) / "model")
        model = KimiLinearForCausalLM.from_pretrained(Path(folder) / "model", dtype=torch.float32, **special).train()
    ids = torch.from_numpy(tokens.astype(np.int64))

    def run_once() -> tuple[float, float]:
        model.zero_grad(set_to_none=True)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        norms = [torch.linalg.vector_norm(p.grad) for p in model.parameters() if p.grad is not None]
        return loss.item(), torch.linalg.vector_norm(torch.stack(norms)).item()

    return run_once


def matmul_pass() -> Callable[[], object]:
    """A product of two square fp32 matrices."""
    matrix = jax.random.normal(jax.random.key(0), (SIDE, SIDE))
    product = jax.jit(jnp.matmul)
    return lambda: jax.block_until_ready(product(matrix, matrix))


def alternate(sides: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Seconds of each side: the median of ROUNDS turns, after two turns that are not counted."""
    seconds = {name: [] for name in sides}
    for turn in range(ROUNDS + 2):
        for name, once in sides.items():
            time.sleep(PAUSE)
            start = time.perf_counter()
            once()
            if turn >= 2:
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(found) for name, found in seconds.items()}


def main() -> None:
    """Measures and prints."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    jax.config.update("jax_platforms", "cpu")
    run = run_config()
    start = jax.jit(lambda: init_state(run, optax.identity()))()
    decoder = start.to_decoder(abstract_decoder(run))
    tokens = np.random.default_rng(0).integers(0, run.model.vocab, (ROWS, TOKENS), dtype=np.int32)
    passes = {"k3jax": our_pass(run, decoder, tokens)}
    versions = {"k3jax": f"jax {jax.__version__}"}
    try:
        passes["transformers"] = their_pass(decoder, tokens)
        import torch
        import transformers

        versions["transformers"] = f"transformers {transformers.__version__}, torch {torch.__version__}"
        versions["transformers"] += f", {torch.get_num_threads()} threads"
    except ImportError as error:
        print(f"transformers is left out: {error} (pip install torch transformers)")
    results = {name: once() for name, once in passes.items()}
    seconds = alternate({"matmul": matmul_pass(), **passes})

    work, ceiling = flops.train_step(run.model, TOKENS, ROWS), 2 * SIDE**3 / seconds["matmul"]
    total, active = parameters.count(decoder)
    print(f"{total:,} parameters, {active:,} active; {ROWS} x {TOKENS} tokens, fp32, forward and backward")
    print(f"{work / 1e9:.1f} GFLOP; a {SIDE:,}^3 fp32 product runs at {ceiling / 1e9:.1f} GFLOP/s")
    for name, (loss, norm) in results.items():
        rate = work / seconds[name]
        print(
            f"{name:12s} {1e3 * seconds[name]:8.1f} ms   {rate / 1e9:6.1f} GFLOP/s   {rate / ceiling:6.1%} of it   "
            f"loss {loss:.6f}, gradient norm {norm:.5f}   ({versions[name]})"
        )
    if "transformers" in seconds:
        ratio = seconds["k3jax"] / seconds["transformers"]
        print(f"ours / theirs: {ratio:.3f} of the time ({1 / ratio:.2f} x as fast)")


if __name__ == "__main__":
    main()
