"""Which rank is late, from what the ranks have said; and the texts that say so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from threefold.mesh.exchange import Exchange
from threefold.run.watch import main_thread
from threefold.run.watch.main_thread import MainThread
from threefold.run.watch.pulse import Peer, Pulse
from threefold.run.watch.stall import Report, Seen, Stall, find
from threefold.run.watch.watchdog import Watchdog
from threefold.training.lag import own_s
from threefold.training.progress import DeviceForward, OwnTime, Phase, Progress, core_wait_s

WORKING = "  File loader.py, line 1, in read\n    file.read()"
PHASES = ("data", "forward", "backward", "reduce", "optimizer")


def seen(
    rank: int,
    number: int,
    *,
    still_s: float = 30.0,
    silent_s: float = 0.5,
    host: str = "a",
    **what: Any,
) -> Seen:
    """A rank that waits in a collective, unless it has a stack."""
    step, phase = divmod(number - 1, len(PHASES))
    waits = "" if "stack" in what else "collective"
    place = {"step": step + 1, "phase": PHASES[phase], "waits": waits, **what}
    return Seen(Report(rank, host, 100 + rank, number, **place), still_s, silent_s)


def found(*ranks: Seen, world_size: int = 4) -> Stall:
    stall = find(
        {each.report.rank: each for each in ranks},
        world_size=world_size,
        stall_s=10,
        silent_s=5,
    )
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
    assert stall.ends


def test_rank_that_is_behind_but_goes_on_is_slow_and_no_stall() -> None:
    ranks = [seen(0, 17), seen(1, 17), seen(2, 16, still_s=3.0, stack=WORKING), seen(3, 17)]
    assert (
        find({each.report.rank: each for each in ranks}, world_size=4, stall_s=10, silent_s=5)
        is None
    )


def test_rank_that_falls_silent_is_not_named_where_it_was() -> None:
    """One call may hold Python's lock in the phase after, which it could not report."""
    ranks = {0: seen(0, 9), 1: seen(1, 7, silent_s=4.0, stack=WORKING)}
    assert find(ranks, world_size=2, stall_s=10, silent_s=5) is None
    ranks[1] = seen(1, 7, silent_s=6.0, stack=WORKING)
    assert found(*ranks.values(), world_size=2).silent == (1,)
    ranks[1] = seen(1, 7, silent_s=2.0, stack=WORKING)
    assert found(*ranks.values(), world_size=2).silent == ()


def test_in_the_same_phase_the_one_outside_of_a_collective_is_late() -> None:
    stall = found(seen(0, 17), seen(1, 17, stack=WORKING), seen(2, 17), seen(3, 17))
    assert [each.report.rank for each in stall.late] == [1]


def test_where_nothing_tells_all_are_named() -> None:
    stall = found(*(seen(rank, 17) for rank in range(4)))
    assert [each.report.rank for each in stall.late] == [0, 1, 2, 3]


def test_of_many_late_ranks_a_few_are_described() -> None:
    stall = found(*(seen(rank, 17, stack=WORKING) for rank in range(64)), world_size=64)
    assert stall.headline().endswith(
        "rank 3 of host a (process 103) is in forward of step 4; and ranks 4 to 63"
    )
    assert stall.text().count("innermost") == 4


def test_rank_without_a_sign_of_life_is_named_whatever_it_said_last() -> None:
    stall = found(seen(0, 17), seen(1, 18, silent_s=12.0, host="b"), seen(2, 17), seen(3, 17))
    assert stall.headline() == (
        "no progress for 30 s: rank 1 of host b (process 101) has given no sign of life for 12 s, "
        "last in backward of step 4: its process or its host is gone, frozen or cut off"
    )
    assert "innermost" not in stall.text()


@pytest.mark.parametrize(
    ("state", "text"),
    [
        (
            "stopped",
            "its process is stopped (SIGSTOP or a debugger): resume it with kill -CONT 101",
        ),
        ("gone", "its process is gone"),
        ("held", "its process is alive, but one call holds Python's lock (the GIL)"),
        (
            "uninterruptible",
            "its process waits uninterruptibly in nfs_wait: a disk, a file system or a driver is stuck",
        ),
    ],
)
def test_what_its_host_sees_of_a_silent_rank_is_said(state: str, text: str) -> None:
    stall = found(
        seen(0, 17),
        seen(1, 18, silent_s=12.0, state=state, kernel="nfs_wait", stack=WORKING),
        seen(2, 17),
    )
    assert stall.headline().endswith(
        f"has given no sign of life for 12 s, in backward of step 4: {text}"
    )
    assert ("innermost" in stall.text()) == (state in ("held", "uninterruptible"))


