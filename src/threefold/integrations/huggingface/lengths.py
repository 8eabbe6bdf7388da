"""Rows of similar lengths near one another, so that little of a batch is padding, in an order that any mesh resumes.

In: the rows' lengths. Out: a sampler whose epoch is the shuffle of DistributedSampler, cut into stretches that are
sorted in turn from long to short and from short to long, so that neighbours are alike across their ends too. The
longest row of all comes first: a lack of memory shows at once. What stays true: the order depends on seed, epoch and
lengths, never on ranks or batch sizes, as transformers' own does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import xxhash

from threefold.arrays import Int64
from threefold.data.order.order import Plain
from threefold.data.order.permutation import Permutation
from threefold.data.sampling.sampler import DistributedSampler

# Rows of a stretch; fewer in a small dataset, which has four stretches at least.
_LONGEST_STRETCH = 4096


class GroupedSampler(DistributedSampler):
    """Every row once per epoch, next to rows of similar lengths.

    Args:
        lengths: of every row, on every rank the same.
    """

    def __init__(self, dataset: Any, *, lengths: Sequence[int], **settings: Any) -> None:
        self._lengths = np.asarray(lengths, np.int64)
        super().__init__(dataset, **settings)
        assert len(self._lengths) == len(dataset)

    @property
    def _made_from(self) -> dict[str, Plain]:
        return {
            **super()._made_from,
            "lengths": xxhash.xxh3_64_hexdigest(self._lengths.tobytes()),
        }

    def _indices_at(self, epoch: int, seed: int) -> Callable[[Int64], Int64]:
        size = len(self._lengths)
        shuffle = Permutation(size, seed=seed, epoch=epoch)
        rows = shuffle.at(np.arange(size, dtype=np.int64))
        stretch = np.arange(size) // min(_LONGEST_STRETCH, max(size // 4, 1))
        # Equal lengths stay in the order of the shuffle.
        rows = rows[np.lexsort((self._lengths[rows] * np.where(stretch % 2, 1, -1), stretch))]
        longest = int(np.argmax(self._lengths[rows]))
        rows[[0, longest]] = rows[[longest, 0]]
        return rows.__getitem__
