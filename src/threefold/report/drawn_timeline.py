"""The phases of the ranks as a picture: a lane for each rank, in it a bar for each phase, as wide as it took.

The page's script tells what a bar is when it is pointed at, or reached by keys; the same numbers are in a table.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from threefold.report.headline import section
from threefold.report.lanes import Lane, Traced
from threefold.report.markup import Html, details, join, table, tag
from threefold.training.timeline import Interval

# Units across a lane, and its height; colours, of which the last is that of all phases beyond.
_ACROSS, _HIGH = 10_000, 14
_COLOURS = 8
_MOST_NOTES, _MOST_ROWS = 20, 256
_USUAL = ("data", "forward", "backward", "reduce", "optimizer")


def timeline_part(traced: Traced | None) -> Html:
    """The lanes with their legend, and the means, whose columns name the bars; nothing if no phase was noted."""
    if traced is None:
        return Html()
    notes = [tag("p", note) for note in traced.notes[:_MOST_NOTES]]
    if not traced.drawn:
        return section("timeline", "Timeline of phases", *notes)
    names = _names(traced)
    drawn = [each for found in traced.drawn.values() for each in found]
    begin, end = min(each.begin_s for each in drawn), max(each.end_s for each in drawn)
    steps = sorted({each.step for each in drawn})
    told = f"step {steps[0]:,}" if len(steps) == 1 else f"steps {steps[0]:,} to {steps[-1]:,}"
    lanes = [_row(lane, _lane(found, names, begin, end)) for lane, found in traced.drawn.items()]
    legend = join(_key(name, number) for number, name in enumerate(names[: _COLOURS - 1]))
    if len(names) >= _COLOURS:
        legend = join([legend, _key(", ".join(names[_COLOURS - 1 :]), _COLOURS - 1)])
    said = f"{told}: {(end - begin) * 1e3:,.1f} ms from left to right"
    region = tag(
        "div", tag("table", tag("tbody", *lanes)), class_="wide timeline", tabindex="0", role="application",
        aria_roledescription="timeline", aria_label=f"Phases of {told}",
    )  # fmt: skip
    zoom = [tag("button", text, type_="button", class_="zoom") for text in ("wider", "narrower")]
    key = tag(
        "p", "Point at a bar to see what it is. With the keyboard: left and right move along a rank, up and down to "
        "another, + and - zoom, 0 shows all.", class_="key",
    )  # fmt: skip
    read = tag("p", said, class_="read", aria_live="polite")
    inside = tag("p", legend, class_="legend"), tag("p", *zoom, class_="zooms"), region, read, key
    return section("timeline", "Timeline of phases", *inside, *notes, _means(traced, names))


def _names(traced: Traced) -> list[str]:
    """The phases, those of every step first in their order, then those that take the longest."""
    total: Counter[str] = Counter()
    for means in traced.means.values():
        total.update(means)  # type: ignore[arg-type]
    usual = [name for name in _USUAL if name in total]
    return [*usual, *(name for name, _ in total.most_common() if name not in usual)]


def _key(name: str, number: int) -> Html:
    return tag("span", tag("span", class_=f"swatch k{number}"), " ", name, class_="keyed")


def _title(lane: Lane) -> str:
    rank, track = lane
    return f"rank {rank}" if track == "host" else f"rank {rank}, {track}"


def _row(lane: Lane, picture: Html) -> Html:
    return tag("tr", tag("th", _title(lane), scope="row"), tag("td", picture))


def _lane(found: Sequence[Interval], names: Sequence[str], begin: float, end: float) -> Html:
    numbers = {name: number for number, name in enumerate(names)}
    scale = _ACROSS / ((end - begin) or 1.0)
    bars = []
    for each in found:
        number = numbers[each.name]
        at, width = (each.begin_s - begin) * scale, max(1.0, (each.end_s - each.begin_s) * scale)
        from_ms, ms = (each.begin_s - begin) * 1e3, (each.end_s - each.begin_s) * 1e3
        bars.append(
            f'<rect class="k{min(number, _COLOURS - 1)}" x="{at:.1f}" width="{width:.1f}" height="{_HIGH}" '
            f'data-at="{number} {each.step} {from_ms:.3f} {ms:.3f}"/>'
        )
    return tag(
        "svg", Html("".join(bars)), viewBox=f"0 0 {_ACROSS} {_HIGH}", preserveAspectRatio="none", height=_HIGH,
        aria_hidden="true",
    )  # fmt: skip


def _means(traced: Traced, names: Sequence[str]) -> Html:
    rows = [
        (_title(lane), *(f"{means[name] * 1e3:,.3f}" if name in means else "-" for name in names))
        for lane, means in list(traced.means.items())[:_MOST_ROWS]
    ]
    listed = table("Milliseconds a step, over all steps that were noted", ("rank", *names), rows)
    return details("Milliseconds in each phase", listed, name="timeline")