def test_thread_that_waits_uninterruptibly_is_said() -> None:
    stall = found(
        seen(0, 17), seen(1, 16, stack=WORKING, kernel="nfs_wait"), seen(2, 17), seen(3, 17)
    )
    assert stall.headline().endswith(
        "is in data of step 4, waiting uninterruptibly in nfs_wait: a disk, a file system or a driver is stuck"
    )


def test_in_the_same_backward_the_one_that_has_begun_fewer_collectives_is_late() -> None:
    """Its collectives run in C++, where no stack shows them; who waits in one group lets others wait in another."""
    tp, dp = ("0,1/tp", "2,3/tp"), ("0,2/dp", "1,3/dp")
    begun = [
        {tp[0]: 8, dp[0]: 3},
        {tp[0]: 7, dp[1]: 3},
        {tp[1]: 8, dp[0]: 4},
        {tp[1]: 8, dp[1]: 4},
    ]
    stall = found(*(seen(rank, 18, begun=counts) for rank, counts in enumerate(begun)))
    assert [each.report.rank for each in stall.late] == [1]


def test_counts_of_other_groups_are_never_compared() -> None:
    stall = found(*(seen(rank, 18, begun={f"{rank}/tp": 3 + rank}) for rank in range(4)))
    assert [each.report.rank for each in stall.late] == [0, 1, 2, 3]


def test_before_the_first_step_only_a_wait_with_a_limit_ends_the_run() -> None:
    """A rank may download or prepare for hours while the others wait for it over the store."""
    setup = {"step": 0, "phase": "loading"}
    late = seen(0, 4, stack=WORKING, **setup)
    assert late.report.place() == "in loading, before its first step"
    assert not found(late, *(seen(rank, 5, waits="store", **setup) for rank in (1, 2, 3))).ends
    assert found(late, *(seen(rank, 5, waits="collective", **setup) for rank in (1, 2, 3))).ends
    held = seen(0, 4, silent_s=12.0, state="held", stack=WORKING, **setup)
    assert not found(held, *(seen(rank, 5, waits="store", **setup) for rank in (1, 2, 3))).ends
    stopped = seen(0, 4, silent_s=12.0, state="stopped", **setup)
    assert found(stopped, *(seen(rank, 5, waits="store", **setup) for rank in (1, 2, 3))).ends


def test_rank_that_has_never_spoken_is_named() -> None:
    stall = found(seen(0, 17), seen(1, 17))
    assert stall.headline() == "no progress for 30 s: ranks 2 and 3 have not begun"
    assert stall.ends


def test_all_at_their_own_data_wait_for_nobody() -> None:
    assert not found(*(seen(rank, 16, stack=WORKING) for rank in range(4))).ends


def test_same_stall_has_the_same_key_until_a_rank_moves() -> None:
    first = found(seen(0, 17), seen(1, 16), seen(2, 17), seen(3, 17))
    later = found(
        seen(0, 17, still_s=60),
        seen(1, 16, still_s=60),
        seen(2, 17, still_s=60),
        seen(3, 17, still_s=60),
    )
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


class _Batches:
    """A batch that takes this thread `on_core` s of a core and `off_core` s without one."""

    def __init__(self, on_core: float, off_core: float) -> None:
        self._on_core, self._off_core = on_core, off_core

    def __iter__(self) -> _Batches:
        return self

    def __next__(self) -> int:
        until = time.thread_time() + self._on_core
        while time.thread_time() < until:
            pass
        time.sleep(self._off_core)
        return 7


def test_waiting_for_data_counts_by_the_clock_and_as_nothing_else() -> None:
    """Reading in the main thread is work and waiting for data; it counts as one."""
    own = OwnTime()
    begun = time.perf_counter()
    assert own.read(_Batches(on_core=0.2, off_core=0.1)) == 7
    passed = time.perf_counter() - begun
    parts = own.parts()
    assert 0.3 <= parts["data"] <= passed
    assert parts["compute"] < 0.1 and parts["core"] < 0.1
    assert own_s(parts) == pytest.approx(sum(parts.values()))


