"""Which rank is late, from what the ranks have said; and the texts that say so."""

from __future__ import annotations

import json

import pytest

from threefold.run.stall import Report, Seen, Stall, find
from threefold.training.progress import OwnTime, Phase, Progress, slowest

WAITING = "  File distributed_c10d.py, line 1, in all_reduce\n    work.wait()"
WORKING = "  File loader.py, line 1, in read\n    file.read()"
PHASES = ("data", "forward", "backward", "reduce", "optimizer")


def seen(
    rank: int, number: int, *, still_s: float = 30.0, silent_s: float = 0.5, stack: str = WAITING, host: str = "a"
) -> Seen:
    step, phase = divmod(number - 1, len(PHASES))
    return Seen(Report(rank, host, 100 + rank, number, step + 1, PHASES[phase], stack=stack), still_s, silent_s)


def found(*ranks: Seen, world_size: int = 4) -> Stall:
    stall = find({each.report.rank: each for each in ranks}, world_size=world_size, stall_s=10, silent_s=5)
    assert stall is not None
    return stall


def test_ranks_that_go_on_are_no_stall() -> None:
    ranks = {rank: seen(rank, 7, still_s=9.0) for rank in range(4)}
    assert find(ranks, world_size=4, stall_s=10, silent_s=5) is None


def test_rank_that_is_behind_is_late_and_the_others_wait() -> None:
    stall = found(seen(0, 17), seen(1, 17), seen(2, 16, stack=WORKING, host="b"), seen(3, 18))
    assert [each.report.rank for each in stall.late] == [2]
    assert stall.text() == (
        "no progress for 30 s: rank 2 of host b (process 102) is in data of step 4\n"
        "  ranks 0 and 1 wait in forward of step 4\n"
        "  rank 3 waits in backward of step 4\n"
        "  rank 2 is at (the innermost call is the last):\n"
        "      File loader.py, line 1, in read\n"
        "        file.read()"
    )
    assert stall.someone_waits


def test_rank_that_is_behind_but_goes_on_is_slow_and_no_stall() -> None:
    ranks = [seen(0, 17), seen(1, 17), seen(2, 16, still_s=3.0, stack=WORKING), seen(3, 17)]
    assert find({each.report.rank: each for each in ranks}, world_size=4, stall_s=10, silent_s=5) is None


def test_in_the_same_phase_the_one_outside_of_a_collective_is_late() -> None:
    stall = found(seen(0, 17), seen(1, 17, stack=WORKING), seen(2, 17), seen(3, 17))
    assert [each.report.rank for each in stall.late] == [1]


def test_where_nothing_tells_all_are_named() -> None:
    stall = found(*(seen(rank, 17) for rank in range(4)))
    assert [each.report.rank for each in stall.late] == [0, 1, 2, 3]


def test_rank_without_a_sign_of_life_is_named_whatever_it_said_last() -> None:
    stall = found(seen(0, 17), seen(1, 18, silent_s=12.0, host="b"), seen(2, 17), seen(3, 17))
    assert stall.headline() == (
        "no progress for 30 s: rank 1 of host b (process 101) has given no sign of life for 12 s, "
        "last in backward of step 4: its process or its host is gone, frozen or cut off"
    )
    assert "innermost" not in stall.text()


def test_rank_that_has_never_spoken_is_named() -> None:
    stall = found(seen(0, 17), seen(1, 17))
    assert stall.headline() == "no progress for 30 s: ranks 2 and 3 have not begun"
    assert stall.someone_waits


def test_all_at_their_own_data_wait_for_nobody() -> None:
    assert not found(*(seen(rank, 16, stack=WORKING) for rank in range(4))).someone_waits


def test_same_stall_has_the_same_key_until_a_rank_moves() -> None:
    first = found(seen(0, 17), seen(1, 16), seen(2, 17), seen(3, 17))
    later = found(seen(0, 17, still_s=60), seen(1, 16, still_s=60), seen(2, 17, still_s=60), seen(3, 17, still_s=60))
    moved = found(seen(0, 22), seen(1, 21), seen(2, 22), seen(3, 22))
    assert first.key == later.key != moved.key


def test_report_travels_as_text() -> None:
    report = seen(3, 17).report
    assert Report.from_json(report.to_json().encode()) == report
    assert json.loads(report.to_json())["phase"] == "forward"


def test_progress_counts_the_phases_it_has_entered() -> None:
    progress = Progress()
    assert progress.place == Phase(0, 0, "start")
    progress.enter("data", step=1)
    progress.enter("forward")
    assert progress.place == Phase(2, 1, "forward")


def test_slowest_rank_and_the_share_that_the_others_wait_for_it() -> None:
    assert slowest([1.0, 1.0, 4.0, 1.0], 5.0) == (2, pytest.approx(0.6))
    assert slowest([2.0, 2.0], 4.0) == (0, 0.0)


def test_own_time_counts_data_once() -> None:
    """Reading in the main thread is work and waiting for data; it counts as one."""
    own = OwnTime(_began=0.0)
    own.read(wall_s=5.0, cpu_s=0.0)
    before = own.total_s()
    own.read(wall_s=2.0, cpu_s=2.0)
    assert own.data_wait_s == 7.0
    assert own.total_s() - before == pytest.approx(0.0, abs=0.1)
