"""`threefold doctor`: checks this machine and, if a launcher or the config asks for ranks, every rank and axis."""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from threefold.commands.arguments import AsJson, Force, is_address, load_config
from threefold.config.loading import LoadedConfig
from threefold.config.schema import Config
from threefold.doctor.findings import (
    Finding,
    judged,
    note,
    ok,
    stop,
    summary,
    warning,
    would_stop,
)
from threefold.doctor.ranks import agree_on_code, look_at_machine, look_at_mesh
from threefold.errors import EXIT_FAILED, ThreefoldError
from threefold.jsonl import Values
from threefold.mesh import environment, local_ranks
from threefold.mesh.topology import Topology, resolve

# Version of the --json output: raised when a field is removed or changes its meaning.
SCHEMA = 1
_MESH_KEYS = ("mesh.dp", "mesh.dp_shard", "mesh.cp", "mesh.tp")
_PRELOAD = (
    "torch",
    "torch.distributed.device_mesh",
    "transformers",
    "threefold.doctor.collectives",
)


@dataclass(frozen=True)
class ReportOptions:
    """How the report is shown, and how long a collective may take, s."""

    as_json: bool = False
    limit_s: float = 30.0


def command(
    context: typer.Context,
    as_json: AsJson = False,
    force: Force = False,
    limit: Annotated[
        float, typer.Option(min=0.1, help="Longest time for one test between ranks, s.")
    ] = 30.0,
) -> None:
    """Find what would stop a run: threefold doctor [CONFIG.yaml] [--section.key value ...].

    Alone, it checks this machine. With a mesh (--mesh.tp 2) it starts ranks here; under a launcher, each of its ranks
    reports. It then tests and measures every axis of the mesh, and pairs of ranks. With s3://BUCKET/PREFIX instead, it
    asks a store whether it keeps what runs rely on, by objects that it removes again.
    """
    options = ReportOptions(as_json, limit)
    try:
        match context.args:
            case [address] if is_address(address):
                code = _look_at_store(address, options)
            case arguments:
                code = doctor_command(load_config(arguments), options, force=force)
    except ThreefoldError as error:
        if not as_json:
            raise
        code = _refused(error, [], {})
    sys.exit(code)


def _look_at_store(address: str, options: ReportOptions) -> int:
    from threefold.places.admission import admit, facts

    admission = admit(address, environment.variables())
    findings = [
        judged(each.name, each.what, each.holds, each.expected, each.fix)
        for each in admission.probes
    ]
    return _show(findings, [], {"store": facts(admission)}, options)


def doctor_command(loaded: LoadedConfig, options: ReportOptions, *, force: bool = False) -> int:
    """Prints the report, returns the exit code; ThreefoldError if the ranks cannot meet or the mesh does not fit."""
    info = environment.current()
    if info.launcher is not None:
        environment.settle_rank(info)
        topology, _ = resolve(loaded.config.mesh, launched_world_size=info.world_size)
        return run_rank(loaded.config, topology, options)
    if not any(key in loaded.origins for key in _MESH_KEYS):
        report = look_at_machine(loaded.config, several_machines=False)
        return _show(report.findings, [], {"machine": report.facts}, options)
    from threefold.run.start import topology_here

    topology, _ = topology_here(loaded.config, force=force)
    if topology.world_size == 1:
        return run_rank(loaded.config, topology, options)
    local_ranks.preload(_PRELOAD)
    return local_ranks.start_ranks(
        _rank_entry, (loaded.config, topology, options), num_ranks=topology.world_size
    )


def _rank_entry(config: Config, topology: Topology, options: ReportOptions) -> None:
    try:
        code = run_rank(config, topology, options)
    except ThreefoldError as error:
        if environment.current().rank == 0:
            sys.stderr.write(f"{error}\n")
        code = error.exit_code
    sys.exit(code)


