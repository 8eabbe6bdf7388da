"""The run: steps, evaluation, save points, stop signals.

Reads top to bottom. `step` decides what is done in a step, `checkpoint` what is kept, this file when. Every decision is
based on facts that all ranks share, so that no rank enters a collective alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple

from threefold.audit.compare import Audit
from threefold.audit.digest import TOKEN_FIELDS
from threefold.config.schema import Config
from threefold.data.sampling.loader import TokenLoader
from threefold.errors import RunError
from threefold.jsonl import Metrics, Tracker
from threefold.mesh.mesh import Mesh
from threefold.mesh.shares import shared_length
from threefold.model.compiled import Recompiled
from threefold.model.flops import KeysSeen
from threefold.model.model import Model
from threefold.optim.build import rates_of
from threefold.optim.schedule import learning_rate
from threefold.plan.operations import Flops
from threefold.training.batches import cut, micro_batches, with_noise
from threefold.training.evaluation import EvalStep
from threefold.training.forward import Batch
from threefold.training.kept_rows import KeptRows
from threefold.training.nonfinite import Finite
from threefold.training.numbers import StepResult, mean_aux_loss, mean_loss, mean_measures
from threefold.training.progress import OwnTime, Progress, Slowest, Stopwatch, peak_memory_bytes
from threefold.training.step import TrainStep
from threefold.training.stop_request import StopRequest


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
        evaluate: evaluates them; None: their cross entropy.
        sample: writes what the model says after an evaluation; None: nothing is asked.
        tasks: what else is evaluated, whose metrics rank 0 has; None: nothing.
        flops, peak_flops: what a token meets, and of a device: for MFU; None if the device's peak is not known.
        estimated_bytes: what a rank was estimated to hold, beside what it does; None: not estimated, or not comparable.
        audit: compares what the ranks have read, before anything is saved.
        finite: looks for numbers that are not finite, before anything is built on them.
        kept_rows: keeps the loss of each row, on one rank of each tp group; None elsewhere, or where it is not known.
        recompiled: counts how often layers are compiled again, if they are compiled.
        progress: told where the loop is, as in the step.
        stop: open already if the caller keeps it open for longer than the loop; else the loop opens its own.
        after_step: called when a step is complete, with what followed it; not in the middle of one.
    """

    config: Config
    mesh: Mesh
    model: Model
    step: TrainStep
    loader: TokenLoader
    num_steps: int
    micro_batch: int
    keep: Callable[[int, float | None, bool], None]
    notice: Callable[[int], None]
    eval_batches: Callable[[], Iterable[Batch]] | None = None
    evaluate: EvalStep | None = None
    sample: Callable[[int], None] | None = None
    tasks: Callable[[int], Metrics] | None = None
    trackers: Sequence[Tracker] = field(default_factory=tuple)
    flops: Flops | None = None
    peak_flops: float | None = None
    estimated_bytes: int | None = None
    audit: Audit | None = None
    finite: Finite | None = None
    kept_rows: KeptRows | None = None
    recompiled: Recompiled | None = None
    progress: Progress = field(default_factory=Progress)
    stop: StopRequest | None = None
    after_step: Callable[[], None] | None = None


@dataclass(frozen=True)
class Outcome:
    """How a run ended: the last step done, its loss, whether it was stopped before its end, and then by what."""

    step: int
    loss: float | None
    stopped: bool
    by: str = "signal"


def train_loop(run: Run, *, first_step: int) -> Outcome:
    """Steps from `first_step` to the last one or to a stop signal; the state is saved at the end either way."""
    batches = iter(run.loader)
    window, slowest = _Window.of(run), Slowest(run.mesh)
    loss: float | None = None
    seed, exact = run.config.train.seed, run.config.train.reduce == "exact"
    own = nullcontext(run.stop) if run.stop is not None else StopRequest(run.mesh)
    with own as stop:
        for step in range(first_step, run.num_steps + 1):
            epoch = run.loader.epoch
            run.progress.enter("data", step=step)
            rows_before = run.loader.rows_read
            batch = window.read(batches)
            length = _shared_length(run)
            computed = batch if length is None else cut(batch, length)
            pieces = micro_batches(computed, run.micro_batch, spread=exact)
            lr = learning_rate(step, num_steps=run.num_steps, config=run.config.optimizer)
            result = run.step.run(with_noise(pieces, run.model, seed=seed, step=step, spread=exact), lr=lr)
            if run.audit is not None:
                used = (batch[name].numpy(force=True) for name in ("indices", *TOKEN_FIELDS) if name in batch)
                run.audit.observe(step, *used)
            window.steps += 1
            rows = run.loader.rows_read - rows_before
            window.tokens += rows * (length or run.config.data.seq_len)
            if window.keys is not None:
                window.keys.read(computed["position_ids"].numpy(force=True))
            stopping = stop.after(step)
            run.notice(step)
            due = _due_after(step, run, first=step == first_step, end=stopping or step == run.num_steps)
            if run.kept_rows is not None:
                run.kept_rows.after(step, result, pieces, now=any(due))
            if run.finite is not None:
                _look_for_nonfinite(run, step, result, pieces, now=any(due))
            if due.log:
                run.progress.enter("log")
                slowest.tell(window.own.total_s())
                loss = mean_loss(result, run.mesh)
                _tell(run.trackers, _step_metrics(run, step, epoch, loss, lr, result, window, slowest))
                window = _Window.of(run)
            eval_loss = _evaluated(run, step, due)
            saving = due.save or due.evaluation or due.tasks
            stop.saving = stopping or step == run.num_steps
            if run.audit is not None and (saving or run.audit.due(step)):
                run.progress.enter("audit")
                run.audit.check()
            if saving:
                run.progress.enter("save")
                run.keep(step, eval_loss, due.save)
                window = _Window.of(run)  # saving and evaluating is not stepping
            if run.after_step is not None:
                run.after_step()
            if stopping and step < run.num_steps:
                return Outcome(step, loss, stopped=True, by=stop.by)
    return Outcome(run.num_steps, loss, stopped=False)


