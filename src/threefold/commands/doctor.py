"""`threefold doctor`: this machine, and where ranks were started or a mesh is asked for, every rank and axis of it."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from threefold.config.loading import Loaded
from threefold.config.schema import Config
from threefold.doctor import (
    gpu,
)
from threefold.doctor import (
    machine as checks_machine,
)
from threefold.doctor import (
    network as checks_network,
)
from threefold.doctor import (
    packages as checks_packages,
)
from threefold.doctor import (
    ranks as checks_ranks,
)
from threefold.doctor.findings import Finding, note, render, stop, summary, would_stop
from threefold.errors import EXIT_FAILED, ThreefoldError, ranks_text
from threefold.mesh import environment, local_ranks
from threefold.mesh.launchers.info import LaunchInfo
from threefold.mesh.topology import AXES, Topology, resolve

if TYPE_CHECKING:
    from threefold.mesh.mesh import Mesh

_MESH_KEYS = ("mesh.dp", "mesh.dp_shard", "mesh.cp", "mesh.tp")
_KEY = "threefold/doctor"


@dataclass(frozen=True)
class Options:
    """How the report is shown, and how long a collective may take, s."""

    as_json: bool = False
    limit_s: float = 30.0


@dataclass(frozen=True)
class MachineReport:
    """Everything found on one machine, and the facts that it was found from."""

    findings: list[Finding]
    facts: dict[str, Any]
    versions: dict[str, str]


def doctor_command(loaded: Loaded, options: Options) -> int:
    """Prints the report and returns the exit code: 0 nothing is in the way of a run, 1 something is.

    Raises:
        ThreefoldError: the ranks cannot meet, or a mesh that does not fit.
    """
    info = environment.current()
    if info.launcher is not None:
        environment.settle_rank(info)
        topology, _ = resolve(loaded.config.mesh, launched_world_size=info.world_size, num_devices=None)
        return run_rank(loaded.config, topology, options)
    if not any(key in loaded.origins for key in _MESH_KEYS):
        report = look_at_machine(loaded.config, several_machines=False)
        _show(report.findings, [], {"machine": report.facts}, options)
        return EXIT_FAILED if would_stop(report.findings) else 0
    from threefold.run.start import topology_here

    topology, _ = topology_here(loaded.config)
    if topology.world_size == 1:
        return run_rank(loaded.config, topology, options)
    local_ranks.preload(("torch", "torch.distributed.device_mesh", "transformers", "threefold.commands.doctor"))
    return local_ranks.start_ranks(_rank_entry, (loaded.config, topology, options), num_ranks=topology.world_size)


def _rank_entry(config: Config, topology: Topology, options: Options) -> None:
    try:
        code = run_rank(config, topology, options)
    except ThreefoldError as error:
        if environment.current().rank == 0:
            sys.stderr.write(f"{error}\n")
        code = error.exit_code
    sys.exit(code)


def look_at_machine(config: Config, *, several_machines: bool) -> MachineReport:
    """All checks that need no other rank."""
    environ = environment.variables()
    folders = {"runs": Path(config.log.dir or "runs"), "caches": environment.cache_folder()}
    machine = checks_machine.look(environ, folders=folders)
    network = checks_network.look(environ)
    packages = checks_packages.look()
    seen = gpu.look(environ)
    findings = [
        *checks_machine.judge(machine),
        *checks_network.judge(network, several_machines=several_machines),
        *checks_packages.judge(packages, gpus=bool(seen.gpus)),
        *gpu.judge(seen),
    ]
    versions = {name: packages[name].version for name in (*checks_packages.SHOWN, "threefold") if name in packages}
    versions["Python"] = machine.python
    if seen.nccl is not None:
        versions["NCCL"] = ".".join(map(str, seen.nccl))
    if seen.driver is not None:
        versions["driver"] = seen.driver
    links = [[*pair, kind] for pair, kind in seen.links.items()]
    facts = {**asdict(machine), "network": asdict(network), "torch": {**asdict(seen), "links": links}}
    return MachineReport(findings, facts, versions)


def run_rank(config: Config, topology: Topology, options: Options) -> int:
    """Looks at this machine and, with the other ranks, at the mesh; rank 0 prints for all."""
    info = environment.current()
    several = info.world_size > info.local_world_size
    report = look_at_machine(config, several_machines=several)
    from threefold.mesh.mesh import join_mesh

    try:
        mesh = join_mesh(topology, info, device=config.mesh.device, timeout_s=options.limit_s)
    except ThreefoldError:
        # The ranks cannot speak to one another: each machine says what it can about itself.
        if info.local_rank == 0:
            _show(report.findings, [], {"machine": report.facts}, options)
        raise
    if mesh.store is None:
        _show(report.findings, ["rank 0: the only one"], {"machine": report.facts}, options)
        return EXIT_FAILED if would_stop(report.findings) else 0
    return _with_others(mesh, report, info, options)


def _with_others(mesh: Mesh, report: MachineReport, info: LaunchInfo, options: Options) -> int:
    """The part of `run_rank` that needs the other ranks."""
    said, result, stuck = _measured_with_others(mesh, report, info, options)
    # Other machines than rank 0's say what is wrong with them through rank 0.
    bad = [finding.to_dict() for finding in report.findings if finding.level in ("stop", "warning")]
    part = json.dumps({"measured": result, "machine": bad, "stuck": stuck.to_dict() if stuck else None})
    results = _exchange(mesh, "result", part, 2 * options.limit_s)
    if mesh.rank == 0:
        reports = [checks_ranks.RankReport.from_json(said[rank]) for rank in sorted(said)]
        heard = {rank: json.loads(text) for rank, text in results.items()}
        findings = [*report.findings, *_of_others(reports, heard), *checks_ranks.judge(reports, mesh.topology)]
        findings += _of_links(heard, reports, mesh)
        facts = {
            "machine": report.facts,
            "mesh": dict(zip(AXES, mesh.topology.sizes, strict=True)),
            "ranks": [asdict(each) for each in reports],
            "measured": {rank: each["measured"] for rank, each in heard.items()},
        }
        _show(findings, checks_ranks.rank_map(reports, mesh.topology), facts, options)
        code = EXIT_FAILED if would_stop(findings) else 0
        _store(mesh).set(f"{_KEY}/code", str(code))
        _exchange(mesh, "done", "", options.limit_s)
    else:
        code = _code_of_rank_0(mesh, stuck, 3 * options.limit_s)
    if stuck is not None:
        # An operation is under way that will not end, and closing would wait for it.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    mesh.close()
    return code


def _measured_with_others(
    mesh: Mesh, report: MachineReport, info: LaunchInfo, options: Options
) -> tuple[dict[int, str], dict[str, Any] | None, Finding | None]:
    """(what every rank says of itself, what this rank has measured, what did not end)."""
    from threefold.doctor import links as checks_links

    stuck = None
    try:
        checks_links.meet(mesh, limit_s=options.limit_s)
    except checks_links.StuckError as error:
        stuck = error.finding(options.limit_s)
    own = checks_ranks.RankReport(
        mesh.rank,
        info.host or report.facts["host"],
        info.local_rank,
        os.getpid(),
        _device_name(mesh),
        time.time(),
        report.versions,
    )
    said = _exchange(mesh, "report", own.to_json(), options.limit_s)
    if stuck is not None or len(said) < mesh.world_size:
        return said, None, stuck
    hosts = [checks_ranks.RankReport.from_json(said[rank]).host for rank in range(mesh.world_size)]
    try:
        measured = checks_links.measure(mesh, limit_s=options.limit_s, hosts=hosts)
    except checks_links.StuckError as error:
        return said, None, error.finding(options.limit_s)
    return said, asdict(measured), None


def _exchange(mesh: Mesh, name: str, part: str, limit_s: float) -> dict[int, str]:
    """What every rank says, by rank; those that say nothing in time are left out. Only rank 0 waits for results."""
    keys = [f"{_KEY}/{name}/{rank}" for rank in range(mesh.world_size)]
    store = _store(mesh)
    store.set(keys[mesh.rank], part)
    if name != "report" and mesh.rank != 0:
        return {}
    ends = time.monotonic() + limit_s
    found = {}
    for rank, key in enumerate(keys):
        try:
            store.wait([key], timedelta(seconds=max(0.01, ends - time.monotonic())))
            found[rank] = store.get(key).decode()
        except RuntimeError:  # that rank is gone or late
            continue
    return found


def _code_of_rank_0(mesh: Mesh, stuck: Finding | None, limit_s: float) -> int:
    store = _store(mesh)
    try:
        store.wait([f"{_KEY}/code"], timedelta(seconds=limit_s))
        code = int(store.get(f"{_KEY}/code"))
        store.set(f"{_KEY}/done/{mesh.rank}", "")
    except RuntimeError:  # rank 0 is gone, and with it who speaks for all
        if stuck is not None:
            sys.stderr.write("\n".join([*stuck.lines(), ""]))
        return EXIT_FAILED
    return code


def _of_others(reports: Sequence[checks_ranks.RankReport], heard: dict[int, dict[str, Any]]) -> list[Finding]:
    """What the first rank of each other machine has found wrong there."""
    found, seen = [], {reports[0].host}
    for report in reports:
        if report.host in seen or report.rank not in heard:
            continue
        seen.add(report.host)
        for values in heard[report.rank]["machine"]:
            found.append(Finding(**{**values, "what": f"on {report.host}: {values['what']}"}))
    return found


def _of_links(
    heard: dict[int, dict[str, Any]], reports: Sequence[checks_ranks.RankReport], mesh: Mesh
) -> list[Finding]:
    from threefold.doctor import links as checks_links

    stuck = [Finding(**each["stuck"]) for each in heard.values() if each["stuck"]]
    found = list({finding.what: finding for finding in stuck}.values())
    missing = sorted(set(range(mesh.world_size)) - set(heard))
    if missing:
        found.append(
            stop(
                "ranks",
                f"no result came from {ranks_text(missing)}",
                expected="a result of every rank",
                fix="look at the output of that rank and of its host",
            )
        )
    measured = {rank: checks_links.Measured.of(each["measured"]) for rank, each in heard.items() if each["measured"]}
    if found or not measured:  # where a test hung, the numbers of the others were taken while they waited
        return found
    own_links = mesh.device.type == "cuda" or len({report.host for report in reports}) > 1
    return checks_links.judge(measured, own_links=own_links)


def _store(mesh: Mesh) -> Any:
    assert mesh.store is not None
    return mesh.store


def _device_name(mesh: Mesh) -> str:
    if mesh.device.type != "cuda":
        return str(mesh.device)
    import torch

    return f"{mesh.device} {torch.cuda.get_device_name(mesh.device)}"


def _show(findings: Sequence[Finding], ranks: Sequence[str], facts: dict[str, Any], options: Options) -> None:
    if options.as_json:
        values = {"findings": [finding.to_dict() for finding in findings], "stop": would_stop(findings), **facts}
        print(json.dumps(values, indent=2, default=str), flush=True)
        return
    shown = [*findings, note("ranks", f"{len(ranks)} on the mesh")] if ranks else list(findings)
    print("\n".join([*render(shown), *(f"          {line}" for line in ranks), summary(findings)]), flush=True)
