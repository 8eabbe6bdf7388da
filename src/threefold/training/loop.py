"""The run: steps, evaluation, save points, stop signals.

Reads top to bottom. `step` decides what is done in a step, `checkpoint` what is kept, this file when. Every decision is
based on facts that all ranks share, so that no rank enters a collective alone.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeVar

from threefold.audit.compare import Audit
from threefold.audit.digest import TOKEN_FIELDS
from threefold.config.schema import Config
from threefold.data.sampling.loader import TokenLoader
from threefold.errors import RunError
from threefold.jsonl import Metrics, Tracker
from threefold.mesh.divisibility import shared_length
from threefold.mesh.mesh import Mesh
from threefold.model.compiled import Recompiled
from threefold.model.flops import KeysSeen
from threefold.model.model import Model
from threefold.optim.build import rates_of
from threefold.optim.schedule import learning_rate
from threefold.plan.operations import Flops
from threefold.training.batches import cut, micro_batches, with_noise
from threefold.training.evaluation import EvalStep
from threefold.training.forward import Batch
from threefold.training.lag import Lag, Slowest
from threefold.training.nonfinite import Finite
from threefold.training.numbers import StepResult, mean_aux_loss, mean_loss, mean_measures
from threefold.training.progress import OwnTime, Progress, Stopwatch, peak_memory_bytes
from threefold.training.row_losses import KeptRows
from threefold.training.step import TrainStep
from threefold.training.stop_request import HOOK, EvaluationLeft, StopRequest

_Read = TypeVar("_Read")


@dataclass
class Guards:
    """The checks around the steps of a run, for any loop: `train_loop`, or a program's (`threefold.Run`).

    Attributes:
        stop: receives requests to stop the run; open.
        finite: looks for non-finite numbers, before anything relies on them.
        audit: compares the rows that the ranks have read, before anything is saved; None: rows are not known.
        trackers: get the metrics; on rank 0 only.
        progress: notified of the loop's place, as in the step.
        late: called on rank 0 with each rank that stays the slowest.
        notice: called after every step; raises, on all ranks after the same step, if saving failed meanwhile.
    """

    stop: StopRequest
    finite: Finite
    audit: Audit | None = None
    trackers: Sequence[Tracker] = ()
    progress: Progress = field(default_factory=Progress)
    late: Callable[[Lag], None] = lambda lag: None
    notice: Callable[[int], None] = lambda step: None

    def tell(self, metrics: Metrics) -> None:
        """Passes a line of metrics on."""
        for tracker in self.trackers:
            tracker.log(metrics)

    def after(self, step: int) -> bool:
        """Whether the run is to stop after `step`, which every rank has just made."""
        stopping = self.stop.after(step)
        self.notice(step)
        return stopping

    def look_for_nonfinite(
        self, step: int, result: StepResult, rows: Callable[[], list[list[int]]], *, now: bool
    ) -> None:
        """Ends the run, or reports it, if a step was not finite (`Finite.after`)."""
        try:
            for skipped in self.finite.after(step, result, rows(), now=now):
                self.tell(skipped)
        except RunError:
            if self.audit is not None:
                self.audit.check()  # so that the record shows what the step has read
            raise

    def prove(self, step: int, *, saving: bool) -> None:
        """Compares what the ranks have read, if it is time, or before something is saved."""
        if self.audit is not None and (saving or self.audit.due(step)):
            self.progress.enter("audit")
            self.audit.check()

    def close(self) -> None:
        """The run is over, complete or not; called again, it does nothing."""
        trackers, self.trackers = self.trackers, ()
        audit, self.audit = self.audit, None
        for tracker in trackers:
            tracker.close()
        if audit is not None:
            audit.close()


@dataclass(frozen=True)
class Loop:
    """The parts of the steps of `threefold train`; assembled by `run.rank`.

    Attributes:
        num_steps: the last step's number (steps count from 1).
        micro_batch: rows of this dp rank in one forward.
        keep: given (step, evaluation loss, due), saves the state if it is due or the best so far, and not saved
            before its evaluation; called by every rank, which need not wait until it is on the disk.
        guards: checks around the steps.
        eval_batches: makes the held-out batches again, or None without evaluation.
        evaluate: evaluates them; None: their cross entropy.
        sample: generates text after an evaluation; None: no prompts are given.
        tasks: further evaluations, whose metrics rank 0 has; None: there are none.
        flops, peak_flops: operations per token, and peak of a device: for MFU; None if the peak is unknown.
        estimated_bytes: estimated memory of a rank, to show beside the real one; None: not estimated or not comparable.
        kept_rows: keeps the loss of each row, on one rank of each tp group; None elsewhere, or if it is unknown.
        recompiled: counts how often layers are compiled again, if they are compiled.
        after_step: called when a step is complete, including what followed it; never in the middle of a step.
    """

    config: Config
    mesh: Mesh
    model: Model
    step: TrainStep
    loader: TokenLoader
    num_steps: int
    micro_batch: int
    keep: Callable[[int, float | None, bool], None]
    guards: Guards
    eval_batches: Callable[[], Iterable[Batch]] | None = None
    evaluate: EvalStep | None = None
    sample: Callable[[int], None] | None = None
    tasks: Callable[[int], Metrics] | None = None
    flops: Flops | None = None
    peak_flops: float | None = None
    estimated_bytes: int | None = None
    kept_rows: KeptRows | None = None
    recompiled: Recompiled | None = None
    after_step: Callable[[], None] | None = None


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
        step, loss: of the last step done.
        stopped: before its end, or in its last evaluation; `by`: by what.
        evaluated: False if the evaluation after the step was left.
    """

    step: int
    loss: float | None
    stopped: bool
    by: str = "signal"
    evaluated: bool = True


