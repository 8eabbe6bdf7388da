"""The Trainer's loaders, made from its arguments, and the loader for evaluation.

An evaluation reads an entire map-style dataset once over all ranks, in the dataset's order. The ranks read neighbouring
blocks of rows, so what they computed in one step is a stretch of the dataset once it is gathered. What stays true:
every row once; every rank makes the same number of steps; a rank without a row in the last one computes a stand-in that
nobody counts.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import recursively_apply
from torch import Tensor
from torch.utils.data import DataLoader, Sampler
from transformers.trainer_utils import seed_worker

from threefold.data.distribute import draw_of
from threefold.data.sampler import DistributedSampler
from threefold.integrations.huggingface.data import (
    Axis,
    Collate,
    NumberedRows,
    TrainLoader,
    collate_numbered,
    on_device,
    tracked,
)


def training(trainer: Any, rows: Any, sampler: Any, *, batch_size: int, collate: Collate) -> TrainLoader:
    """This dp rank's share of the rows, in the order of `sampler`; ConfigError if the sampler's draws are unknown."""
    args, axis = trainer.args, trainer.axis
    order = DistributedSampler.for_loop(
        rows,
        num_replicas=axis.dp_size,
        rank=axis.dp_rank,
        global_batch=batch_size * axis.dp_size * args.gradient_accumulation_steps,
        seed=_seed(args),
        # ~index: a stand-in, see NumberedRows.
        stand_in=operator.invert,
        tail="drop" if args.dataloader_drop_last else "exact",
        **draw_of(sampler, len(rows)),
    )
    # Ranks that share their rows draw the same random numbers in their workers.
    seeded = partial(seed_worker, num_workers=args.dataloader_num_workers, rank=axis.dp_rank)
    return TrainLoader(rows, order, batch_size=batch_size, worker_init_fn=seeded, **_settings(trainer, collate))


def evaluation(trainer: Any, rows: Any, *, batch_size: int, collate: Collate) -> EvaluationLoader:
    """The loader of this dp rank's part of every step of an evaluation."""
    return EvaluationLoader(rows, batch_size=batch_size, **_settings(trainer, collate))


def _settings(trainer: Any, collate: Collate) -> dict[str, Any]:
    args = trainer.args
    return {
        "accelerator": trainer.accelerator,
        "axis": trainer.axis,
        "collate_fn": collate,
        "num_workers": args.dataloader_num_workers,
        "pin_memory": args.dataloader_pin_memory,
        "persistent_workers": args.dataloader_persistent_workers,
        "multiprocessing_context": args.dataloader_multiprocessing_context,
        "prefetch_factor": args.dataloader_prefetch_factor,
        # Separate, so that opening a loader does not change the random numbers of dropout.
        "generator": torch.Generator().manual_seed(_seed(args)),
    }


def _seed(args: Any) -> int:
    return args.seed if args.data_seed is None else args.data_seed


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
        super().__init__(NumberedRows(dataset), batch_sampler=blocks, collate_fn=collate, **kept)
        self.rows = 0
        self.end_of_dataloader, self.remainder = False, -1
        self._axis, self._accelerator, self._blocks = axis, accelerator, blocks
        self._step = 0

    @property
    def total_batch_size(self) -> int:
        """Rows of a batch over all dp ranks, as accelerate's loaders name it."""
        return self._blocks.global_batch

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for step, (numbers, batch) in enumerate(self._tracked()):
            self._step, self.rows = step, len(numbers)
            yield on_device(batch, self._accelerator)

    def _tracked(self) -> Iterator[Any]:
        return tracked(self, self._accelerator, super().__iter__(), num_batches=len(self._blocks))

    def gather(self, data: Any) -> Any:
        """Tensors [rows, ...] of this step's batch, or nested lists and dicts of them -> [rows of all ranks, ...]."""
        return recursively_apply(self._gathered, data)

    def _gathered(self, tensor: Tensor) -> Tensor:
        if tensor.ndim == 0:
            return self._accelerator.gather(tensor)
        block, real = self._blocks.block(self._step), self._blocks.real(self._step)
        if self._axis.world_size == 1:
            return tensor[:real]
        padded = tensor.new_zeros((block, *tensor.shape[1:]))
        padded[: self.rows] = tensor[: self.rows]
        gathered = self._accelerator.gather(padded)
        # gathered: (dp ranks, sharers, block, ...)
        gathered = gathered.view(self._axis.dp_size, self._axis.sharers, block, *tensor.shape[1:])[:, 0]
        return gathered.flatten(0, 1)[:real]


class BlockBatches(Sampler[list[int]]):
    """One dp rank's batches of an evaluation: blocks of neighbouring rows, which joined in rank order are the dataset.

    The last batches are equal and as small as possible; places past the end are stand-ins (~row).
    """

    def __init__(self, num_rows: int, batch_size: int, axis: Axis) -> None:
        self._num_rows, self._batch_size, self._axis = num_rows, batch_size, axis

    @property
    def global_batch(self) -> int:
        return self._batch_size * self._axis.dp_size

    def __len__(self) -> int:
        return -(-self._num_rows // self.global_batch)

    def real(self, step: int) -> int:
        """Real rows of a step, over all ranks."""
        return min(self.global_batch, self._num_rows - step * self.global_batch)

    def block(self, step: int) -> int:
        """Places of each rank in a step."""
        return -(-self.real(step) // self._axis.dp_size)

    def __iter__(self) -> Iterator[list[int]]:
        for step in range(len(self)):
            block = self.block(step)
            first = step * self.global_batch + self._axis.dp_rank * block
            rows = range(first, first + block)
            yield [row if row < self._num_rows else ~(row % self._num_rows) for row in rows]
