"""Which rank is named as the slowest: the rule on series of logged steps, what is said, and what the kernel tells."""

from __future__ import annotations

import json
import math
import os
import random
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from torch.distributed import HashStore

from threefold.run.watch import main_thread
from threefold.training.lag import PARTS, Lag, Lags, Slowest, slowest
from threefold.training.progress import OwnTime, Progress

STEP_S = 0.2
# Own seconds of a rank in a step, of which the first one of a start is thrown away.
Series = Callable[[int, int], float]


def named(
    own: Series, *, steps: int, ranks: int = 2, elapsed_s: float = STEP_S, part: str = "compute"
) -> list[Lag]:
    """The lags of a series."""
    lags = Lags()
    told = [
        lags.after(
            step,
            elapsed_s,
            [(f"host-{rank}", {part: own(step, rank)}) for rank in range(ranks)],
        )
        for step in range(1, steps + 1)
    ]
    return [lag for lag in told if lag is not None]


def noisy(seed: int, *, spread: float, late: Mapping[int, float] = {}) -> Series:
    """Each rank computes half of a step, more or less, and a late one by a share of the step more."""
    rng = random.Random(seed)
    return lambda step, rank: STEP_S * (0.5 + rng.gauss(0, spread) + late.get(rank, 0.0))


def test_slowest_rank_and_the_share_that_the_others_wait_for_it() -> None:
    assert slowest(
        [{"core": 1.0}, {"data": 0.5, "still": 0.5}, {"compute": 4.0}, {"core": 1.0}], 5.0
    ) == (2, pytest.approx(0.6))
    assert slowest([{"core": 2.0}, {"compute": 2.0}], 4.0) == (0, 0.0)
    assert slowest([{"core": 2.0}, {"compute": 3.0}], 0.0) == (1, 0.0)
    # A count is no time.
    assert slowest([{"core": 2.0, "throttled_s": 9.0}, {"compute": 3.0}], 1.0)[0] == 1


@pytest.mark.parametrize("ranks", [2, 4, 16])
def test_rank_that_loses_30_percent_is_named_once_within_100_logged_steps(ranks: int) -> None:
    """Through noise of a third of that, for each of 60 seeds."""
    for seed in range(60):
        found = named(noisy(seed, spread=0.1, late={1: 0.3}), steps=400, ranks=ranks)
        assert [(lag.rank, lag.host) for lag in found] == [(1, "host-1")], seed
        assert found[0].step <= 100
        assert found[0].share == pytest.approx(0.3, abs=0.06)
        assert found[0].own["compute"] == pytest.approx(0.8, abs=0.06)


@pytest.mark.parametrize("lag", [0.0, 0.05])
@pytest.mark.parametrize("spread", [0.02, 0.1, 0.5])
def test_noise_is_not_named_nor_is_what_costs_less_than_10_percent(
    lag: float, spread: float
) -> None:
    """2,000 logged steps for each of 8 seeds; the wildest noise has shares of 100 %."""
    for seed in range(8):
        assert named(noisy(seed, spread=spread, late={1: lag}), steps=2000) == [], seed


def test_false_alarms_are_as_rare_as_the_rule_says() -> None:
    """Ranks that are late by turns of chance, half of the blocks each: the most that is allowed to two equal ranks.

    A rank is named falsely once in a million blocks or less; so of 1,000 series of 500 blocks, of two ranks each, one
    may have one. More than five would be no chance (one in 1,700, by Poisson's law of 1).
    """
    rng, false = random.Random(3), 0
    for _ in range(1000):
        late = [rng.random() < 0.5 for _ in range(501)]
        false += bool(
            named(
                lambda step, rank, late=late: late[step - 1] == rank, steps=501, elapsed_s=0.5
            )
        )  # type: ignore[misc]
    assert false <= 5


def test_rank_that_becomes_late_is_named_from_then_on_and_again_only_if_it_is_another() -> None:
    def own(step: int, rank: int) -> float:
        late = rank == 2 if 600 <= step < 900 else rank == 3 if 1200 <= step < 1500 else False
        return STEP_S * (0.9 if late else 0.5)

    found = named(own, steps=2000, ranks=4)
    assert [lag.rank for lag in found] == [2, 3]
    assert [600 - 2 <= found[0].since <= 600, 1200 - 2 <= found[1].since <= 1200] == [
        True,
        True,
    ]
    # Two steps of 0.2 s are a block; 24 of them, late, are enough.
    assert [lag.step - lag.since for lag in found] == [48, 48]
    again = named(
        lambda step, rank: STEP_S * (0.9 if rank == 1 and step % 600 > 300 else 0.5), steps=2000
    )
    assert [lag.rank for lag in again] == [1]