def _shared_length(run: Run) -> int | None:
    """Places of the global batch's longest row, as the mesh needs them, the same on every rank; None: all of them."""
    longest = run.loader.longest
    return None if longest is None else min(shared_length(longest, run.mesh.topology), run.config.data.seq_len)


class _Due(NamedTuple):
    """What follows a step, the same on every rank."""

    log: bool
    evaluation: bool
    tasks: bool
    save: bool


def _due_after(step: int, run: Run, *, first: bool, end: bool) -> _Due:
    config = run.config
    evaluation = step == run.num_steps or _is_nth(step, config.eval.every)
    return _Due(
        log=first or end or step % config.log.every == 0,
        evaluation=bool(run.eval_batches) and evaluation,
        tasks=run.tasks is not None and evaluation,
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
    tokens: int = 0
    """places of the rows that were computed."""
    own: OwnTime = field(default_factory=OwnTime)
    keys: KeysSeen | None = None
    """of the rows that this rank read; None: nothing is compared with them."""

    @classmethod
    def of(cls, run: Run) -> _Window:
        keys = KeysSeen(run.flops) if run.flops is not None and run.peak_flops is not None else None
        return cls(keys=keys, own=OwnTime(run.progress))

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
    tokens_per_s = window.tokens / elapsed_s
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
    if run.estimated_bytes is not None:
        metrics["estimated_memory_bytes"] = run.estimated_bytes
    metrics |= rates_of(run.step.optimizer)
    metrics |= dict(zip(run.step.measures, mean_measures(result, run.mesh), strict=True))
    if (aux_loss := mean_aux_loss(result, run.mesh)) is not None:
        metrics["aux_loss"] = aux_loss
    if run.config.model.admission == "off":
        metrics["admission"] = "off"
    if (found := slowest.find(elapsed_s)) is not None:
        metrics["slowest_rank"], metrics["slowest_share"] = found
    if run.finite is not None and run.config.train.nonfinite == "skip":
        metrics["skipped_steps"] = run.finite.skipped
    if run.recompiled is not None:
        metrics["recompiles"] = run.recompiled.look()
    if window.keys is not None:
        assert run.flops is not None and run.peak_flops is not None
        metrics["mfu"] = tokens_per_s * run.flops.per_token(window.keys) / (run.peak_flops * run.mesh.world_size)
    return metrics


def _evaluated(run: Run, step: int, due: _Due) -> float | None:
    """The loss of held-out rows, if they are due; tasks are evaluated besides."""
    eval_loss = _evaluate(run, step) if due.evaluation else None
    if due.tasks:
        assert run.tasks is not None
        _tell(run.trackers, {"step": step, **run.tasks(step)})
    return eval_loss


def _evaluate(run: Run, step: int) -> float:
    assert run.eval_batches is not None
    run.progress.enter("evaluation")
    metrics = eval_metrics(run.evaluate or EvalStep(run.model), run.eval_batches())
    _tell(run.trackers, {"step": step, **metrics})
    if run.sample is not None:
        run.sample(step)
    found: float = metrics["eval_loss"]
    return found


def eval_metrics(evaluate: EvalStep, batches: Iterable[Batch]) -> Metrics:
    """The loss over all batches, how much it counts, and what it measures besides; every rank calls it."""
    (total, count), measured = evaluate.measured(batches)
    told = {f"eval_{name}": value for name, value in measured.items()}
    # A loss that measures more is that of pairs; any other of one's own may count weights.
    name = "eval_pairs" if told else "eval_count" if evaluate.own_loss else "eval_tokens"
    counted = round(count) if name != "eval_count" or float(count).is_integer() else count
    return {"eval_loss": total / count, name: counted, **told}


def _tell(trackers: Sequence[Tracker], metrics: Metrics) -> None:
    for tracker in trackers:
        tracker.log(metrics)
