"""The Trainer's loaders, made from its arguments: for training, for a custom loader, and for evaluation."""

import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import xxhash
from accelerate.data_loader import DataLoaderShard
from torch.utils.data import BatchSampler, DataLoader
from transformers.trainer_pt_utils import LengthGroupedSampler
from transformers.trainer_utils import seed_worker

from threefold.arrays import Int64
from threefold.data.order.order import Plain
from threefold.data.order.permutation import Permutation
from threefold.data.sampling.distribute import (
    KEPT,
    DistributedLoader,
    draw_of,
    known_draw,
    require_distributed,
)
from threefold.data.sampling.sampler import DistributedSampler
from threefold.integrations.huggingface.evaluation_loader import EvaluationLoader
from threefold.integrations.huggingface.training_loader import Collate, TrainLoader
from threefold.jsonl import Values

# Rows of a stretch; fewer in a small dataset, which has four stretches at least.
_LONGEST_STRETCH = 4096


class GroupedSampler(DistributedSampler):
    """Every row once per epoch, next to rows of similar lengths, so that little of a batch is padding.

    An epoch is the shuffle of DistributedSampler, cut into stretches that are sorted in turn from long to short and
    from short to long, so that neighbours are alike across their ends too. The longest row comes first: a lack of
    memory shows at once. The order depends on seed, epoch and lengths, never on ranks or batch sizes, as transformers'
    own does.

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
        rows = Permutation(size, seed=seed, epoch=epoch).at(np.arange(size, dtype=np.int64))
        stretch = np.arange(size) // min(_LONGEST_STRETCH, max(size // 4, 1))
        # Equal lengths stay in the order of the shuffle.
        rows = rows[np.lexsort((self._lengths[rows] * np.where(stretch % 2, 1, -1), stretch))]
        longest = int(np.argmax(self._lengths[rows]))
        rows[[0, longest]] = rows[[longest, 0]]
        return rows.__getitem__


def training(
    trainer: Any, rows: Any, sampler: Any, *, batch_size: int, collate: Collate
) -> TrainLoader:
    """This dp rank's share of the rows, in the order of `sampler`; ConfigError if the sampler's draws are unknown."""
    args = trainer.args
    grouped = type(sampler) is LengthGroupedSampler
    order = _order(
        trainer,
        rows,
        draw={"lengths": sampler.lengths} if grouped else draw_of(sampler, len(rows)),
        batch_size=batch_size,
        drop=args.dataloader_drop_last,
    )
    # Ranks that share their rows draw the same random numbers in their workers.
    seeded = partial(
        seed_worker, num_workers=args.dataloader_num_workers, rank=trainer.axis.dp_rank
    )
    return TrainLoader(
        rows,
        order,
        batch_size=batch_size,
        worker_init_fn=seeded,
        # A micro-batch may be computed in two parts; over tp transformers sums some gradients in each of them.
        split=trainer.get_tp_size() == 1,
        **_settings(trainer, collate),
    )


def adopted(trainer: Any, loader: Any) -> Any:
    """A loader made by the user's `get_train_dataloader`, converted to ours, with its place and its audit.

    Loaders of `threefold.distribute` are converted, and those of `accelerator.prepare` whose sampler draws in a known
    way. Any other is returned unchanged. Rows that such a loader repeats to fill an epoch become stand-ins.
    """
    if type(loader) is DistributedLoader:
        require_distributed(loader, trainer.axis)
        plain, sampler, batch_size = loader, loader.sampler, loader.batch_size
        draw: Values | None
        draw = {**sampler.draw, "order": sampler.order, "seed": sampler.seed}
        drop = sampler.tail == "drop"
    elif type(loader) is DataLoaderShard and type(loader.base_dataloader) is DataLoader:
        plain = loader.base_dataloader
        batches = getattr(plain.batch_sampler, "batch_sampler", plain.batch_sampler)
        if type(batches) is not BatchSampler:
            return loader
        if (draw := known_draw(batches.sampler, len(plain.dataset))) is None:
            return loader
        batch_size = batches.batch_size
        drop = batches.drop_last
    else:
        return loader
    order = _order(trainer, plain.dataset, draw=draw, batch_size=batch_size or 1, drop=drop)
    kept = {name: getattr(plain, name) for name in KEPT if name != "drop_last"}
    kept |= {
        "accelerator": trainer.accelerator,
        "axis": trainer.axis,
        "batch_size": batch_size or 1,
        "generator": torch.Generator().manual_seed(_seed(trainer.args)),
        "split": trainer.get_tp_size() == 1,
    }
    return TrainLoader(plain.dataset, order, **kept)


def _order(
    trainer: Any, rows: Any, *, draw: Values, batch_size: int, drop: bool
) -> DistributedSampler:
    args, axis = trainer.args, trainer.axis
    kind = GroupedSampler if "lengths" in draw else DistributedSampler
    return kind.for_loop(
        rows,
        num_replicas=axis.dp_size,
        rank=axis.dp_rank,
        global_batch=batch_size * axis.dp_size * args.gradient_accumulation_steps,
        # See NumberedRows.
        stand_in=operator.invert,
        alone=partial(operator.add, len(rows)),
        **{"seed": _seed(args), "tail": "drop" if drop else "exact", **draw},
    )


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
