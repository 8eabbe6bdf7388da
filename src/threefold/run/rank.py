"""One rank of a run, from its place on the mesh to its exit code.

All errors in the request are found before the first collective: each rank finds the same ones, and one rank prints
them. Later failures are printed once, by the rank that failed first.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import sys
import traceback
from datetime import timedelta
from typing import Any

import torch
import transformers
import xxhash

from threefold import __version__
from threefold.audit.compare import Audit
from threefold.config.loading import Loaded
from threefold.config.schema import Config
from threefold.errors import EXIT_FAILED, Problem, ThreefoldError
from threefold.jsonl import MetricsFile, Tracker
from threefold.mesh import environment
from threefold.mesh.exchange import OtherRankError
from threefold.mesh.mesh import FAILURES, Mesh, join_mesh
from threefold.mesh.rendezvous_errors import NoDeviceError, RendezvousError
from threefold.mesh.topology import Topology
from threefold.model import load
from threefold.run import assemble
from threefold.run.assemble import Built
from threefold.run.console import Screen, Terminal, conclude, introduce
from threefold.run.folder import RunFolder, log_to_file, open_run, require_shared
from threefold.run.lock import RunLock
from threefold.run.request import Asked, asked_of
from threefold.run.resume import undamaged, versions
from threefold.run.same_bytes import keep_lists
from threefold.run.sources import file_lines
from threefold.run.watchdog import Watchdog
from threefold.training.admission.admit import admit
from threefold.training.loop import Outcome, Run, StopRequest, train_loop
from threefold.training.nonfinite import Finite, Policy
from threefold.training.progress import Progress, flops_per_token, peak_flops
from threefold.training.step import TrainStep, token_loss_of, warm_up_buckets

log = logging.getLogger("threefold")

# The watchdog must report before the collectives' own limit, which would end the run with a bare timeout.
_REPORT_BEFORE = 0.9
# A running save may finish before a failed run ends.
_LINGER_S = 60.0
# How gloo and NCCL report that a peer's process is gone; the traceback only shows where this rank waited for it.
_PEER_GONE = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "remote process exited")


def run_rank(loaded: Loaded, topology: Topology, why: str) -> int:
    """Trains as one rank of `topology` and returns its exit code; failures are printed once for all ranks."""
    quieten_libraries()
    config, info = loaded.config, environment.current()
    mesh: Mesh | None = None
    try:
        asked = config.mesh
        mesh = join_mesh(topology, info, device=asked.device, timeout_s=asked.timeout_s, facts=facts_of(config))
        with RunLock() as lock:
            return _train(loaded, mesh, why, lock)
    except (SystemExit, KeyboardInterrupt):
        if mesh is not None and mesh.store is not None:
            with contextlib.suppress(Exception):
                mesh.store.add(FAILURES, 1)  # the other ranks need not report that this one has left
        raise
    except BaseException as error:
        code = report_failure(error, mesh, info.rank)
        if isinstance(error, ThreefoldError) and mesh is not None:
            mesh.close()
        return code
    finally:
        sys.stdout.flush()


def report_failure(error: BaseException, mesh: Mesh | None, rank: int) -> int:
    """Prints a failed rank's reason if it is the first of the run, logs it in any case, and returns the exit code."""
    expected = isinstance(error, ThreefoldError)
    text = str(error) if expected else "".join(traceback.format_exception(error)).rstrip()
    log.error("%s", text)
    if isinstance(error, RuntimeError) and any(sign in str(error) for sign in _PEER_GONE):
        text = str(_peer_gone(str(error).strip().splitlines()[0]))
    if _is_first_failure(error, mesh, rank):
        environment.tell_failure(text)
        print(f"{text}\n", end="", file=sys.stderr, flush=True)  # one write, which other ranks cannot split
    return error.exit_code if isinstance(error, ThreefoldError) else EXIT_FAILED


def _is_first_failure(error: BaseException, mesh: Mesh | None, rank: int) -> bool:
    if isinstance(error, RendezvousError | NoDeviceError):
        return error.first
    if mesh is None or mesh.store is None:
        return rank == 0
    try:
        if isinstance(error, OtherRankError):
            mesh.store.wait([FAILURES], timedelta(seconds=_LINGER_S))  # that rank's own report
            return False
        return mesh.store.add(FAILURES, 1) == 1
    except Exception:  # the store is gone: rank 0 hosted it and failed before
        return False


def _peer_gone(reason: str) -> Problem:
    return Problem(
        f"rank {environment.current().rank} lost its connection to another rank: {reason}",
        "every rank to stay until the run is over",
        "if no rank has reported an error, one was killed: look for `Out of memory` in the kernel's log (dmesg) of its "
        "host; the same command resumes from the newest checkpoint, and --max-restarts N does so automatically",
    )


def facts_of(config: Config) -> dict[str, str]:
    """Returns what must be the same on every rank besides the mesh: the version, and a digest per config section."""
    sections = {name: getattr(config, name).model_dump_json().encode() for name in type(config).model_fields}
    digests = {f"the config's section {name!r}": xxhash.xxh3_64_hexdigest(text) for name, text in sections.items()}
    return {"threefold": __version__, **digests}


