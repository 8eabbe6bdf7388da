"""One optimizer step: micro-batches, backward, one global norm, update; and the evaluation step.

The loss of the step is the sum over all target tokens of the global batch divided by their number, for any mesh and any
micro-batching. No other file sees a gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from threefold.data.rows.concat import IGNORED
from threefold.mesh.mesh import Mesh
from threefold.model.build import ParallelModel
from threefold.model.collectives import local_part
from threefold.model.context_parallel.split import local_positions
from threefold.model.data_parallel import last_backward
from threefold.model.head import Sums
from threefold.training.loss import RouterLoss, TokenLoss
from threefold.training.progress import Progress

Batch = dict[str, Tensor]

_PER_TOKEN = ("input_ids", "labels", "position_ids", "document_ids")


@dataclass(frozen=True)
class StepResult:
    """What one step computed, still on the device.

    Attributes:
        loss_sum: cross entropy over this rank's target tokens; sum it over the `loss` group for the step's own.
        target_tokens: number of target tokens of the global batch.
        grad_norm: of the global gradient, before clipping.
        aux_loss: this rank's share of the routers' loss, or None if the model has none.
        micro_losses: what this rank minimised in each micro-batch.
    """

    loss_sum: Tensor
    target_tokens: Tensor
    grad_norm: Tensor
    aux_loss: Tensor | None = None
    micro_losses: tuple[Tensor, ...] = ()


class TrainStep:
    """A model, its optimizer and the mesh they live on; each call is one optimizer step.

    A loss or a gradient that is not finite on any rank leaves weights and optimizer as they are, on all ranks.
    """

    def __init__(
        self,
        model: ParallelModel,
        optimizer: torch.optim.Optimizer,
        mesh: Mesh,
        *,
        grad_clip: float = 0.0,
        token_loss: TokenLoss | None = None,
        observe: Callable[[], None] | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Args:
        token_loss: from `token_loss_of`; by default the cross entropy alone.
        observe: called when the gradients are complete and not yet clipped, to compare them.
        progress: told which phase the step is in.
        """
        self._model = model
        self._optimizer = optimizer
        self._mesh = mesh
        self._grad_clip = grad_clip
        self._token_loss = token_loss or token_loss_of(model, mesh)
        self._router = RouterLoss.of(model.module)
        self._observe = observe
        self._parameters_on = next(model.module.parameters()).device
        self._progress = progress or Progress()

    def __call__(self, batches: Sequence[Batch], *, lr: float) -> StepResult:
        """Runs forward and backward over the micro-batches of this dp rank, then updates the weights.

        Batches are [batch, sequence] rows of this dp rank, the same on its cp and tp ranks, on any device.
        """
        self._progress.enter("forward")
        ranks = self._mesh.size("loss")
        target_tokens, counting = self._count_targets(batches)
        loss_sum = torch.zeros((), device=self._mesh.device)
        routers = self._router is not None
        aux_loss = torch.zeros((), device=self._mesh.device) if routers else None
        picks = self._picks_beforehand(batches) if routers and len(batches) > 1 else None
        losses: list[Tensor] = []
        for number, batch in enumerate(batches, start=1):
            if number > 1:
                self._progress.enter("forward")
            with (
                last_backward(self._model.forward, number == len(batches)),
                forward_sums(self._model, batch, self._mesh, self._token_loss, routers=routers) as sums,
            ):
                if counting is not None:
                    counting.wait()
                    counting = None
                # FSDP2 and DDP average over the dp x cp ranks; the loss is divided by a count that is global already.
                objective = sums.objective * (ranks / target_tokens.clamp(min=1))
                if self._router is not None and aux_loss is not None:
                    counted = counted_tokens(batch, self._mesh)
                    if picks is None:
                        picks = _over_ranks(self._router.picks(sums.router_logits, counted), self._mesh)
                    share = self._router.share(sums.router_logits, picks, counted)
                    objective = objective + self._router.coefficient * ranks * share
                    aux_loss += share.detach()
                losses.append(objective.detach())
                self._progress.enter("backward")
                # One if the loss is finite. A NaN loss can have a finite gradient: other ranks would not notice.
                objective.backward(1 + (losses[-1] - losses[-1]))
            loss_sum += sums.cross_entropy
        self._progress.enter("reduce")
        grad_norm = self._reduce_and_clip()
        self._progress.enter("optimizer")
        self._update(grad_norm, lr)
        return StepResult(loss_sum, target_tokens, grad_norm, aux_loss, tuple(losses))

    def _update(self, grad_norm: Tensor, lr: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        # The fused kernels read a flag on the device and then change nothing: no wait for the norm.
        found = (~grad_norm.isfinite()).float()
        self._optimizer.found_inf = found.to(self._parameters_on)  # type: ignore[attr-defined]
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    @torch.no_grad()
    def _picks_beforehand(self, batches: Sequence[Batch]) -> Tensor:
        """The routers' picks over the global batch. Costs one more forward: the first backward needs all of them.

        Dropout and jitter are drawn as they will be in the forward of each micro-batch.
        """
        assert self._router is not None
        device = self._mesh.device
        picks = torch.zeros(self._router.num_experts + 1, dtype=torch.float64, device=device)
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            for batch in batches:
                with forward_sums(self._model, batch, self._mesh, self._token_loss, routers=True) as sums:
                    picks += self._router.picks(sums.router_logits, counted_tokens(batch, self._mesh))
        return _over_ranks(picks, self._mesh)

    def _count_targets(self, batches: Sequence[Batch]) -> tuple[Tensor, dist.Work | None]:
        """The number of target tokens of the global batch, and the work to wait for before reading it."""
        counted = torch.stack([(batch["labels"] != IGNORED).sum() for batch in batches]).sum().to(self._mesh.device)
        # Counted before the cp split, so the dp ranks alone hold distinct rows; under way while forward computes.
        group = self._mesh.group("dp")
        return counted, dist.all_reduce(counted, group=group, async_op=True) if group is not None else None

    def _reduce_and_clip(self) -> Tensor:
        parameters = dict(self._model.module.named_parameters())
        self._sum_partial([parameters[name].grad for name in self._model.tensor.partial_gradients])
        split = self._model.tensor.placements
        gradients: dict[bool, list[Tensor]] = {True: [], False: []}
        for name, parameter in parameters.items():
            if parameter.grad is not None:
                _place_as_parameter(parameter)
                gradients[name in split and not split[name].is_replicate()].append(local_part(parameter.grad))
        norm = self._global_norm(gradients[True], gradients[False])
        if self._observe is not None:
            self._observe()
        if self._grad_clip:
            factor = (self._grad_clip / (norm + 1e-6)).clamp(max=1.0)
            torch._foreach_mul_(gradients[True] + gradients[False], factor.to(self._parameters_on))
        return norm

    def _sum_partial(self, gradients: Sequence[Tensor | None]) -> None:
        """Sums over tp the gradients that each rank knows only in part; once a step, in one collective."""
        tp = self._mesh.group("tp")
        own = [local_part(gradient) for gradient in gradients if gradient is not None]
        if tp is None or not own:
            return
        together = torch.cat([gradient.flatten() for gradient in own]).to(self._mesh.device)
        dist.all_reduce(together, group=tp)
        parts = together.split([gradient.numel() for gradient in own])
        torch._foreach_copy_(own, [part.view_as(gradient) for part, gradient in zip(parts, own, strict=True)])

    def _global_norm(self, split: list[Tensor], whole: list[Tensor]) -> Tensor:
        """Norm of the whole gradient; `split` differs between tp ranks, `whole` is the same on each and counts once."""
        squares = torch.stack([_square_sum(split, self._mesh.device), _square_sum(whole, self._mesh.device)])
        # Replicas have equal gradients; only ranks that share one copy hold different parts.
        if (fsdp := self._mesh.group("fsdp")) is not None:
            dist.all_reduce(squares, group=fsdp)
        if (tp := self._mesh.group("tp")) is None:
            return squares.sum().sqrt()
        # The second is 0, or NaN if `whole` is not finite on one tp rank alone: all must know.
        parts = torch.stack([squares[0], squares[1] - squares[1]])
        dist.all_reduce(parts, group=tp)
        return (parts.sum() + squares[1]).sqrt()


def token_loss_of(model: ParallelModel, mesh: Mesh, *, label_smoothing: float = 0.0, z_loss: float = 0.0) -> TokenLoss:
    """The loss of tokens whose logits this model gives on this rank."""
    return TokenLoss(
        group=mesh.group("tp"),
        vocabulary_start=model.tensor.vocabulary_start,
        vocabulary=model.module.config.get_text_config().vocab_size,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
    )


@contextmanager
def forward_sums(
    model: ParallelModel, batch: Batch, mesh: Mesh, token_loss: TokenLoss, *, routers: bool = False
) -> Iterator[Sums]:
    """Sums over this rank's target tokens of a batch [batch, sequence]; backward belongs inside the `with`."""
    tokens = {name: batch[name].to(mesh.device, non_blocking=True) for name in _PER_TOKEN if name in batch}
    with model.context.batch(tokens) as local:
        with torch.autocast(mesh.device.type, dtype=model.autocast, enabled=model.autocast is not None):
            sums: Sums = model.forward(
                labels=local["labels"],
                token_loss=token_loss,
                output_router_logits=routers,
                input_ids=local["input_ids"],
                position_ids=local["position_ids"],
                # Ones keep transformers from inferring packed documents from the positions; `context` has the masks.
                attention_mask=torch.ones_like(local["input_ids"]),
                use_cache=False,
            )
        yield sums


def counted_tokens(batch: Batch, mesh: Mesh) -> Tensor:
    """[rows x sequence / cp] of this rank's tokens in the order in which it holds them: 1.0, or 0.0 for padding."""
    rows, sequence = batch["input_ids"].shape
    if (padding := batch.get("padding")) is None:
        return torch.ones(rows * sequence // mesh.size("cp"), device=mesh.device)
    own = local_positions(sequence, cp_size=mesh.size("cp"), cp_rank=mesh.cp_rank)
    return (~padding[:, own.to(padding.device)]).flatten().to(mesh.device, torch.float32, non_blocking=True)


def micro_batches(batch: Batch, rows: int) -> list[Batch]:
    """A batch in pieces of `rows` rows; the last one may be shorter."""
    pieces = zip(*(values.split(rows) for values in batch.values()), strict=True)
    return [dict(zip(batch, piece, strict=True)) for piece in pieces]


def warm_up_buckets(model: ParallelModel, mesh: Mesh, *, rows: int, seq_len: int) -> None:
    """One backward over [rows, seq_len] tokens, as a micro-batch has, without any trace. Every rank calls it.

    torch's DistributedDataParallel lays out its buckets again after the first backward, in the order in which the
    gradients came. The place of a gradient in a bucket decides in which order the ranks' parts of it are added. Without
    this, the first step of a resumed run on more than two ranks would have other sums than that of an unbroken run.
    """
    if not isinstance(model.forward, DistributedDataParallel):
        return
    tokens = torch.zeros(rows, seq_len, dtype=torch.int64)
    batch = {"input_ids": tokens, "labels": tokens, "position_ids": torch.arange(seq_len).expand(rows, -1)}
    with (
        torch.random.fork_rng(devices=[mesh.device] if mesh.device.type == "cuda" else []),
        forward_sums(model, batch, mesh, token_loss_of(model, mesh)) as sums,
    ):
        sums.objective.backward()
    model.module.zero_grad(set_to_none=True)


@torch.no_grad()
def evaluate(model: ParallelModel, batches: Iterable[Batch], mesh: Mesh) -> tuple[float, int]:
    """Sum of the loss and number of target tokens over the rows of all dp ranks, which give equally many batches."""
    model.module.eval()
    token_loss = token_loss_of(model, mesh)
    totals = torch.zeros(2, dtype=torch.float64, device=mesh.device)
    for batch in batches:
        with forward_sums(model, batch, mesh, token_loss) as sums:
            totals[0] += sums.cross_entropy
        totals[1] += (batch["labels"] != IGNORED).sum() / mesh.size("cp")
    if (group := mesh.group("loss")) is not None:
        dist.all_reduce(totals, group=group)
    model.module.train()
    return totals[0].item(), round(totals[1].item())


def mean_loss(result: StepResult, mesh: Mesh) -> float:
    """The step's own loss: one small collective, then a wait for the device."""
    total = _over_ranks(result.loss_sum, mesh)
    return (total / result.target_tokens).item() if result.target_tokens.item() else math.nan


def mean_aux_loss(result: StepResult, mesh: Mesh) -> float | None:
    """The routers' loss of the step, or None if the model has none; as `mean_loss`."""
    return None if result.aux_loss is None else _over_ranks(result.aux_loss, mesh).item()


def _over_ranks(part: Tensor, mesh: Mesh) -> Tensor:
    total = part.double()  # itself, if it is already
    if (group := mesh.group("loss")) is not None:
        dist.all_reduce(total, group=group)
    return total


def _place_as_parameter(parameter: torch.nn.Parameter) -> None:
    """Gives a gradient its parameter's placement; autograd may leave it as a pending sum (for embeddings it does)."""
    gradient = parameter.grad
    both_split = isinstance(parameter, DTensor) and isinstance(gradient, DTensor)
    if both_split and gradient.placements != parameter.placements:
        parameter.grad = gradient.redistribute(placements=parameter.placements)


def _square_sum(tensors: list[Tensor], device: torch.device) -> Tensor:
    if not tensors:
        return torch.zeros((), device=device)
    return torch.stack(torch._foreach_norm(tensors, dtype=torch.float32)).square().sum().to(device)
