"""`threefold doctor` on two hosts: both are on the map, and an address that the other cannot reach is named."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from ranks.runs import environment
from ranks.two_hosts import Host, hosts, why_not

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timing,
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]


def _doctor(
    folder: Path,
    both: Sequence[Host],
    *arguments: str,
    interfaces: Mapping[int, str] | None = None,
) -> list[tuple[int, str]]:
    """(exit code, output) of the doctor on each host."""
    started: list[subprocess.Popen[bytes]] = []
    for number, host in enumerate(both):
        interface = (interfaces or {}).get(number, "eth0")
        torchrun = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nnodes",
            "2",
            "--nproc-per-node",
            "2",
        ]
        torchrun += [
            "--node-rank",
            str(number),
            "--master-addr",
            both[0].address,
            "--master-port",
            "29500",
        ]
        started.append(
            host.start(
                [*torchrun, "-m", "threefold", "doctor", *arguments],
                cwd=folder,
                env={
                    **environment(folder),
                    "GLOO_SOCKET_IFNAME": interface,
                    "OMP_NUM_THREADS": "1",
                },
                output=folder / f"host-{number}.txt",
            )
        )
    codes = [process.wait(150) for process in started]
    return [
        (code, (folder / f"host-{number}.txt").read_text()) for number, code in enumerate(codes)
    ]


def test_both_hosts_are_on_the_map(tmp_path: Path) -> None:
    with hosts("tfdoc", 2) as both:
        (code, report), (other_code, other) = _doctor(
            tmp_path, both, "--mesh.dp", "1", "--mesh.tp", "4"
        )
    assert code == other_code == 0, report + other
    assert "rank 0: dp 0  cp 0  tp 0  on tfdoc-1, cpu" in report
    assert "rank 3: dp 0  cp 0  tp 3  on tfdoc-2, cpu" in report
    assert (
        "axis tp: ranks 0 to 3 are on several hosts: every layer waits for the network"
        in report
    )
    assert "pairs: slowest of 6: ranks " in report
    assert "gloo: uses eth0: GLOO_SOCKET_IFNAME=eth0" in report
    assert "rank 0" not in other


def test_address_that_the_other_host_cannot_reach_stops(tmp_path: Path) -> None:
    with hosts("tfdoc", 2) as both:
        answers = _doctor(tmp_path, both, "--limit", "8", interfaces={0: "lo"})
    assert all(code != 0 for code, _ in answers)
    said = answers[0][1]
    assert (
        "STOP    gloo: would offer 127.0.0.1 to the other machines: GLOO_SOCKET_IFNAME=lo"
        in said
    )
    assert "expected: an address that they can reach" in said
