"""One rank of a run, from its place on the mesh to its exit code.

All errors in the request are found before the first collective: each rank finds the same ones, and one rank prints
them. Later failures are printed once, by the rank that failed first.
"""

import contextlib
import dataclasses
import math
import sys
from functools import partial
from typing import Any, NamedTuple

import torch

from threefold import progress_bars
from threefold.audit.compare import Audit
from threefold.check.admit import admit
from threefold.check.full_size import admit_full_size
from threefold.checkpoint import chat_template
from threefold.config.loading import LoadedConfig
from threefold.data.rows.known_rows import KnownRows
from threefold.jsonl import Values
from threefold.mesh import environment
from threefold.mesh.mesh import FAILURES, Mesh
from threefold.mesh.topology import Topology
from threefold.model.data_parallel import device_of
from threefold.model.flops import flops_of
from threefold.plan.accelerators import peak_flops
from threefold.plan.choices import GIVEN, dtype
from threefold.run import assemble, memory_check
from threefold.run.assemble import Built
from threefold.run.console import conclude, head_of, introduce
from threefold.run.eval_samples import EvalSamples
from threefold.run.eval_tasks import EvalTasks
from threefold.run.exports import Exports
from threefold.run.head import Head, printed
from threefold.run.process import compute_alike, joined, quieten_libraries, stay_near
from threefold.run.request import asked_of
from threefold.run.run import LINGER_S, REPORT_BEFORE, Run
from threefold.run.same_bytes import keep_lists
from threefold.run.sources import file_lines
from threefold.run.terminal import Screen, Terminal
from threefold.run.user_objects import Hooks, UserObjects
from threefold.run.watch.stall import CLOSING
from threefold.run.watch.watchdog import Watchdog
from threefold.training.evaluation import EvalStep
from threefold.training.forward import token_loss_of, warm_up_buckets
from threefold.training.loop import Guards, Loop, Outcome, train_loop
from threefold.training.profiler import Profiled
from threefold.training.progress import DeviceForward
from threefold.training.row_losses import KeptRows, count_pairs
from threefold.training.step import TrainStep


def run_rank(loaded: LoadedConfig, topology: Topology, why: str) -> int:
    """Trains as one rank of `topology` and returns its exit code; failures are printed once for all ranks."""
    config, info = loaded.config, environment.current()
    quieten_libraries(shown=info.rank == 0 and not loaded.quiet)
    if loaded.quiet:
        progress_bars.silence()
    # With one process a step may take any time: no other rank waits for it.
    limit_s = math.inf if topology.world_size == 1 else REPORT_BEFORE * config.mesh.timeout_s
    timeout_s = config.train.timeout_s or limit_s
    environment.record_collectives()
    pulse = loaded.pulses[info.rank] if loaded.pulses else None
    with Watchdog(
        info.rank, stall_s=config.log.stall_s, timeout_s=timeout_s, pulse=pulse
    ) as watch:

        def train(mesh: Mesh) -> int:
            watch.mesh = mesh
            if topology.world_size == 1:  # one process: what it waits for is named all the same
                watch.begin(torch.distributed.HashStore(), [info.host])
            code = _train(loaded, mesh, why, watch)
            watch.leave()
            return code

        try:
            return joined(config, topology, train, watch, keep=loaded.reason)
        except (SystemExit, KeyboardInterrupt):
            if watch.store is not None:
                with contextlib.suppress(Exception):
                    # The other ranks need not report that this one has left.
                    watch.store.add(FAILURES, 1)
            raise
        finally:
            sys.stdout.flush()


