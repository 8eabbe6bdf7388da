"""One rank of a run, from its place on the mesh to its exit code.

Everything that can be wrong with the request is found before the first collective: each rank finds the same, one prints
it. What goes wrong later is printed once, by the rank where it went wrong first.
"""

from __future__ import annotations

import functools
import logging
import sys
from pathlib import Path

import numpy as np
import torch
import transformers
import xxhash
from rich.console import Console

from threefold import __version__
from threefold.checkpoint.layout import CheckpointFolder
from threefold.config.loading import Loaded
from threefold.config.schema import Config
from threefold.data.rows.concat import Rows
from threefold.data.skip import steps_left
from threefold.data.tokens import Tokenizer
from threefold.errors import EXIT_STOPPED_WITH_CHECKPOINT, ThreefoldError
from threefold.export.model_folder import generate_sample
from threefold.integrations.terminal import Terminal
from threefold.jsonl import MetricsFile, Tracker
from threefold.mesh import environment
from threefold.mesh.mesh import FAILURES, Mesh, join_mesh
from threefold.mesh.rendezvous_errors import NoDeviceError, RendezvousError
from threefold.mesh.topology import Topology
from threefold.model import load
from threefold.model.build import build
from threefold.run import assemble
from threefold.run.folder import RunFolder, log_to_file, open_run
from threefold.run.lock import RunLock
from threefold.run.open_audit import open_audit
from threefold.run.resume import Keeper, undamaged
from threefold.run.shared_folder import require_shared
from threefold.run.start import report_failure
from threefold.run.watchdog import Watchdog
from threefold.training.loop import Outcome, Run, train_loop
from threefold.training.metrics import flops_per_token, peak_flops
from threefold.training.nonfinite import Finite, Policy
from threefold.training.optimizer import adamw
from threefold.training.progress import Progress
from threefold.training.step import TrainStep, token_loss_of, warm_up_buckets

log = logging.getLogger("threefold")

_FIRST_ROW = np.zeros(1, dtype=np.int64)
_LARGEST_SAMPLED = 500_000_000
# The watchdog's report comes before the collectives' own limit, which would end the run with a bare timeout.
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
    """What must be the same on every rank, beside the mesh: the version, the config by its sections' digests."""
    return {"threefold": __version__} | {
        f"the config's section {section!r}": xxhash.xxh3_64_hexdigest(
            getattr(config, section).model_dump_json().encode()
        )
        for section in type(config).model_fields
    }


def _as_restarted(config: Config) -> Config:
    """The config, which after a restart goes on with what the run itself has saved."""
    if not environment.current().restart or config.log.dir is None or config.checkpoint.resume == "auto":
        return config
    if config.checkpoint.resume != "never" and not CheckpointFolder(Path(config.log.dir)).all():
        return config
    return config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"resume": "auto"})})


def quieten_libraries() -> None:
    """Sends the libraries' warnings to the rank's log file."""
    # Their warnings go to the rank's log file: eight ranks would print each of them eight times.
    logging.captureWarnings(True)
    log.addHandler(logging.NullHandler())  # until the run's folder is known
    logging.getLogger("torch").setLevel(logging.ERROR)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def is_first_failure(mesh: Mesh | None, rank: int, error: BaseException | None = None) -> bool:
    """Whether this rank is the run's first to fail, and so the one to say why."""
    if isinstance(error, RendezvousError | NoDeviceError):
        return error.first
    if mesh is None or mesh.store is None:
        return rank == 0
    try:
        return mesh.store.add(FAILURES, 1) == 1
    except Exception:  # the store is gone: rank 0 kept it, and has failed before
        return False


