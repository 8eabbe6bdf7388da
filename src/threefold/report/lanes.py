"""When each rank was in which phase (RUN/timeline), in as few intervals as a page can draw.

Read once for each state of its files: a live page asks again and again, and they are long. No torch.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from threefold.config.paths import TIMELINE_FOLDER
from threefold.report.opened import opened
from threefold.training.timeline import Interval, parsed

_MOST_FILES, _MOST_BYTES = 1024, 1 << 26
_MOST_LANES, _MOST_DRAWN = 64, 2400
_MOST_NAMES, _LONGEST_NAME = 24, 60
_OTHERS = "other phases"

Lane = tuple[int, str]
"""A rank, and whether its host or its device."""


class Traced(NamedTuple):
    """The phases of some steps.

    Attributes:
        drawn: the intervals of each lane, by their begin.
        means: of each lane: seconds a step in each phase, over all steps and not only those that are drawn.
        notes: what is not drawn, and what was not read.
    """

    drawn: Mapping[Lane, Sequence[Interval]]
    means: Mapping[Lane, Mapping[str, float]]
    notes: Sequence[str]


def traced(run: Path) -> Traced | None:
    """The phases that the ranks of a run have noted (`log.timeline`); None if none was."""
    try:
        paths = sorted((run / TIMELINE_FOLDER).glob("rank-*.json"))
        signs = tuple((path, (status := path.stat()).st_mtime_ns, status.st_size) for path in paths)
    except OSError:  # it is being deleted
        return None
    return _read(signs) if signs else None


@lru_cache(maxsize=32)
def _read(signs: tuple[tuple[Path, int, int], ...]) -> Traced | None:
    lanes: dict[Lane, list[Interval]] = defaultdict(list)
    notes, room = [], _MOST_BYTES
    for number, (path, _, size) in enumerate(signs):
        if number >= _MOST_FILES or size > room:
            notes.append(f"the phases of {len(signs) - number:,} more ranks were not read, from {path.name} on")
            break
        room -= size
        try:
            with opened(path) as file:
                found = parsed(file.read(size))
        except OSError as error:
            notes.append(f"{path.name} cannot be read: {error.strerror}")
            continue
        if not found:
            notes.append(f"{path.name} is not what a rank writes")
        for each in found:
            lanes[each.rank, each.track].append(each)
    if not lanes and not notes:
        return None
    usual = _usual(lanes)
    ordered = {
        lane: sorted((_named(each, usual) for each in lanes[lane]), key=lambda each: each.begin_s)
        for lane in sorted(lanes)
    }
    return Traced(_drawn(ordered, notes), {lane: _means(found) for lane, found in ordered.items()}, notes)


def _usual(lanes: Mapping[Lane, Sequence[Interval]]) -> set[str]:
    """The names that most intervals have, as many as a page can tell apart."""
    counted = Counter(each.name for found in lanes.values() for each in found)
    return {name for name, _ in counted.most_common(_MOST_NAMES)}


def _named(each: Interval, usual: set[str]) -> Interval:
    name = each.name[:_LONGEST_NAME] if each.name in usual else _OTHERS
    return each if name == each.name else each._replace(name=name)


def _means(found: Sequence[Interval]) -> dict[str, float]:
    seconds: dict[str, float] = defaultdict(float)
    for each in found:
        seconds[each.name] += each.end_s - each.begin_s
    steps = len({each.step for each in found})
    return {name: total / steps for name, total in seconds.items()}


def _drawn(lanes: dict[Lane, list[Interval]], notes: list[str]) -> dict[Lane, list[Interval]]:
    """The first lanes, and of them the first steps that there is room for; what is left out is noted."""
    kept = dict(list(lanes.items())[:_MOST_LANES])
    if len(kept) < len(lanes):
        notes.append(f"{len(lanes) - len(kept):,} more ranks are not drawn")
    counted = Counter(each.step for found in kept.values() for each in found)
    steps, room = sorted(counted), _MOST_DRAWN
    last = steps[0] if steps else 0
    for step in steps:
        room -= counted[step]
        if room < 0:
            break
        last = step
    most = max(1, _MOST_DRAWN // max(1, len(kept)))
    whole = counted[steps[0]] <= _MOST_DRAWN if steps else True
    drawn = {lane: [each for each in found if each.step <= last] for lane, found in kept.items()}
    if not whole:  # of one step alone there are too many
        drawn = {lane: found[:most] for lane, found in drawn.items()}
        notes.append(f"of step {last:,} only the first {most:,} phases of each rank are drawn")
    if steps and last < steps[-1]:
        of = f"steps {steps[0]:,} to {last:,} of {steps[0]:,} to {steps[-1]:,} are drawn"
        notes.append(f"{of}; timeline/timeline.json has all of them, for ui.perfetto.dev")
    return {lane: found for lane, found in drawn.items() if found}
