"""One rank of a run, from its place on the mesh to its exit code.

In chapters: what is asked, where it lies, what is built, who watches, how it ends. All errors in the request
are found before the first collective: each rank finds the same ones, and one rank prints them. Later failures are
printed once, by the rank that failed first.
"""

from __future__ import annotations

import functools
import logging
import sys
from pathlib import Path

import torch
import transformers
import xxhash
from rich.console import Console

from threefold import __version__
from threefold.audit.compare import Audit
from threefold.checkpoint.layout import CheckpointFolder
from threefold.config.loading import Loaded
from threefold.config.schema import Config
from threefold.errors import ThreefoldError
from threefold.integrations.terminal import Terminal
from threefold.jsonl import MetricsFile, Tracker
from threefold.mesh import environment
from threefold.mesh.mesh import Mesh, join_mesh
from threefold.mesh.topology import Topology
from threefold.run import assemble
from threefold.run.assemble import Built
from threefold.run.console import conclude, introduce
from threefold.run.failure import is_first_failure, report_failure
from threefold.run.folder import RunFolder, log_to_file, open_run, require_shared
from threefold.run.lock import RunLock
from threefold.run.request import Asked, asked_of
from threefold.run.resume import undamaged
from threefold.run.watchdog import Watchdog
from threefold.training.loop import Outcome, Run, train_loop
from threefold.training.nonfinite import Finite, Policy
from threefold.training.progress import Progress, flops_per_token, peak_flops
from threefold.training.step import TrainStep, token_loss_of, warm_up_buckets

log = logging.getLogger("threefold")

# The watchdog must report before the collectives' own limit, which would end the run with a bare timeout.
_REPORT_BEFORE = 0.9


def run_rank(loaded: Loaded, topology: Topology, why: str) -> int:
    """Trains as one rank of `topology` and returns its exit code; failures are printed once for all ranks."""
    quieten_libraries()
    config = loaded.config
    info = environment.current()
    mesh: Mesh | None = None
    try:
        mesh = join_mesh(
            topology, info, device=config.mesh.device, timeout_s=config.mesh.timeout_s, facts=facts_of(config)
        )
        with RunLock() as lock:
            return _train(config, mesh, why, lock)
    except BaseException as error:
        if isinstance(error, SystemExit | KeyboardInterrupt):
            raise
        code = report_failure(error, first=is_first_failure(mesh, info.rank, error))
        if isinstance(error, ThreefoldError) and mesh is not None:
            mesh.close()
        return code
    finally:
        sys.stdout.flush()


def facts_of(config: Config) -> dict[str, str]:
    """Returns what must be the same on every rank besides the mesh: the version, and a digest per config section."""
    return {"threefold": __version__} | {
        f"the config's section {section!r}": xxhash.xxh3_64_hexdigest(
            getattr(config, section).model_dump_json().encode()
        )
        for section in type(config).model_fields
    }


def _as_restarted(config: Config) -> Config:
    """Returns the config; after a restart, it resumes from what the run itself saved."""
    if not environment.current().restart or config.log.dir is None or config.checkpoint.resume == "auto":
        return config
    if config.checkpoint.resume != "never" and not CheckpointFolder(Path(config.log.dir)).all():
        return config
    return config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"resume": "auto"})})


def quieten_libraries() -> None:
    """Sends the libraries' warnings to the rank's log file."""
    # On the terminal, eight ranks would print each warning eight times.
    logging.captureWarnings(True)
    log.addHandler(logging.NullHandler())  # until the run's folder is known
    logging.getLogger("torch").setLevel(logging.ERROR)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def _train(config: Config, mesh: Mesh, why: str, lock: RunLock) -> int:
    if config.train.deterministic:
        environment.make_products_deterministic()
        torch.use_deterministic_algorithms(True)
    console = Console(quiet=mesh.rank != 0, soft_wrap=True)
    asked = asked_of(config, mesh)
    run = assemble.build_run(asked, mesh, _open_folder(asked, mesh, lock))
    introduce(console, run, why)
    if run.done >= run.num_steps:
        more = f"nothing to do: step {run.done} of {run.num_steps} is done. More: --train.steps N"
        console.print(more, highlight=False)
        mesh.close()
        return 0
    audit = _accept(console, run, lock)
    outcome = _watched(run, audit, _trackers(console, run))
    mesh.barrier()
    mesh.close()
    return conclude(console, run, outcome)


