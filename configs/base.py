"""Every field of a run once, with its unit. Files beside this one set what differs.

A field left at None is off or chosen from the others, as its comment says. `python -m k3jax.train --config=FILE:NAME
--config.a.b=value` overrides one field; a wrong name, type or range ends the program with one line that names it.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """The defaults: every K3 feature on, at the sizes of `tiny` (configs/k3.py)."""
    return ConfigDict(
        {
            "name": "tiny",  # printed and saved, nothing else
            "model": {
                "vocab": 264,  # rows of the embedding and the head, at least the tokenizer's size
                "embed": 128,  # d, width of the residual stream
                "layers": 8,
                "dense_layers": 1,  # the first layers have one dense MLP in place of the experts
                "mlp": 384,  # inner width of the dense MLP
                "mla_layers": (4, 8),  # which layers (counted from 1) are MLA; the others are KDA
                "attn_res_block": 4,  # layers per Attention Residuals block; None: plain residuals
                "activation": "situ",  # situ | swiglu
                "situ_beta": 4.0,  # bound of the gate branch
                "situ_linear_beta": 25.0,  # bound of the linear branch; None: unbounded
                "norm_eps": 1e-5,  # of every RMSNorm but the two low-rank norms of MLA
                "init_std": 0.02,  # standard deviation of every matrix at the start
                "kda": {
                    "heads": 4,
                    "key_dim": 32,  # also the rank of the decay gate
                    "value_dim": 32,
                    "output_gate": "full",  # full | low_rank (rank value_dim)
                    "lower_bound": -5.0,  # of the log decay; None: the unbounded softplus gate of Kimi Linear
                },
                "mla": {
                    "heads": 4,
                    "q_lora": 48,  # rank of the query projection; None: one full matrix
                    "kv_lora": 32,  # width of the compressed key and value
                    "qk_nope": 32,  # key width per head
                    "qk_shared": 16,  # key width shared by all heads (never rotated)
                    "value_dim": 32,
                    "output_gate": True,
                    "norm_eps": 1e-6,  # of the two low-rank norms
                },
                "moe": {
                    "routed_experts": 16,
                    "top_k": 4,
                    "shared_experts": 1,  # one MLP of width shared_experts * expert_mlp on the full stream
                    "latent": 64,  # width the routed experts work at; None: embed, without projections
                    "expert_mlp": 64,  # inner width of one expert
                    "scaling": 1.0,  # factor on the mixing weights after they are normalised
                    "groups": 1,  # experts are chosen inside the best `top_groups` of `groups` groups
                    "top_groups": 1,
                    "balancing": "quantile",  # quantile | sign | none: how the router bias follows the load
                    "balancing_ema": 0.0,  # decay of a running mean over the quantile estimates; 0: none
                    "sign_rate": 1e-3,  # step of the sign rule
                },
            },
            "init_from": None,  # weights to start from: a Hugging Face folder, a workdir or checkpoints/<step> of one
            "data": {
                # stdlib: this Python's own library; paths or globs of text (one file, one document), .jsonl (`text`
                # or `messages`), .parquet (`text`), folders of token shards; local or gs://
                "source": ("stdlib",),
                "weights": (),  # share of the rows that each source gives; (): every document once per epoch
                "held_out": (),  # sources of the evaluation; (): one document in twenty of `source`
                "tokenizer": "bytes",  # bytes | a tokenizer.json | a tiktoken vocabulary (.model, .tiktoken)
                "chat_template": None,  # Jinja file for `messages`; None: the tokenizer's own, or ChatML
                "seq_len": 256,  # T, tokens per row
                "batch_rows": 8,  # rows per optimizer step
                "seed": 0,  # order of the documents
            },
            "optim": {
                "learning_rate": 1e-2,  # peak, of Muon and AdamW alike (Muon's update has RMS 0.2 of it)
                "schedule": "cosine",  # cosine | wsd
                "warmup_steps": 10,
                "decay_steps": 0,  # wsd only: length of the last, falling part
                "end_fraction": 0.0,  # last learning rate as a part of the peak
                "momentum": 0.95,  # of Muon
                "weight_decay": 0.1,
                "clip_norm": 1.0,  # global norm of all gradients, before momentum; None: no clipping
                "qk_clip": 100.0,  # largest MLA logit of a head after an update (tau); None: no clipping
                "frozen": (),  # patterns of parameters that stay as they are: "embed", "*.router.*"
                "rate_scale": (),  # "PATTERN=FACTOR": learning rate of some parameters; the last match counts
            },
            "train": {
                "steps": 500,
                "epochs": None,  # passes over the data, in place of steps
                "accumulate": 1,  # micro-batches a step is computed in, for memory; the numbers stay the same
                "max_skipped": 20,  # non-finite steps in a row that end the run
                "seed": 0,  # initial parameters
                "dtype": "float32",  # of activations and matmuls: float32 | bfloat16; parameters stay float32
            },
            "eval": {
                "every": 100,  # steps between held-out losses; the last step always has one
                "rows": 64,  # rows of the held-out part (the last evaluation takes all of them)
            },
            "sample": {
                "every": None,  # steps between samples; None: one, after the last step
                "prompt": "def ",
                "tokens": 160,
                "temperature": 0.7,
            },
            "checkpoint": {
                "every": 250,  # steps between checkpoints; the last step always has one
                "keep": 2,  # last checkpoints that stay
            },
            "mesh": {  # devices along each axis; their product is the number of devices
                "data": None,  # rows are split, parameters repeated; None: all devices the other axes leave
                "fsdp": 1,  # rows are split, and parameters and optimizer state too
                "expert": 1,  # rows are split; whole experts apart, tokens travel to them; other parameters as by fsdp
                "context": 1,  # each row is cut into pieces, for long rows; parameters as by fsdp
                "tensor": 1,  # heads, inner widths and vocabulary are split; all see the same tokens
            },
            "log": {
                "health_every": 20,  # steps between the numbers of every layer (load, logits, gates, mixing)
                "tensorboard": True,  # <workdir>/tensorboard
                "wandb": None,  # project at Weights & Biases
            },
            "profile": {
                "steps": None,  # "10:13" writes a jax.profiler trace of steps 10, 11 and 12 to <workdir>/profile
            },
            "debug": {
                "nans": False,  # end at the first non-finite step and name the first layer that was not finite
            },
            "memory": {
                "policy": "save_all",  # save_all | recompute_all: what the backward pass finds saved
            },
        }
    )
