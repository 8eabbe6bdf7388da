"""The run: steps, evaluation, save points, stop signals.

Reads top to bottom. `step` decides what is done in a step, `checkpoint` what is kept, this file when. Every decision is
based on facts that all ranks share, so that no rank enters a collective alone.
"""

from __future__ import annotations

import os
import signal
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from threefold.audit.compare import Audit
from threefold.audit.digest import TOKEN_FIELDS
from threefold.config.schema import Config
from threefold.data.loader import TokenLoader
from threefold.errors import RunError
from threefold.jsonl import Metrics, Tracker
from threefold.mesh.mesh import Mesh
from threefold.model.build import ParallelModel
from threefold.training.nonfinite import Finite
from threefold.training.optimizer import learning_rate
from threefold.training.progress import OwnTime, Progress, Slowest, Stopwatch, peak_memory_bytes
from threefold.training.step import Batch, StepResult, TrainStep, evaluate, mean_aux_loss, mean_loss, micro_batches

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_KEY = "threefold/stop-after"  # and who asks: the store may outlive a restart, and hold an older request
# A terminal sends Ctrl-C to every process and a launcher passes it on: within this time it is one request.
_ONE_REQUEST_S = 1.0
# So many signals of one kind within that time end the process at once, whatever it is doing.
_AT_ONCE = 3


@dataclass(frozen=True)
class Run:
    """What a run consists of; `run.rank` puts it together.

    Attributes:
        num_steps: the last step's number (steps count from 1).
        micro_batch: rows of this dp rank in one forward.
        keep: given (step, evaluation loss, due), saves the state if it is due or the best so far; called by every
            rank, which need not wait until it is on the disk.
        notice: called after every step; raises, on all ranks after the same step, if saving failed meanwhile.
        eval_batches: makes the held-out batches again, or None without evaluation.
        flops_per_token, peak_flops: for MFU; None if the device's peak is not known.
        audit: compares what the ranks have read, before anything is saved.
        finite: looks for numbers that are not finite, before anything is built on them.
        progress: told where the loop is, as in the step.
        watch: watches the ranks while they step.
        stop: open already if the caller keeps it open for longer than the loop; else the loop opens its own.
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
    watch: AbstractContextManager[object] | None = None
    stop: StopRequest | None = None


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
    own = nullcontext(run.stop) if run.stop is not None else StopRequest(run.mesh)
    with own as stop, run.watch or nullcontext():
        for step in range(first_step, run.num_steps + 1):
            epoch = run.loader.epoch
            run.progress.enter("data", step=step)
            rows_before = run.loader.rows_read
            batch = window.read(batches)
            pieces = micro_batches(batch, run.micro_batch)
            lr = learning_rate(step, num_steps=run.num_steps, config=run.config.optimizer)
            result = run.step(pieces, lr=lr)
            if run.audit is not None:
                used = (batch[name].numpy(force=True) for name in ("indices", *TOKEN_FIELDS) if name in batch)
                run.audit.observe(step, *used)
            window.steps += 1
            window.rows += run.loader.rows_read - rows_before
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
            stop.saving = stopping or step == run.num_steps
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
    """What follows a step, the same on every rank."""

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
            run.audit.check()  # so that the record shows what the step has read
        raise


@dataclass
class _Window:
    """What happened since the last logged step."""

    elapsed: Stopwatch = field(default_factory=Stopwatch)
    steps: int = 0
    rows: int = 0
    own: OwnTime = field(default_factory=OwnTime)

    def read(self, batches: Iterator[Batch]) -> Batch:
        watch, cpu_s = Stopwatch(), time.thread_time()
        batch = next(batches)
        self.own.read(watch.lap(), time.thread_time() - cpu_s)
        return batch


def _is_nth(step: int, every: int) -> bool:
    return bool(every) and step % every == 0


def _step_metrics(
    run: Run, step: int, epoch: int, loss: float, lr: float, result: StepResult, window: _Window, slowest: Slowest
) -> Metrics:
    seq_len = run.config.data.seq_len
    elapsed_s = window.elapsed.lap()
    step_time_s = elapsed_s / window.steps
    tokens_per_s = window.rows * seq_len / elapsed_s
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
    if run.config.model.admission == "off":
        metrics["admission"] = "off"
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


class StopRequest:
    """Listens for stop signals while it is open: a signal to any rank lets all of them finish the same step.

    A second Ctrl-C leaves a step that does not end. Once the last save has begun (`saving`), further signals change
    nothing; three of one kind within a second end the process at once, and say so.

    No collective is spent on it. The rank that is signalled in step s publishes s + 2 in the rendezvous store before it
    enters step s + 1; no other rank can finish step s + 1 without it, so every rank reads the same answer at the end of
    that step at the latest.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self.saving = False
        self._asked: dict[int, deque[float]] = {number: deque(maxlen=_AT_ONCE) for number in SIGNALS}
        self._first_s: float | None = None
        self._stop_after: int | None = None
        self._key = f"{_KEY}/{mesh.share('stop requests', lambda: uuid.uuid4().hex)}"
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        for number in SIGNALS:
            self._previous[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: object) -> None:
        times, now = self._asked[number], time.monotonic()
        # A launcher that is interrupted twice passes the second on as SIGTERM.
        again = self._first_s is not None and now - self._first_s > _ONE_REQUEST_S
        if again and not self.saving and self._asked[signal.SIGINT]:
            os._exit(128 + signal.SIGINT)
        self._first_s = self._first_s or now
        times.append(now)
        if len(times) == _AT_ONCE and now - times[0] <= _ONE_REQUEST_S:
            name = signal.Signals(number).name
            os.write(2, f"ended at once by {_AT_ONCE} x {name}: what was being saved is lost\n".encode())
            os._exit(128 + number)

    @property
    def _is_asked(self) -> bool:
        return any(self._asked.values())

    def after(self, step: int) -> bool:
        """Whether the run stops after `step`, which this rank has just finished."""
        store = self._mesh.store
        if store is None:
            return self._is_asked
        if self._stop_after is None:
            if self._is_asked:
                store.compare_set(self._key, "", str(step + 2))
            if store.check([self._key]):
                self._stop_after = int(store.get(self._key))
        return self._stop_after is not None and step >= self._stop_after
