"""The same promises inside a loop of accelerate's: loaders of this rank's share that `accelerator` knows.

In: an Accelerator and a plain DataLoader, in the place of `accelerator.prepare(loader)`. Out: for training a loader
that reads every sample once an epoch, and is saved and loaded by `accelerator.save_state` and `load_state`, with other
ranks or rows too; for evaluation one whose rows `accelerator.gather_for_metrics` puts into the dataset's order, each
once. Both put batches on the device and tell accelerate where a loader ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.utils.data import DataLoader

from threefold.data.distribute import DistributedLoader, IgnoreLastRow, check_loader, distribute
from threefold.data.partition import Tail
from threefold.data.rows.concat import IGNORED
from threefold.errors import ConfigError
from threefold.integrations.huggingface.data import Axis, Collate, Numbered, NumberedRows, Tracked
from threefold.integrations.huggingface.loaders import BlockBatches
from threefold.integrations.huggingface.loss import sharers_of


def prepare_loader(
    accelerator: Accelerator,
    loader: DataLoader[Any],
    *,
    seed: int = 0,
    tail: Tail | None = None,
    ignore_last_row: IgnoreLastRow | None = None,
) -> PreparedLoader:
    """A training loader that reads this rank's share; in the place of `accelerator.prepare(loader)`.

    `batch_size` is rows per rank; shuffling is taken from the loader. It is registered for checkpointing:
    `accelerator.load_state` goes on at the next sample.

    Args:
        seed: of the order, the same on every rank.
        tail: `exact` (every sample once; a row that keeps a rank in step has labels of -100), `drop` or `pad`; default:
            `drop` if the loader has drop_last, else `exact`.
        ignore_last_row: as for `threefold.distribute`.

    Raises:
        ConfigError: a loader that cannot be distributed.
    """
    tail = tail or ("drop" if loader.drop_last else "exact")
    axis = _axis(accelerator)
    prepared = PreparedLoader(
        distribute(loader, axis, seed=seed, tail=tail, ignore_last_row=ignore_last_row), accelerator
    )
    accelerator.register_for_checkpointing(prepared)
    return prepared


class PreparedLoader:
    """A distributed loader as accelerate's own are: on the device, and known to its gradient state."""

    def __init__(self, loader: DistributedLoader, accelerator: Accelerator) -> None:
        self.loader = loader
        # 0: nothing that gather_for_metrics would have to cut off.
        self.end_of_dataloader, self.remainder = False, 0
        self._accelerator = accelerator

    @property
    def dataset(self) -> Any:
        return self.loader.dataset

    def __len__(self) -> int:
        """Batches of a whole epoch."""
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        """The rest of the epoch after `load_state_dict`, else the epoch from its head."""
        return self._given_out(iter(self.loader))

    def set_epoch(self, epoch: int) -> None:
        """Go to the head of `epoch`; in the epoch of a state just loaded, the place stays."""
        self.loader.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """The place after the newest batch that the loop had; the same on every rank."""
        return self.loader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken, with any number of ranks and any batch size.

        Raises:
            DataError: a state of another seed, data or size.
        """
        self.loader.load_state_dict(state)

    def _given_out(self, batches: Iterator[Any]) -> Iterator[Any]:
        rows, per_batch = self.loader.rows_left(), self.loader.batch_size or 1
        left = rows // per_batch if self.loader.drop_last else -(-rows // per_batch)
        tracked = Tracked(self, self._accelerator)
        for number, batch in enumerate(tracked.over(batches), start=1):
            self.end_of_dataloader = number == left
            yield tracked.placed(batch)


def prepare_evaluation_loader(accelerator: Accelerator, loader: DataLoader[Any]) -> PreparedEvaluationLoader:
    """An evaluation loader in the dataset's order; in the place of `accelerator.prepare(loader)`.

    Raises:
        ConfigError: a loader that cannot be distributed, or that shuffles.
    """
    check_loader(loader)
    if not isinstance(loader.sampler, torch.utils.data.SequentialSampler):
        raise ConfigError(
            f"the evaluation loader draws its rows with a {type(loader.sampler).__name__}",
            expected="the dataset's order, which gather_for_metrics gives back",
            fix="DataLoader(dataset, batch_size=...) without shuffle and sampler",
        )
    axis = _axis(accelerator)
    if axis.sharers > 1:
        raise ConfigError(
            f"{axis.sharers} ranks share the parts of one model, and gather_for_metrics would give each row "
            f"{axis.sharers} times",
            expected="an evaluation by sums and counts, or by threefold's Trainer, which knows these ranks",
            fix="exact_mean(accelerator, loss_sums, counts) over prepare_loader(accelerator, loader, tail='exact')",
        )
    return PreparedEvaluationLoader(loader, accelerator, axis)


class PreparedEvaluationLoader(DataLoader[Any]):
    """Every row once over all ranks, in the dataset's order, in equally large batches on every rank.

    The last batches are filled up where the ranks do not divide the rows: integer labels of these rows are -100,
    `gather_for_metrics` cuts them off, and `rows` says how many of the newest batch are true ones.
    """

    def __init__(self, loader: DataLoader[Any], accelerator: Accelerator, axis: Axis) -> None:
        self._blocks = BlockBatches(len(loader.dataset), loader.batch_size or 1, axis)  # type: ignore[arg-type]
        names = ("num_workers", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "prefetch_factor")
        super().__init__(
            NumberedRows(loader.dataset),
            batch_sampler=self._blocks,
            collate_fn=_WithStandIns(loader.collate_fn),
            persistent_workers=loader.persistent_workers,
            **{name: getattr(loader, name) for name in names},
        )
        self.rows = 0
        self.end_of_dataloader, self.remainder = False, 0
        self._accelerator = accelerator
        self._axis = axis
        self._is_accelerate_prepared = True

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        tracked, last = Tracked(self, self._accelerator), len(self._blocks) - 1
        self.remainder = 0
        for step, (numbers, batch) in enumerate(tracked.over(super().__iter__())):
            self.rows = int((numbers >= 0).sum())
            self.end_of_dataloader = step == last
            places = self._blocks.block(step) * self._axis.dp_size
            self.remainder = self._blocks.real(step) if self._blocks.real(step) < places else 0
            yield tracked.placed(_ignored_after(self.rows, batch) if self.rows < len(numbers) else batch)


class _WithStandIns:
    """Collates samples without their numbers, stand-ins too."""

    def __init__(self, collate: Collate) -> None:
        self._collate = collate

    def __call__(self, samples: list[tuple[int, Any]]) -> Numbered:
        numbers = torch.tensor([number for number, _ in samples], dtype=torch.int64)
        return Numbered(numbers, self._collate([row for _, row in samples]))


def _ignored_after(rows: int, batch: Any) -> Any:
    """The batch with integer labels of -100 behind its first `rows` rows; as it is, where it has none."""
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if not isinstance(labels, Tensor) or labels.is_floating_point() or not labels.ndim:
        return batch
    labels = labels.clone()
    labels[rows:] = IGNORED
    return type(batch)({**batch, "labels": labels})


def _axis(accelerator: Accelerator) -> Axis:
    return Axis(accelerator.process_index, accelerator.num_processes, sharers=sharers_of(accelerator))
