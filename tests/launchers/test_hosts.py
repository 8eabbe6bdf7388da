"""Two hosts that are not one cluster: folders that are not shared, an interface that leads nowhere, a late host."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from ranks.faults import wait_for
from ranks.runs import environment, prepare
from ranks.two_hosts import Host, hosts, why_not

pytestmark = [
    pytest.mark.launchers,
    pytest.mark.timing,
    pytest.mark.timeout(200),
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]

TIMEOUT_S = 12.0
KEYS = (
    "--mesh.dp",
    "2",
    "--train.steps",
    "3",
    "--mesh.timeout_s",
    str(TIMEOUT_S),
    "--log.dir",
    "run",
)


def start(
    host: Host, number: int, folder: Path, output: Path, **env: str
) -> subprocess.Popen[bytes]:
    place = {"RANK": str(number), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    master = {"MASTER_ADDR": "tfhosts-1", "MASTER_PORT": "29500"}
    return host.start(
        [sys.executable, "-m", "threefold", "train", "config.yaml", *KEYS],
        cwd=folder,
        env={**environment(folder), "OMP_NUM_THREADS": "1", **place, **master, **env},
        output=output,
    )


def test_folder_that_hosts_do_not_share_is_refused(tmp_path: Path) -> None:
    with hosts("tfhosts", 2) as both:
        started = []
        for number, host in enumerate(both):
            folder = tmp_path / f"disk-{number}"
            folder.mkdir()
            prepare(folder)
            started.append(start(host, number, folder, tmp_path / f"{number}.txt"))
        codes = [process.wait(90) for process in started]
    printed = [(tmp_path / f"{number}.txt").read_text() for number in range(2)]
    assert codes == [2, 2], printed
    said = "log.dir = run on tfhosts-2 is not the folder that rank 0 writes to"
    assert sum(said in text for text in printed) == 1, printed
    assert not (tmp_path / "disk-0" / "run").exists()


def test_interface_that_leads_nowhere_is_told(tmp_path: Path) -> None:
    prepare(tmp_path)
    with hosts("tfhosts", 2) as both:
        begun = time.monotonic()
        started = [
            start(host, number, tmp_path, tmp_path / f"{number}.txt", GLOO_SOCKET_IFNAME="lo")
            for number, host in enumerate(both)
        ]
        codes = [process.wait(90) for process in started]
        took = time.monotonic() - begun
    printed = [(tmp_path / f"{number}.txt").read_text() for number in range(2)]
    assert codes == [1, 1], printed
    assert sum("the ranks have met, but rank" in text for text in printed) == 1, printed
    assert "export GLOO_SOCKET_IFNAME=NAME" in "".join(printed)
    # Importing torch and reading the config come before the time that is limited.
    assert took < TIMEOUT_S + 20


def test_host_that_comes_late_is_waited_for(tmp_path: Path) -> None:
    prepare(tmp_path)
    with hosts("tfhosts", 2) as both:
        # The rank that has nobody to reach comes first, and must try again until the other is there.
        second = start(both[1], 1, tmp_path, tmp_path / "1.txt")
        wait_for(lambda: _tries(both[1]), "a rank that looks for rank 0", within_s=180)
        first = start(both[0], 0, tmp_path, tmp_path / "0.txt")
        codes = [first.wait(90), second.wait(90)]
    assert codes == [0, 0], (tmp_path / "0.txt").read_text() + (tmp_path / "1.txt").read_text()


def _tries(host: Host) -> bool:
    """Whether a process of the host has torch's libraries, so that it is at the rendezvous, or about to be."""
    listed = subprocess.run(
        ["ip", "netns", "pids", host.namespace], capture_output=True, text=True, check=True
    )
    maps = [Path(f"/proc/{process}/maps") for process in listed.stdout.split()]
    return any("libtorch_cpu" in path.read_text() for path in maps if path.exists())