def _train(loaded: LoadedConfig, mesh: Mesh, why: str, watch: Watchdog) -> int:
    config, enter = loaded.config, watch.progress.enter
    enter("the request")
    compute_alike(config)
    first = mesh.rank == 0
    console = Screen(quiet=loaded.quiet or not first, logs=first, as_json=config.log.json)
    asked = asked_of(config, mesh)
    plain = loaded.user_objects is None or (
        loaded.user_objects.loss is None and loaded.user_objects.optimizer is None
    )
    if plain:
        asked = memory_check.fitted(asked, mesh)
    config = asked.config
    enter("admission")
    with console.bars.show("admission: the architecture on this mesh"):
        admission = admit(config, asked.architecture, mesh)
    run = Run(config.log.dir, mesh=mesh, config=config, watch=watch, last=loaded.last)
    run.say, run.warn = console.print, console.warn
    with run:
        folder = dataclasses.replace(run.folder, accepts_changes=loaded.accept_changes)
        with memory_check.explained(asked, mesh, folder.path):
            enter("data preparation")
            built = assemble.build_run(
                asked,
                mesh,
                folder,
                loaded.user_objects or UserObjects(),
                say=console.print,
                enter=enter,
            )
            built.loader.leave_out(config.data.skip, first_step=built.done + 1)
            enter("admission at full size")
            full_size = _admit_full_size(built) if built.done < built.num_steps else ()
            enter("the start")
            extras = Extras(
                Exports(built.checkpointer, say=console.print),
                EvalSamples(built, say=console.print) if config.eval.sample else None,
                EvalTasks(built.config, built.model) if config.eval.tasks else None,
            )
            computed, computed_why = dtype(loaded.config, device_of(mesh))
            # Where it was chosen for the device; on a CPU it is the usual one.
            chosen = [("compute type", f"{computed}: {computed_why}")] * (
                computed_why != GIVEN and mesh.on_cuda
            )
            head = head_of(built, why, (admission, *full_size, *asked.said, *chosen))
            introduce(console, head)
            unevaluated = _left_in_evaluation(built)
            if built.done >= built.num_steps and not unevaluated:
                more = "--train.steps" if config.train.epochs is None else "--train.epochs"
                console.print(
                    f"nothing to do: step {built.done} of {built.num_steps} is done. To train more: {more} N"
                )
                enter(CLOSING)
                _store(run, console)
                mesh.close()
                return 0
            run.config = built.config
            _accept(console, run, built, head)
            hooks = Hooks(
                built.user_objects.callbacks if mesh.rank == 0 else (),
                folder.path,
                run.guards.stop.ask,
            )
            outcome = _followed(run, built, console, extras, hooks, unevaluated)
            hooks.ended(outcome.step, outcome.by if outcome.stopped else "done")
            mesh.barrier()
            mesh.close()
            saved = built.checkpointer.saver.saved_step
            left = {} if outcome.evaluated else {"evaluated": False}
            run.ended(outcome.step, stopped=outcome.stopped, saved=saved, **left)
            return conclude(console, built, outcome)


def _left_in_evaluation(run: Built) -> bool:
    """Whether the run's last start ended in the evaluation of the step that this one continues from.

    A stop signal leaves any evaluation, with a note; what has no note is the last step, saved before it is evaluated.
    """

    def unevaluated() -> bool:
        last: Values = {}
        for line in run.folder.journal.lines():
            if line.get("step") == run.done and line["event"] in ("save", "stop", "done"):
                last = line
        without_note = run.done >= run.num_steps and last.get("event") == "save"
        return without_note or not last.get("evaluated", True)

    asked = run.config.evaluates or bool(run.config.eval.tasks)
    return asked and run.mesh.share("unevaluated", unevaluated)


def _admit_full_size(run: Built) -> tuple[tuple[str, str], ...]:
    """The probes of the run's own forward, for its head."""
    if run.config.model.admission == "off":
        return ()
    data = run.config.data
    probed = admit_full_size(
        run.model,
        rows=run.micro_batch,
        seq_len=data.seq_len,
        documents=bool(data.document_mask),
    )
    return () if probed is None else (probed,)


def _accept(console: Screen, run: Run, built: Built, head: Head) -> None:
    """Begins the run, because nothing can refuse the request any more, and opens its audit."""
    config, checkpointer = built.config, built.checkpointer
    folder = built.folder.path
    files = list[str]()

    def facts() -> Values:
        keep_lists(built.rows, folder)
        if built.pairs is not None:
            built.pairs.keep(folder)
        files.extend(file_lines(config, to=folder))
        changed = {each.key: [each.before, each.now] for each in checkpointer.changed}
        kept: dict[str, Any] = {"reduce": "exact"} if config.train.exact else {}
        if checkpointer.lost_bits is not None:
            kept["lost_bits"] = checkpointer.lost_bits
        if (template := checkpointer.template) is not None:
            chat_template.keep(template, folder)
            kept[chat_template.KEY] = chat_template.digest_of(template)
        return {"changed": changed, **kept, "files": files, "head": head.to_values()}

    rows = built.loader.rows
    known = KnownRows(rows, seed=built.mesh.rank)
    skips = built.loader.planned
    run.begin(partial(assemble.start_of, built), facts, rows=rows, known=known, skips=skips)
    checkpointer.folder = run.folder
    for line in files:
        console.print(printed("files", line))


