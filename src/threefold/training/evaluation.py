"""Exact sums of the loss over rows that are shared unevenly by the dp ranks."""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch.distributed.fsdp import FSDPModule

from threefold.checkpoint.copies import refuse_drift, state_held
from threefold.data.rows.concat import IGNORED
from threefold.errors import DataError, check_argument
from threefold.jsonl import Values
from threefold.model.data_parallel import reshard
from threefold.model.model import Model, OutputsOf, check_model
from threefold.training.batches import Batches
from threefold.training.forward import (
    Batch,
    OwnLoss,
    forward_own,
    forward_sums,
    measures_of,
    refuse_means,
    token_loss_of,
)
from threefold.training.numbers import refuse_nothing
from threefold.training.stop_request import EvaluationLeft


class EvalNumbers(NamedTuple):
    """Over the rows of all dp ranks, the same on each: sum of the loss, and number of target tokens (or its count)."""

    loss_sum: float
    num_counted: float

    @property
    def loss(self) -> float:
        """The mean loss."""
        return self.loss_sum / self.num_counted


class EvalStep:
    """Evaluates a model; every rank of its mesh calls it; nothing is updated."""

    def __init__(
        self, model: Model, *, loss: OwnLoss | None = None, loss_on: OutputsOf = "logits"
    ) -> None:
        """Args: as for `TrainStep`."""
        check_model(model)
        model.refuse_outputs(loss_on, loss, "EvalStep")
        self._model, self._loss, self._loss_on = model, loss, loss_on
        self.own_loss = loss is not None
        self._measures = measures_of(loss)

    def __call__(self, batches: Iterable[Values]) -> EvalNumbers:
        """The sum and the count over the batches of all dp ranks, of any number and size on each, in any order.

        While another dp rank has batches left, a rank without any computes along without being counted.

        Raises:
            DataError: none of them has anything to count; on every rank.
        """
        return self.measured(batches)[0]

    @torch.no_grad()
    def measured(self, batches: Iterable[Values]) -> tuple[EvalNumbers, dict[str, float]]:
        """The result of a call, and the means of a custom loss's further measures by name (`forward`)."""
        loss_sum, count, parts, of_one, *sums = self._totals(batches)
        refuse_means(parts, of_one)
        refuse_nothing("the evaluation", count)
        means = {name: total / count for name, total in zip(self._measures, sums, strict=True)}
        return EvalNumbers(loss_sum, round(count) if self._loss is None else count), means

    def _totals(self, batches: Iterable[Values]) -> list[float]:
        model, mesh = self._model, self._model.mesh
        check_argument(
            "batches",
            batches,
            isinstance(batches, Iterable) and not isinstance(batches, Mapping),
            expected="this rank's batches, one after another",
            fix="evaluate([batch]), or evaluate(loader)",
        )
        # torch's sampler and ours name the places of an epoch so, of which some repeat a row.
        sampler = getattr(batches, "sampler", None)
        again = getattr(sampler, "total_size", 0) - len(getattr(sampler, "dataset", ()))
        if again > 0:
            raise DataError(
                f"the evaluation would count {again} rows twice, which its sampler repeats to give all ranks as many",
                expected="every row once: other ranks wait for one that has more",
                fix="threefold.distribute(loader, tail='exact')",
            )
        mesh.agree("an evaluation")
        held = state_held(model.module, None, buffers=model.context is not None)
        refuse_drift(held, mesh, when="before an evaluation")
        model.trust_no_weight()
        totals = torch.zeros(4 + len(self._measures), dtype=torch.float64, device=mesh.device)
        reader = Batches(
            model, own_loss=self.own_loss, labels=self._loss_on == "log_probabilities"
        )
        failures: list[Exception] = []
        try:
            with model.evaluating():
                for batch, counts in self._with_stand_ins(reader, batches, failures):
                    sums = self._of(batch, failures)
                    totals += sums if counts else 0 * totals
        except EvaluationLeft:
            reshard(model.forward)  # what is in shards is saved
            raise
        mesh.all_reduce("loss", totals)
        reshard(model.forward)
        return [*totals.tolist()]

    def _of(self, batch: Batch, failures: list[Exception]) -> torch.Tensor:
        model, mesh = self._model, self._model.mesh
        if self._loss is not None:
            with forward_own(
                model, batch, self._loss, of=self._loss_on, failures=failures
            ) as own:
                return own.totals
        with forward_sums(model, batch, token_loss_of(model)) as sums:
            targets = (batch["labels"] != IGNORED).sum().to(
                mesh.device, torch.float64
            ) / mesh.cp_size
            loss_sum = model.sums.summand(sums.cross_entropy).double()
            return torch.nn.functional.pad(torch.stack([loss_sum, targets]), (0, 2))

    def _with_stand_ins(
        self, reader: Batches, batches: Iterable[Values], failures: Sequence[Exception]
    ) -> Iterator[tuple[Batch, bool]]:
        """This rank's batches, then stand-ins until no rank has any left; a loss's error on one is raised on all."""
        mesh = self._model.mesh
        last: Batch | None = None
        nothing: Batch = {}
        own = iter(batches)
        sharded = isinstance(self._model.forward, FSDPModule)

        def read() -> tuple[list[Batch], int]:
            if failures:
                raise failures[0]
            batch = next(own, None)
            return ([nothing], 0) if batch is None else (reader.pieces(batch, None), 1)

        for number in itertools.count(1):
            (batch, *_), some = mesh.agree("evaluation batch", number, read)
            if not some:
                return
            if number == 1 and some < mesh.dp_size and sharded and self._model.context is None:
                raise DataError(
                    "a rank has no batch to evaluate",
                    expected="at least one on every dp rank: a sharded custom module is computed by all of them",
                    fix="threefold.distribute(loader, tail='exact') gives every rank the same number",
                )
            if batch is not nothing:
                last = dict(batch)
                yield last, True
            elif sharded or self._model.context is not None:
                # Forward has collectives, which other ranks have entered.
                last = last or self._stand_in()
                yield last, False

    def _stand_in(self) -> Batch:
        mesh = self._model.mesh
        tokens = torch.zeros(1, 2 * mesh.cp_size * mesh.tp_size, dtype=torch.int64)
        return {"input_ids": tokens, "labels": torch.full_like(tokens, IGNORED)}