def train_loop(run: Loop, *, first_step: int, unevaluated: bool = False) -> Outcome:
    """Steps from `first_step` to the last one or to a stop signal; the state is saved at the end either way.

    After the last step it is saved before the evaluation, which may fail or be killed. A stop signal leaves an
    evaluation, after which the state is saved.

    Args:
        unevaluated: the evaluation after the step before the first one comes first.
    """
    batches, guards = iter(run.loader), run.guards
    window = _window_of(run)
    slowest = Slowest(run.mesh, notice=guards.late)
    loss: float | None = None
    seed = run.config.train.seed
    exact = run.config.train.exact
    if unevaluated:
        due = _due_after(first_step - 1, run, first=False, end=True)
        run.keep(first_step - 1, _evaluated(run, first_step - 1, due), False)
        if guards.stop.left:
            return Outcome(first_step - 1, loss, stopped=True, evaluated=False)
    for step in range(first_step, run.num_steps + 1):
        epoch = run.loader.epoch
        guards.progress.enter("data", step=step)
        rows_before = run.loader.rows_read
        batch = window.read(batches)
        guards.progress.rows = batch.get("indices", ())
        length = _shared_length(run)
        computed = batch if length is None else cut(batch, length)
        pieces = micro_batches(computed, run.micro_batch, spread=exact)
        lr = learning_rate(step, num_steps=run.num_steps, config=run.config.optimizer)
        result = run.step.run(
            with_noise(pieces, run.model, seed=seed, step=step, spread=exact), lr=lr
        )
        if guards.audit is not None:
            used = (
                batch[name].numpy(force=True)
                for name in ("indices", *TOKEN_FIELDS)
                if name in batch
            )
            guards.audit.observe(step, *used)
        window.steps += 1
        rows = run.loader.rows_read - rows_before
        window.tokens += rows * (length or run.config.data.seq_len)
        if window.keys is not None:
            window.keys.read(computed["position_ids"].numpy(force=True))
        stopping = guards.after(step)
        due = _due_after(
            step, run, first=step == first_step, end=stopping or step == run.num_steps
        )
        if run.kept_rows is not None:
            run.kept_rows.after(step, result, pieces, now=any(due))
        guards.look_for_nonfinite(step, result, partial(_rows_of, pieces), now=any(due))
        if due.log:
            guards.progress.enter("log")
            slowest.tell(window.own)
            loss = mean_loss(result, run.mesh)
            guards.tell(_step_metrics(run, step, epoch, loss, lr, result, window, slowest))
            window = _window_of(run)
        saving = due.save or due.evaluation or due.tasks
        guards.prove(step, saving=saving)
        last = step == run.num_steps
        if last:
            _keep(run, step, None, due=True, end=True)
            # A second Ctrl-C leaves the evaluation.
            guards.stop.saving = not (due.evaluation or due.tasks)
        eval_loss = _evaluated(run, step, due)
        stopping |= guards.stop.left
        if saving:
            now = due.save or guards.stop.left
            _keep(run, step, eval_loss, due=now and not last, end=stopping or last)
            window = _window_of(run)  # saving and evaluating is not stepping
        if run.after_step is not None:
            run.after_step()
        if guards.stop.left or (stopping and step < run.num_steps):
            by = HOOK if guards.stop.by == HOOK and not guards.stop.left else "signal"
            return Outcome(step, loss, True, by, evaluated=not guards.stop.left)
    return Outcome(run.num_steps, loss, stopped=False)


def _keep(run: Loop, step: int, eval_loss: float | None, *, due: bool, end: bool) -> None:
    run.guards.stop.saving = end
    run.guards.progress.enter("save")
    run.keep(step, eval_loss, due)


def _rows_of(batches: Sequence[Batch]) -> list[list[int]]:
    """The rows of each micro-batch, by their numbers; none where they are not known."""
    return [batch["indices"].tolist() if "indices" in batch else [] for batch in batches]


def _shared_length(run: Loop) -> int | None:
    """Places of the global batch's longest row, as the mesh needs them, the same on every rank; None: all of them."""
    if (longest := run.loader.longest) is None:
        return None
    return min(shared_length(longest, run.mesh.topology), run.config.data.seq_len)


class _Due(NamedTuple):
    """The work due after a step, the same on every rank."""

    log: bool
    evaluation: bool
    tasks: bool
    save: bool


