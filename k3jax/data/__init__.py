"""From files to batches: sources -> documents -> packing; ngram is the yardstick.

The whole road:

    corpus = load(config.data, config.model.vocab)
    for batch in corpus.train_batches().iterate(start_step=resumed_step):
        ...

or in steps: the standard library and other files (sources, files, records) -> tokenize (tokenizers, vocabularies,
chat, documents), or token shards made once (prepare, shards) -> TrainRows, EvaluationRows, Batches (packing, mixture).
"""

from k3jax.data.corpus import Corpus, load
from k3jax.data.documents import DocumentSet, TokenDocuments, tokenize
from k3jax.data.ngram import ngram_losses
from k3jax.data.packing import Batch, Batches, EvaluationRows, TrainRows, stream_hash
from k3jax.data.sources import BadDocument, Source, StandardLibrary
from k3jax.data.tokenizers import ByteTokenizer, Tokenizer

__all__ = [
    "BadDocument",
    "Batch",
    "Batches",
    "ByteTokenizer",
    "Corpus",
    "DocumentSet",
    "EvaluationRows",
    "Source",
    "StandardLibrary",
    "TokenDocuments",
    "Tokenizer",
    "TrainRows",
    "load",
    "ngram_losses",
    "stream_hash",
    "tokenize",
]
