"""The whole page in one file: markup, style, script and the curves' points, with nothing from elsewhere.

The page's own policy (Content-Security-Policy) allows exactly its script and its style, by their hashes, and no
request: so text of a run that was mistaken for markup could do nothing.
"""

import base64
import hashlib
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from threefold.build_id import build_id
from threefold.jsonl import Values
from threefold.records.metrics import seconds_of
from threefold.report.facts import RunFacts
from threefold.report.headline import compared, differing, figures, tasks_of
from threefold.report.markup import Html, data, join, shown, tag
from threefold.report.sections import Judged, judged, sections
from threefold.report.thinned_curves import (
    clocks,
    curve_names,
    drawn,
    not_finite,
    read_tokens,
    with_rows,
)

# Title, unit and the names of each chart; anything else that is logged has its own chart.
_CHARTS = (
    ("Loss", "", ("loss", "eval_loss")),
    ("Gradient norm", "", ("grad_norm",)),
    ("Learning rate", "", ("lr",)),
    ("Tokens a second", "tokens/s", ("tokens_per_s",)),
    ("Model FLOPs utilization (MFU)", "", ("mfu",)),
    ("Time of a step, and of waiting for data", "s", ("step_time_s", "data_wait_s")),
    ("Memory of rank 0 at its peak", "bytes", ("peak_memory_bytes",)),
    ("How far the slowest rank is behind", "share of a step", ("slowest_share",)),
)
# Points of all curves of a page, and the least and the most of one.
_ALL_POINTS, _FEWEST, _MOST = 30_000, 120, 3000
_CLOCK = 2000
_MOST_MARKS, _MOST_BATCHES = 300, 24


@cache
def asset(name: str) -> str:
    """A file of the page that is in the package."""
    return (files("threefold.report") / "assets" / name).read_text(encoding="utf-8")


