"""Which rank the others waited for, which steps took long, and whether they waited for data: from the logged steps."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from threefold.why.lookback import Lookback

# Share of a step that waits for data; lines that say it.
_WAITS, _FEWEST = 0.2, 5
# A step that takes so many times as long as is usual, and so large a share of all steps' time beyond that.
_LONG, _LOST = 3.0, 0.05

Values = tuple[str, list[int], float, str, list[str]]


def slow_findings(run: Lookback) -> Iterator[Values]:
    """What `findings.Anomaly` is made of, for each."""
    yield from _late_ranks(run)
    yield from _waits(run)
    yield from _long_steps(run)


def _late_ranks(run: Lookback) -> Iterator[Values]:
    for event in run.events:
        if (
            event["event"] == "lag"
            and isinstance(share := event.get("share"), float)
            and share > 0
        ):
            what = f"rank {event.get('rank')} was the slowest from step {event.get('since')} on"
            yield "slow", [], 10 * share, what, [str(event.get("text")), "journal.jsonl"]


def _waits(run: Lookback) -> Iterator[Values]:
    pairs = [
        (run.number(step, "data_wait_s"), run.number(step, "step_time_s"))
        for step in run.logged
    ]
    shares = [wait / time for wait, time in pairs if wait is not None and time]
    if len(shares) >= _FEWEST and (share := float(np.median(shares))) >= _WAITS:
        what = f"steps waited for data for {share:.0%} of their time"
        yield (
            "slow",
            [],
            10 * share,
            what,
            ["the median of data_wait_s / step_time_s; --data.num_workers 2 reads ahead"],
        )


def _long_steps(run: Lookback) -> Iterator[Values]:
    steps, times = run.series("step_time_s")
    # The first line after a start has what a start costs.
    begun = {
        event["step"]
        for event in run.events
        if event.get("event") == "start" and isinstance(event.get("step"), int)
    }
    firsts = {
        next((step for step in steps.tolist() if step > begin), -1) for begin in begun | {0}
    }
    if len(steps) < _FEWEST:
        return
    usual = float(np.median(times))
    long = [
        (float(time), int(step))
        for step, time in zip(steps, times, strict=True)
        if step not in firsts
    ]
    for time, step in sorted(long, reverse=True)[:3]:
        if time < _LONG * usual or time - usual < _LOST * times.sum():
            return
        wait = run.number(step, "data_wait_s")
        rank = run.number(step, "slowest_rank")
        facts = [f"{time / usual:.1f} times the median, {usual:.3g} s"]
        facts += (
            [f"{wait:.3g} s of it waiting for data"]
            if wait is not None and wait > _WAITS * time
            else []
        )
        facts += (
            [
                f"rank {int(rank)} was the slowest, by {run.number(step, 'slowest_share') or 0:.0%}"
            ]
            if rank is not None
            else []
        )
        yield "slow", [step], min(5.0, time / usual / 2), f"steps took {time:.3g} s", facts
