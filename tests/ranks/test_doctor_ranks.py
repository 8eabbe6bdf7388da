"""`threefold doctor` on real ranks: every axis is tried, and a rank that does not come is named within the limit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ranks.runs import command, environment
from ranks.spawn import run_ranks
from threefold.doctor.collectives import (
    Measured,
    StuckError,
    Timing,
    judge,
    paired_ranks,
    rounds,
)
from threefold.mesh.mesh import Mesh

pytestmark = pytest.mark.ranks


def test_mesh_is_started_here_and_every_axis_measured(tmp_path: Path) -> None:
    done = command(tmp_path, "doctor", "--json", "--mesh.dp", "2", "--mesh.tp", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    values = json.loads(done.stdout)
    assert [rank["rank"] for rank in values["ranks"]] == [0, 1, 2, 3]
    assert values["mesh"] == {"dp_replicate": 2, "dp_shard": 1, "cp": 1, "tp": 2}
    for rank, measured in values["measured"].items():
        assert list(measured["axes"]) == ["dp", "tp", "world"]
        for timing in measured["axes"].values():
            assert timing["right"] and int(rank) in timing["ranks"]
            assert (
                timing["barrier_s"] > 0
                and timing["latency_s"] > 0
                and timing["bytes_per_s"] > 0
            )
    pairs = {
        (int(rank), int(other))
        for rank, each in values["measured"].items()
        for other in each["pairs"]
    }
    assert pairs == {(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)}
    checks = [finding["check"] for finding in values["findings"]]
    assert checks.count("Python") == 1
    assert [check for check in checks if check.startswith("axis")] == [
        "axis dp",
        "axis tp",
        "axis world",
    ]


def test_under_torchrun_rank_0_speaks_for_all(tmp_path: Path) -> None:
    # Cold, by torchrun's own script: what is found out of a machine may depend on what is imported, and by whom.
    torchrun = Path(sys.executable).with_name("torchrun")
    done = subprocess.run(
        [torchrun, "--standalone", "--nproc-per-node", "2", "-m", "threefold", "doctor"],
        cwd=tmp_path,
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("Python:") == 1
    assert "rank 1: dp 1  cp 0  tp 0  on " in done.stdout
    assert "pairs: slowest of 1: ranks 0 and 1, " in done.stdout


def _measure_without(how: str) -> str | None:
    import torch.distributed as dist

    from threefold.doctor import collectives
    from threefold.mesh.mesh import init_mesh

    mesh = init_mesh(dp=2)
    assert mesh.store is not None
    begun = time.monotonic()
    if dist.get_rank() == 1:
        if how == "late":
            mesh.store.wait(["test is over"])
        return None
    try:
        collectives.measure(mesh, limit_s=1.0, hosts=["a", "a"])
    except collectives.StuckError as error:
        assert time.monotonic() - begun < 40
        mesh.store.set("test is over", "")
        return "\n".join(error.finding(1.0).lines())
    return "measured"


@pytest.mark.parametrize("how", ["late", "gone"])
def test_rank_that_does_not_come_is_named_in_time(how: str) -> None:
    said, _ = run_ranks(_measure_without, 2, how)
    assert said == (
        "STOP    collective: all-reduce over dp of ranks 0 and 1 did not end in 1 s: rank 1 did not join\n"
        "          expected: an answer from every rank\n"
        "          fix: look at rank 1: is the process running, is its host reachable"
    )


def _whole_doctor_without_a_rank(folder: str) -> None:
    import torch.distributed as dist

    from threefold.commands import doctor
    from threefold.config.schema import Config
    from threefold.doctor import ranks
    from threefold.mesh.topology import Topology

    os.chdir(folder)
    rank = dist.get_rank()
    os.environ.update(
        RANK=str(rank), WORLD_SIZE="3", LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="3"
    )
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="1")
    meshes = []
    measured = ranks._measured

    def silent(mesh: Mesh, *rest: object, **limits: float) -> None:
        assert mesh.store is not None
        mesh.store.wait(["test is over"])
        raise SystemExit(0)

    if rank == 2:
        doctor.look_at_mesh = silent  # type: ignore[assignment]
    else:
        ranks._measured = lambda mesh, *rest, **limits: (
            meshes.append(mesh) or measured(mesh, *rest, **limits)
        )
    with open(f"{folder}/rank-{rank}", "w") as file:
        os.dup2(file.fileno(), 1)
    os._exit = lambda code: (_ for _ in ()).throw(SystemExit(code))  # type: ignore[assignment]
    try:
        code = doctor.run_rank(
            Config(), Topology(dp_replicate=3), doctor.ReportOptions(limit_s=0.5)
        )
    except SystemExit as stop:
        code = stop.code
    Path(f"{folder}/code-{rank}").write_text(str(code))
    if rank == 0:
        meshes[0].store.set("test is over", "")


def test_report_is_whole_where_a_rank_is_silent(tmp_path: Path) -> None:
    run_ranks(_whole_doctor_without_a_rank, 3, str(tmp_path))
    assert (tmp_path / "code-0").read_text() == (tmp_path / "code-1").read_text() == "1"
    report = (tmp_path / "rank-0").read_text()
    assert "barrier of ranks 0 to 2 did not end in 0.5 s: rank 2 did not join" in report
    assert "no result came from rank 2" in report
    assert (tmp_path / "rank-1").read_text() == ""


def test_every_pair_meets_once_and_no_rank_has_two_partners_at_a_time() -> None:
    for size in (2, 3, 7, 8):
        found = list(rounds(range(size)))
        pairs = [pair for each in found for pair in each]
        assert sorted(pairs) == [(a, b) for a in range(size) for b in range(a + 1, size)]
        assert all(
            len({rank for pair in each for rank in pair}) == 2 * len(each) for each in found
        )


def test_of_many_ranks_one_a_host_takes_part_in_pairs() -> None:
    assert paired_ranks(["a"] * 8) == list(range(8))
    assert paired_ranks([f"host-{rank // 8}" for rank in range(128)]) == list(range(0, 128, 8))


def _measured(rates: dict[str, float], *, right: bool = True) -> Measured:
    axis = Timing([0, 1], 1e-4, 2e-4, 5e9, right)
    return Measured({"tp": axis}, {other: (1e-4, rate) for other, rate in rates.items()})


def test_slow_pair_and_wrong_sums_are_named() -> None:
    found = judge(
        {0: _measured({"1": 8e9, "2": 1e9, "3": 8e9}), 1: _measured({"2": 9e9})}, own_links=True
    )
    assert found[-1].level == "warning"
    assert found[-1].what == (
        "slowest of 4: ranks 0 and 2, 953.7 MiB/s, 100 us one way; median 7.451 GiB/s"
    )
    assert (
        judge({0: _measured({"1": 8e9, "2": 1e9, "3": 8e9})}, own_links=False)[-1].level == "ok"
    )
    wrong = judge({0: _measured({}, right=False)}, own_links=True)
    assert wrong[0].lines() == [
        "STOP    axis tp: an all-reduce of ranks 0 and 1 gave a wrong sum",
        "          expected: the sum of what the ranks sent",
        "          fix: take the host or the network card out of the job: it corrupts data",
    ]


def test_network_between_ranks_that_all_came() -> None:
    error = StuckError("all-reduce over cp", [0, 1], [], "Connection refused")
    assert error.finding(5).lines() == [
        "STOP    collective: all-reduce over cp of ranks 0 and 1 did not end in 5 s: all ranks joined, so the "
        "network between them is at fault (Connection refused)",
        "          expected: an answer from every rank",
        "          fix: open all ports between the machines; set GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME on all; "
        "NCCL_DEBUG=INFO",
    ]