def test_some_steps_in_which_it_is_not_late_delay_it_only() -> None:
    found = named(
        lambda step, rank: STEP_S * (0.9 if rank == 1 and step % 30 >= 3 else 0.5), steps=200
    )
    assert [lag.rank for lag in found] == [1] and found[0].step > 49


def test_turns_are_nobodys_lag() -> None:
    """Each rank is late for two seconds, then the other one: they have a core by turns."""
    assert (
        named(lambda step, rank: STEP_S * (0.9 if step // 10 % 2 == rank else 0.5), steps=5000)
        == []
    )


def test_what_is_no_number_is_no_time() -> None:
    assert named(lambda step, rank: math.nan if rank == 1 else 0.1, steps=500) == []
    assert named(lambda step, rank: math.inf if rank == 1 else 0.1, steps=500) == []
    assert named(lambda step, rank: 0.9 if rank else 0.1, steps=500, elapsed_s=math.nan) == []
    assert named(lambda step, rank: 0.9 if rank else 0.1, steps=500, elapsed_s=0.0) == []
    between = named(
        lambda step, rank: math.nan if step % 2 else STEP_S * (0.9 if rank == 0 else 0.5),
        steps=500,
    )
    assert [lag.rank for lag in between] == [0]


def test_one_rank_is_alone() -> None:
    assert Slowest(_mesh(None, 0, 1), notice=_never).find(1, 1.0) == {}


def test_a_rank_that_was_named_lasts_until_it_has_caught_up() -> None:
    lags, lasting = Lags(), []
    for step in range(1, 300):
        late = step < 150 or step > 270  # then again, for too short a time to be named
        lags.after(
            step,
            STEP_S,
            [("a", {"compute": STEP_S * (0.9 if late and rank else 0.5)}) for rank in range(2)],
        )
        lasting.append(lags.lasting == [1])
    assert lasting.index(True) == 48  # steps count from 1
    assert 150 + 5 < 1 + lasting.index(False, 48) < 150 + 30
    assert not any(lasting[200:])


SEEN = {"looks/1": 4.0, "stopped/1": 3.0}


@pytest.mark.parametrize(
    ("late", "others", "blocks"),
    [
        ({}, SEEN, 12),
        ({}, {"looks/1": 4.0, "stopped/1": 0.0}, 24),
        ({}, {"looks/0": 4.0, "stopped/0": 3.0}, 24),  # another one is stopped
        ({"throttled_s": 0.3}, {"throttled_s": 0.05}, 12),
        ({"throttled_s": 0.3}, {"throttled_s": 0.25}, 24),  # of one cgroup
        ({"throttled_s": 0.01}, {"throttled_s": 0.0}, 24),
        ({"throttled_s": math.nan}, {"throttled_s": 0.0}, 24),
    ],
)
def test_half_of_the_blocks_are_enough_where_the_kernel_is_seen_to_withhold_what_is_lost(
    late: dict[str, float], others: dict[str, float], blocks: int
) -> None:
    lags = Lags()
    ranks = [("a", {"compute": 0.1, **others}), ("b", {"compute": 0.1, "still": 0.3, **late})]
    found = [lags.after(step, 0.4, ranks) for step in range(1, 60)]
    assert [step for step, lag in enumerate(found) if lag is not None] == [blocks]


def test_a_rank_that_costs_nothing_is_not_named() -> None:
    """Late by a tenth in most blocks, and far ahead in some."""
    lags, found = Lags(), []
    for step in range(40):
        own = (2.0, 0.0) if step % 12 == 11 else (0.0, 0.05)
        ranks = [
            (str(rank), {"compute": 0.1 + late, "looks/1": 4.0, "stopped/1": 0.0})
            for rank, late in enumerate(own)
        ]
        found.append(lags.after(step, 0.4, ranks))
    assert found == [None] * 40


def test_who_is_late_by_turns_is_not_named_for_what_is_seen() -> None:
    """A process that is stopped as often as it is the other's turn to be late costs nothing that lasts."""
    lags = Lags()
    for step in range(3000):
        own = [0.3 if step // 8 % 2 == rank else 0.0 for rank in range(2)]
        ranks = [
            ("a", {"still": own[0], **SEEN}),
            ("a", {"still": own[1], "looks/0": 4.0, "stopped/0": 3.0}),
        ]
        assert lags.after(step, 0.4, ranks) is None


# --- what is said


def _lag(part: str, **more: float) -> Lag:
    """That of rank 1, which does more of a part; of what is counted, the looks at it are another rank's."""
    looks = {name: more.pop(name) for name in list(more) if "/" in name}
    return Lag(
        1,
        "a",
        20,
        95,
        0.6,
        {"compute": 0.2, part: 0.7, **more},
        {"compute": 0.2, part: 0.1, **looks},
    )


STOPPED = {"looks/1": 20.0, "stopped/1": 14.0}


@pytest.mark.parametrize(
    ("part", "counts", "why"),
    [
        (
            "still",
            STOPPED,
            "it stands still for 70% of the time, the others for 10%: its process is stopped in 70% of the checks "
            "(SIGSTOP: cpulimit, a debugger)",
        ),
        (
            "still",
            {},
            "it stands still for 70% of the time, the others for 10%: it is stopped or frozen, its machine pauses, or "
            "one call holds Python's lock (the GIL)",
        ),
        (
            "core",
            {"throttled_s": 0.69},
            "it waits for a core for 70% of the time, the others for 10%: its cgroup's quota of CPU time throttles it "
            "for 69% of the time",
        ),
        ("core", {"stolen_s": 0.5}, "the hypervisor takes 50% of its host's cores (steal)"),
        ("core", {"throttled_s": 0.05}, "something else computes on its cores"),
        (
            "data",
            STOPPED,
            "it waits for its data for 70% of the time, the others for 10%: its loader's workers, or its disk",
        ),
        (
            "blocked",
            {"major_faults": 400.0},
            "400 times a second it reads memory from a disk (swapped out, or a file's)",
        ),
        (
            "blocked",
            {"major_faults": 2.0},
            "is blocked in the kernel for 70% of the time, the others for 10%: a file, a lock",
        ),
        (
            "compute",
            {},
            "it computes for 70% of the time, the others for 10%: a slower core, or more work",
        ),
        ("device", {}, "a slower device, or one that is fed late"),
    ],
)
def test_why_is_what_it_does_most_beyond_the_others(
    part: str, counts: dict[str, float], why: str
) -> None:
    lag = _lag(part, **counts)
    assert why in lag.why()
    assert lag.text() == (
        "rank 1 of host a has been the slowest since step 20: a step would take about 60% less if it were as fast as "
        f"the others; {lag.why()}"
    )
    assert json.loads(json.dumps(asdict(lag)))["own"] == lag.own


# --- what is told


def _mesh(store: Any, rank: int, world_size: int) -> Any:
    return SimpleNamespace(store=store, rank=rank, world_size=world_size, host=f"host-{rank}")


def _never(lag: Lag) -> None:
    raise AssertionError(lag)


@dataclass
class _Own:
    """As `OwnTime`, of what a rank is to tell."""

    values: dict[str, float]
    counted: dict[str, float]

    def parts(self) -> dict[str, float]:
        return self.values

    def counts(self) -> dict[str, float]:
        return self.counted


def test_ranks_tell_their_time_and_what_was_counted_meanwhile() -> None:
    store, found = HashStore(), list[Lag]()
    store.set_timeout(timedelta(seconds=20))
    ranks = [
        Slowest(_mesh(store, rank, 2), notice=found.append if rank == 0 else _never)
        for rank in range(2)
    ]
    metrics: list[dict[str, Any]] = []
    for step in range(1, 120):
        for rank, each in enumerate(ranks):
            counted = {"throttled_s": 0.12 * rank, "looks/1": 4.0, "stopped/1": 0.0}
            each.tell(
                cast(
                    OwnTime, _Own({"compute": 0.05, "core": 0.12 * rank, "data": 0.0}, counted)
                )
            )
        assert ranks[1].find(step, STEP_S) == {}
        metrics.append(ranks[0].find(step, STEP_S))
    assert [(lag.rank, lag.host, lag.step) for lag in found] == [(1, "host-1", 25)]
    assert found[0].own["throttled_s"] == pytest.approx(0.6)
    assert "quota of CPU time throttles it for 60%" in found[0].text()
    assert metrics[0] == {"slowest_rank": 1, "slowest_share": pytest.approx(0.6)}
    assert [line.get("lagging_rank") for line in metrics] == [None] * 24 + [1] * 95


def test_a_rank_that_tells_late_is_judged_by_the_same_step_as_the_others() -> None:
    """A tp rank, which the collective of the loss does not wait for: it tells when rank 0 has looked for it."""
    store, found = HashStore(), list[Lag]()
    store.set_timeout(timedelta(seconds=20))
    ranks = [
        Slowest(_mesh(store, rank, 2), notice=found.append if rank == 0 else _never)
        for rank in range(2)
    ]
    rng = random.Random(1)
    metrics: list[dict[str, Any]] = []
    for step in range(1, 400):
        # Both have as much, in every second step; so half of it is nobody's.
        own, late = 0.3 if step % 2 else 0.0, step > 2 and rng.random() < 0.5
        for rank in (0, 1):
            if rank == 1 and late:
                metrics.append(ranks[0].find(step, 0.3))
            ranks[rank].tell(cast(OwnTime, _Own({"compute": own}, {})))
        if not late:
            metrics.append(ranks[0].find(step, 0.3))
        ranks[1].find(step, 0.3)
    assert found == []
    assert {line["slowest_share"] for line in metrics} == {0.0}


def test_what_was_counted_before_a_window_is_not_of_it() -> None:
    """A machine has counted since it was started; and a step may tell several times before it is logged."""
    progress = Progress()
    assert OwnTime(progress).counts() == {}
    progress.counted = {"throttled_s": 3600.0, "stolen_s": 5.0}
    own = OwnTime(progress)
    progress.counted = {"throttled_s": 3600.5, "major_faults": 7.0}
    assert own.counts() == {"throttled_s": 0.5} == own.counts()


def test_every_part_has_words() -> None:
    for part in PARTS:
        assert _lag(part).why()


# --- what is read from the kernel


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Files in the place of /proc and /sys."""
    plain = Path

    def moved(*parts: Any) -> Path:
        path = plain(*parts)
        return (
            tmp_path / str(path).lstrip("/")
            if path.is_absolute() and tmp_path not in path.parents
            else path
        )

    monkeypatch.setattr(main_thread, "Path", moved)

    def texts(name: str) -> str:
        file = tmp_path / "proc" / name
        return file.read_text() if file.exists() else ""

    monkeypatch.setattr(main_thread, "proc_text", texts)
    return tmp_path


def _write(folder: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


CPU_V2 = "usage_usec 1\nnr_periods 9\nnr_throttled 7\nthrottled_usec {}\n"
CPU_V1 = "nr_periods 9\nnr_throttled 7\nthrottled_time {}\n"


@pytest.mark.parametrize(
    ("files", "throttled_s"),
    [
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/b/cpu.stat": CPU_V2.format(2_500_000),
            },
            2.5,
        ),
        # The quota of the cgroup around it, and a container that sees its own as the root.
        (
            {
                "proc/self/cgroup": "0::/a/b c\n",
                "sys/fs/cgroup/a/cpu.stat": CPU_V2.format(500_000),
            },
            0.5,
        ),
        ({"proc/self/cgroup": "0::/../x\n", "sys/fs/cgroup/cpu.stat": CPU_V2.format(7)}, 7e-6),
        (
            {
                "proc/self/cgroup": "9:name=systemd:/\n4:memory:/m\n2:cpu,cpuacct:/x\n",
                "sys/fs/cgroup/cpu,cpuacct/x/cpu.stat": CPU_V1.format(3_000_000_000),
                "sys/fs/cgroup/memory/m/cpu.stat": CPU_V1.format(9_000_000_000),
            },
            3.0,
        ),
        ({"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/cpu.stat": "usage_usec 1\n"}, None),
        ({"proc/self/cgroup": ""}, None),
        ({}, None),
    ],
)
def test_throttling_of_cgroups(
    kernel: Path, files: dict[str, str], throttled_s: float | None
) -> None:
    _write(kernel, files)
    found = main_thread.counters()
    assert found.get("throttled_s") == (
        None if throttled_s is None else pytest.approx(throttled_s)
    )
    assert found["major_faults"] >= 0


@pytest.mark.parametrize(
    ("line", "ticks"),
    [
        ("cpu  1 2 3 4 5 6 7 800 9 10\n", 800),
        ("cpu  1 2 3 4 5 6 7\n", None),
        ("cpu0 1 2 3 4 5 6 7 8\n", None),
        ("", None),
    ],
)
def test_steal(kernel: Path, line: str, ticks: int | None) -> None:
    _write(kernel, {"proc/stat": line + "intr 1 2 3 4 5 6 7 8 9\n"})
    expected = (
        None if ticks is None else ticks / os.sysconf("SC_CLK_TCK") / (os.cpu_count() or 1)
    )
    assert main_thread.counters().get("stolen_s") == expected


def test_counters_of_this_machine_are_numbers_that_do_not_fall() -> None:
    first, then = main_thread.counters(), main_thread.counters()
    assert first.keys() == then.keys() and re.fullmatch(r"[a-z_ ]+", " ".join(first))
    assert all(0 <= first[name] <= then[name] for name in first)