def test_what_is_noted_of_a_rank_is_told_once_and_none_is_lost() -> None:
    progress = Progress()
    own = OwnTime(progress)
    progress.blocked_s, progress.still_s = 2.0, 0.5
    # Asked for again, it is the same.
    assert (own.parts()["blocked"], own.parts()["still"]) == (2.0, 0.5)
    progress.still_s += 0.25  # noted between what was told and the next window
    own = OwnTime(progress)
    progress.blocked_s += 1.0
    assert (own.parts()["blocked"], own.parts()["still"]) == (1.0, 0.25)
    assert (OwnTime(progress).parts()["blocked"], OwnTime(progress).parts()["still"]) == (
        0.0,
        0.0,
    )


def test_a_stop_that_is_over_is_noted_before_it_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who notes it may come to it only when this thread lets it."""
    progress, slept = Progress(), list[float]()
    progress.note_by = time.monotonic() - 0.3

    def sleep(seconds: float, *, notes: bool) -> None:
        slept.append(seconds)
        if notes and len(slept) == 3:
            progress.still_s, progress.note_by = 0.3, time.monotonic() + 60

    monkeypatch.setattr("threefold.training.progress.time.sleep", partial(sleep, notes=True))
    assert OwnTime(progress).parts()["still"] == 0.3 and len(slept) == 3
    assert OwnTime(progress).parts()["still"] == 0.0 and len(slept) == 3
    progress.note_by = time.monotonic() - 0.3
    monkeypatch.setattr("threefold.training.progress.time.sleep", partial(sleep, notes=False))
    begun = time.monotonic()
    # Nobody notes, and it goes on.
    assert OwnTime(progress).parts()["still"] == 0.0 and len(slept) > 3
    assert time.monotonic() - begun < 5


@pytest.mark.timing
def test_a_thread_that_waits_for_a_core_is_seen_to() -> None:
    """Two processes on one core: one of them waits while the other computes."""
    if not Path("/proc/self/schedstat").exists():
        pytest.skip(
            "this kernel does not tell how long a thread waits for a core (/proc/self/schedstat)"
        )
    work = (
        "import time\n"
        "from threefold.training.progress import core_wait_s\n"
        "print('ready', flush=True)\n"
        "input()\n"
        "until = time.thread_time() + 0.5\n"
        "begun, waited = time.perf_counter(), core_wait_s()\n"
        "while time.thread_time() < until: pass\n"
        "print(core_wait_s() - waited, time.perf_counter() - begun)\n"
    )
    core = min(os.sched_getaffinity(0))
    both = [
        subprocess.Popen(
            [sys.executable, "-c", work],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    try:
        for each in both:
            os.sched_setaffinity(each.pid, {core})
            assert each.stdout is not None and each.stdout.readline() == "ready\n"
        for each in both:
            assert each.stdin is not None
            each.stdin.write("\n")
            each.stdin.flush()
        for each in both:
            waited, passed = map(float, each.communicate(timeout=60)[0].split())
            assert waited == pytest.approx(passed - 0.5, abs=0.1)
        assert passed > 0.7
    finally:
        for each in both:
            each.kill()
            each.wait()


def test_where_the_kernel_tells_nothing_nobody_waits_for_a_core() -> None:
    assert core_wait_s("no-such-process") == 0.0


class _Event:
    """As torch.cuda.Event, on a clock that goes on by one with each event."""

    clock = 0

    def record(self) -> None:
        _Event.clock += 1000
        self.at = _Event.clock

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: _Event) -> float:
        return end.at - self.at


def test_device_time_is_that_of_forwards() -> None:
    progress = Progress()
    progress.device = DeviceForward(_Event)
    for phase in (
        "forward",
        "backward",
        "forward",
        "backward",
        "reduce",
        "evaluation",
        "backward",
    ):
        progress.enter(phase)
    assert progress.device.take_s() == 2.0
    for phase in ("forward", "forward", "backward"):  # one without a backward
        progress.enter(phase)
    own = OwnTime(progress)
    assert progress.device.take_s() == 0.0  # what was before a window does not count
    progress.enter("forward")
    progress.enter("backward")
    own.read(iter([7]))
    parts = own.parts()
    assert parts.keys() == {"data", "device"} and parts["device"] == 1.0
    assert own.parts() == parts  # asked for again, it is the same


@pytest.mark.timing
def test_rank_that_comes_from_exchange_to_exchange_in_one_phase_goes_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As in an admission, whose probes take longer together than a rank may stand still."""
    store = dist.HashStore()
    watch = Watchdog(0, stall_s=0.6, timeout_s=60.0)
    watch.mesh = SimpleNamespace(exchange=Exchange(0, 1, dist.HashStore()))  # type: ignore[assignment]
    with watch:
        watch.begin(store, ["here"])
        watch.progress.enter("admission")
        until = time.monotonic() + 2.0
        while time.monotonic() < until:
            watch.mesh.exchange.value_of(0, "probe", lambda: 1)
            time.sleep(0.1)
        assert capsys.readouterr().err == ""
        time.sleep(2.0)
    (line,) = (line for line in capsys.readouterr().err.splitlines() if "no progress" in line)
    assert "rank 0 of host here" in line and "is in admission" in line


