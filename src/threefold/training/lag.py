"""Which rank the others wait for, and whether that is chance.

In: at each logged step every rank's own time (`progress.OwnTime`), by the clock and by what it was spent on, which all
report before the collective of the loss, so that no rank waits for the store. Tp ranks do not share one: what
one has not reported by then is judged at the next logged step, with the others' time of the same step. Out: the slowest
rank and the share of the step that it costs; and once for each rank that remains so, a `Lag` with the reasons.

A share is noisy, so the rule counts signs. Logged steps are added up to blocks of at least 0.3 s; a rank is
late in a block if it is the slowest there by 10 % of the time. By chance that is any rank, so one rank at most half of
the time. Each late block adds log(0.9 / 0.5) to a rank's score, each other one log(0.1 / 0.5), and it is never below 0
(Page's cumulative sum, for a rank late in 90 % of the blocks). At log(1e6) the rank is named: after 24 late blocks in a
row, or some more with others among them; at half of that if its kernel was seen to withhold the time that it loses,
which is not chance. If blocks are independent, and every rank is as fast as the others, a given rank is named falsely
once in a million blocks, or less.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from threefold.training.progress import OwnTime

if TYPE_CHECKING:
    from threefold.jsonl import Metrics
    from threefold.mesh.mesh import Mesh

_KEY = "threefold/own-time"
_LATE_SHARE, _BLOCK_S = 0.1, 0.3
_LATE = math.log(0.9 / 0.5)
_NOT_LATE = math.log(0.1 / 0.5)
_ENOUGH = math.log(1e6)
# The parts of own time, and how they are reported; possible causes, if no other is known.
PARTS = {
    "data": "waits for its data",
    "compute": "computes",
    "core": "waits for a core",
    "blocked": "is blocked in the kernel",
    "still": "stands still",
    "device": "has its device in forwards",
}
_LIKELY = {
    "compute": "a slower core, or more work",
    "data": "its loader's workers, or its disk",
    "core": "something else computes on its cores",
    "blocked": "a file, a lock or a pipe",
    "device": "a slower device, or one that is fed late",
    "still": "it is stopped or frozen, its machine pauses, or one call holds Python's lock (the GIL)",
}
# For reports of ranks that have just met: long, as it is not asked for any more after it.
_PATIENCE = timedelta(seconds=10)
# The share of lost time that makes a cause an explanation; the rate of reads of memory per second that is a cause.
_EXPLAINS, _READS = 0.4, 20.0


@dataclass(frozen=True)
class Lag:
    """A rank that stays the slowest, as the journal has it.

    Attributes:
        since, step: the first step of the blocks that count, and the one at which it is named.
        share: what a step would take less if the rank were as fast as the mean of the others.
        own, others: of this rank, and the mean of the others: seconds by `PARTS`, and what was counted
            (`run.watch.main_thread`), a second.
    """

    rank: int
    host: str
    since: int
    step: int
    share: float
    own: Mapping[str, float]
    others: Mapping[str, float]

    @property
    def stopped(self) -> float:
        """The share of the looks at its process that find it stopped."""
        # Another rank looks at it, so its looks are among those of the others.
        looks, stops = (
            self.others.get(f"{name}/{self.rank}", 0.0) for name in ("looks", "stopped")
        )
        return stops / looks if looks > 0 else 0.0

    @property
    def withheld(self) -> float:
        """The share of the time in which it is seen to be stopped, or throttled by more than twice what others are."""
        return max(
            self.stopped,
            self.own.get("throttled_s", 0.0) - 2 * self.others.get("throttled_s", 0.0),
        )

    def text(self) -> str:
        """One line: which rank, what it costs, and why."""
        return (
            f"rank {self.rank} of host {self.host} has been the slowest since step {self.since}: a step would take "
            f"about {self.share:.0%} less if it were as fast as the others; {self.why()}"
        )

    def why(self) -> str:
        """What it spends most time on compared to the others, and the known cause."""
        part = max(
            self.own.keys() & PARTS.keys(), key=lambda part: self.own[part] - self.others[part]
        )
        own, others = self.own[part], self.others[part]
        cause = self._cause(part, own - others)
        return (
            f"it {PARTS[part]} for {own:.0%} of the time, the others for {others:.0%}: {cause}"
        )

    def _cause(self, part: str, excess: float) -> str:
        throttled, stolen, reads = (
            self.own.get(name, 0.0) for name in ("throttled_s", "stolen_s", "major_faults")
        )
        if part == "still" and self.stopped >= _EXPLAINS * excess:
            return f"its process is stopped in {self.stopped:.0%} of the checks (SIGSTOP: cpulimit, a debugger)"
        if part == "blocked" and reads >= _READS:
            return f"{reads:.0f} times a second it reads memory from a disk (swapped out, or a file's)"
        if part == "core" and throttled >= _EXPLAINS * excess:
            return (
                f"its cgroup's quota of CPU time throttles it for {throttled:.0%} of the time"
            )
        if part in ("core", "compute") and stolen >= _EXPLAINS * excess:
            return f"the hypervisor takes {stolen:.0%} of its host's cores (steal)"
        return _LIKELY[part]


class Slowest:
    """Finds the rank that the others wait for, over the rendezvous store: three small messages a logged step."""

    def __init__(self, mesh: "Mesh", *, notice: Callable[[Lag], None]) -> None:
        """Args:
        notice: called on rank 0 with each rank that stays the slowest, once.
        """
        self._store = mesh.store if mesh.world_size > 1 else None
        self._rank, self._host = mesh.rank, mesh.host
        self._ranks = range(mesh.world_size)
        self._lags, self._notice = Lags(), notice
        self._logged, self._found = 0, dict[str, Any]()
        self._unread: list[float] = []  # elapsed seconds

    def tell(self, own: OwnTime) -> None:
        """Reports this rank's own time since the last logged step; before the collective of the loss."""
        if self._store is not None:
            values = [self._logged, self._host, own.parts() | own.counts()]
            # No rank reports the logged step after the next one before all ranks have read this one.
            self._store.set(f"{_KEY}/{self._rank}/{self._logged % 2}", json.dumps(values))

    def find(self, step: int, elapsed_s: float) -> "Metrics":
        """On rank 0, after that collective: who is slowest and who remains so; nothing elsewhere, or in one process."""
        self._logged += 1
        if self._store is None or self._rank != 0:
            return {}
        self._unread.append(elapsed_s)
        while self._unread:
            oldest = self._logged - len(self._unread)
            keys = [f"{_KEY}/{rank}/{oldest % 2}" for rank in self._ranks]
            try:
                self._store.wait(keys, _PATIENCE)
            except RuntimeError:
                # A program that logs on rank 0 alone, or twice a step: the others do not report.
                self._store = None
                return {}
            reports = list(map(json.loads, self._store.multi_get(keys)))
            if any(count < oldest for count, *_ in reports):
                break
            elapsed_s = self._unread.pop(0)
            ranks = [(host, values) for _, host, values in reports]
            rank, share = slowest([values for _, values in ranks], elapsed_s)
            self._found = {"slowest_rank": rank, "slowest_share": share}
            if (lag := self._lags.after(step, elapsed_s, ranks)) is not None:
                self._notice(lag)
        lasting = self._lags.lasting
        return self._found | ({"lagging_rank": lasting[0]} if lasting else {})