def _open_folder(asked: Asked, mesh: Mesh, lock: RunLock) -> RunFolder:
    """The run's folder, opened by rank 0, seen by all hosts, with the newest undamaged checkpoint."""
    opened = mesh.share("run", lambda: open_run(_as_restarted(asked.config), lock).to_values())
    folder = RunFolder.from_values(opened)
    require_shared(folder.path, mesh)
    log_to_file(folder.path, mesh.rank)
    return undamaged(folder, mesh)


def _accept(console: Console, run: Built, lock: RunLock) -> Audit:
    """Makes the folder this run's, now that nothing can refuse the request any more, and opens the run's audit."""
    config, mesh = run.config, run.mesh
    run.loader.leave_out(config.data.skip, first_step=run.done + 1)
    audit = assemble.open_audit(run)
    for path in mesh.share("accept", lambda: [str(moved) for moved in run.folder.accept(config)]):
        console.print(f"  set aside: {path}, later than the step that the run goes on from", highlight=False)
    lock.keep()
    return audit


def _trackers(console: Console, run: Built) -> list[Tracker]:
    """Who hears what the run logs; nobody but on rank 0."""
    if run.mesh.rank != 0:
        return []
    say = functools.partial(console.print, highlight=False, markup=False)
    return [
        MetricsFile(run.folder.metrics),
        Terminal(console, num_steps=run.num_steps, done=run.done),
        *assemble.trackers_of(run, say=say),
    ]


def _watched(run: Built, audit: Audit, trackers: list[Tracker]) -> Outcome:
    """Trains to the end or to a stop signal, watched, audited and heard by the trackers; returns when all is saved."""
    config, keeper = run.config, run.keeper
    warm_up_buckets(run.model, run.mesh, rows=run.micro_batch, seq_len=config.data.seq_len)
    keeper.start()
    try:
        outcome = train_loop(_loop_of(run, audit, trackers), first_step=run.done + 1)
        keeper.finish()
    except ThreefoldError:
        keeper.linger()
        raise
    finally:
        for tracker in trackers:
            tracker.close()
        audit.close()
    return outcome


def _loop_of(run: Built, audit: Audit, trackers: list[Tracker]) -> Run:
    """What the loop is given."""
    config, mesh, text = run.config, run.mesh, run.architecture.get_text_config()
    progress = Progress()
    step = TrainStep(
        run.model,
        run.optimizer,
        mesh,
        grad_clip=config.train.grad_clip,
        token_loss=token_loss_of(
            run.model, mesh, label_smoothing=config.train.label_smoothing, z_loss=config.train.z_loss
        ),
        progress=progress,
    )
    flops = flops_per_token(
        run.num_parameters,
        num_layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        seq_len=config.data.seq_len,
    )
    skipping = config.train.nonfinite == "skip"
    timeout_s = config.train.timeout_s or _REPORT_BEFORE * config.mesh.timeout_s
    return Run(
        config,
        mesh,
        run.model,
        step,
        run.loader,
        run.num_steps,
        run.micro_batch,
        run.keeper.keep,
        run.keeper.notice,
        eval_batches=assemble.held_out_of(run),
        trackers=trackers,
        flops_per_token=flops,
        peak_flops=peak_flops(torch.cuda.get_device_name(mesh.device)) if mesh.device.type == "cuda" else None,
        audit=audit,
        finite=Finite(mesh, Policy(skip=skipping, limit=config.train.nonfinite_limit, run=str(run.folder.path))),
        progress=progress,
        watch=Watchdog(mesh, progress, stall_s=config.log.stall_s, timeout_s=timeout_s),
    )
