"""The Trainer's loaders, made from its arguments: for training, for a loader of one's own, and for evaluation."""

from __future__ import annotations

import operator
from functools import partial
from typing import Any

import torch
from accelerate.data_loader import DataLoaderShard
from torch.utils.data import BatchSampler, DataLoader
from transformers.trainer_pt_utils import LengthGroupedSampler
from transformers.trainer_utils import seed_worker

from threefold.data.sampling.distribute import (
    KEPT,
    DistributedLoader,
    draw_of,
    is_known,
    require_distributed,
)
from threefold.data.sampling.sampler import DistributedSampler
from threefold.integrations.huggingface.evaluation_loader import EvaluationLoader
from threefold.integrations.huggingface.lengths import GroupedSampler
from threefold.integrations.huggingface.training_loader import Collate, TrainLoader


def training(
    trainer: Any, rows: Any, sampler: Any, *, batch_size: int, collate: Collate
) -> TrainLoader:
    """This dp rank's share of the rows, in the order of `sampler`; ConfigError if the sampler's draws are unknown."""
    args = trainer.args
    order = _order(
        trainer,
        rows,
        draw=_draw_of(sampler, rows),
        batch_size=batch_size,
        drop=args.dataloader_drop_last,
    )
    # Ranks that share their rows draw the same random numbers in their workers.
    seeded = partial(
        seed_worker, num_workers=args.dataloader_num_workers, rank=trainer.axis.dp_rank
    )
    settings = {
        **_settings(trainer, collate),
        "worker_init_fn": seeded,
        "split": _may_split(trainer),
    }
    return TrainLoader(rows, order, batch_size=batch_size, **settings)


def adopted(trainer: Any, loader: Any) -> Any:
    """A loader that the user's `get_train_dataloader` made, as ours, with its place and its audit.

    Taken over are those of `threefold.distribute`, and those of `accelerator.prepare` whose sampler draws in a known
    way. Any other is returned as it is. Rows that such a loader repeats to fill up an epoch become stand-ins.
    """
    if type(loader) is DistributedLoader:
        require_distributed(loader, trainer.axis)
        plain, sampler, batch_size = loader, loader.sampler, loader.batch_size
        draw: dict[str, Any] = {**sampler.draw, "order": sampler.order, "seed": sampler.seed}
        drop = sampler.tail == "drop"
    elif type(loader) is DataLoaderShard and type(loader.base_dataloader) is DataLoader:
        plain = loader.base_dataloader
        batches = getattr(plain.batch_sampler, "batch_sampler", plain.batch_sampler)
        if type(batches) is not BatchSampler or not is_known(
            batches.sampler, len(plain.dataset)
        ):
            return loader
        draw = draw_of(batches.sampler, len(plain.dataset))
        batch_size = batches.batch_size
        drop = batches.drop_last
    else:
        return loader
    order = _order(trainer, plain.dataset, draw=draw, batch_size=batch_size or 1, drop=drop)
    kept = {
        name: getattr(plain, name)
        for name in KEPT
        if name not in ("batch_size", "drop_last", "generator")
    }
    kept |= {
        "accelerator": trainer.accelerator,
        "axis": trainer.axis,
        "split": _may_split(trainer),
    }
    generator = torch.Generator().manual_seed(_seed(trainer.args))
    return TrainLoader(
        plain.dataset, order, batch_size=batch_size or 1, generator=generator, **kept
    )


def _order(
    trainer: Any, rows: Any, *, draw: dict[str, Any], batch_size: int, drop: bool
) -> DistributedSampler:
    args, axis = trainer.args, trainer.axis
    kind = GroupedSampler if "lengths" in draw else DistributedSampler
    settings = {"seed": _seed(args), "tail": "drop" if drop else "exact", **draw}
    return kind.for_loop(
        rows,
        num_replicas=axis.dp_size,
        rank=axis.dp_rank,
        global_batch=batch_size * axis.dp_size * args.gradient_accumulation_steps,
        # See NumberedRows.
        stand_in=operator.invert,
        alone=partial(operator.add, len(rows)),
        **settings,
    )


def _draw_of(sampler: Any, rows: Any) -> dict[str, Any]:
    return (
        {"lengths": sampler.lengths}
        if type(sampler) is LengthGroupedSampler
        else draw_of(sampler, len(rows))
    )


def _may_split(trainer: Any) -> bool:
    """Whether a micro-batch may be computed in two parts: transformers sums some gradients over tp in each of them."""
    return trainer.get_tp_size() == 1


def evaluation(
    trainer: Any, rows: Any, *, batch_size: int, collate: Collate
) -> EvaluationLoader:
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
