"""Batches of a custom loop: anything that a model would silently ignore or misread is refused, with the fix."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from threefold.data.order.permutation import seed_of
from threefold.data.rows.concat import IGNORED
from threefold.errors import ConfigError
from threefold.jsonl import Values
from threefold.model import noise
from threefold.model.model import Model
from threefold.training.forward import Batch

_PER_TOKEN = ("input_ids", "labels", "position_ids", "document_ids", "padding")
# Added by loaders: the rows' numbers.
_KNOWN = (*_PER_TOKEN, "attention_mask", "indices")
_COUNTED = "labels = ids[:, 1:]; input_ids = ids[:, :-1]   (rows of sequence + 1 tokens)"


class Batches:
    """Reads the batches of one model; every rank calls it with those of its dp rank.

    Attributes:
        taken: batches so far.
    """

    def __init__(self, model: Model, *, own_loss: bool, labels: bool = False) -> None:
        """Args: `labels`: a custom loss gets the model's outputs for them."""
        self._model, self._own_loss = model, own_loss
        self._labels = labels or not own_loss
        self.taken = 0

    def pieces(self, batch: Values | Sequence[Values], rows: int | None) -> list[Batch]:
        """A batch in micro-batches of at most `rows` rows; None: all in one. A list of batches: each of them so.

        Raises:
            ConfigError: it is not a batch of this model.
        """
        self.taken += 1
        if (
            isinstance(batch, list | tuple)
            and batch
            and all(isinstance(each, Mapping) for each in batch)
        ):
            return [piece for each in batch for piece in self._read(each, rows)]
        return self._read(batch, rows)

    def _read(self, batch: Any, rows: int | None) -> list[Batch]:
        if not isinstance(batch, Mapping):
            raise ConfigError(
                f"the batch is a {type(batch).__name__}",
                expected="a dict of tensors by name",
                fix="step({'input_ids': input_ids, 'labels': labels})",
            )
        entries = dict(batch)
        if self._model.context is not None:
            entries = self._tokens(entries)
        if rows is None:
            return [entries]
        sizes = {
            len(values)
            for values in entries.values()
            if isinstance(values, Tensor) and values.ndim
        }
        if len(sizes) != 1 or not all(
            isinstance(values, Tensor) and values.ndim for values in entries.values()
        ):
            raise ConfigError(
                f"micro_batch = {rows}, but the batch has entries that are not tensors of that many rows",
                expected="tensors [rows, ..], which can be split by rows",
                fix="micro_batch=None, or batches of tensors only",
            )
        return micro_batches(entries, rows)

    def _tokens(self, batch: Values) -> Batch:
        ids = batch.get("input_ids")
        if (
            not isinstance(ids, Tensor)
            or ids.ndim != 2
            or ids.dtype != torch.int64
            or not ids.numel()
        ):
            raise ConfigError(
                f"the batch has {_kind_of(ids)} for input_ids",
                expected="int64 [rows, sequence]",
                fix="'input_ids': tokens.long().reshape(rows, sequence)",
            )
        # Reading a device's values would wait for it every step: there a strange token makes the loss NaN, or fails.
        look = self.taken <= 1 or ids.device.type == "cpu"
        batch = {name: values for name, values in batch.items() if values is not None}
        self._refuse_mask(batch.pop("attention_mask", None), look)
        if (unknown := [name for name in batch if name not in _KNOWN]) and not self._own_loss:
            raise ConfigError(
                f"the batch has {unknown[0]!r}, which the step does not know",
                expected=f"{', '.join(_KNOWN[:-2])}: anything else would be ignored",
                fix=f"batch.pop({unknown[0]!r}), or a loss that reads it: TrainStep(model, loss=...)",
            )
        if "labels" not in batch and self._labels:
            raise ConfigError(
                "the batch has no labels",
                expected="labels, shifted by one token",
                fix=_COUNTED
                if self._own_loss
                else f"{_COUNTED}, or TrainStep(model, loss=...)",
            )
        for name in (name for name in _PER_TOKEN if name in batch):
            if not isinstance(batch[name], Tensor) or batch[name].shape != ids.shape:
                raise ConfigError(
                    f"the batch has {_kind_of(batch[name])} for {name}, and [{ids.shape[0]}, {ids.shape[1]}] input_ids",
                    expected="one for each token",
                    fix=f"'{name}': {name}.expand_as(input_ids)"
                    if name == "position_ids"
                    else _COUNTED,
                )
            if batch[name].dtype != (kind := torch.bool if name == "padding" else torch.int64):
                raise ConfigError(
                    f"the batch has {_kind_of(batch[name])} for {name}",
                    expected=f"{str(kind).removeprefix('torch.')} [rows, sequence]",
                    fix=f"'{name}': {name}.{'bool' if name == 'padding' else 'long'}()",
                )
        if look and self._labels:
            self._model.refuse_strange("labels", batch["labels"], besides=IGNORED)
        for name, values in batch.items():
            if not isinstance(values, Tensor) or not values.ndim or len(values) != len(ids):
                raise ConfigError(
                    f"the batch has {_kind_of(values)} for {name}, and {len(ids)} rows",
                    expected="a tensor [rows, ..]",
                    fix=f"'{name}': torch.as_tensor({name}).expand({len(ids)})",
                )
        self._model.refuse_rows(batch, look=look)
        if self._labels and look and _unshifted(ids, batch["labels"]):
            raise ConfigError(
                "the labels are the input_ids themselves, not shifted by one token",
                expected="labels[t] = input_ids[t + 1]: they are shifted before rows are split, so the model, unlike "
                "transformers', does not shift them; it would learn to copy",
                fix=_COUNTED,
            )
        return batch

    def _refuse_mask(self, mask: Any, look: bool) -> None:
        if mask is not None and (
            not isinstance(mask, Tensor) or (look and not bool((mask == 1).all()))
        ):
            raise ConfigError(
                "the batch has an attention_mask that is not all ones",
                expected="document numbers, which any mesh keeps apart; padding is number -1, with labels -100",
                fix="batch['document_ids'] = batch.pop('attention_mask') - 1",
            )