def quieten_libraries() -> None:
    """Sends the libraries' warnings to the rank's log file."""
    # On the terminal, eight ranks would print each warning eight times.
    logging.captureWarnings(True)
    log.addHandler(logging.NullHandler())  # until the run's folder is known
    logging.getLogger("torch").setLevel(logging.ERROR)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def _train(loaded: Loaded, mesh: Mesh, why: str, lock: RunLock) -> int:
    config = loaded.config
    if config.train.deterministic:
        environment.make_products_deterministic()
        torch.use_deterministic_algorithms(True)
    console = Screen(quiet=mesh.rank != 0, soft_wrap=True, markup=False, highlight=False)
    asked = asked_of(config, mesh)
    config = asked.config
    admission = admit(config, asked.architecture, mesh)
    folder = dataclasses.replace(_open_folder(asked, mesh, lock), accepts_changes=loaded.accept_changes)
    run = assemble.build_run(asked, mesh, folder)
    introduce(console, run, why, admission.said)
    if run.done >= run.num_steps:
        more = "--train.steps" if config.train.epochs is None else "--train.epochs"
        console.print(f"nothing to do: step {run.done} of {run.num_steps} is done. To train more: {more} N")
        mesh.close()
        return 0
    # Until the end, so that no signal can interrupt what is being saved.
    with StopRequest(mesh) as stop:
        audit = _accept(console, run, lock)
        outcome = _watched(run, audit, _trackers(console, run), stop)
        mesh.barrier()
        mesh.close()
        return conclude(console, run, outcome)


def _open_folder(asked: Asked, mesh: Mesh, lock: RunLock) -> RunFolder:
    """Returns the run's folder, opened by rank 0, seen by all hosts, with the newest undamaged checkpoint."""
    opened = mesh.share("run", lambda: open_run(asked.config, lock).to_values())
    folder = RunFolder.from_values(opened)
    require_shared(folder.path, mesh)
    log_to_file(folder.path, mesh.rank)
    return undamaged(folder, mesh)


def _accept(console: Screen, run: Built, lock: RunLock) -> Audit:
    """Makes the folder this run's, because nothing can refuse the request any more, and opens the run's audit."""
    config, mesh = run.config, run.mesh
    run.loader.leave_out(config.data.skip, first_step=run.done + 1)
    audit = assemble.open_audit(run)

    def accept() -> dict[str, Any]:
        keep_lists(run.rows, run.folder.path)
        return run.folder.accept(config, facts=_facts_of_start(run))

    accepted = mesh.share("accept", accept)
    run.checkpointer.folder = dataclasses.replace(run.folder, run=accepted["run"], start=accepted["start"])
    for path in accepted["aside"]:
        console.print(f"  set aside: {path}, later than the step that the run resumes from")
    for line in mesh.share("files", lambda: file_lines(config, to=run.folder.path)):
        console.print(f"  files  {line}")
    lock.keep()
    return audit


def _facts_of_start(run: Built) -> dict[str, object]:
    """What the journal keeps of a start."""
    from_checkpoint = str(run.folder.resume.path.resolve()) if run.folder.resume is not None else None
    facts = {"from": from_checkpoint, "mesh": str(run.mesh.topology), "restart": environment.current().restart}
    changed = {change.key: [change.before, change.now] for change in run.checkpointer.changed}
    return {**facts, "host": environment.current().host, "changed": changed, **versions()}


def _trackers(console: Screen, run: Built) -> list[Tracker]:
    if run.mesh.rank != 0:
        return []
    go_on = run.config.checkpoint.on_error == "continue"
    terminal = Terminal(console, num_steps=run.num_steps, done=run.done)
    return [
        MetricsFile(run.folder.metrics, continue_on_error=go_on, timed=True),
        terminal,
        *assemble.trackers_of(run, say=console.print),
    ]


def _watched(run: Built, audit: Audit, trackers: list[Tracker], stop: StopRequest) -> Outcome:
    """Trains to the end or to a stop signal, watched, audited and tracked; returns when everything is saved."""
    checkpointer = run.checkpointer
    warm_up_buckets(run.model, run.mesh, rows=run.micro_batch, seq_len=run.config.data.seq_len)
    checkpointer.start()
    try:
        outcome = train_loop(_loop_of(run, audit, trackers, stop), first_step=run.done + 1)
        checkpointer.saver.wait()
    except ThreefoldError:
        checkpointer.saver.join(_LINGER_S)
        raise
    finally:
        for tracker in trackers:
            tracker.close()
        audit.close()
    return outcome


def _loop_of(run: Built, audit: Audit, trackers: list[Tracker], stop: StopRequest) -> Run:
    config, train, mesh = run.config, run.config.train, run.mesh
    progress = Progress()
    step = TrainStep(
        run.model,
        run.optimizer,
        mesh,
        grad_clip=train.grad_clip,
        token_loss=token_loss_of(run.model, mesh, label_smoothing=train.label_smoothing, z_loss=train.z_loss),
        progress=progress,
    )
    num_layers, hidden_size = load.sizes(run.model.module)
    flops = flops_per_token(
        run.num_parameters, num_layers=num_layers, hidden_size=hidden_size, seq_len=config.data.seq_len
    )
    policy = Policy(skip=train.nonfinite == "skip", limit=train.nonfinite_limit, run=str(run.folder.path))
    timeout_s = train.timeout_s or _REPORT_BEFORE * config.mesh.timeout_s
    return Run(
        config,
        mesh,
        run.model,
        step,
        run.loader,
        run.num_steps,
        run.micro_batch,
        run.checkpointer.save,
        run.checkpointer.saver.check,
        eval_batches=assemble.held_out_of(run),
        trackers=trackers,
        flops_per_token=flops,
        peak_flops=peak_flops(torch.cuda.get_device_name(mesh.device)) if mesh.device.type == "cuda" else None,
        audit=audit,
        finite=Finite(mesh, policy),
        progress=progress,
        watch=Watchdog(mesh, progress, stall_s=config.log.stall_s, timeout_s=timeout_s),
        stop=stop,
    )
