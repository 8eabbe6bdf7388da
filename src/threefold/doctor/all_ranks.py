"""What the ranks of a mesh find together: each looks at its machine, all measure the mesh, rank 0 gathers.

Nothing waits without a limit: what ranks say lies in the rendezvous store, and a rank that says nothing in time is left
out and named.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from threefold.config.schema import Config
from threefold.doctor import gpu, machine, network, packages
from threefold.doctor import ranks as side_by_side
from threefold.doctor.findings import Finding, stop
from threefold.errors import EXIT_FAILED, ranks_text
from threefold.mesh import environment
from threefold.mesh.launchers.info import LaunchInfo
from threefold.mesh.topology import AXES

if TYPE_CHECKING:
    from threefold.mesh.mesh import Mesh

_KEY = "threefold/doctor"


@dataclass(frozen=True)
class MachineReport:
    """Everything found on one machine, and the facts that it was found from."""

    findings: list[Finding]
    facts: dict[str, Any]
    versions: dict[str, str]


@dataclass(frozen=True)
class MeshReport:
    """Everything found on a mesh; whole on rank 0, elsewhere `stuck` alone.

    Attributes:
        ranks: a line for each rank.
        stuck: an operation of this rank that did not end within its limit, and never will.
    """

    findings: list[Finding] = field(default_factory=list)
    ranks: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    stuck: Finding | None = None


def look_at_machine(config: Config, *, several_machines: bool) -> MachineReport:
    """All checks that need no other rank."""
    environ = environment.variables()
    folders = {"runs": Path(config.log.dir or "runs"), "caches": environment.cache_folder()}
    host = machine.look(environ, folders=folders)
    nets = network.look(environ)
    installed = packages.look()
    seen = gpu.look(environ)
    findings = [
        *machine.judge(host),
        *network.judge(nets, several_machines=several_machines),
        *packages.judge(installed, gpus=bool(seen.gpus)),
        *gpu.judge(seen),
    ]
    versions = {name: installed[name].version for name in (*packages.SHOWN, "threefold") if name in installed}
    versions["Python"] = host.python
    if seen.nccl is not None:
        versions["NCCL"] = ".".join(map(str, seen.nccl))
    if seen.driver is not None:
        versions["driver"] = seen.driver
    pairs = [[*pair, kind] for pair, kind in seen.links.items()]
    facts = {**asdict(host), "network": asdict(nets), "torch": {**asdict(seen), "links": pairs}}
    return MachineReport(findings, facts, versions)


def look_at_mesh(mesh: Mesh, report: MachineReport, info: LaunchInfo, *, limit_s: float) -> MeshReport:
    """What this rank's machine and the other ranks have found; every rank calls it.

    Args:
        limit_s: the longest time of one test.
    """
    said, result, stuck = _measured(mesh, report, info, limit_s=limit_s)
    # Other machines than rank 0's say what is wrong with them through rank 0.
    bad = [finding.to_dict() for finding in report.findings if finding.level in ("stop", "warning")]
    part = json.dumps({"measured": result, "machine": bad, "stuck": stuck.to_dict() if stuck else None})
    results = _exchange(mesh, "result", part, 2 * limit_s)
    if mesh.rank != 0:
        return MeshReport(stuck=stuck)
    reports = [side_by_side.RankReport.from_json(said[rank]) for rank in sorted(said)]
    heard = {rank: json.loads(text) for rank, text in results.items()}
    findings = [*report.findings, *_of_others(reports, heard), *side_by_side.judge(reports, mesh.topology)]
    findings += _of_links(heard, reports, mesh)
    facts = {
        "machine": report.facts,
        "mesh": dict(zip(AXES, mesh.topology.sizes, strict=True)),
        "ranks": [asdict(each) for each in reports],
        "measured": {rank: each["measured"] for rank, each in heard.items()},
    }
    return MeshReport(findings, side_by_side.rank_map(reports, mesh.topology), facts, stuck)


def agree_on_code(mesh: Mesh, code: int | None, stuck: Finding | None, *, limit_s: float) -> int:
    """The exit code that rank 0 gives, on every rank; the others pass None. 1 where rank 0 is gone."""
    store = _store(mesh)
    if code is not None:
        store.set(f"{_KEY}/code", str(code))
        _exchange(mesh, "done", "", limit_s)
        return code
    try:
        store.wait([f"{_KEY}/code"], timedelta(seconds=3 * limit_s))
        code = int(store.get(f"{_KEY}/code"))
        store.set(f"{_KEY}/done/{mesh.rank}", "")
    except RuntimeError:  # rank 0 is gone, and with it who speaks for all
        if stuck is not None:
            sys.stderr.write("\n".join([*stuck.lines(), ""]))
        return EXIT_FAILED
    return code


def _measured(
    mesh: Mesh, report: MachineReport, info: LaunchInfo, *, limit_s: float
) -> tuple[dict[int, str], dict[str, Any] | None, Finding | None]:
    """(what every rank says of itself, what this rank has measured, what did not end)."""
    from threefold.doctor import links

    stuck = None
    try:
        links.meet(mesh, limit_s=limit_s)
    except links.StuckError as error:
        stuck = error.finding(limit_s)
    own = side_by_side.RankReport(
        mesh.rank,
        info.host or report.facts["host"],
        info.local_rank,
        os.getpid(),
        _device_name(mesh),
        time.time(),
        report.versions,
    )
    said = _exchange(mesh, "report", own.to_json(), limit_s)
    if stuck is not None or len(said) < mesh.world_size:
        return said, None, stuck
    hosts = [side_by_side.RankReport.from_json(said[rank]).host for rank in range(mesh.world_size)]
    try:
        measured = links.measure(mesh, limit_s=limit_s, hosts=hosts)
    except links.StuckError as error:
        return said, None, error.finding(limit_s)
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


def _of_others(reports: Sequence[side_by_side.RankReport], heard: dict[int, dict[str, Any]]) -> list[Finding]:
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
    heard: dict[int, dict[str, Any]], reports: Sequence[side_by_side.RankReport], mesh: Mesh
) -> list[Finding]:
    from threefold.doctor import links

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
    measured = {rank: links.Measured.of(each["measured"]) for rank, each in heard.items() if each["measured"]}
    if found or not measured:  # where a test hung, the numbers of the others were taken while they waited
        return found
    own_links = mesh.device.type == "cuda" or len({report.host for report in reports}) > 1
    return links.judge(measured, own_links=own_links)


def _store(mesh: Mesh) -> Any:
    assert mesh.store is not None
    return mesh.store


def _device_name(mesh: Mesh) -> str:
    if mesh.device.type != "cuda":
        return str(mesh.device)
    import torch

    return f"{mesh.device} {torch.cuda.get_device_name(mesh.device)}"
