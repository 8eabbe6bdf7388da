"""The losses of a run on pairs of answers (`train.objective: dpo`): of its rows, and of those that it is evaluated on.

The model must be as the run began with it: they are built before a checkpoint is read into it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from threefold.config.schema import Config
from threefold.data.rows.best_fit import PaddedRows
from threefold.data.rows.concat import Rows
from threefold.data.rows.known_rows import parts_of
from threefold.mesh.environment import cache_folder
from threefold.model.model import Model
from threefold.plan import choices
from threefold.training.dpo_loss import PairLoss, WithoutAdapters
from threefold.training.dpo_reference import (
    Kept,
    Lookup,
    ReferenceIdentity,
    digest_of,
    kept_reference,
    most_documents,
)
from threefold.training.evaluation import EvalStep

FOLDER = "reference"


@dataclass(frozen=True)
class Pairs:
    """The objective of a run on pairs, its evaluation (if any), and the state kept for them."""

    loss: PairLoss
    evaluation: EvalStep | None
    _kept: tuple[Kept, ...]

    def keep(self, run: Path) -> None:
        """Writes the references into the folder of the run; rank 0 calls it."""
        for each in self._kept:
            each.keep(run / FOLDER)


def pairs_of(
    config: Config,
    model: Model,
    rows: Rows,
    held_out: Rows | None,
    *,
    resumed: Path | None,
    say: Callable[[str], None],
) -> Pairs | None:
    """The losses of a run on pairs, None for any other run; every rank calls it.

    Args:
        resumed: folder of the run whose checkpoint is resumed.
        say: prints a line.

    Raises:
        CheckpointError: the reference that is kept has changed, or is that of other weights.
    """
    if config.train.objective != "dpo":
        return None
    weights = None if config.model.lora.r else digest_of(model)
    losses: list[PairLoss] = []
    kept: list[Kept] = []
    for each in (rows, held_out) if held_out is not None else (rows,):
        loss, references = _loss_of(config, model, each, weights, resumed, say)
        losses.append(loss)
        kept += references
    return Pairs(
        losses[0],
        evaluation_of(model, losses[1]) if held_out is not None else None,
        tuple(kept),
    )


def evaluation_of(model: Model, loss: PairLoss) -> EvalStep:
    """The evaluation of the rows that the loss is of."""
    return EvalStep(model, loss=loss, loss_on="log_probabilities")


def _loss_of(
    config: Config,
    model: Model,
    rows: Rows,
    weights: str | None,
    resumed: Path | None,
    say: Callable[[str], None],
) -> tuple[PairLoss, list[Kept]]:
    """The loss of some rows, and the references that it looks up; without `weights`, adapters are switched off."""
    parts = [part.rows for part in parts_of(rows)]
    padded = [part for part in parts if isinstance(part, PaddedRows)]
    assert len(padded) == len(parts), "pairs have no other rows"
    most = most_documents(padded)
    if weights is None:
        return PairLoss(
            model, config.dpo, WithoutAdapters(model, num_documents=most), num_documents=most
        ), []
    kept = [
        kept_reference(
            part,
            model,
            ReferenceIdentity(part.fingerprint, weights, config.model.dtype),
            cache=cache_folder() / "references",
            run=resumed / FOLDER if resumed is not None else None,
            micro_batch=choices.micro_batch(config, model.mesh.topology).value,
            say=say,
        )
        for part in padded
    ]
    first = np.cumsum([0, *(len(each.values) for each in kept)])
    ends = np.concatenate(
        [part.document_ends + begin for part, begin in zip(padded, first[:-1], strict=True)]
    )
    values = torch.from_numpy(np.concatenate([each.values for each in kept])).to(
        model.mesh.device
    )
    lookup = Lookup(values, torch.from_numpy(ends).to(model.mesh.device), num_documents=most)
    return PairLoss(model, config.dpo, lookup, num_documents=most), kept
