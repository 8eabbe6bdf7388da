"""The Trainer's loaders, from its arguments: which argument decides what, in one place."""

from __future__ import annotations

import operator
from functools import partial
from typing import Any

import torch
from transformers.trainer_utils import seed_worker

from threefold.data.distribute import draw_of
from threefold.data.sampler import DistributedSampler
from threefold.integrations.huggingface.data import Collate, TrainLoader
from threefold.integrations.huggingface.evaluation import EvaluationLoader


def training(trainer: Any, rows: Any, sampler: Any, *, batch_size: int, collate: Collate) -> TrainLoader:
    """The loader of this dp rank's share of the rows, in the order that transformers' `sampler` asks for.

    Raises:
        ConfigError: a sampler of which it is not known what it draws.
    """
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
    return TrainLoader(rows, order, batch_size=batch_size, worker_init_fn=seeded, **_kept(trainer, collate))


def evaluation(trainer: Any, rows: Any, *, batch_size: int, collate: Collate) -> EvaluationLoader:
    """The loader of this dp rank's part of every step of an evaluation."""
    return EvaluationLoader(rows, batch_size=batch_size, **_kept(trainer, collate))


def _kept(trainer: Any, collate: Collate) -> dict[str, Any]:
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
        # Of its own: opening a loader must not move the random numbers that dropout draws.
        "generator": torch.Generator().manual_seed(_seed(args)),
    }


def _seed(args: Any) -> int:
    return args.seed if args.data_seed is None else args.data_seed
