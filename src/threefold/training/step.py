"""One optimizer step: micro-batches, backward, one global norm, update.

The loss of the step is the sum over all target tokens of the global batch divided by their number, for any mesh and any
micro-batching; or the sum of a custom loss divided by its count. Only `gradients` reads them.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from threefold.checkpoint.copies import refuse_drift, state_held
from threefold.config.optimizer import OptimizerConfig
from threefold.config.schema import Config
from threefold.data.rows.concat import IGNORED
from threefold.errors import ConfigError, RunError, ThreefoldError, check_argument
from threefold.jsonl import Values
from threefold.model import noise
from threefold.model.data_parallel import frozen_in, last_backward
from threefold.model.gradient_sums import hook_problems
from threefold.model.model import Model, OutputsOf, wait_for_trained
from threefold.optim.bfloat16_moments import NarrowAdamW
from threefold.optim.build import build_optimizer, refuse_other_parameters
from threefold.optim.classes import mesh_problems
from threefold.optim.ema import Ema
from threefold.training.batches import Batches
from threefold.training.forward import (
    Batch,
    OwnLoss,
    check_settings,
    checked_rate,
    counted_tokens,
    forward_own,
    forward_sums,
    measures_of,
    refuse_means,
    refuse_unequal,
    token_loss_of,
    warm_up_buckets,
    watch_shards,
)
from threefold.training.gradients import Gradients, clip_factor
from threefold.training.loss import RouterLoss, TokenLoss
from threefold.training.numbers import (
    StepNumbers,
    StepResult,
    mean_loss,
    over_ranks,
    refuse_nothing,
)
from threefold.training.progress import Progress

_WITH_FLAG = (torch.optim.Adam, torch.optim.AdamW, NarrowAdamW)


class TrainStep:
    """A model and its optimizer; each call is one optimizer step, which every rank of the mesh makes.

    A loss or a gradient that is not finite on any rank leaves weights and optimizer as they are, on all ranks.
    """

    def __init__(
        self,
        model: Model,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        loss: OwnLoss | None = None,
        loss_on: OutputsOf = "logits",
        lr: float | Literal["auto"] = "auto",
        weight_decay: float | None = None,
        grad_clip: float = 1.0,
        micro_batch: int | None = None,
        token_loss: TokenLoss | None = None,
        observe: Callable[[], None] | None = None,
        progress: Progress | None = None,
        ema: Ema | None = None,
        compare_copies: bool = True,
    ) -> None:
        """Args:
        optimizer: over `model.parameters()`; its groups keep their rates. None: AdamW with `lr` and `weight_decay`
            (None: 0.1), whose rate a torch scheduler may set.
        loss: (outputs, batch) -> (sum over rows, count) of this rank's part of a batch; None: next-token cross entropy.
            Its attribute `rows_together`: how many consecutive rows it needs together, as for pairs; default 1.
        loss_on: what a causal model passes to `loss`: its `logits`, `hidden_states` before the head, or the
            `log_probabilities` of the labels, for which no rank holds all logits.
        lr: for AdamW here; assign `step.lr` to follow a schedule. auto: by the weights (`model.automatic_rate`).
        grad_clip: the norm above which the gradient is scaled down; 0: never.
        micro_batch: rows of this dp rank in one forward; None: all of a batch.
        token_loss: from `token_loss_of`, in place of the cross entropy alone.
        observe: called when the gradients are complete and not yet clipped, to compare them.
        progress: notified of the phase that the step is in.
        ema: a moving average to update after each step.
        compare_copies: end training if state that several ranks hold whole differs: after the first step, and every
            `audit.every` steps. False: for a probe, which compares more than that and reports why.

        Raises:
            ConfigError: a setting is wrong or has no effect, or the optimizer is over other parameters.
        """
        check_settings(model, grad_clip, micro_batch)
        model.refuse_outputs(loss_on, loss, "TrainStep")
        self.model, self._mesh = model, model.mesh
        self._parameters = {
            name: (each, each.requires_grad) for name, each in model.named_parameters()
        }
        self._own_optimizer = optimizer is None
        if optimizer is None:
            decay = checked_rate("weight_decay", 0.1 if weight_decay is None else weight_decay)
            self.given_decay: float | None = decay
            self.optimizer = build_optimizer(
                model.module, OptimizerConfig(weight_decay=decay), working=model.working
            )
            self._set_rates(model.automatic_rate if lr == "auto" else checked_rate("lr", lr))
        else:
            for name, value in (
                ("lr", None if lr == "auto" else lr),
                ("weight_decay", weight_decay),
            ):
                if value is not None:
                    raise ConfigError(
                        f"TrainStep was given an optimizer and {name} = {value}",
                        expected="one or the other: the groups of the optimizer have their own",
                        fix=f"leave {name} out, and give it to the optimizer",
                    )
            refuse_other_parameters(optimizer, model.module)
            ConfigError.raise_for(mesh_problems(optimizer))
            self.optimizer, self.given_decay = optimizer, None
        self._fused = None
        if model.working is not None:  # other steps need not load it
            from threefold.optim.fused_adamw import FusedAdamW

            if isinstance(self.optimizer, FusedAdamW):
                self._fused = self.optimizer  # clips gradients itself
        self._grad_clip = float(grad_clip)
        self._micro_batch = micro_batch
        self._loss, self._loss_on = loss, loss_on
        self._token_loss = token_loss or (token_loss_of(model) if loss is None else None)
        self._router = RouterLoss.of(model.module) if model.context is not None else None
        if self._router is not None:
            self._mesh.routers.append(self._router)
        self._batches = Batches(
            model, own_loss=loss is not None, labels=loss_on == "log_probabilities"
        )
        self._gradients = Gradients(model)
        self._observe = observe
        self._parameters_on = next(model.module.parameters()).device
        self.progress = progress or Progress()
        self._ema = ema
        # Copies of a whole model; each may leave some parameters out of its loss.
        self._averages = loss is not None and not isinstance(model.forward, FSDPModule)
        # A custom module may use different parameters in each micro-batch: separate reductions would mix them up.
        self._unsharded = model.asked is None
        # The count that divides the loss is global.
        self._averaged_over = model.sums.averaged_over
        self._compares = compare_copies
        self.after: Callable[[StepResult], None] = lambda result: refuse_nothing(
            "the global batch", result.target_tokens.item()
        )
        """Is given what each call has computed, on every rank; raises if that must not be built on."""
        self.before_update: Callable[[], object] = lambda: None
        """Is called when gradients are complete, before weights, moments and averages are written."""
        self._left = False  # after an error in the middle of a step
        if loss is not None:
            watch_shards(model)
            together = getattr(loss, "rows_together", 1)
            check_argument(
                "loss.rows_together",
                together,
                type(together) is int and together >= 1,
                expected="how many consecutive rows belong together",
                fix="loss.rows_together = 2",
            )
        self._steps, self._compare_every = 0, (model.asked or Config()).audit.every

    @property
    def measures(self) -> tuple[str, ...]:
        """The names of further measures that a custom loss returns (`forward`)."""
        return measures_of(self._loss)

    @property
    def lr(self) -> float | None:
        """The learning rate of the next step; None with a custom optimizer, whose groups have their own."""
        first = self.optimizer.param_groups[0]
        return first["lr"] / first["lr_share"] if self._own_optimizer else None

    @lr.setter
    def lr(self, rate: float) -> None:
        if not self._own_optimizer:
            raise ConfigError(
                f"step.lr = {rate}, but the optimizer is a custom one",
                expected="its own rates, set in its param_groups or by a torch scheduler",
                fix="for group in optimizer.param_groups: group['lr'] = ...",
            )
        self._set_rates(checked_rate("step.lr", rate))

    def _set_rates(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group.get("lr_share", 1.0)

    def __call__(self, batch: Values | Sequence[Values]) -> StepNumbers:
        """One step with the rows of this dp rank, which its cp and tp ranks pass too.

        A list of batches is one global batch, in micro-batches that may differ in row length.

        For a causal language model: a dict of `input_ids` and `labels`, each int64 [rows, sequence] on any device,
        labels shifted already and -100 where nothing is predicted; `position_ids` count from 0 in each row (document)
        unless given; `document_ids` keep documents apart; the routers' loss skips tokens marked by `padding`, bool. A
        custom loss may take any further tensors; those [rows, sequence, ..] are split over cp as tokens are.

        Raises:
            DataError: the global batch has nothing to train on; on every rank, and nothing is updated.
            ConfigError: the batch does not fit this model, or rows are split and the loss is not a sum over them.
        """
        result = self._run(lambda: self._batches.pieces(batch, self._micro_batch), None)
        self.after(result)
        return StepNumbers(mean_loss(result, self._mesh), result.grad_norm.item())

    def state_dict(self) -> dict[str, Any]:
        """The rate and the optimizer's state, for the same mesh; `threefold.save` writes state for any mesh."""
        return {"lr": self.lr, "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`."""
        if set(state) != {"lr", "optimizer"} or (state["lr"] is None) == self._own_optimizer:
            raise ConfigError(
                f"this is not the state of a TrainStep like this one: it has {', '.join(map(str, state)) or 'nothing'}",
                expected="the state_dict() of a TrainStep whose optimizer was made in the same way",
                fix="step.load_state_dict(step.state_dict())",
            )
        self.optimizer.load_state_dict(state["optimizer"])

    def run(self, batches: Sequence[Batch], *, lr: float | None = None) -> StepResult:
        """Forward and backward over the micro-batches of this dp rank, then the update; waits for no device.

        Batches are [batch, sequence] rows of this dp rank, the same on its cp and tp ranks, on any device.

        Args:
            lr: for the optimizer's groups (times their `lr_share`, if they have one); None: as they are.
        """
        return self._run(lambda: batches, lr)

    def _run(self, read: Callable[[], Sequence[Batch]], lr: float | None) -> StepResult:
        batches, target_tokens = self._agreed(read)
        if self._batches.taken == 1 and self.model.before_first_step is not None:
            self.model.before_first_step(self.model, batches[0])
        if self._batches.taken == 1 and self._loss is None:
            rows, sequence = batches[0]["input_ids"].shape
            warm_up_buckets(self.model, rows=rows, seq_len=sequence)
        due = self._compares and (
            not self._steps
            or (self._compare_every and not (self._steps + 1) % self._compare_every)
        )
        if not self._steps:
            self.model.trust_no_weight()
        elif due and self.model.working is not None:
            self.model.working.refuse_stale()
        self.progress.enter("forward")
        self._left = True
        try:
            if self._loss is None:
                backward = partial(self._backward, batches, target_tokens)
            else:
                backward = partial(self._backward_own, batches, bool(due))
            result, scale = self.model.sums.complete(backward, len(batches))
            self.progress.enter("reduce")
            if self._averages:
                self._gradients.average()
            norm = self._gradients.complete(scale=scale, observe=self._observe)
            if self._fused is not None:
                self._fused.clip_factor = clip_factor(norm, self._grad_clip)
            else:
                self._gradients.clip(norm, self._grad_clip)
        except BaseException as error:
            # Our errors are raised on all ranks in the same step; the next must not begin with this step's gradients.
            self._left = self._left and not isinstance(error, ThreefoldError)
            self.model.module.zero_grad(set_to_none=True)
            raise
        self._left = False
        self.progress.enter("optimizer")
        self._update(norm, lr)
        self._steps += 1
        if due:
            self._compare_copies()
        return replace(result, grad_norm=norm)

    def _agreed(
        self, read: Callable[[], Sequence[Batch]]
    ) -> tuple[Sequence[Batch], Tensor | None]:
        """The micro-batches of this rank, and the number of target tokens of the global batch, if already known.

        Raises:
            ThreefoldError: a rank cannot make the step, or the ranks' batches do not belong to one (`Mesh.agree`).
        """
        number = self._steps + 1
        own_loss = self._loss is not None
        together = self._mesh.meets_others

        def begin() -> tuple[Sequence[Batch], int]:
            if self._left and together:
                raise RunError(
                    f"step {number} was abandoned by an error on rank {self._mesh.rank}, while other ranks were in it",
                    expected="steps that all ranks finish: the others still wait for this one",
                    fix="let the error end the program, and load the last checkpoint",
                )
            if not torch.is_grad_enabled():
                raise ConfigError(
                    "the step runs under torch.no_grad()",
                    expected="gradients: a step trains",
                    fix="call step(batch) outside of torch.no_grad(); threefold.EvalStep(model) evaluates",
                )
            if torch.is_autocast_enabled(self._mesh.device.type):
                raise ConfigError(
                    "the step runs under torch.autocast()",
                    expected="none: the forward uses the model's own dtypes, and only the gradients would lose bits",
                    fix="threefold.load_model(..., dtype='bfloat16'), and step(batch) outside of torch.autocast()",
                )
            kept = self._mesh.kept if self._compares else {}
            if kept and kept.get(self.model) is not self.optimizer:
                raise ConfigError(
                    "the run saves another model or optimizer than the step's",
                    expected="the step that was passed to run.load: no checkpoint would have the state of this one",
                    fix="run.load(step, loader) with the step that is called; make two models that both learn parts "
                    "of one module, or save each with threefold.save, in a loop without a Run",
                )
            self._refuse_changed()
            batches = read()
            if not together or own_loss:
                return batches, 0
            # In host memory, where a loader leaves them; on a device it is waited for.
            return batches, sum(int((each["labels"] != IGNORED).sum()) for each in batches)

        if not together:
            return begin()[0], None
        self.progress.enter("exchange")
        # A rank may also leave a part of the model in eval mode.
        still = sum(not each.training for each in self.model.module.modules())
        call = f"eval-mode ({still} modules) step" if still else "step"
        call += frozen_in(self.model.module)
        batches, count = self._mesh.agree(call, number, begin)
        wait_for_trained(self.model)  # by a collective: only when all ranks train the same
        return batches, None if own_loss else torch.full((), count, device=self._mesh.device)

    def _refuse_changed(self) -> None:
        """ConfigError if trained parameters would not be updated, or have a gradient to which the step would add."""
        named = [*self.model.named_parameters()]
        ConfigError.raise_for(hook_problems(named))
        self.model.trained.update(f"model.{name}" for name, each in named if each.requires_grad)
        for name, parameter in named:
            registered, trained = self._parameters.get(name, (None, False))
            if parameter is not registered:
                raise ConfigError(
                    f"{name} is not a parameter that the step was made with",
                    expected="the model unchanged: what is replaced or added later would not be trained",
                    fix="change the model first, and make the optimizer and TrainStep(model, ...) after it",
                )
            if parameter.requires_grad > trained and self._own_optimizer:
                raise ConfigError(
                    f"requires_grad of {name} was set to True, and the step's own optimizer does not have it",
                    expected="an optimizer over all parameters ever trained: this one would leave it unchanged",
                    fix="TrainStep(model, torch.optim.AdamW(model.parameters()))",
                )
            if parameter.grad is not None:
                raise ConfigError(
                    f"{name} has a gradient before the step",
                    expected="none: a step accumulates its own, and divides them by its count",
                    fix="model.module.zero_grad(), or make its source a part of the loss",
                )

    def _compare_copies(self) -> None:
        """RunError on every rank if state that several of them hold whole is no longer the same."""
        state = state_held(
            self.model.module, self.optimizer, buffers=self.model.context is not None
        )
        if self._ema is not None:
            state |= self._ema.state()
        refuse_drift(
            state,
            self._mesh,
            when="after the first step" if self._steps == 1 else f"after {self._steps} steps",
        )

    def _backward(
        self, batches: Sequence[Batch], counted: Tensor | None
    ) -> tuple[StepResult, None]:
        ranks, device = self._averaged_over, self._mesh.device
        assert self._token_loss is not None
        target_tokens = counted
        if target_tokens is None:
            target_tokens = torch.stack(
                [(batch["labels"] != IGNORED).sum() for batch in batches]
            ).sum()
            target_tokens = target_tokens.to(device, non_blocking=True)
        loss_sum = torch.zeros((), device=device)
        routers = self._router is not None
        aux_loss = torch.zeros((), device=device) if routers else None
        picks = self._beforehand(batches)[0] if routers and len(batches) > 1 else None
        losses: list[Tensor] = []
        of_rows: list[Tensor] = []
        for number, batch in enumerate(batches, start=1):
            if number > 1:
                self.progress.enter("forward")
            with (
                last_backward(
                    self.model.forward, number == len(batches), unsharded=self._unsharded
                ),
                forward_sums(self.model, batch, self._token_loss, routers=routers) as sums,
            ):
                # With no target tokens it is NaN, and nothing is updated.
                objective = sums.objective * (ranks / target_tokens)
                if aux_loss is not None:
                    share, added = self._routers_share(batch, sums.router_logits, picks)
                    objective = objective + added
                    aux_loss += self.model.sums.summand(share)
                losses.append(objective.detach())
                self._go_backward(objective)
            loss_sum = loss_sum + self.model.sums.summand(sums.cross_entropy)
            of_rows += [] if sums.of_rows is None else [sums.of_rows]
        outcome = StepResult(
            loss_sum, target_tokens, loss_sum, aux_loss, tuple(losses), of_rows=tuple(of_rows)
        )
        return outcome, None

    def _backward_own(
        self, batches: Sequence[Batch], due: bool
    ) -> tuple[StepResult, Tensor | None]:
        """The gradients of the sum, and what to scale them by once the count of all micro-batches is known.

        If routers have a loss too, the count must be known before: with several micro-batches, by one more forward.
        """
        ranks = self._mesh.size("loss")
        device = self._mesh.device
        loss: Any = self._loss
        totals = torch.zeros(4 + len(measures_of(loss)), dtype=torch.float64, device=device)
        routers = self._router is not None
        aux_loss = torch.zeros((), device=device) if routers else None
        picks, early_count = (
            self._beforehand(batches) if routers and len(batches) > 1 else (None, None)
        )
        losses: list[Tensor] = []
        of_rows: list[Tensor] = []
        failures: list[Exception] = []
        split = len(batches) > 1 or self._mesh.dp_size > 1
        for number, batch in enumerate(batches, start=1):
            if number > 1:
                self.progress.enter("forward")
            with (
                last_backward(
                    self.model.forward,
                    number == len(batches) and not self._averages,
                    unsharded=self._unsharded,
                ),
                forward_own(
                    self.model,
                    batch,
                    loss,
                    of=self._loss_on,
                    routers=routers,
                    failures=failures,
                    by_rows=split,
                    twice=split and due and number == 1,
                ) as sums,
            ):
                objective = sums.objective
                totals += sums.totals
                of_rows += [] if sums.of_rows is None else [sums.of_rows]
                if aux_loss is not None:
                    early_count = (
                        over_ranks(sums.totals.clone(), self._mesh)[1]
                        if early_count is None
                        else early_count
                    )
                    share, added = self._routers_share(batch, sums.router_logits, picks)
                    objective = objective * (ranks / early_count) + added
                    aux_loss += share
                losses.append(objective.detach())
                self._go_backward(objective)
        ended = over_ranks(totals[1:4].clone(), self._mesh)
        self._left = False  # an error here is raised on every rank
        if failures:
            self.progress.enter("forward")  # where the non-finite value is from
        refuse_unequal(totals[:2], ended, failures, self._mesh)
        if not self._steps:
            refuse_means(*ended[1:].tolist())
        self._left = True
        count = ended[0]
        # With a count of 0 the mean is not a number, and nothing is updated.
        scale = None if routers else torch.where(count > 0, ranks / count, math.nan)
        return StepResult(
            totals[0], count, totals[0], aux_loss, tuple(losses), totals[4:], tuple(of_rows)
        ), scale

    def _routers_share(
        self, batch: Batch, router_logits: tuple[Tensor, ...], picks: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """This rank's share of the routers' loss, detached, and what it adds to the objective."""
        assert self._router is not None
        counted = counted_tokens(batch, self._mesh)
        if picks is None:
            picks = over_ranks(self._router.picks(router_logits, counted), self._mesh)
        share = self._router.share(router_logits, picks, counted)
        return share.detach(), self._router.coefficient * self._averaged_over * share

    def _go_backward(self, objective: Tensor) -> None:
        self.progress.enter("backward")
        # One if the loss is finite. A NaN loss can have a finite gradient: other ranks would not notice.
        loss = objective.detach()
        objective.backward(1 + (loss - loss))

    def _update(self, grad_norm: Tensor, lr: float | None) -> None:
        self.before_update()
        if lr is not None:
            self._set_rates(lr)
        takes_flag = type(self.optimizer) in _WITH_FLAG or self._fused is not None
        if takes_flag and getattr(self.optimizer, "_step_supports_amp_scaling", False):
            # Adam's fused kernels read a flag on the device and then change nothing: no wait for the norm. Others take
            # the flag too, but leave a state behind that was never written (SGD's momentum in the first step).
            nonfinite = (~grad_norm.isfinite()).float()
            self.optimizer.found_inf = nonfinite.to(self._parameters_on)  # type: ignore[attr-defined]
            self.optimizer.step()
        elif math.isfinite(grad_norm.item()):
            self.optimizer.step()
        if self._fused is None:
            self.model.trust_no_weight()
        if self._ema is not None:
            self._ema.update(grad_norm.isfinite().float())
        self.model.module.zero_grad(set_to_none=True)

    @torch.no_grad()
    def _beforehand(self, batches: Sequence[Batch]) -> tuple[Tensor, Tensor]:
        """Routers' picks, and the count of a custom loss, over the global batch: the first backward needs them.

        Costs one more forward. Dropout and jitter are drawn as they will be in the forward of each micro-batch.
        """
        assert self._router is not None
        device, loss = self._mesh.device, self._loss
        picks = torch.zeros(self._router.num_experts + 1, dtype=torch.float64, device=device)
        count = torch.zeros((), dtype=torch.float64, device=device)
        with noise.without_trace(self.model.module, device):
            for batch in batches:
                if loss is None:
                    assert self._token_loss is not None
                    forward: Any = forward_sums(
                        self.model, batch, self._token_loss, routers=True
                    )
                else:
                    forward = forward_own(
                        self.model, batch, loss, of=self._loss_on, routers=True
                    )
                with forward as sums:
                    picks += self._router.picks(
                        sums.router_logits, counted_tokens(batch, self._mesh)
                    )
                    count += 0.0 if loss is None else sums.totals[1]
        return over_ranks(picks, self._mesh), over_ranks(count, self._mesh)
