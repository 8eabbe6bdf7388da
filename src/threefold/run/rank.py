"""One rank of a run, from its place on the mesh to its exit code.

All errors in the request are found before the first collective: each rank finds the same ones, and one rank prints
them. Later failures are printed once, by the rank that failed first.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from threefold import progress_bars
from threefold.audit.compare import Audit
from threefold.check.admit import admit
from threefold.check.full_size import admit_full_size
from threefold.checkpoint import run_template
from threefold.checkpoint.lineage import Author
from threefold.checkpoint.lock import RunLock
from threefold.checkpoint.manifest import versions
from threefold.config.loading import LoadedConfig
from threefold.data.sampling.loader import Batch
from threefold.errors import ThreefoldError
from threefold.jsonl import MetricsFile, Tracker
from threefold.mesh import environment
from threefold.mesh.mesh import FAILURES, Mesh, join_mesh
from threefold.mesh.topology import Topology
from threefold.model.flops import flops_of
from threefold.plan.accelerators import peak_flops
from threefold.run import assemble, memory
from threefold.run.assemble import Built
from threefold.run.console import conclude, head_of, introduce
from threefold.run.eval_samples import EvalSamples
from threefold.run.eval_tasks import EvalTasks
from threefold.run.exports import Exports
from threefold.run.failure import report_failure
from threefold.run.fits import Fitted, fitted
from threefold.run.folder import RunFolder, log_to_file, open_run, require_shared
from threefold.run.head import Head, printed
from threefold.run.hooks import Hooks
from threefold.run.process import compute_alike, facts_of, quieten_libraries
from threefold.run.request import Asked, asked_of
from threefold.run.resume import undamaged
from threefold.run.same_bytes import keep_lists
from threefold.run.sources import file_lines
from threefold.run.terminal import Screen, Terminal
from threefold.run.user_objects import Given
from threefold.run.watch.stall import CLOSING
from threefold.run.watch.watchdog import Watchdog
from threefold.training.evaluation import EvalStep
from threefold.training.forward import token_loss_of, warm_up_buckets
from threefold.training.kept_rows import KeptRows, count_pairs
from threefold.training.loop import Outcome, Run, train_loop
from threefold.training.nonfinite import Finite, Policy
from threefold.training.profiled import Profiled
from threefold.training.progress import DeviceForward, Progress
from threefold.training.step import TrainStep
from threefold.training.stop_request import StopRequest

log = logging.getLogger("threefold")

# The watchdog must report before the collectives' own limit, which would end the run with a bare timeout.
_REPORT_BEFORE = 0.9
# A running save may finish before a failed run ends.
_LINGER_S = 60.0


def run_rank(loaded: LoadedConfig, topology: Topology, why: str) -> int:
    """Trains as one rank of `topology` and returns its exit code; failures are printed once for all ranks."""
    config, info = loaded.config, environment.current()
    quieten_libraries(shown=info.rank == 0 and not loaded.quiet)
    if loaded.quiet:
        progress_bars.silence()
    asked, mesh = config.mesh, None
    timeout_s = config.train.timeout_s or _REPORT_BEFORE * asked.timeout_s
    environment.record_collectives()
    with Watchdog(info.rank, stall_s=config.log.stall_s, timeout_s=timeout_s) as watch:
        try:
            facts = facts_of(config)
            mesh = join_mesh(
                topology, info, device=asked.device, timeout_s=asked.timeout_s, facts=facts, met=watch.begin
            )
            watch.mesh = mesh
            with RunLock() as lock:
                code = _train(loaded, mesh, why, lock, watch)
            watch.leave()
            return code
        except (SystemExit, KeyboardInterrupt):
            if mesh is not None and mesh.store is not None:
                with contextlib.suppress(Exception):
                    mesh.store.add(FAILURES, 1)  # the other ranks need not report that this one has left
            raise
        except BaseException as error:
            code = report_failure(error, mesh, info.rank, watch, keep=loaded.reason)
            if isinstance(error, ThreefoldError) and mesh is not None:
                mesh.close()
            return code
        finally:
            sys.stdout.flush()


def _train(loaded: LoadedConfig, mesh: Mesh, why: str, lock: RunLock, watch: Watchdog) -> int:
    config, enter = loaded.config, watch.progress.enter
    enter("the request")
    compute_alike(config)
    first = mesh.rank == 0
    console = Screen(quiet=loaded.quiet or not first, logs=first, as_json=config.log.json)
    asked = asked_of(config, mesh)
    plain = loaded.given is None or (loaded.given.loss is None and loaded.given.optimizer is None)
    fitting = fitted(asked, mesh) if plain else Fitted(asked)
    asked = fitting.asked
    config = asked.config
    enter("admission")
    with console.bars.show("admission: the architecture on this mesh"):
        admission = admit(config, asked.architecture, mesh)
    enter("opening the run")
    folder = dataclasses.replace(_open_folder(asked, mesh, lock), accepts_changes=loaded.accept_changes)
    with memory.explained(asked, mesh, folder.path):
        watch.folder = folder.path
        enter("data preparation")
        run = assemble.build_run(asked, mesh, folder, loaded.given or Given(), say=console.print, enter=enter)
        enter("admission at full size")
        full_size = _admit_full_size(run) if run.done < run.num_steps else ()
        enter("the start")
        extras = extras_of(run, say=console.print)
        head = head_of(run, why, (admission.said, *full_size, *fitting.said))
        introduce(console, head)
        if run.done >= run.num_steps:
            more = "--train.steps" if config.train.epochs is None else "--train.epochs"
            console.print(f"nothing to do: step {run.done} of {run.num_steps} is done. To train more: {more} N")
            enter(CLOSING)
            mesh.close()
            return 0
        # Until the end, so that no signal can interrupt what is being saved.
        with StopRequest(mesh, last=loaded.last) as stop:
            audit = _accept(console, run, head, lock)
            hooks = Hooks(run.given.callbacks if mesh.rank == 0 else (), run.folder.path, stop.ask)
            outcome = _followed(run, audit, console, stop, extras, hooks, watch)
            hooks.ended(outcome.step, outcome.by if outcome.stopped else "done")
            mesh.barrier()
            mesh.close()
            return conclude(console, run, outcome)


def _admit_full_size(run: Built) -> tuple[tuple[str, str], ...]:
    """What of the run's own forward was probed, for its head."""
    if run.config.model.admission == "off":
        return ()
    data = run.config.data
    said = admit_full_size(run.model, rows=run.micro_batch, seq_len=data.seq_len, documents=bool(data.document_mask))
    return () if said is None else (said,)