def _curves_of(runs: Sequence[RunFacts], verdicts: Sequence[Judged | None]) -> Sequence[Values]:
    """The curves of each run, by name, in as many points as a page has room for."""
    number = sum(len(curve_names(facts.metrics)) for facts in runs)
    most = max(_FEWEST, min(_MOST, _ALL_POINTS // max(1, number)))
    curves = []
    for facts, about in zip(runs, verdicts, strict=True):
        metrics = facts.metrics
        points = {name: metrics.points(name) for name in curve_names(metrics)}
        of_rows = about.reasons.losses if about is not None else None
        if of_rows is not None and "loss" in points:
            points["loss"] = with_rows(points["loss"], of_rows)
        curves.append(
            {
                name: drawn(now, metrics.replaced(name), most=most)
                for name, now in points.items()
            }
        )
    return curves


def points_of(runs: Sequence[RunFacts], verdicts: Sequence[Judged | None]) -> Values:
    """Data drawn by the page's script: charts, and each run's curves, marks, clock, and rows of unusual steps."""
    usual: list[tuple[str, str, tuple[str, ...]]] = [
        (title, unit, names)
        for title, unit, names in _CHARTS
        if any(name in facts.metrics for name in names for facts in runs)
    ]
    if tasks := [
        name for name in tasks_of(runs) if all(_is_share(each, name) for each in runs)
    ]:
        usual.append(("Tasks", "", tuple(tasks)))
    known_names = {name for _, _, names in [*_CHARTS, *usual] for name in names}
    others = dict.fromkeys(
        name for facts in runs for name in curve_names(facts.metrics) if name not in known_names
    )
    charts = [*usual, *((name, "", (name,)) for name in others)]
    return {
        "charts": [
            {"title": title, "unit": unit, "names": names} for title, unit, names in charts
        ],
        "runs": [
            {**_drawn(facts), "curves": curves, "batches": _batches(judged), "config": config}
            for facts, curves, judged, config in zip(
                runs,
                _curves_of(runs, verdicts),
                verdicts,
                differing([facts.resolved for facts in runs]),
                strict=True,
            )
        ],
    }


def _is_share(facts: RunFacts, name: str) -> bool:
    """Whether a number is between 0 and 1, like an accuracy: several such fit into one chart."""
    values = facts.metrics.points(name).finite().values
    return not len(values) or bool(values.min() >= 0 and values.max() <= 1)


def _drawn(facts: RunFacts) -> Values:
    metrics = facts.metrics
    return {
        "name": facts.name,
        "path": str(facts.path),
        "state": facts.state,
        "holes": {
            name: not_finite(metrics.points(name))
            for name in ("loss", "grad_norm")
            if name in metrics
        },
        "passes": clocks(metrics, _starts(facts), most=_CLOCK),
        "tokens": read_tokens(metrics, most=_CLOCK),
        "marks": _marks(facts),
    }


def _starts(facts: RunFacts) -> list[tuple[int, float]]:
    """The last step before each start, and when it was."""
    pairs = ((start.get("step"), seconds_of(start.get("time"))) for start in facts.starts)
    return [
        (step, moment) for step, moment in pairs if type(step) is int and moment is not None
    ]


def _batches(judged: Judged | None) -> Values:
    """The rows read by the unusual steps, by step."""
    if judged is None:
        return {}
    by_step = {
        str(step): judged.reasons.of_step(step) for step in judged.reasons.steps[:_MOST_BATCHES]
    }
    return {step: read for step, read in by_step.items() if read is not None}


def _marks(facts: RunFacts) -> Sequence[Values]:
    """Starts, stops, rewinds and the best checkpoint, as lines of a chart; saves are many, and in a table."""
    marks: list[dict[str, Any]] = []
    for event in facts.events:
        step, kind = event.get("step"), event["event"]
        if (
            type(step) is not int
            or kind not in ("start", "stop", "rewind")
            or (kind == "start" and not step)
        ):
            continue
        if (
            kind == "rewind"
            and marks
            and (marks[-1]["step"], marks[-1]["kind"]) == (step, "resume")
        ):
            marks.pop()  # the start that goes back
        moment = seconds_of(event.get("time"))
        seconds = (
            moment - facts.metrics.times[0]
            if moment is not None and len(facts.metrics.times)
            else None
        )
        marks.append(
            {"step": step, "kind": "resume" if kind == "start" else kind, "seconds": seconds}
        )
    marks += [{"step": facts.best[0], "kind": "best"}] if facts.best else []
    return marks[-_MOST_MARKS:]


def report(runs: Sequence[RunFacts]) -> bytes:
    """The page of one run, or of several overlaid, as a file that needs no other."""
    verdicts = [judged(facts.path) for facts in runs]
    return page(title_of(runs), body(parts_of(runs, verdicts), runs), points_of(runs, verdicts))


def title_of(runs: Sequence[RunFacts]) -> str:
    return runs[0].name if len(runs) == 1 else f"{len(runs)} runs"


def parts_of(
    runs: Sequence[RunFacts], verdicts: Sequence[Judged | None]
) -> dict[str, dict[str, Html]]:
    """The content of each box of the page, by name: `top`, before the curves, and a box of each run, by its number."""
    boxes = [sections(facts, judged) for facts, judged in zip(runs, verdicts, strict=True)]
    return {"top": top_of(runs), **{str(number): each for number, each in enumerate(boxes)}}


def top_of(runs: Sequence[RunFacts]) -> dict[str, Html]:
    """The part before the curves: the state of a run, or several side by side."""
    return {"standing": standing(runs[0])} if len(runs) == 1 else compared(runs)


def body(parts: Mapping[str, Mapping[str, Html]], runs: Sequence[RunFacts]) -> Html:
    """The boxes and the curves in their order."""
    boxes = {
        name: tag("div", *inside.values(), class_="parts", data_box=name)
        for name, inside in parts.items()
    }
    per_run = [boxes[str(number)] for number in range(len(runs))]
    if len(runs) > 1:
        per_run = [
            tag("details", tag("summary", facts.name), box, class_="run")
            for facts, box in zip(runs, per_run, strict=True)
        ]
    return join([boxes["top"], charts_part(), *per_run])


def standing(facts: RunFacts) -> Html:
    """The state of a run, and its figures."""
    line = tag("p", tag("span", facts.state, class_=f"state {facts.state}"), " ", facts.why)
    return tag("section", line, figures(facts), class_="part", data_part="standing")


def charts_part() -> Html:
    """Where the script puts the charts."""
    without = tag(
        "noscript",
        tag("p", "The charts need JavaScript. Their numbers are in the tables below."),
    )
    return tag(
        "section",
        tag("h2", "Curves"),
        tag("div", id_="controls"),
        tag("div", id_="charts"),
        without,
        id_="curves",
    )


def page(title: str, body: Html, values: Values, *, live: bool = False) -> bytes:
    """An HTML page around a body.

    Args:
        values: for the script: `points_of`, and what a live page adds.
        live: the page may ask its own server for more, otherwise no server.
    """
    style = asset("uplot.min.css") + asset("page.css")
    scripts = [asset("uplot.min.js"), asset("page.js")]
    server = "'self'" if live else "'none'"
    policy = (
        f"default-src 'none'; script-src {' '.join(map(_hash, scripts))}; style-src {_hash(style)}; img-src data:; "
        f"connect-src {server}; form-action {server}; base-uri 'none'"
    )
    assert not any("</script" in text for text in scripts) and "</style" not in style
    licence = tag(
        "details", tag("summary", "charts by uPlot"), tag("pre", asset("uplot.LICENSE"))
    )
    made = tag("footer", tag("p", f"threefold {build_id()}"), licence)
    home = tag("p", tag("a", "all runs", href="./")) if values.get("list") else ""
    status = tag("p", "following", id_="live", role="status") if live else ""
    text = (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="referrer" content="no-referrer"><link rel="icon" href="data:,">'
        f"<title>{shown(title)} - threefold</title><style>{style}</style></head><body>"
        f"<header>{home}<h1>{shown(title)}</h1>{status}</header><main>{body}</main>{made}{data('values', values)}"
        f"{''.join(f'<script>{script}</script>' for script in scripts)}</body></html>\n"
    )
    return text.encode("utf-8", "replace")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
