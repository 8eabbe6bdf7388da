"""The top of a run's page, its figures with their units, and several runs side by side."""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from threefold.records.metrics import seconds_of
from threefold.report.facts import RunFacts
from threefold.report.markup import Html, join, table, tag
from threefold.report.thinned_curves import curve_names, summary

_MOST_KEYS = 200
# Logged steps whose pace is expected of those that are left.
_PACE = 20
# The prefix of the names of tasks' figures, and how many are shown first.
TASK, _MOST_TASKS = "task_", 8


def section(name: str, title: str, *inside: Any) -> Html:
    """A part of the page with a heading; `name` finds it again when the page is redrawn."""
    return tag("section", tag("h2", title), *inside, class_="part", data_part=name)


def figures(facts: RunFacts) -> Html:
    """The few numbers that are looked for first."""
    metrics, entries = facts.metrics, []
    last = metrics.last
    step = last.get("step")
    if step is not None:
        of = f" of {facts.num_steps:,}" if facts.num_steps and facts.num_steps >= step else ""
        entries.append(("step", f"{step:,}{of}"))
        if (left := _left_s(facts, step)) is not None:
            done = tag("progress", value=step, max=facts.num_steps, aria_label="steps done")
            entries.append(("left", join([f"about {duration(left)}", done])))
    entries += [
        (title, text) for name, title in _FIGURES if (text := measured(name, last.get(name)))
    ]
    if facts.best is not None:
        entries.append(("best evaluation", f"{facts.best[1]:.4f} (step {facts.best[0]:,})"))
    elif (low := summary(metrics.points("eval_loss")).get("smallest")) is not None:
        entries.append(("best evaluation", f"{low[1]:.4f} (step {low[0]:,})"))
    entries += [
        (name.removeprefix(TASK), _score(facts, name))
        for name in tasks_of([facts])[:_MOST_TASKS]
    ]
    if (trained := _trained_s(facts)) is not None:
        entries.append(("trained for", duration(trained)))
    if len(facts.starts) > 1:
        entries.append(("starts", str(len(facts.starts))))
    return tag(
        "dl",
        *(tag("div", tag("dt", name), tag("dd", text)) for name, text in entries),
        class_="figures",
    )


_FIGURES = (
    ("loss", "loss"),
    ("grad_norm", "gradient norm"),
    ("tokens", "tokens read"),
    ("tokens_per_s", "tokens/s"),
    ("mfu", "MFU"),
    ("peak_memory_bytes", "memory"),
)


def tasks_of(runs: Sequence[RunFacts]) -> list[str]:
    """The curves of tasks (eval.tasks) that some of the runs have."""
    return list(
        dict.fromkeys(
            name
            for facts in runs
            for name in curve_names(facts.metrics)
            if name.startswith(TASK)
        )
    )


def _score(facts: RunFacts, name: str) -> str:
    """The newest figure of a task."""
    last = summary(facts.metrics.points(name)).get("last")
    return f"{measured(name, last[1])} (step {last[0]:,})" if last else "-"


def measured(name: str, value: Any) -> str:
    """A logged number with its unit; empty if it is not a number."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return ""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "infinite"
    if name.endswith("_bytes"):
        return f"{value / 2**30:.2f} GiB"
    if name in ("mfu", "slowest_share") or name.endswith("accuracy"):
        return f"{value:.1%}"
    if name.endswith("_s") and not name.endswith("per_s"):
        return f"{value:.3f} s"
    if name in ("step", "tokens", "samples", "tokens_per_s"):
        return f"{value:,.0f}"
    return f"{value:.6g}"


def duration(seconds: float) -> str:
    """A time as `3 d 4 h`, `2 h 5 min`, `1 min 20 s`."""
    whole = round(seconds)
    for size, name, rest, small in (
        (86400, "d", 3600, "h"),
        (3600, "h", 60, "min"),
        (60, "min", 1, "s"),
    ):
        if whole >= size:
            return f"{whole // size:,} {name} {whole % size // rest} {small}"
    return f"{seconds:.1f} s"


def _trained_s(facts: RunFacts) -> float | None:
    """Time from each start to its stop, or to its last logged step, in seconds."""
    moments = [
        (at, event["event"])
        for event in facts.events
        if (at := seconds_of(event.get("time"))) is not None
    ]
    begins = [at for at, kind in moments if kind == "start"]
    total, logged = 0.0, facts.metrics.times
    for begin, end in pairwise([*begins, math.inf]):
        ends = [at for at, kind in moments if kind != "start" and begin <= at < end]
        before = bisect_left(logged, end)
        ends += [logged[before - 1]] if before and logged[before - 1] >= begin else []
        total += max(ends, default=begin) - begin
    return total or None


def _left_s(facts: RunFacts, step: int) -> float | None:
    """Seconds until a run that goes has made its steps, at the pace of the last logged ones; None if not known."""
    clocks = facts.metrics.clocks()
    if facts.state != "running" or not facts.num_steps or not clocks:
        return None
    steps, moments = (column[-_PACE:] for column in clocks[max(clocks)])
    made = int(steps[-1] - steps[0])
    return (
        float(moments[-1] - moments[0]) / made * max(0, facts.num_steps - step)
        if made
        else None
    )


def compared(runs: Sequence[RunFacts]) -> dict[str, Html]:
    """The runs of one page side by side: their states, and the keys in which they differ."""
    rows, tasks = [], tasks_of(runs)[:_MOST_TASKS]
    for facts in runs:
        last, best = facts.metrics.last, facts.best
        cells = [
            measured(name, last.get(name)) or "-"
            for name in ("step", "loss", "tokens_per_s", "tokens")
        ]
        rows.append(
            (
                facts.name,
                facts.state,
                *cells,
                f"{best[1]:.4f} (step {best[0]:,})" if best else "-",
                *(_score(facts, name) for name in tasks),
            )
        )
    named = [name.removeprefix(TASK) for name in tasks]
    head = ("run", "state", "step", "loss", "tokens/s", "tokens", "best evaluation", *named)
    parts = {
        "compared": section("compared", "Runs", table("Where each run stands", head, rows))
    }
    named = [facts.name for facts in runs]
    configs = differing([facts.resolved for facts in runs])
    differ = [(key, *(config[key] for config in configs)) for key in configs[0]]
    if differ:
        parts["differ"] = section(
            "differ", "Keys that differ", table("Config", ("key", *named), differ[:_MOST_KEYS])
        )
    return parts


def differing(configs: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    """The keys in which some configs differ, with the same keys for all; `-` if one lacks a key."""
    keys = [
        key
        for key in dict.fromkeys(key for config in configs for key in config)
        if key != "log.dir"
    ]
    differ = [key for key in keys if len({config.get(key, "-") for config in configs}) > 1]
    return [{key: config.get(key, "-") for key in differ} for config in configs]
