"""The same promises inside an accelerate loop: loaders of this rank's share that `accelerator` tracks.

In: an Accelerator and a plain DataLoader, in place of `accelerator.prepare(loader)`. Out: for training, a loader that
reads every sample once per epoch and that `accelerator.save_state` and `load_state` save and restore, also with another
number of ranks or rows per batch; for evaluation, one whose rows `accelerator.gather_for_metrics` returns once each, in
the dataset's order. Both put batches on the device and tell accelerate when a loader ends.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from accelerate import Accelerator
from torch import Tensor
from torch.utils.data import DataLoader, SequentialSampler

from threefold.data.order.partition import Tail
from threefold.data.rows.concat import IGNORED
from threefold.data.sampling.distribute import (
    KEPT,
    DistributedLoader,
    IgnoreLastRow,
    check_loader,
    distribute,
)
from threefold.errors import ConfigError
from threefold.integrations.huggingface.evaluation_loader import EvaluationLoader
from threefold.integrations.huggingface.loss import sharers_of
from threefold.integrations.huggingface.training_loader import Axis, on_device, tracked

# The rest of the loader's settings is kept.
_REPLACED = ("batch_size", "drop_last", "generator")


def prepare_loader(
    accelerator: Accelerator,
    loader: DataLoader[Any],
    *,
    seed: int = 0,
    tail: Tail | None = None,
    ignore_last_row: IgnoreLastRow | None = None,
) -> "PreparedLoader":
    """A training loader that reads this rank's share; in place of `accelerator.prepare(loader)`.

    `batch_size` is rows per rank; shuffling is taken from the loader. It is registered for checkpointing:
    `accelerator.load_state` resumes at the next sample.

    Args:
        seed: of the order, the same on every rank.
        tail: `exact` (every sample once; a row that only keeps a rank in step has labels of -100), `drop` or `pad`;
            default: `drop` if the loader has drop_last, else `exact`.
        ignore_last_row: as for `threefold.distribute`.

    Raises:
        ConfigError: a loader that cannot be distributed.
    """
    tail = tail or ("drop" if loader.drop_last else "exact")
    distributed = distribute(
        loader, _axis(accelerator), seed=seed, tail=tail, ignore_last_row=ignore_last_row
    )
    prepared = PreparedLoader(distributed, accelerator)
    accelerator.register_for_checkpointing(prepared)
    return prepared


class PreparedLoader:
    """A distributed loader that, as accelerate's own, puts batches on the device and is in the gradient state.

    `set_epoch`, `state_dict`, `load_state_dict` and `dataset` are those of `DistributedLoader`.
    """

    def __init__(self, loader: DistributedLoader, accelerator: Accelerator) -> None:
        self.loader = loader
        # 0: nothing that gather_for_metrics would have to cut off.
        self.end_of_dataloader, self.remainder = False, 0
        self._accelerator = accelerator

    def __getattr__(self, name: str) -> Any:
        if name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __len__(self) -> int:
        """Batches of a complete epoch."""
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        """The rest of the epoch after `load_state_dict`, else the epoch from its head."""
        return self._on_device(iter(self.loader))

    def _on_device(self, batches: Iterator[Any]) -> Iterator[Any]:
        rows = self.loader.sampler.rows_left()
        per_batch = self.loader.batch_size or 1
        left = rows // per_batch if self.loader.drop_last else -(-rows // per_batch)
        for batch in tracked(self, batches, num_batches=left):
            yield on_device(batch, self._accelerator)


def prepare_evaluation_loader(
    accelerator: Accelerator, loader: DataLoader[Any]
) -> "PreparedEvaluationLoader":
    """An evaluation loader in the dataset's order; in place of `accelerator.prepare(loader)`.

    Raises:
        ConfigError: a loader that cannot be distributed, or that shuffles.
    """
    check_loader(loader)
    if not isinstance(loader.sampler, SequentialSampler):
        raise ConfigError(
            f"the evaluation loader draws its rows with a {type(loader.sampler).__name__}",
            expected="the dataset's order, in which gather_for_metrics returns the rows",
            fix="DataLoader(dataset, batch_size=...) without shuffle and sampler",
        )
    axis = _axis(accelerator)
    if axis.sharers > 1:
        raise ConfigError(
            f"{axis.sharers} ranks share the parts of one model, and gather_for_metrics would return each row "
            f"{axis.sharers} times",
            expected="an evaluation by sums and counts, or by threefold's Trainer, which supports such ranks",
            fix="exact_mean(accelerator, loss_sums, counts) over prepare_loader(accelerator, loader, tail='exact')",
        )
    return PreparedEvaluationLoader(loader, accelerator, axis)


class PreparedEvaluationLoader(EvaluationLoader):
    """Every row once over all ranks, in the dataset's order, in batches of the same size on every rank.

    The last batches are filled up if the number of ranks does not divide the rows: integer labels of these rows are
    -100, `gather_for_metrics` cuts them off, and `rows` is the number of real rows in the newest batch.
    """

    def __init__(self, loader: DataLoader[Any], accelerator: Accelerator, axis: Axis) -> None:
        super().__init__(
            loader.dataset,
            batch_size=loader.batch_size or 1,
            accelerator=accelerator,
            axis=axis,
            keep_stand_ins=True,
            **{name: getattr(loader, name) for name in KEPT if name not in _REPLACED},
        )
        self._is_accelerate_prepared = True

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        self.remainder = 0
        for step, (numbers, batch, *_) in enumerate(self._tracked()):
            self.rows = int((numbers >= 0).sum())
            real = self._blocks.real(step)
            self.remainder = real if real < self._blocks.block(step) * self._axis.dp_size else 0
            kept = _ignored_after(self.rows, batch) if self.rows < len(numbers) else batch
            yield on_device(kept, self._accelerator)


def _ignored_after(rows: int, batch: Any) -> Any:
    """The batch with integer labels of -100 after its first `rows` rows; unchanged if it has no integer labels."""
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if not isinstance(labels, Tensor) or labels.is_floating_point() or not labels.ndim:
        return batch
    labels = labels.clone()
    labels[rows:] = IGNORED
    return type(batch)({**batch, "labels": labels})


def _axis(accelerator: Accelerator) -> Axis:
    return Axis(
        accelerator.process_index, accelerator.num_processes, sharers=sharers_of(accelerator)
    )