def _open_folder(asked: Asked, mesh: Mesh, lock: RunLock) -> RunFolder:
    """Returns the run's folder, opened by rank 0, seen by all hosts, with the newest undamaged checkpoint."""
    opened = mesh.share("run", lambda: open_run(asked.config, lock).to_values())
    folder = RunFolder.from_values(opened)
    require_shared(folder.path, mesh)
    log_to_file(folder.path, mesh.rank)
    return undamaged(folder, mesh)


def _accept(console: Screen, run: Built, head: Head, lock: RunLock) -> Audit:
    """Makes the folder this run's, because nothing can refuse the request any more, and opens the run's audit."""
    config, mesh = run.config, run.mesh
    run.loader.leave_out(config.data.skip, first_step=run.done + 1)
    mesh.share("identity", lambda: run.folder.claim().id)
    audit = assemble.open_audit(run)

    def accept() -> dict[str, Any]:
        keep_lists(run.rows, run.folder.path)
        if run.pairs is not None:
            run.pairs.keep(run.folder.path)
        if run.checkpointer.template is not None:
            run_template.keep(run.checkpointer.template, run.folder.path)
        files = file_lines(config, to=run.folder.path)
        accepted = run.folder.accept(config, facts=_facts_of_start(run, head, files))
        return {**accepted, "files": files}

    accepted = mesh.share("accept", accept)
    run.checkpointer.folder = dataclasses.replace(run.folder, author=Author(**accepted["author"]))
    for path in accepted["aside"]:
        console.print(f"  set aside: {path}, later than the step that the run resumes from")
    for line in accepted["files"]:
        console.print(printed("files", line))
    lock.keep()
    return audit


def _facts_of_start(run: Built, head: Head, files: Sequence[str]) -> dict[str, object]:
    """What the journal keeps of a start."""
    from_checkpoint = str(run.folder.resume.path.resolve()) if run.folder.resume is not None else None
    info, template = environment.current(), run.checkpointer.template
    exact: dict[str, object] = {"reduce": "exact"} if run.config.train.reduce == "exact" else {}
    if (lost := run.checkpointer.lost_bits) is not None:
        exact["lost_bits"] = lost
    facts = {"from": from_checkpoint, "mesh": run.mesh.topology.sizes, "restart": info.restart, "host": info.host}
    changed = {change.key: [change.before, change.now] for change in run.checkpointer.changed}
    kept = {run_template.KEY: run_template.digest_of(template)} if template is not None else {}
    return {**facts, "changed": changed, **exact, **kept, **versions(), "files": files, "head": head.to_values()}


def _followed(
    run: Built,
    audit: Audit,
    console: Screen,
    stop: StopRequest,
    extras: Extras,
    hooks: Hooks,
    watch: Watchdog,
) -> Outcome:
    """Trains to the end or to a stop signal, audited and tracked; returns when everything is saved."""
    trackers = trackers_on(console, run, hooks)
    if (profile := run.config.log.profile) is not None:
        watch.follow(Profiled(run.folder.path, run.mesh.rank, profile))
    if run.mesh.device.type == "cuda" and run.mesh.world_size > 1:
        watch.progress.device = DeviceForward(partial(torch.cuda.Event, enable_timing=True))
    checkpointer = run.checkpointer
    if (
        run.pairs is None and run.given.loss is None
    ):  # the gradients of a custom loss are averaged outside of those buckets
        watch.progress.enter("the warm-up")
        warm_up_buckets(run.model, run.mesh, rows=run.micro_batch, seq_len=run.config.data.seq_len)
    checkpointer.start()
    rows = kept_rows_of(run, audit)
    try:
        loop = _loop_of(run, audit, trackers, stop, extras, watch.progress)
        shown = shown_evaluation(console, run)
        loop = dataclasses.replace(loop, kept_rows=rows, eval_batches=shown)
        outcome = train_loop(dataclasses.replace(loop, after_step=lambda: _saved(run, hooks)), first_step=run.done + 1)
        loop.progress.close()
        loop.progress.enter(CLOSING)
        with console.bars.show("saving"):
            checkpointer.saver.wait()
        _saved(run, hooks)
    except ThreefoldError:
        checkpointer.saver.join(_LINGER_S)
        raise
    finally:
        for tracker in trackers:
            tracker.close()
        audit.close()
        if rows is not None:
            rows.close()
    return outcome