def _followed(
    run: Run, built: Built, console: Screen, extras: "Extras", hooks: Hooks, unevaluated: bool
) -> Outcome:
    """Trains to the end or to a stop signal, audited and tracked; returns when everything is saved."""
    guards, watch, checkpointer = run.guards, run.watch, built.checkpointer
    shown = Terminal(console, num_steps=built.num_steps, done=built.done)
    described = built.config.model_dump(mode="json"), assemble.tracked_facts(built)
    guards.trackers = (
        [*run.track(*described, shown=[shown]), hooks] if built.mesh.rank == 0 else []
    )
    if (profile := built.config.log.profile) is not None:
        watch.follow(Profiled(built.folder.path, built.mesh.rank, profile))
    guards.progress = watch.progress
    if built.loader.ahead is not None:
        built.loader.ahead.enter = watch.progress.enter
    if built.mesh.on_cuda and built.mesh.world_size > 1:
        watch.progress.device = DeviceForward(partial(torch.cuda.Event, enable_timing=True))
        stay_near(built.mesh.device)  # only now: data are prepared by all cores
    # The gradients of a custom loss are averaged outside those buckets.
    if built.pairs is None and built.user_objects.loss is None:
        watch.progress.enter("the warm-up")
        warm_up_buckets(built.model, rows=built.micro_batch, seq_len=built.config.data.seq_len)
    loop = _loop_of(built, guards, extras)
    checkpointer.start(loop.step)
    checkpointer.on_saved = hooks.saved
    guards.notice = checkpointer.saver.check
    rows, batches = kept_rows_of(built, guards.audit), None
    if built.held_out is not None:
        batches = assemble.held_out_batches(
            built.config, built.held_out, built.mesh, console.bars
        )
    try:
        loop = dataclasses.replace(
            loop,
            kept_rows=rows,
            eval_batches=batches,
            after_step=checkpointer.report_saved,
        )
        outcome = train_loop(loop, first_step=built.done + 1, unevaluated=unevaluated)
        guards.progress.close()
        guards.progress.enter(CLOSING)
        with console.bars.show("saving"):
            checkpointer.saver.wait()
        checkpointer.report_saved()
        _store(run, console)
    except Exception:
        checkpointer.saver.join(LINGER_S)
        if run.folder.mirror is not None:
            run.folder.mirror.join(LINGER_S)
        raise
    finally:
        guards.close()
        if rows is not None:
            rows.close()
    return outcome


def _store(run: Run, console: Screen) -> None:
    """Waits until the run's checkpoints are in its store, if it has one."""
    if run.folder.mirror is not None:
        with console.bars.show(f"sending to {run.config.checkpoint.store}"):
            run.folder.mirror.wait(run.watch.progress.tick)


def _loop_of(run: Built, guards: Guards, extras: "Extras") -> Loop:
    config, train, mesh = run.config, run.config.train, run.mesh
    for each in extras:
        if each is not None:
            each.progress = guards.progress
    objective: dict[str, Any]
    evaluation = None
    if run.pairs is not None:
        objective = {"loss": run.pairs.loss, "loss_on": "log_probabilities"}
        evaluation = run.pairs.evaluation
    elif run.user_objects.loss is not None:
        objective = {"loss": run.user_objects.loss, "loss_on": run.user_objects.loss_on}
        evaluation = EvalStep(run.model, **objective)
    else:
        objective = {
            "token_loss": token_loss_of(
                run.model, label_smoothing=train.label_smoothing, z_loss=train.z_loss
            )
        }
    step = TrainStep(
        run.model,
        run.optimizer,
        **objective,
        grad_clip=train.grad_clip,
        ema=run.ema,
        progress=guards.progress,
    )
    peak = peak_flops(torch.cuda.get_device_name(mesh.device)) if mesh.on_cuda else None
    return Loop(
        config,
        mesh,
        run.model,
        step,
        run.loader,
        run.num_steps,
        run.micro_batch,
        extras.exports.save,
        guards,
        evaluate=evaluation,
        sample=extras.sample,
        tasks=extras.tasks,
        flops=flops_of(run.model.module) if peak is not None else None,
        peak_flops=peak,
        estimated_bytes=run.estimated_bytes if mesh.on_cuda else None,
        recompiled=run.recompiled,
    )


class Extras(NamedTuple):
    """Each has a `progress`, which is to be the run's."""

    exports: Exports
    sample: EvalSamples | None
    tasks: EvalTasks | None


def kept_rows_of(run: Built, audit: Audit | None) -> KeptRows | None:
    """Keeps the rows' losses on the first rank of each tp group, if they are asked for and known."""
    asked, mesh = run.config.audit, run.mesh
    if (
        audit is None
        or not (asked.rows and asked.every)
        or mesh.tp_rank
        or run.user_objects.loss is not None
    ):
        return None
    count = count_pairs if run.pairs is not None else None
    spread = run.config.train.exact
    return KeptRows(
        run.folder.path, mesh, segment=audit.start.segment, count=count, spread=spread
    )
