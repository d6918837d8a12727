"""From files to batches: sources -> tokenizers -> packing; ngram is the yardstick.

The whole road:

    documents = tokenize(StandardLibrary("train"), ByteTokenizer())
    batches = Batches(TrainRows(documents, seq_len=256, seed=0), batch_rows=8)
    for batch in batches.iterate(start_step=resumed_step):
        ...
"""

from k3jax.data.ngram import ngram_losses
from k3jax.data.packing import Batch, Batches, EvaluationRows, TrainRows, stream_hash
from k3jax.data.sources import BadDocument, Source, StandardLibrary
from k3jax.data.tokenizers import ByteTokenizer, TokenDocuments, Tokenizer, tokenize

__all__ = [
    "BadDocument",
    "Batch",
    "Batches",
    "ByteTokenizer",
    "EvaluationRows",
    "Source",
    "StandardLibrary",
    "TokenDocuments",
    "Tokenizer",
    "TrainRows",
    "ngram_losses",
    "stream_hash",
    "tokenize",
]