def _train(config: Config, mesh: Mesh, why: str, lock: RunLock) -> int:
    if config.train.deterministic:
        environment.make_products_deterministic()
        torch.use_deterministic_algorithms(True)
    console = Console(quiet=mesh.rank != 0, soft_wrap=True)
    tokenizer = assemble.tokenizer_of(config)
    architecture = load.read_config(config.model, vocab_size=tokenizer.vocab_size)
    assemble.check(config, architecture, tokenizer, mesh.topology, device=mesh.device.type)
    folder = RunFolder.from_json(mesh.share("run", lambda: open_run(_as_restarted(config), lock).to_json()))
    require_shared(folder.path, mesh)
    log_to_file(folder.path, mesh.rank)
    folder = undamaged(folder, mesh)
    rows = assemble.rows_of(config, tokenizer, mesh)
    held_out = assemble.rows_of(config, tokenizer, mesh, held_out=True) if config.eval.source else None
    loader = assemble.loader_of(config, rows, mesh)
    steps = config.train.steps or (config.train.epochs or 0) * loader.steps_per_epoch or assemble.DEFAULT_STEPS
    model = build(config, architecture, mesh)
    optimizer = adamw(model.module, config.optimizer)
    # Dropout differs between rows and places in a row, and agrees where tp ranks hold the same activations.
    torch.manual_seed(hash((config.train.seed, mesh.dp_rank, mesh.cp_rank)) % 2**63)
    keeper = Keeper(config, folder, mesh, model, optimizer, loader, architecture)
    done = keeper.resume()
    if config.train.epochs is not None:
        steps = steps_left(steps, skip={*loader.left_out, *config.data.skip})
    per_dp_rank = config.train.global_batch // mesh.dp_size
    micro_batch = per_dp_rank if config.train.micro_batch == "auto" else config.train.micro_batch
    num_parameters = sum(parameter.numel() for parameter in model.module.parameters())
    skips = ", ".join(f"[{first}, {last}]" for first, last in config.data.skip)
    choices = model.choices + ((("data.skip", f"the batches of the steps {skips} are left out"),) if skips else ())
    _introduce(console, config, mesh, why, folder, rows, tokenizer, num_parameters, choices, done, steps)
    if done >= steps:
        console.print(f"nothing to do: step {done} of {steps} is done. More: --train.steps N", highlight=False)
        mesh.close()
        return 0
    loader.leave_out(config.data.skip, first_step=done + 1)
    audit = open_audit(config, folder, mesh, loader, done=done)
    for path in mesh.share("accept", lambda: [str(moved) for moved in folder.accept(config)]):
        console.print(f"  set aside: {path}, later than the step that the run goes on from", highlight=False)
    lock.keep()
    warm_up_buckets(model, mesh, rows=micro_batch, seq_len=config.data.seq_len)
    keeper.start()
    text = architecture.get_text_config()
    trackers: list[Tracker] = []
    if mesh.rank == 0:
        trackers = [MetricsFile(folder.metrics), Terminal(console, num_steps=steps, done=done)]
        say = functools.partial(console.print, highlight=False, markup=False)
        trackers += assemble.trackers_of(config, mesh, folder.path, num_parameters, first_step=done + 1, say=say)
    progress = Progress()
    timeout_s = config.train.timeout_s or _REPORT_BEFORE * config.mesh.timeout_s
    run = Run(
        config,
        mesh,
        model,
        TrainStep(
            model,
            optimizer,
            mesh,
            grad_clip=config.train.grad_clip,
            token_loss=token_loss_of(
                model, mesh, label_smoothing=config.train.label_smoothing, z_loss=config.train.z_loss
            ),
            progress=progress,
        ),
        loader,
        steps,
        micro_batch,
        keeper.keep,
        keeper.notice,
        eval_batches=assemble.HeldOut(held_out, micro_batch, mesh, config.data.document_mask) if held_out else None,
        trackers=trackers,
        flops_per_token=flops_per_token(
            num_parameters,
            num_layers=text.num_hidden_layers,
            hidden_size=text.hidden_size,
            seq_len=config.data.seq_len,
        ),
        peak_flops=peak_flops(torch.cuda.get_device_name(mesh.device)) if mesh.device.type == "cuda" else None,
        audit=audit,
        finite=Finite(
            mesh,
            Policy(
                skip=config.train.nonfinite == "skip",
                limit=config.train.nonfinite_limit,
                run=str(folder.path),
            ),
        ),
        progress=progress,
        watch=Watchdog(mesh, progress, stall_s=config.log.stall_s, timeout_s=timeout_s),
    )
    try:
        outcome = train_loop(run, first_step=done + 1)
        keeper.finish()
    except ThreefoldError:
        keeper.linger()
        raise
    finally:
        for tracker in trackers:
            tracker.close()
        audit.close()
    mesh.barrier()
    mesh.close()
    return _conclude(console, config, folder, outcome, rows, tokenizer, num_parameters)


