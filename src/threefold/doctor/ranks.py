"""What ranks say of themselves, side by side: where each is, and in what they differ. No torch, no communication."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from threefold.doctor.findings import Finding, note, ok, stop, warning
from threefold.errors import ranks_text
from threefold.mesh.topology import Topology

_MOST_SKEW_S = 1.0
_MOST_SHOWN = 16
# Ranks with other versions of these do not compute or say the same.
_MUST_AGREE = ("torch", "transformers", "threefold", "NCCL")


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

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> RankReport:
        return cls(**json.loads(text))


def rank_map(reports: Sequence[RankReport], topology: Topology) -> list[str]:
    """A line for each rank: host, device, and its place on the axes."""
    lines = []
    for report in reports[:_MOST_SHOWN]:
        _, _, cp, tp = topology.coordinates(report.rank)
        place = f"dp {topology.dp_rank(report.rank)}  cp {cp}  tp {tp}"
        lines.append(f"rank {report.rank}: {place}  on {report.host}, {report.device}, process {report.process}")
    if len(reports) > _MOST_SHOWN:
        hosts = len({report.host for report in reports})
        lines.append(f"... and {len(reports) - _MOST_SHOWN} more; {len(reports)} ranks on {hosts} hosts")
    return lines


def judge(reports: Sequence[RankReport], topology: Topology) -> list[Finding]:
    """In what the ranks differ, and axes that a host's border cuts."""
    found = [finding for name in _versions(reports) for finding in _differences(name, reports)]
    found = found or [ok("versions of the ranks", "the same on all")]
    found.append(_clocks(reports))
    hosts = {report.rank: report.host for report in reports}
    for axis in ("tp", "cp"):
        for ranks in topology.groups(axis):
            if len({hosts[rank] for rank in ranks if rank in hosts}) > 1:
                found.append(
                    note(f"axis {axis}", f"{ranks_text(ranks)} are on several hosts: every layer waits for the network")
                )
                break
    return found


def _versions(reports: Sequence[RankReport]) -> list[str]:
    return sorted({name for report in reports for name in report.versions})


def _differences(name: str, reports: Sequence[RankReport]) -> list[Finding]:
    by_version: dict[str, list[int]] = {}
    for report in reports:
        by_version.setdefault(report.versions.get(name, "none"), []).append(report.rank)
    if len(by_version) == 1:
        return []
    what = "; ".join(f"{version} on {ranks_text(ranks)}" for version, ranks in by_version.items())
    say = stop if name in _MUST_AGREE else warning
    return [
        say(
            "versions of the ranks",
            f"{name}: {what}",
            expected="the same everywhere, so that all ranks compute and say the same",
            fix="the same environment or image on every machine",
        )
    ]


def _clocks(reports: Sequence[RankReport]) -> Finding:
    first, last = (choose(reports, key=lambda report: report.clock) for choose in (min, max))
    skew_s = last.clock - first.clock
    if skew_s <= _MOST_SKEW_S:
        return ok("clocks of the ranks", f"within {max(skew_s, 0.001):.3f} s")
    return warning(
        "clocks of the ranks",
        f"{last.host} is {skew_s:.1f} s ahead of {first.host}",
        expected=f"within {_MOST_SKEW_S:g} s: logs of several machines are read side by side",
        fix="start chrony or systemd-timesyncd on both",
    )
