"""Checks by all ranks of a mesh: each checks its machine, all measure the mesh, rank 0 gathers.

Every wait has a limit: ranks put their reports into the rendezvous store, and a rank that reports nothing in time is
left out and named. `judge` compares the reports, without torch and communication.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from threefold.config.schema import Config
from threefold.doctor import gpu, machine, network, nvidia, packages, rdma
from threefold.doctor.findings import Finding, judged, note, ok, stop, warning
from threefold.errors import EXIT_FAILED, ranks_text
from threefold.jsonl import Values
from threefold.mesh import environment
from threefold.mesh.launchers.info import LaunchInfo
from threefold.mesh.topology import AXES, Topology

if TYPE_CHECKING:
    from threefold.mesh.mesh import Mesh

_KEY = "threefold/doctor"
_MOST_SKEW_S = 1.0
_MOST_SHOWN = 16
# Ranks with different versions of these do not compute or send the same.
_UNUSED_ON_CPUS = ("NCCL", "CUDA", "cuDNN", "driver", "GPU", "fabric")
_MUST_AGREE = ("torch", "transformers", "threefold", "NCCL")


@dataclass(frozen=True)
class MachineReport:
    """Everything found on one machine, and the facts behind it."""

    findings: list[Finding]
    facts: dict[str, Any]
    versions: dict[str, str]


@dataclass(frozen=True)
class RankReport:
    """One rank: its place, its versions, and its clock just after a barrier, s."""

    rank: int
    host: str
    local_rank: int
    process: int
    device: str
    clock: float
    versions: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class MeshReport:
    """Everything found on a mesh; complete on rank 0, elsewhere only `stuck`.

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
    tools = nvidia.look()
    probe = gpu.look(environ, tools)
    cards = rdma.look(environ)
    findings = machine.judge(host) + network.judge(nets, several_machines=several_machines)
    findings += packages.judge(installed, gpus=bool(probe.gpus)) + gpu.judge(probe)
    of_gpus = nvidia.judge(tools) + rdma.judge(cards, gpus=bool(probe.gpus))
    findings += of_gpus
    if config.mesh.device == "cpu":
        findings = [_unused(each) if each in of_gpus else each for each in findings]
        findings = [
            _unused(each) if each.check.startswith(_UNUSED_ON_CPUS) else each
            for each in findings
        ]
    elif not probe.gpus:
        findings = [_unused(each) if each.check == "NCCL" else each for each in findings]
    versions = {
        name: installed[name].version
        for name in (*packages.SHOWN, "threefold")
        if name in installed
    }
    versions["Python"] = host.python
    if probe.nccl is not None:
        versions["NCCL"] = ".".join(map(str, probe.nccl))
    if probe.driver is not None:
        versions["driver"] = probe.driver
    pairs = [[*pair, kind] for pair, kind in probe.links.items()]
    facts = {
        **asdict(host),
        "network": asdict(nets),
        "torch": {**asdict(probe), "links": pairs},
        "rdma": asdict(cards),
    }
    return MachineReport(
        findings, facts | {"gpus": [asdict(each) for each in tools.gpus]}, versions
    )


def _unused(finding: Finding) -> Finding:
    """A finding about something that the run does not use, which does not stop it."""
    return replace(finding, level="warning") if finding.level == "stop" else finding