def _due_after(step: int, run: Loop, *, first: bool, end: bool) -> _Due:
    config = run.config
    evaluation = step == run.num_steps or _is_nth(step, config.eval.every)
    return _Due(
        log=first or end or step % config.log.every == 0,
        evaluation=bool(run.eval_batches) and evaluation,
        tasks=run.tasks is not None and evaluation,
        save=end or _is_nth(step, config.checkpoint.every),
    )


@dataclass
class Window:
    """Measurements since the last logged step."""

    elapsed: Stopwatch = field(default_factory=Stopwatch)
    steps: int = 0
    tokens: int = 0
    """places of the rows that were computed."""
    own: OwnTime = field(default_factory=OwnTime)
    keys: KeysSeen | None = None
    """of the rows that this rank read; None: nothing is compared with them."""

    def read(self, batches: Iterator[_Read]) -> _Read:
        """The next batch, which this rank waits for."""
        return self.own.read(batches)

    def measured(self, step: int, mesh: Mesh, slowest: Slowest) -> Metrics:
        """The duration of a step of the window, and the rank that the others waited for."""
        elapsed_s = self.elapsed.lap()
        return {
            "step_time_s": elapsed_s / max(1, self.steps),
            "data_wait_s": self.own.data_wait_s / max(1, self.steps),
            "peak_memory_bytes": peak_memory_bytes(mesh.device.type),
            **slowest.find(step, elapsed_s),
        }


def _window_of(run: Loop) -> Window:
    keys = KeysSeen(run.flops) if run.flops is not None and run.peak_flops is not None else None
    return Window(keys=keys, own=OwnTime(run.guards.progress))


def _is_nth(step: int, every: int) -> bool:
    return bool(every) and step % every == 0


def _step_metrics(
    run: Loop,
    step: int,
    epoch: int,
    loss: float,
    lr: float,
    result: StepResult,
    window: Window,
    slowest: Slowest,
) -> Metrics:
    seq_len = run.config.data.seq_len
    measured = window.measured(step, run.mesh, slowest)
    tokens_per_s = window.tokens / (measured["step_time_s"] * window.steps)
    metrics: dict[str, Any] = {
        "step": step,
        "epoch": epoch,
        "loss": loss,
        "grad_norm": result.grad_norm.item(),
        "lr": lr,
        "tokens": run.loader.rows_read * seq_len,
        "samples": run.loader.rows_read,
        **measured,
        "tokens_per_s": tokens_per_s,
    }
    if run.estimated_bytes is not None:
        metrics["estimated_memory_bytes"] = run.estimated_bytes
    metrics |= rates_of(run.step.optimizer)
    metrics |= dict(zip(run.step.measures, mean_measures(result, run.mesh), strict=True))
    if (aux_loss := mean_aux_loss(result, run.mesh)) is not None:
        metrics["aux_loss"] = aux_loss
    if run.config.model.admission == "off":
        metrics["admission"] = "off"
    if run.config.train.nonfinite == "skip":
        metrics["skipped_steps"] = run.guards.finite.skipped
    if run.recompiled is not None:
        metrics["recompiles"] = run.recompiled.look()
    if window.keys is not None:
        assert run.flops is not None and run.peak_flops is not None
        metrics["mfu"] = (
            tokens_per_s
            * run.flops.per_token(window.keys)
            / (run.peak_flops * run.mesh.world_size)
        )
    return metrics


def _evaluated(run: Loop, step: int, due: _Due) -> float | None:
    """The loss of held-out rows, if they are due and a stop signal leaves the time; tasks are evaluated too."""
    stop, eval_loss = run.guards.stop, None
    try:
        eval_loss = _evaluate(run, step) if due.evaluation else None
    except EvaluationLeft:
        stop.left = True
        stop.after(step)  # on every rank, so that each knows the signal
    if due.tasks and not stop.left:
        assert run.tasks is not None
        run.guards.tell({"step": step, **run.tasks(step)})
    return eval_loss


def _evaluate(run: Loop, step: int) -> float:
    assert run.eval_batches is not None
    run.guards.progress.enter("evaluation")
    batches = run.guards.stop.until_asked(run.eval_batches(), step)
    metrics = eval_metrics(run.evaluate or EvalStep(run.model), batches)
    run.guards.tell({"step": step, **metrics})
    if run.sample is not None:
        run.sample(step)
    loss: float = metrics["eval_loss"]
    return loss


def eval_metrics(evaluate: EvalStep, batches: Iterable[Batch]) -> Metrics:
    """The loss over all batches, its count, and its further measures; every rank calls it."""
    (total, count), measured = evaluate.measured(batches)
    extra = {f"eval_{name}": value for name, value in measured.items()}
    # A loss that measures more is that of pairs; any other custom loss may count weights.
    name = "eval_pairs" if extra else "eval_count" if evaluate.own_loss else "eval_tokens"
    counted = round(count) if name != "eval_count" or float(count).is_integer() else count
    return {"eval_loss": total / count, name: counted, **extra}