def _introduce(
    console: Console,
    config: Config,
    mesh: Mesh,
    why: str,
    folder: RunFolder,
    rows: Rows,
    tokenizer: Tokenizer,
    num_parameters: int,
    choices: tuple[tuple[str, str], ...],
    done: int,
    steps: int,
) -> None:
    name = config.model.name_or_path or f"random weights from seed {config.train.seed}"
    ranks = f"{mesh.world_size} ranks" if mesh.world_size > 1 else "1 process"
    origin = (
        (config.model.config or load.EMBEDDED_DEFAULT)["model_type"] + ", " if not config.model.name_or_path else ""
    )
    lines = [
        f"threefold {__version__}  {folder.path}",
        f"  model  {origin}{num_parameters:,} parameters, {name}, {config.model.dtype}",
        f"  mesh   {mesh.topology} on {ranks} ({mesh.device.type}): {why}",
        f"  data   {assemble.data_name(config)} ({tokenizer.name}): {rows.report}; {config.data.seq_len} tokens a row",
    ]
    if done < steps:
        lines.append(f"  steps  {done + 1} to {steps}, {config.train.global_batch} rows each")
    lines += [f"  {choice}: {reason}" for choice, reason in choices]
    if folder.resume is not None:
        lines.append(f"  resumed from {folder.resume.path}")
    if (info := environment.current()).restart:
        lines.append(f"  restart {info.restart}{_restarted_by(info)}")
    for line in lines:
        console.print(line, highlight=False, markup=False)


def _restarted_by(info: environment.LaunchInfo) -> str:
    return f" of {info.max_restarts}: a rank had failed" if info.max_restarts else f": by {info.launcher}"


def _conclude(
    console: Console,
    config: Config,
    folder: RunFolder,
    outcome: Outcome,
    rows: Rows,
    tokenizer: Tokenizer,
    num_parameters: int,
) -> int:
    if outcome.stopped:
        console.print(f"stopped by a signal after step {outcome.step}; the checkpoint is saved in {folder.path}")
        console.print(f"go on: threefold train {folder.path}/config.yaml --log.dir {folder.path}", highlight=False)
        return EXIT_STOPPED_WITH_CHECKPOINT
    if console.quiet:
        return 0
    if config.log.sample_tokens and num_parameters <= _LARGEST_SAMPLED:
        checkpoint = CheckpointFolder(folder.path).newest()
        assert checkpoint is not None
        prompt = rows.rows(_FIRST_ROW)["input_ids"][0][: max(1, min(48, config.data.seq_len // 2))]
        text = generate_sample(checkpoint, tokenizer, prompt.tolist(), num_tokens=config.log.sample_tokens)
        console.print("a sample (the prompt, then what the model wrote):", highlight=False)
        for line in text.splitlines():
            console.print(f"  | {line}", highlight=False, markup=False)
    elif config.log.sample_tokens:
        console.print(f"no sample: {num_parameters:,} parameters are too many for one process after training")
    loss = f"loss {outcome.loss:.4f}" if outcome.loss is not None else ""
    console.print(f"done: {outcome.step} steps, {loss}, in {folder.path}", highlight=False)
    console.print(f"export: threefold export {folder.path} --to DIR", highlight=False)
    return 0
