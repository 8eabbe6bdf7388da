"""The loss of pairs of answers: a custom loss, on the log-probabilities of the labels.

In a row, document 2k is the prompt with the chosen answer and document 2k + 1 that with the rejected one. The
log-probabilities of the trained tokens of each are summed over the whole document, wherever cp ranks hold it. The
reward of the answer, in units of 1 / beta, is this sum minus that of a frozen reference, the model that training
began with. The loss is the mean over the pairs of the global batch.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from threefold.config.objective import DpoConfig
from threefold.data.rows.concat import IGNORED
from threefold.model import lora
from threefold.model.model import Model
from threefold.training.forward import Batch, token_loss_of

# This rank's part of a batch -> [rows, documents] float64: the reference's sums, the same on all cp and tp ranks.
Reference: TypeAlias = Callable[[Batch], Tensor]

MEASURES = ("reward_chosen", "reward_rejected", "reward_margin", "reward_accuracy")


class Documents(NamedTuple):
    """For each document of some rows, [rows, documents] float64: log-probability and number of its trained tokens."""

    sums: Tensor
    counts: Tensor


def of_documents(
    model: Model, log_probabilities: Tensor, batch: Batch, num_documents: int
) -> Documents:
    """Sums over whole documents, the same on all cp ranks, each of which calls it.

    Args:
        log_probabilities: of this rank's labels, [rows, sequence / cp].
        batch: this rank's part, with `labels` and `document_ids` [rows, sequence / cp].
        num_documents: of the row that has most; the others have none there.
    """
    ids = batch["document_ids"]
    trained = batch["labels"] != IGNORED
    # A product, as a scattered sum would have no order on a GPU. of_document: (rows, documents, sequence / cp)
    of_document = ids[:, None] == torch.arange(num_documents, device=ids.device)[:, None]
    values = torch.stack([log_probabilities * trained, trained], dim=-1).double()
    sums = model.sum_over_context(of_document.double() @ values)
    return Documents(sums[..., 0], sums[..., 1])


class PairLoss:
    """A loss for `TrainStep` and `EvalStep`, with `loss_on="log_probabilities"`.

    Its count is the number of pairs. It measures the mean rewards of chosen and rejected answers, their difference,
    and the share of pairs whose chosen answer has the larger one.
    """

    measures = MEASURES
    of_rows: Tensor | None = None
    """Of the batch before: the sum by rows of this rank's share, [rows]."""

    def __init__(
        self, model: Model, asked: DpoConfig, reference: Reference, *, num_documents: int
    ) -> None:
        """Args: `num_documents`: of the row that has most."""
        self._model = model
        self._asked = asked
        self._reference = reference
        self._num_documents = num_documents

    def __call__(
        self, log_probabilities: Tensor, batch: Batch
    ) -> tuple[Tensor, Tensor, Tensor]:
        answers = of_documents(self._model, log_probabilities, batch, self._num_documents)
        gained = answers.sums - self._reference(batch)
        # Both answers of a pair are trained on, or neither: a row that fills up a batch has no labels.
        counted = (answers.counts > 0)[:, ::2]
        # Each cp rank has all of it, and returns its share.
        share = counted / self._model.mesh.cp_size
        losses = pair_losses(self._asked, gained, answers.counts)
        rewards = self._asked.beta * gained.detach()
        chosen = rewards[:, ::2]
        rejected = rewards[:, 1::2]
        stats = torch.stack([chosen, rejected, chosen - rejected, (chosen > rejected).double()])
        own = losses * share
        self.of_rows = own.detach().sum(1)
        return own.sum(), share.sum(), (stats * share).sum(dim=(1, 2))


def pair_losses(asked: DpoConfig, gained: Tensor, counts: Tensor) -> Tensor:
    """The loss of each pair, [rows, pairs].

    Args:
        gained: log-probability of each answer above that of the reference, [rows, 2 x pairs], chosen ones first.
        counts: how many tokens each has.
    """
    if asked.loss == "ipo":
        # arXiv:2310.12036, equation 17. Of means over tokens, as its authors computed it: a sum's square would grow
        # with the square of an answer's length.
        mean = gained / counts.clamp(min=1)
        return (mean[:, ::2] - mean[:, 1::2] - 1 / (2 * asked.beta)).square()
    margin = asked.beta * (gained[:, ::2] - gained[:, 1::2])
    if asked.loss == "hinge":
        # arXiv:2305.10425, as a loss of the rewards: arXiv:2309.06657.
        return F.relu(1 - margin)
    # arXiv:2305.18290, equation 7; with a share of swapped answers, as arXiv:2403.00409 describes it
    swapped = asked.label_smoothing
    return -(1 - swapped) * F.logsigmoid(margin) - swapped * F.logsigmoid(-margin)


class WithoutAdapters:
    """A reference: the model itself without its adapters and without dropout, in one more forward."""

    def __init__(self, model: Model, *, num_documents: int) -> None:
        self._model, self._num_documents = model, num_documents
        self._token_loss = token_loss_of(model)

    @torch.no_grad()
    def __call__(self, batch: Batch) -> Tensor:
        model = self._model
        with model.evaluating(), lora.switched_off(model.module):
            outputs = model.outputs(batch, "log_probabilities", token_loss=self._token_loss)
        return of_documents(model, outputs.values, batch, self._num_documents).sums
