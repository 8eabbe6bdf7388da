"""The loader for evaluation: an entire map-style dataset once over all ranks, in the dataset's order.

The ranks read neighbouring blocks of rows, so their gathered results of one step cover a contiguous part of the
dataset. Invariants: every row once; every rank makes the same number of steps, with the same number of rows, so
that a loss may gather them; a rank without a row in the last one computes a stand-in that is not counted.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import recursively_apply
from torch import Tensor
from torch.utils.data import DataLoader, Sampler
from transformers.trainer_pt_utils import find_batch_size

from threefold.integrations.huggingface.training_loader import (
    Axis,
    Collate,
    NumberedRows,
    collate_numbered,
    on_device,
    tracked,
)


class EvaluationLoader(DataLoader[Any]):
    """Every row once over all dp ranks, in the dataset's order, in the same number of batches on every rank.

    After each batch `rows` is the number of its real rows, 0 for a stand-in, and `gather` joins what every rank
    computed from its batch, in the dataset's order and without stand-ins.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        batch_size: int,
        accelerator: Accelerator,
        axis: Axis,
        collate_fn: Collate,
        keep_stand_ins: bool = False,
        **kept: Any,
    ) -> None:
        blocks = BlockBatches(len(dataset), batch_size, axis)
        collate = partial(collate_numbered, collate_fn, keep_stand_ins=keep_stand_ins)
        super().__init__(
            NumberedRows(dataset), batch_sampler=blocks, collate_fn=collate, **kept
        )
        self.rows = 0
        self.end_of_dataloader, self.remainder = False, -1
        self._axis, self._accelerator, self._blocks = axis, accelerator, blocks
        self._step, self._by_rows = 0, True

    @property
    def total_batch_size(self) -> int:
        """Rows of a batch over all dp ranks, as accelerate's loaders name it."""
        return self._blocks.global_batch

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for step, (numbers, batch, *_) in enumerate(self._tracked()):
            self._step, self.rows = step, len(numbers)
            self._by_rows = find_batch_size(batch) == self._blocks.block(step)
            yield on_device(batch, self._accelerator)

    def _tracked(self) -> Iterator[Any]:
        return tracked(self, super().__iter__(), num_batches=len(self._blocks))

    def gather(self, data: Any) -> Any:
        """Tensors [rows, ...] of this step's batch, or nested lists and dicts of them -> [rows of all ranks, ...].

        With a collator whose batch has another number of rows than samples (such as DataCollatorWithFlattening), all
        results of each rank, except those of a stand-in.
        """
        return recursively_apply(self._gathered, data)

    def _gathered(self, tensor: Tensor) -> Tensor:
        if tensor.ndim == 0:
            return self._accelerator.gather(tensor)
        block = self._blocks.block(self._step)
        full = self._blocks.batch_size
        # What the loop repeats for every row of a full batch is longer than the last batch.
        sizes = torch.tensor(
            [len(tensor), self._by_rows and len(tensor) in (block, full)], device=tensor.device
        )
        # sizes: (dp ranks, sharers, 2)
        of_ranks = self._accelerator.gather(sizes).view(
            self._axis.dp_size, self._axis.sharers, 2
        )[:, 0]
        if bool(of_ranks[:, 1].all()):
            tensor = tensor[:block]
            lengths = [block] * self._axis.dp_size
        else:
            lengths = of_ranks[:, 0].tolist()
        padded = tensor.new_zeros((max(lengths), *tensor.shape[1:]))
        padded[: len(tensor)] = tensor
        gathered = self._accelerator.gather(padded).view(
            self._axis.dp_size, self._axis.sharers, *padded.shape
        )[:, 0]
        # Only ranks without a row, which are the last, have a stand-in.
        with_rows = zip(gathered[: self._blocks.real(self._step)], lengths, strict=False)
        return torch.cat([part[:length] for part, length in with_rows])


class BlockBatches(Sampler[list[int]]):
    """One dp rank's batches of an evaluation: blocks of neighbouring rows, which joined in rank order are the dataset.

    The rows that do not fill a step are one of as many as all ranks can have, and one of a row for some ranks; there a
    rank without a row has a stand-in (~row).
    """

    def __init__(self, num_rows: int, batch_size: int, axis: Axis) -> None:
        self.batch_size, self._num_rows, self._axis = batch_size, num_rows, axis

    @property
    def global_batch(self) -> int:
        return self.batch_size * self._axis.dp_size

    @property
    def _last(self) -> list[int]:
        """Real rows of the steps after the full ones."""
        left = self._num_rows % self.global_batch
        alone = left % self._axis.dp_size
        return [rows for rows in (left - alone, alone) if rows]

    def __len__(self) -> int:
        return self._num_rows // self.global_batch + len(self._last)

    def real(self, step: int) -> int:
        """Real rows of a step, over all ranks."""
        full = self._num_rows // self.global_batch
        return self.global_batch if step < full else self._last[step - full]

    def block(self, step: int) -> int:
        """Places of each rank in a step."""
        return -(-self.real(step) // self._axis.dp_size)

    def __iter__(self) -> Iterator[list[int]]:
        start = 0
        for step in range(len(self)):
            block = self.block(step)
            first = start + self._axis.dp_rank * block
            rows = range(first, first + block)
            yield [row if row < self._num_rows else ~(row % self._num_rows) for row in rows]
            start += self.real(step)
