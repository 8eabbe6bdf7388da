"""The run: steps, evaluation, save points, stop signals.

Reads top to bottom. What is done in a step is `step`'s, what is kept is `checkpoint`'s; here is when. Every decision is
taken on facts that all ranks share, so that no rank enters a collective alone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple

from threefold.audit.compare import Audit
from threefold.audit.digest import TOKEN_FIELDS
from threefold.config.schema import Config
from threefold.data.loader import TokenLoader
from threefold.errors import RunError
from threefold.jsonl import Metrics, Tracker
from threefold.mesh.mesh import Mesh
from threefold.model.build import ParallelModel
from threefold.training.metrics import Stopwatch, peak_memory_bytes
from threefold.training.nonfinite import Finite
from threefold.training.optimizer import learning_rate
from threefold.training.progress import OwnTime, Progress, Slowest, Watch
from threefold.training.signals import StopRequest
from threefold.training.step import Batch, StepResult, TrainStep, evaluate, mean_aux_loss, mean_loss, micro_batches

log = logging.getLogger("threefold")


@dataclass(frozen=True)
class Run:
    """What a run consists of; `app` puts it together.

    Attributes:
        num_steps: the last step's number (steps count from 1).
        micro_batch: rows of this dp rank in one forward.
        keep: given (step, evaluation loss, due), saves the state where it is due or the best so far; called by every
            rank, which need not wait until it is on the disk.
        notice: called after every step; raises, on all ranks after the same step, where saving failed meanwhile.
        eval_batches: makes the held-out batches again, or None where there is no evaluation.
        flops_per_token, peak_flops: for MFU; None where the device's peak is not known.
        audit: compares what the ranks have read, before anything is saved.
        finite: looks for numbers that are not finite, before anything is built on them.
        progress: told where the loop is, as the step is.
        watch: looks after the ranks while they step.
    """

    config: Config
    mesh: Mesh
    model: ParallelModel
    step: TrainStep
    loader: TokenLoader
    num_steps: int
    micro_batch: int
    keep: Callable[[int, float | None, bool], None]
    notice: Callable[[int], None]
    eval_batches: Callable[[], Iterable[Batch]] | None = None
    trackers: Sequence[Tracker] = field(default_factory=tuple)
    flops_per_token: float | None = None
    peak_flops: float | None = None
    audit: Audit | None = None
    finite: Finite | None = None
    progress: Progress = field(default_factory=Progress)
    watch: Watch | None = None


@dataclass(frozen=True)
class Outcome:
    """How a run ended: the last step done, its loss, and whether a signal ended it."""

    step: int
    loss: float | None
    stopped: bool


def train_loop(run: Run, *, first_step: int) -> Outcome:
    """Steps from `first_step` to the last one or to a stop signal; the state is saved at the end either way."""
    batches = iter(run.loader)
    window, slowest = _Window(), Slowest(run.mesh)
    loss: float | None = None
    with StopRequest(run.mesh) as stop, run.watch or nullcontext():
        for step in range(first_step, run.num_steps + 1):
            epoch = run.loader.epoch
            run.progress.enter("data", step=step)
            batch = window.read(batches)
            pieces = micro_batches(batch, run.micro_batch)
            lr = learning_rate(step, num_steps=run.num_steps, config=run.config.optimizer)
            result = run.step(pieces, lr=lr)
            if run.audit is not None:
                run.audit.observe(step, *(batch[name].numpy(force=True) for name in ("indices", *TOKEN_FIELDS)))
            window.steps += 1
            stopping = stop.after(step)
            run.notice(step)
            due = _due_after(step, run, first=step == first_step, end=stopping or step == run.num_steps)
            if run.finite is not None:
                _look_for_nonfinite(run, step, result, pieces, now=any(due))
            if due.log:
                run.progress.enter("log")
                slowest.tell(window.own.total_s())
                loss = mean_loss(result, run.mesh)
                _tell(run.trackers, _step_metrics(run, step, epoch, loss, lr, result, window, slowest))
                window = _Window()
            eval_loss = _evaluate(run, step) if due.evaluation else None
            saving = due.save or due.evaluation
            if run.audit is not None and (saving or run.audit.due(step)):
                run.progress.enter("audit")
                run.audit.check()
            if saving:
                run.progress.enter("save")
                run.keep(step, eval_loss, due.save)
                window = _Window()  # saving and evaluating is not stepping
            if stopping and step < run.num_steps:
                return Outcome(step, loss, stopped=True)
    return Outcome(run.num_steps, loss, stopped=False)


class _Due(NamedTuple):
    """What follows a step, on every rank alike."""

    log: bool
    evaluation: bool
    save: bool


def _due_after(step: int, run: Run, *, first: bool, end: bool) -> _Due:
    config = run.config
    return _Due(
        log=first or end or step % config.log.every == 0,
        evaluation=bool(run.eval_batches) and (step == run.num_steps or _is_nth(step, config.eval.every)),
        save=end or _is_nth(step, config.checkpoint.every),
    )


def _look_for_nonfinite(run: Run, step: int, result: StepResult, batches: Sequence[Batch], *, now: bool) -> None:
    assert run.finite is not None
    try:
        for skipped in run.finite.after(step, result, batches, now=now):
            _tell(run.trackers, skipped)
    except RunError:
        if run.audit is not None:
            run.audit.check()  # so that the record can tell what the step has read
        raise


class _Window:
    """What happened since the last logged step."""

    def __init__(self) -> None:
        self._watch = Stopwatch()
        self.steps = 0
        self.own = OwnTime()

    def read(self, batches: Iterator[Batch]) -> Batch:
        watch, cpu_s = Stopwatch(), time.thread_time()
        batch = next(batches)
        self.own.read(watch.lap(), time.thread_time() - cpu_s)
        return batch

    def elapsed_s(self) -> float:
        return self._watch.lap()


def _is_nth(step: int, every: int) -> bool:
    return bool(every) and step % every == 0


def _step_metrics(
    run: Run,
    step: int,
    epoch: int,
    loss: float,
    lr: float,
    result: StepResult,
    window: _Window,
    slowest: Slowest,
) -> Metrics:
    rows, seq_len = run.config.train.global_batch, run.config.data.seq_len
    elapsed_s = window.elapsed_s()
    step_time_s = elapsed_s / window.steps
    tokens_per_s = rows * seq_len / step_time_s
    metrics: Metrics = {
        "step": step,
        "epoch": epoch,
        "loss": loss,
        "grad_norm": result.grad_norm.item(),
        "lr": lr,
        "tokens": run.loader.rows_read * seq_len,
        "samples": run.loader.rows_read,
        "step_time_s": step_time_s,
        "data_wait_s": window.own.data_wait_s / window.steps,
        "tokens_per_s": tokens_per_s,
        "peak_memory_bytes": peak_memory_bytes(run.mesh.device.type),
    }
    if (aux_loss := mean_aux_loss(result, run.mesh)) is not None:
        metrics["aux_loss"] = aux_loss
    if (found := slowest.find(elapsed_s)) is not None:
        metrics["slowest_rank"], metrics["slowest_share"] = found
    if run.finite is not None and run.config.train.nonfinite == "skip":
        metrics["skipped_steps"] = run.finite.skipped
    if run.peak_flops is not None and run.flops_per_token is not None:
        metrics["mfu"] = tokens_per_s * run.flops_per_token / (run.peak_flops * run.mesh.world_size)
    return metrics


def _evaluate(run: Run, step: int) -> float:
    assert run.eval_batches is not None
    run.progress.enter("evaluation")
    total, tokens = evaluate(run.model, run.eval_batches(), run.mesh)
    loss = total / max(1, tokens)
    _tell(run.trackers, {"step": step, "eval_loss": loss, "eval_tokens": tokens})
    return loss


def _tell(trackers: Sequence[Tracker], metrics: Metrics) -> None:
    for tracker in trackers:
        tracker.log(metrics)