def _saved(run: Built, hooks: Hooks) -> None:
    done = run.checkpointer.saved
    if done is not None and done.step == run.checkpointer.saver.saved_step:
        hooks.saved(done)


def _loss_of(run: Built) -> dict[str, Any]:
    """What the step minimises, as its arguments."""
    if run.pairs is not None:
        return {"loss": run.pairs.loss, "loss_on": "log_probabilities"}
    if run.given.loss is not None:
        return {"loss": run.given.loss, "loss_on": run.given.loss_on}
    smoothing, z_loss = run.config.train.label_smoothing, run.config.train.z_loss
    return {"token_loss": token_loss_of(run.model, run.mesh, label_smoothing=smoothing, z_loss=z_loss)}


def _evaluation_of(run: Built) -> EvalStep | None:
    if run.pairs is not None:
        return run.pairs.evaluation
    return EvalStep(run.model, loss=run.given.loss, loss_on=run.given.loss_on) if run.given.loss is not None else None


def _loop_of(
    run: Built,
    audit: Audit,
    trackers: list[Tracker],
    stop: StopRequest,
    extras: Extras,
    progress: Progress,
) -> Run:
    config, train, mesh = run.config, run.config.train, run.mesh
    for each in extras:
        if each is not None:
            each.progress = progress
    step = TrainStep(
        run.model, run.optimizer, **_loss_of(run), grad_clip=train.grad_clip, ema=run.ema, progress=progress
    )
    policy = Policy(skip=train.nonfinite == "skip", run=str(run.folder.path))
    peak = peak_flops(torch.cuda.get_device_name(mesh.device)) if mesh.device.type == "cuda" else None
    return Run(
        config,
        mesh,
        run.model,
        step,
        run.loader,
        run.num_steps,
        run.micro_batch,
        extras.exports.save,
        run.checkpointer.saver.check,
        evaluate=_evaluation_of(run),
        sample=extras.sample,
        tasks=extras.tasks,
        trackers=trackers,
        flops=flops_of(run.model.module) if peak is not None else None,
        peak_flops=peak,
        estimated_bytes=run.estimated_bytes if mesh.device.type == "cuda" else None,
        audit=audit,
        finite=Finite(mesh, policy),
        recompiled=run.recompiled,
        progress=progress,
        stop=stop,
    )


class Extras(NamedTuple):
    """Each has a `progress`, which is to be the run's."""

    exports: Exports
    sample: EvalSamples | None
    tasks: EvalTasks | None


def extras_of(run: Built, *, say: Callable[[str], None]) -> Extras:
    """Every rank calls it.

    Raises:
        ConfigError: a prompt or a task cannot be used.
    """
    sample = EvalSamples(run, say=say) if run.config.eval.sample else None
    tasks = EvalTasks(run.config, run.model) if run.config.eval.tasks else None
    return Extras(Exports(run.checkpointer, say=say), sample, tasks)


def trackers_on(console: Screen, run: Built, hooks: Hooks) -> list[Tracker]:
    """All that get the metrics, on rank 0."""
    if run.mesh.rank != 0:
        return []
    go_on = run.config.checkpoint.on_error == "continue"
    terminal = Terminal(console, num_steps=run.num_steps, done=run.done)
    return [
        MetricsFile(run.folder.metrics, continue_on_error=go_on, timed=True),
        terminal,
        *assemble.trackers_of(run, say=console.print),
        hooks,
    ]


def kept_rows_of(run: Built, audit: Audit) -> KeptRows | None:
    """Keeps the rows' losses on the first rank of each tp group, if they are asked for and known."""
    asked, mesh = run.config.audit, run.mesh
    if not (asked.rows and asked.every) or mesh.tp_rank or run.given.loss is not None:
        return None
    count = count_pairs if run.pairs is not None else None
    spread = run.config.train.reduce == "exact"
    return KeptRows(run.folder.path, mesh, segment=audit.start.segment, count=count, spread=spread)


def shown_evaluation(console: Screen, run: Built) -> Callable[[], Iterable[Batch]] | None:
    """Makes the held-out batches again, with a bar of how many are evaluated; None without an evaluation."""
    make = assemble.held_out_of(run)
    if make is None or run.held_out is None:
        return make
    total = -(-run.held_out.num_rows // (run.micro_batch * run.mesh.dp_size))
    return lambda: console.bars.track(make(), "evaluation", total)