def cut(batch: Batch, length: int) -> Batch:
    """The first `length` places of each row of a batch; only padding is beyond."""
    assert bool((batch["labels"][:, length:] == IGNORED).all()) and bool(
        batch["padding"][:, length:].all()
    )
    return {
        name: values[:, :length] if values.ndim > 1 else values
        for name, values in batch.items()
    }


def micro_batches(batch: Batch, rows: int, *, spread: bool = False) -> list[Batch]:
    """A batch in pieces of `rows` rows; the last one may be shorter.

    Args:
        spread: a piece's rows are as many apart as there are pieces, and not neighbours. A dp rank reads every dp-th
            row of the global batch, so the pieces of all ranks are then the same on any number of dp ranks.
    """
    if spread:
        count = len(next(iter(batch.values()))) // rows
        return [
            {name: values[first::count].contiguous() for name, values in batch.items()}
            for first in range(count)
        ]
    pieces = zip(*(values.split(rows) for values in batch.values()), strict=True)
    return [dict(zip(batch, piece, strict=True)) for piece in pieces]


def with_noise(
    pieces: Sequence[Batch], model: Model, *, seed: int, step: int, spread: bool
) -> Sequence[Batch]:
    """`micro_batches` with random numbers that follow from the seed, the step and each one's first row.

    That row is counted in the global batch. With one row in a micro-batch, and with `spread` for any number of them,
    the noise of a row is then the same on any number of dp ranks.
    """
    mesh = model.mesh
    size = len(next(iter(pieces[0].values())))
    first = range(len(pieces)) if spread else range(0, len(pieces) * size, size)
    places = noise.places_in_row(mesh, model.tensor.sequence_group)
    rows = [mesh.dp_rank + mesh.dp_size * row for row in first]
    return noise.Keyed(
        pieces,
        [seed_of("noise of a row", seed, step, row, *places) for row in rows],
        mesh.device,
    )


def _unshifted(ids: Tensor, labels: Tensor) -> bool:
    """Whether the labels are the tokens at their own places, and not those at the next ones."""
    counted = labels != IGNORED
    if (
        ids.shape[1] < 2
        or not bool(counted.any())
        or not torch.equal(ids[counted], labels[counted])
    ):
        return False
    inside = counted[:, :-1]
    return not torch.equal(ids[:, 1:][inside], labels[:, :-1][inside])


def _kind_of(values: Any) -> str:
    if isinstance(values, Tensor):
        return f"{str(values.dtype).removeprefix('torch.')} {list(values.shape)}"
    return "nothing" if values is None else f"a {type(values).__name__}"