def own_s(values: Mapping[str, float]) -> float:
    """A rank's own time."""
    return sum(values.get(part, 0.0) for part in PARTS)


def slowest(ranks: Sequence[Mapping[str, float]], elapsed_s: float) -> tuple[int, float]:
    """(rank with the most own time, share of the elapsed time by which it exceeds the others' mean).

    A share of 0.3: if that rank were as fast as the others, a step would take about 30 % less time.
    """
    own = list(map(own_s, ranks))
    rank = own.index(max(own))
    others = (sum(own) - own[rank]) / (len(own) - 1)
    return rank, (own[rank] - others) / elapsed_s if elapsed_s > 0 else 0.0


@dataclass
class _Streak:
    """The blocks since a rank's score was last 0; `own` and `others` are sums over them."""

    since: int
    score: float = 0.0
    elapsed_s: float = 0.0
    own: dict[str, float] = field(default_factory=dict)
    others: dict[str, float] = field(default_factory=dict)
    named: bool = False


class Lags:
    """Names each rank that stays the slowest, once; see the rule above."""

    def __init__(self) -> None:
        self._streaks: dict[int, _Streak] = {}
        self._named: set[int] = set()
        self._block: list[dict[str, float]] = []

    @property
    def lasting(self) -> list[int]:
        """The ranks that were named and have not caught up."""
        return [rank for rank, streak in self._streaks.items() if streak.named]

    def after(
        self, step: int, elapsed_s: float, ranks: Sequence[tuple[str, Mapping[str, float]]]
    ) -> Lag | None:
        """The rank that is to be named at a logged step.

        Args:
            ranks: of each its host, and what it reported since the last logged step. The first logged step of a start
                has what a start costs, and does not count.
        """
        if not self._block:
            self._begin_block(step, len(ranks))
            return None
        if not math.isfinite(elapsed_s + sum(own_s(values) for _, values in ranks)):
            return None
        self._elapsed_s += elapsed_s
        for total, (_, values) in zip(self._block, ranks, strict=True):
            _add(total, values)
        if self._elapsed_s < _BLOCK_S:
            return None
        late = self._after_block()
        streak = self._streaks.get(late)
        self._begin_block(step, len(ranks))
        if streak is None or late in self._named or streak.score < _ENOUGH / 2:
            return None
        own, others = (
            {name: total / streak.elapsed_s for name, total in of.items()}
            for of in (streak.own, streak.others)
        )
        lag = Lag(
            late, ranks[late][0], streak.since, step, own_s(own) - own_s(others), own, others
        )
        enough = _ENOUGH / 2 if lag.withheld >= _EXPLAINS * lag.share else _ENOUGH
        if streak.score < enough or not lag.share > 0:
            return None
        streak.named = True
        self._named.add(late)
        return lag

    def _begin_block(self, step: int, num_ranks: int) -> None:
        self._since, self._elapsed_s = step, 0.0
        self._block = [{} for _ in range(num_ranks)]

    def _after_block(self) -> int:
        """The slowest rank of the block, by which the streaks are changed."""
        slow, share = slowest(self._block, self._elapsed_s)
        if share >= _LATE_SHARE:
            self._streaks.setdefault(slow, _Streak(self._since))
        for rank, streak in list(self._streaks.items()):
            change = _LATE if rank == slow and share >= _LATE_SHARE else _NOT_LATE
            streak.score = min(streak.score + change, _ENOUGH)
            if streak.score <= 0:
                del self._streaks[rank]
                continue
            streak.elapsed_s += self._elapsed_s
            for other, total in enumerate(self._block):
                _add(
                    *(
                        (streak.own, total)
                        if other == rank
                        else (streak.others, total, 1 / (len(self._block) - 1))
                    )
                )
        return slow


def _add(total: dict[str, float], values: Mapping[str, float], times: float = 1.0) -> None:
    for name, value in values.items():
        total[name] = total.get(name, 0.0) + times * value