def look_at_mesh(
    mesh: Mesh, report: MachineReport, info: LaunchInfo, *, limit_s: float
) -> MeshReport:
    """Everything that this machine and the other ranks have found; every rank calls it. `limit_s`: of one test."""
    reports, result, stuck = _measured(mesh, report, info, limit_s=limit_s)
    # Rank 0 also reports the faults of the other machines.
    bad = [
        asdict(finding) for finding in report.findings if finding.level in ("stop", "warning")
    ]
    part = json.dumps(
        {"measured": result, "machine": bad, "stuck": asdict(stuck) if stuck else None}
    )
    results = _exchange(mesh, "result", part, 2 * limit_s)
    if mesh.rank != 0:
        return MeshReport(stuck=stuck)
    heard = {rank: json.loads(text) for rank, text in results.items()}
    findings = [*report.findings, *_of_others(reports, heard), *judge(reports, mesh.topology)]
    findings += _of_links(heard, reports, mesh)
    facts = {
        "machine": report.facts,
        "mesh": dict(zip(AXES, mesh.topology.sizes, strict=True)),
        "ranks": [asdict(each) for each in reports],
        "measured": {rank: each["measured"] for rank, each in heard.items()},
    }
    return MeshReport(findings, rank_map(reports, mesh.topology), facts, stuck)


def agree_on_code(
    mesh: Mesh, code: int | None, stuck: Finding | None, *, limit_s: float
) -> int:
    """Rank 0's exit code, on every rank; the other ranks pass None. 1 if rank 0 is gone."""
    store = mesh.store
    assert store is not None
    if code is not None:
        store.set(f"{_KEY}/code", str(code))
        _exchange(mesh, "done", "", limit_s)
        return code
    try:
        store.wait([f"{_KEY}/code"], timedelta(seconds=3 * limit_s))
        code = int(store.get(f"{_KEY}/code"))
        store.set(f"{_KEY}/done/{mesh.rank}", "")
    except RuntimeError:  # rank 0, which prints for all, is gone
        if stuck is not None:
            sys.stderr.write("\n".join([*stuck.lines(), ""]))
        return EXIT_FAILED
    return code


def _measured(
    mesh: Mesh, report: MachineReport, info: LaunchInfo, *, limit_s: float
) -> tuple[list[RankReport], Values | None, Finding | None]:
    """(the reports of the ranks that sent one, this rank's measurements, the operation that did not end)."""
    from threefold.doctor import collectives

    stuck = None
    try:
        collectives.meet(mesh, limit_s=limit_s)
    except collectives.StuckError as error:
        stuck = error.finding(limit_s)
    host = info.host or report.facts["host"]
    device = _device_name(mesh)
    own = RankReport(
        mesh.rank, host, info.local_rank, os.getpid(), device, time.time(), report.versions
    )
    texts = _exchange(mesh, "report", json.dumps(asdict(own)), limit_s)
    reports = [RankReport(**json.loads(text)) for text in texts.values()]
    if stuck is not None or len(reports) < mesh.world_size:
        return reports, None, stuck
    try:
        measured = collectives.measure(
            mesh, limit_s=limit_s, hosts=[each.host for each in reports]
        )
    except collectives.StuckError as error:
        return reports, None, error.finding(limit_s)
    return reports, asdict(measured), None


def _exchange(mesh: Mesh, name: str, part: str, limit_s: float) -> dict[int, str]:
    """The texts of the ranks that send one in time, by rank in order. Only rank 0 waits for results."""
    keys = [f"{_KEY}/{name}/{rank}" for rank in range(mesh.world_size)]
    store = mesh.store
    assert store is not None
    store.set(keys[mesh.rank], part)
    if name != "report" and mesh.rank != 0:
        return {}
    ends = time.monotonic() + limit_s
    texts = {}
    for rank, key in enumerate(keys):
        try:
            store.wait([key], timedelta(seconds=max(0.01, ends - time.monotonic())))
            texts[rank] = store.get(key).decode()
        except RuntimeError:  # that rank is gone or late
            continue
    return texts


def _of_others(reports: Sequence[RankReport], heard: dict[int, Values]) -> list[Finding]:
    """The faults of each other machine, as its first rank found them."""
    findings, hosts = [], {reports[0].host}
    for report in reports:
        if report.host in hosts or report.rank not in heard:
            continue
        hosts.add(report.host)
        faults = [Finding(**values) for values in heard[report.rank]["machine"]]
        findings += [replace(fault, what=f"on {report.host}: {fault.what}") for fault in faults]
    return findings


