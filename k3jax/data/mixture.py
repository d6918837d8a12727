"""Several corpora in one stream, each giving its share of the rows.

Place i of the mixture is row j of source s, where s and j follow from i and the weights alone: of the first n rows
source s has given between floor and ceiling of about n w_s / sum w, whatever n is. Within a source nothing changes:
its rows, its epochs and its order of the documents are those of TrainRows, with a seed of its own.

Invariant: a row is a function of its place, as without a mixture; every source is walked in its own order without a
gap, so each of its documents appears once in each of its epochs.
"""

from collections.abc import Sequence

import grain

from k3jax.data.documents import DocumentSet, TokenDocuments
from k3jax.data.packing import TrainRows

SEED_STRIDE = 2**32  # above every data.seed, so that no two sources share one


def mixed_rows(
    sources: Sequence[TokenDocuments | DocumentSet], weights: Sequence[float], seq_len: int, seed: int
) -> grain.MapDataset:
    """The rows of all `sources`, endless; `weights` > 0 are their shares of the rows, kept to 1 %.

    Grain's mixing is integer arithmetic on the place, so it is exact at any length. It scales the smallest weight to
    100 and rounds down, hence the 1 %.
    """
    rows = [TrainRows(documents, seq_len, seed + place * SEED_STRIDE) for place, documents in enumerate(sources)]
    return grain.MapDataset.mix([grain.MapDataset.source(source) for source in rows], list(weights))