def run_rank(config: Config, topology: Topology, options: ReportOptions) -> int:
    """Checks this machine and, with the other ranks, the mesh; rank 0 prints for all."""
    info = environment.current()
    report = look_at_machine(config, several_machines=info.world_size > info.local_world_size)
    report.findings.extend(
        _memory(config, topology, report.facts["torch"]["gpus"], info.local_world_size)
    )
    from threefold.mesh.mesh import join_mesh

    try:
        mesh = join_mesh(topology, info, device=config.mesh.device, timeout_s=options.limit_s)
    except ThreefoldError as error:
        # The ranks cannot communicate, so each machine reports about itself.
        if info.local_rank == 0 and options.as_json:
            return _refused(error, report.findings, {"machine": report.facts})
        if info.local_rank == 0:
            _show(report.findings, [], {"machine": report.facts}, options)
        raise
    if mesh.store is None:
        return _show(
            report.findings, ["rank 0: the only one"], {"machine": report.facts}, options
        )
    joint = look_at_mesh(mesh, report, info, limit_s=options.limit_s)
    code = _show(joint.findings, joint.ranks, joint.facts, options) if mesh.rank == 0 else None
    code = agree_on_code(mesh, code, joint.stuck, limit_s=options.limit_s)
    if joint.stuck is not None:
        # An operation is running that will never end, and closing would wait for it.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    mesh.close()
    return code


def _memory(
    config: Config, topology: Topology, gpus: Sequence[Values], ranks_here: int
) -> list[Finding]:
    """The estimated memory of a rank of the config's model; nothing where that is not known here."""
    from threefold.commands.model_config import values_of
    from threefold.plan.accelerators import of_memory
    from threefold.plan.fit import estimate_of
    from threefold.plan.memory import peak
    from threefold.run.local_rank_limit import room_here

    model = config.model
    if model.config is None and not (Path(model.name_or_path or "") / "config.json").is_file():
        return []  # of the Hub's models nothing is fetched here
    device, free = None, room_here().free_bytes
    if gpus and config.mesh.device != "cpu":
        smallest = min(gpus, key=lambda gpu: gpu["free"])
        device = of_memory(smallest["memory"])
        free = smallest["free"]
    elif free is not None:
        free //= max(1, ranks_here)
    try:
        values = values_of(model)
    except ThreefoldError:
        return []
    if (estimate := estimate_of(config, values, topology, device)) is None:
        return []
    moment = peak(*estimate)
    what = f"a rank would hold about {moment.total / 2**30:.2f} GiB in the {moment.name}, as estimated"
    if free is None or moment.total <= free:
        return [
            ok(
                "memory of a step",
                what + (f"; {free / 2**30:.2f} are free" if free is not None else ""),
            )
        ]
    return [
        warning(
            "memory of a step",
            what,
            f"at most the {free / 2**30:.2f} GiB that are free for a rank",
            "--train.micro_batch 1, --train.activation_checkpointing full, or another mesh: threefold plan",
        )
    ]


def _refused(error: ThreefoldError, findings: Sequence[Finding], facts: Values) -> int:
    """Prints as JSON what was found before an error, and the error; returns its exit code."""
    faults = [stop("request", each.what, each.expected, each.fix) for each in error.problems]
    sys.stderr.write(f"{error}\n")
    _show([*findings, *faults], [], facts, ReportOptions(as_json=True))
    return error.exit_code


def _show(
    findings: Sequence[Finding],
    ranks: Sequence[str],
    facts: Values,
    options: ReportOptions,
) -> int:
    """Prints a report; returns its exit code."""
    code = EXIT_FAILED if would_stop(findings) else 0
    if options.as_json:
        values = {
            "schema": SCHEMA,
            "findings": [asdict(finding) for finding in findings],
            "stop": would_stop(findings),
            **facts,
        }
        print(json.dumps(values, indent=2, default=str), flush=True)
        return code
    shown = [*findings, note("ranks", f"{len(ranks)} on the mesh")] if ranks else list(findings)
    lines = [line for finding in shown for line in finding.lines()]
    print(
        "\n".join([*lines, *(f"          {line}" for line in ranks), summary(findings)]),
        flush=True,
    )
    return code