def _of_links(
    heard: dict[int, Values], reports: Sequence[RankReport], mesh: Mesh
) -> list[Finding]:
    from threefold.doctor import collectives

    stuck = [Finding(**each["stuck"]) for each in heard.values() if each["stuck"]]
    findings = list({finding.what: finding for finding in stuck}.values())
    missing = sorted(set(range(mesh.world_size)) - set(heard))
    if missing:
        findings.append(
            stop(
                "ranks",
                f"no result came from {ranks_text(missing)}",
                "a result from every rank",
                "look at the output of that rank and of its host",
            )
        )
    measured = {
        rank: collectives.Measured.of(each["measured"])
        for rank, each in heard.items()
        if each["measured"]
    }
    if findings or not measured:  # if a test hung, the other ranks measured while they waited
        return findings
    own_links = mesh.on_cuda or len({report.host for report in reports}) > 1
    return collectives.judge(measured, own_links=own_links)


def _device_name(mesh: Mesh) -> str:
    if not mesh.on_cuda:
        return str(mesh.device)
    import torch

    return f"{mesh.device} {torch.cuda.get_device_name(mesh.device)}"


def rank_map(reports: Sequence[RankReport], topology: Topology) -> list[str]:
    """A line for each rank: host, device, and its place on the axes."""
    lines = []
    for report in reports[:_MOST_SHOWN]:
        _, _, cp, tp = topology.coordinates(report.rank)
        place = f"dp {topology.dp_rank(report.rank)}  cp {cp}  tp {tp}"
        lines.append(
            f"rank {report.rank}: {place}  on {report.host}, {report.device}, process {report.process}"
        )
    if len(reports) > _MOST_SHOWN:
        hosts = len({report.host for report in reports})
        lines.append(
            f"... and {len(reports) - _MOST_SHOWN} more; {len(reports)} ranks on {hosts} hosts"
        )
    return lines


def judge(reports: Sequence[RankReport], topology: Topology) -> list[Finding]:
    """How the ranks differ, and the axes that span several hosts."""
    findings = []
    for name in sorted({name for report in reports for name in report.versions}):
        by_version: dict[str, list[int]] = {}
        for report in reports:
            by_version.setdefault(report.versions.get(name, "none"), []).append(report.rank)
        if len(by_version) > 1:
            versions = "; ".join(
                f"{version} on {ranks_text(ranks)}" for version, ranks in by_version.items()
            )
            level = stop if name in _MUST_AGREE else warning
            findings.append(
                level(
                    "versions of the ranks",
                    f"{name}: {versions}",
                    "the same everywhere, so that all ranks compute and send the same",
                    "the same environment or image on every machine",
                )
            )
    findings = findings or [ok("versions of the ranks", "the same on all")]
    first, last = (choose(reports, key=lambda report: report.clock) for choose in (min, max))
    skew_s = last.clock - first.clock
    close = f"within {max(skew_s, 0.001):.3f} s"
    far = f"{last.host} (rank {last.rank}) is {skew_s:.1f} s ahead of {first.host} (rank {first.rank})"
    fits = skew_s <= _MOST_SKEW_S
    findings.append(
        judged(
            "clocks of the ranks",
            close if fits else far,
            fits,
            f"within {_MOST_SKEW_S:g} s: logs of several machines are compared",
            "start chrony or systemd-timesyncd on both",
            otherwise="warning",
        )
    )
    hosts = {report.rank: report.host for report in reports}
    for axis in ("tp", "cp"):
        cut = (
            ranks
            for ranks in topology.groups(axis)
            if len({hosts[rank] for rank in ranks if rank in hosts}) > 1
        )
        if ranks := next(cut, None):
            text = (
                f"{ranks_text(ranks)} are on several hosts: every layer waits for the network"
            )
            findings.append(note(f"axis {axis}", text))
    return findings