def test_each_place_is_mirrored() -> None:
    progress, told = Progress(), []
    progress.mirror = told.append
    progress.enter("data", step=1)
    progress.enter("forward")
    assert told == [Phase(1, 1, "data"), Phase(2, 1, "forward")]


@pytest.mark.timing
def test_main_thread_that_waits_for_no_rank_is_blocked() -> None:
    """It reads a pipe that is written to only when another thread has looked."""
    thread, (reads, writes), found = MainThread(), os.pipe(), []

    def look() -> None:
        ends = time.monotonic() + 20.0  # it may not read yet
        while not any(found) and time.monotonic() < ends:
            found.append(thread.is_blocked(0.1))
        os.write(writes, b".")

    looks = threading.Thread(target=look)
    looks.start()
    os.read(reads, 1)
    looks.join()
    os.close(reads)
    os.close(writes)
    assert found[-1]


@pytest.mark.timing
def test_main_thread_that_computes_is_not_blocked() -> None:
    thread, found, ends = MainThread(), [], time.monotonic() + 0.5

    def look() -> None:
        while time.monotonic() < ends:
            found.append(thread.is_blocked(0.05))

    looks = threading.Thread(target=look)
    looks.start()
    while looks.is_alive():
        sum(range(1000))
    assert found and not any(found)


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="a pulse needs Linux")
def test_pulse_is_read_by_another_of_the_host() -> None:
    pulse = Pulse()
    pulse.tell(Phase(17, 4, "forward"))
    pulse.beat(3)
    peer = Peer.at(json.loads(json.dumps(pulse.address)))
    assert peer is not None
    assert (peer.place, peer.last_beat[1], peer.silenced_by(5.0)) == (
        Phase(17, 4, "forward"),
        3,
        "",
    )
    assert peer.silenced_by(0.0) == "held"
    assert (
        "test_pulse_is_read_by_another_of_the_host" in peer.stack().splitlines()[-1]
        or "_ask" in peer.stack()
    )
    assert Peer.at({**pulse.address, "here": "another host"}) is None
    assert Peer.at({**pulse.address, "file": 99999}) is None
    another = Peer(pulse.address | {"since": "1"})
    assert another.silenced_by(5.0) == "gone"  # its number belongs to another process now
    pulse.close()


class SilentPeer:
    """Rank 0 of this host, which one call has held for `silent_s`."""

    process, place, silent_s = 100, Phase(17, 4, "forward"), 0.0
    last_beat = 0.0, 3

    def silenced_by(self, silent_s: float) -> str:
        return "held" if self.silent_s > silent_s else ""

    def stack(self) -> str:
        return WORKING

    def where_in_the_kernel(self) -> str:
        return ""


def test_what_its_host_sees_of_the_lowest_rank_is_there_before_the_judge_finds_it_silent() -> (
    None
):
    watchdog, peer, told = (
        Watchdog(1, stall_s=2.0, timeout_s=100.0),
        SilentPeer(),
        dict[str, str](),
    )
    watchdog._hosts, watchdog._peers = ["a", "a"], {0: peer}  # type: ignore[assignment, dict-item]
    store: Any = SimpleNamespace(set=told.__setitem__)
    watchdog._report_for_the_silent(store)
    assert told == {}
    peer.silent_s = 0.75 * watchdog._silent_s
    watchdog._report_for_the_silent(store)
    (report,) = map(Report.from_json, told.values())
    assert (report.rank, report.state, report.phase, report.beat) == (0, "held", "forward", 3)
    assert not watchdog.speaks_for_its_host()  # it may come back


def test_files_that_frames_are_known_by_are_there() -> None:
    """A file with another name would be passed over without a word: its thread would not be known by its frames."""
    source = Path(main_thread.__file__).parents[2]
    known = (*main_thread._STORES, main_thread._LOOP, main_thread._RANK, main_thread._SAVER)
    assert [name for name in known if not (source / name).is_file()] == []
