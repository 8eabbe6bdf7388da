"""The parts of a run's page that are text and tables: each a section with a heading, or nothing if there is nothing.

In: a run's facts. Out: markup, in which every text of a file is escaped.
"""

from collections import defaultdict
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from threefold.errors import ThreefoldError, ranks_text, shell_word
from threefold.jsonl import Values
from threefold.mesh.topology import Topology
from threefold.records.files import unsafe_files
from threefold.records.state import shown_time
from threefold.report.facts import RunFacts, sizes_of
from threefold.report.headline import measured, section
from threefold.report.markup import Html, details, join, pasted, shown, table, tag
from threefold.report.mesh_svg import drawn
from threefold.report.reasons import Reasons
from threefold.report.thinned_curves import curve_names, left_out, summary
from threefold.report.verdict import proof_lines
from threefold.why.batch_rows import BatchRow
from threefold.why.findings import row_text

_MOST_ROWS, _MOST_FOUND = 200, 20
# In their own columns or parts.
_SHOWN_ELSEWHERE = ("event", "time", "step", "start", "head", "files", "own", "others")
_SHAPE = (
    "model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "intermediate_size", "num_experts", "vocab_size", "max_position_embeddings", "tie_word_embeddings",
)  # fmt: skip


class Verdict(NamedTuple):
    """The audit's verdict: whether it is proved, in a line, and all lines."""

    proved: bool
    said: str
    lines: list[str]


def verdict_of(run: Path) -> Verdict:
    """The verdict of `threefold data audit` on a run."""
    lines: list[str] = []
    # The audit would wait for it, or show what it holds.
    if (unsafe := next(unsafe_files(run), None)) is not None:
        return Verdict(False, f"not proved: {': '.join(unsafe)}", [])
    try:
        lines += proof_lines(run)
    except (ThreefoldError, OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        reason = (
            error.problems[0].what
            if isinstance(error, ThreefoldError)
            else f"its record cannot be read: {error}"
        )
        return Verdict(False, f"not proved: {reason}", [*lines, *str(error).splitlines()])
    return Verdict(True, lines[-1], lines[1:-1])


class Judged(NamedTuple):
    """Results about a run that take a moment to compute: the audit's verdict, and anomalies with reasons."""

    verdict: Verdict
    reasons: Reasons


def judged(run: Path) -> Judged:
    """Runs the audit, and looks for anomalies; may take seconds."""
    return Judged(verdict_of(run), Reasons(run))


def sections(facts: RunFacts, judged: Judged | None) -> dict[str, Html]:
    """All sections of a run by name, in the order of the page; those not judged yet are left out."""
    parts = {
        "why": _standing_out(facts, judged.reasons) if judged else Html(),
        "trained": _trained(facts),
        "mesh": mesh_part(facts),
        "data": _data(judged.verdict) if judged else Html(),
        "numbers": _numbers(facts),
        "history": _history(facts),
        "checkpoints": _checkpoints(facts),
        "samples": _samples(facts),
        "late": _late(facts),
        "phases": _phases(facts),
        "warnings": _warnings(facts),
        "damage": _damage(facts),
        "next": _next(facts),
        "config": _config(facts),
    }
    return {name: each for name, each in parts.items() if each}


def _trained(facts: RunFacts) -> Html:
    head = facts.head
    rows: list[tuple[Any, ...]] = (
        [(name or "also", _lines(text)) for name, text in islice(head.entries(), _MOST_ROWS)]
        if head
        else []
    )
    rows += [
        ("files", str(line)) for start in facts.starts[-1:] for line in start.get("files") or ()
    ]
    if facts.created:
        rows.append(("made", shown_time(facts.created)))
    if facts.origin:
        where = f"{facts.origin.get('path')} (step {facts.origin.get('step')})"
        rows.append(("forked from", where))
    if facts.architecture:
        shape = ", ".join(
            f"{key} {facts.architecture[key]}" for key in _SHAPE if key in facts.architecture
        )
        rows.append(("architecture", shape))
    if facts.versions:
        rows.append(
            (
                "versions",
                ", ".join(f"{name} {version}" for name, version in facts.versions.items()),
            )
        )
    if not rows:
        return Html()
    caption = "What the last start chose, and why" if head else "What its files say"
    return section(
        "trained", "What was trained", table(caption, ("what", "how, and why"), rows)
    )


def _lines(text: str) -> Html:
    first, *rest = text.split("\n")
    return join([first, *(piece for line in rest for piece in (Html("<br>"), line))])


def mesh_part(facts: RunFacts) -> Html:
    """The mesh, and where its ranks are now."""
    if facts.mesh is None:
        return Html()
    now = {rank: place.name for rank, place in facts.places.items()}
    rows = []
    for name in dict.fromkeys(now.values()):
        ranks = [rank for rank in now if now[rank] == name]
        steps = sorted({facts.places[rank].step for rank in ranks})
        rows.append(
            (
                name,
                ranks_text(ranks),
                f"{steps[0]:,}" if len(steps) == 1 else f"{steps[0]:,} to {steps[-1]:,}",
            )
        )
    listed: Any = (
        table("Where the ranks of this host are now", ("phase", "ranks", "step"), rows)
        if rows
        else ""
    )
    if facts.state == "running" and not rows:
        listed = tag(
            "p",
            "Where the ranks are now is not known here: they run on other hosts, or as another user.",
        )
    return section("mesh", "Mesh", drawn(Topology(*facts.mesh), now), listed)


def _data(verdict: Verdict) -> Html:
    line = tag("p", tag("strong", verdict.said, class_="good" if verdict.proved else "bad"))
    lines = tag("pre", "\n".join(text.removeprefix("  ") for text in verdict.lines))
    return section("data", "Data: what was read", line, lines if verdict.lines else "")


def _numbers(facts: RunFacts) -> Html:
    """The curves as a table: for those who cannot see them, and for exact values."""
    rows = []
    for name in curve_names(facts.metrics):
        stats = summary(facts.metrics.points(name))
        if stats["count"]:
            pairs = (stats.get(key) for key in ("first", "last", "smallest", "largest"))
            cells = [
                f"{measured(name, pair[1])} (step {pair[0]:,})" if pair else "-"
                for pair in pairs
            ]
            rows.append(
                (
                    name,
                    f"{stats['count']:,}",
                    *cells,
                    f"{stats['not_finite']:,}" if stats["not_finite"] else "-",
                )
            )
    if not rows:
        return Html()
    head = ("number", "logged", "first", "last", "smallest", "largest", "not finite")
    more = sorted(left_out(facts.metrics))
    inside = details(
        "All numbers, unrounded",
        table("Every curve in numbers", head, rows),
        tag("p", f"Too many to show: {', '.join(more)}") if more else "",
        name="numbers",
    )
    return section("numbers", "Curves in numbers", inside)


def _standing_out(facts: RunFacts, reasons: Reasons) -> Html:
    """The findings of `threefold why`, and skipped updates."""
    rows: list[tuple[Any, ...]] = []
    for each in reasons.found[:_MOST_FOUND]:
        steps = ", ".join(f"{step:,}" for step in each.steps[:6]) + (
            ", ..." if len(each.steps) > 6 else ""
        )
        evidence = join(tag("p", fact) for fact in each.facts)
        rows.append(
            (
                steps or "-",
                join([tag("p", tag("strong", each.what)), evidence, *map(_row, each.rows)]),
            )
        )
    rows += [
        (f"{step:,}", f"no update: {why}")
        for step, why in islice(facts.metrics.skipped.items(), _MOST_FOUND)
    ]
    left = len(reasons.found) - _MOST_FOUND
    all_of = pasted(f"threefold why {shell_word(facts.path)} --json")
    more = tag("p", f"and {left:,} less important ones: ", all_of) if left > 0 else ""
    notes = tag("p", reasons.note) if reasons.note else ""
    if not rows:
        return section("why", "What stands out, and why", tag("p", "nothing unusual"), notes)
    see = tag("p", "Choose a step in a chart to see what it read.")
    return section(
        "why",
        "What stands out, and why",
        table("The most important first", ("step", "what, and the evidence"), rows),
        more,
        notes,
        see,
    )


def _row(row: BatchRow) -> Html:
    """A row of the data that is named, with the beginning of its text."""
    documents = ", ".join(f"{each:,}" for each in row.documents[:6])
    files = f" of {', '.join(row.files[:3])}" if row.files else ""
    some = (
        f" (document{'s' if len(row.documents) > 1 else ''} {documents}{files})"
        if documents
        else ""
    )
    named = tag("p", row_text(row), some)
    return join([named, tag("pre", tag("bdi", row.text)) if row.text else ""])


def _history(facts: RunFacts) -> Html:
    rows = []
    for event in facts.events[-_MOST_ROWS:]:
        facts_of = {key: value for key, value in event.items() if key not in _SHOWN_ELSEWHERE}
        if (sizes := sizes_of(event.get("mesh"))) is not None:
            facts_of["mesh"] = str(Topology(*sizes))
        rows.append(
            (
                shown_time(str(event.get("time", ""))),
                event["event"],
                event.get("step", ""),
                _event_text(facts_of),
            )
        )
    if not rows:
        return Html()
    left = len(facts.events) - len(rows)
    note = tag("p", f"The {left:,} earlier events are not shown.") if left > 0 else ""
    state = tag("p", f"{facts.state}: {facts.why}" if facts.why else facts.state)
    history = table(
        "Starts, stops, saves and rewinds", ("when", "what", "after step", ""), rows
    )
    return section(
        "history",
        "History",
        state,
        details(f"{len(facts.events):,} events", history, note, name="events"),
    )


def _event_text(values: Values) -> str:
    wanted = {
        key: value
        for key, value in values.items()
        if value not in (None, {}, [], "", 0) and key != "run"
    }
    changed = wanted.pop("changed", {})
    texts = [
        f"{key} {value if not isinstance(value, list) else ', '.join(map(str, value))}"
        for key, value in wanted.items()
    ]
    if isinstance(changed, Mapping):
        texts += [f"{key} {_arrow(value)}" for key, value in changed.items()]
    return "; ".join(texts)


def _arrow(value: Any) -> str:
    return (
        f"{value[0]} -> {value[1]}"
        if isinstance(value, list) and len(value) == 2
        else str(value)
    )


def _checkpoints(facts: RunFacts) -> Html:
    rows = []
    for each in [*facts.saved[-_MOST_ROWS:], *facts.exported[-_MOST_ROWS:]]:
        size = f"{each.size_bytes / 2**20:,.1f} MiB" if each.size_bytes is not None else "-"
        rows.append(
            (
                each.name,
                f"{each.step:,}",
                size,
                f"{each.state}{', the best' if each.best else ''}",
            )
        )
    if not rows:
        return Html()
    listed = table(
        "In the run's folder; sizes of checkpoints as they were sealed",
        ("checkpoint", "step", "size", "state"),
        rows,
    )
    return section("checkpoints", "Checkpoints", listed)


def _samples(facts: RunFacts) -> Html:
    if not facts.samples:
        return Html()
    newest = facts.samples[-1]["step"]
    inside = [_sample(sample) for sample in facts.samples if sample["step"] == newest]
    before = [_sample(sample) for sample in reversed(facts.samples) if sample["step"] != newest]
    more = details(f"{len(before):,} before", *before, name="samples") if before else ""
    return section("samples", "Samples", *inside, more)


def _sample(sample: Values) -> Html:
    text = tag(
        "blockquote",
        tag("bdi", tag("strong", sample["prompt"]), sample["text"]),
        class_="sample",
    )
    return tag("div", tag("p", f"after step {sample['step']:,}"), text)


def _late(facts: RunFacts) -> Html:
    shares: dict[int, list[tuple[float, int]]] = defaultdict(list)
    for step, rank in zip(*facts.metrics.points("slowest_rank").finite(), strict=True):
        if (share := facts.metrics.number(int(step), "slowest_share")) is not None:
            shares[int(rank)].append((share, int(step)))
    logged = sum(map(len, shares.values()))
    rows = []
    for rank, late in sorted(
        shares.items(), key=lambda entry: -sum(share for share, _ in entry[1])
    )[:64]:
        most, at = max(late)
        mean = sum(share for share, _ in late) / len(late)
        often = f"{len(late):,} ({len(late) / logged:.0%})"
        rows.append((f"rank {rank}", often, f"{mean:.1%}", f"{most:.1%} (step {at:,})"))
    if not rows:
        return Html()
    what = (
        "How often each rank was the slowest at a logged step, and by what share "
        "of the step it was behind the others"
    )
    head = ("rank", "slowest at", "behind on average", "most")
    named = [
        tag("p", str(event.get("text"))) for event in facts.events if event["event"] == "lag"
    ]
    return section("late", "Late ranks", *named, table(what, head, rows))


def _phases(facts: RunFacts) -> Html:
    names = list(dict.fromkeys(name for phases in facts.phases.values() for name in phases))
    rows = [
        (rank, *(f"{phases.get(name, 0.0):.4f}" for name in names))
        for rank, phases in facts.phases.items()
    ]
    if not rows:
        return Html()
    return section(
        "phases",
        "Phases of a step",
        table("Seconds a step, of traced steps", ("rank", *names), rows),
    )


def _warnings(facts: RunFacts) -> Html:
    rows = [
        (each.level.lower(), ranks_text(each.ranks), f"{each.times:,}", each.text)
        for each in facts.warnings
    ]
    notes = [tag("p", note) for note in facts.notes]
    if not rows and not notes:
        return Html()
    listed = (
        table("What the ranks logged", ("level", "ranks", "times", "first said"), rows)
        if rows
        else ""
    )
    return section("warnings", "Warnings", listed, *notes)


def _damage(facts: RunFacts) -> Html:
    if not facts.damaged:
        return Html()
    rows = [(each.file, each.line or "-", each.what) for each in facts.damaged]
    note = tag("p", f"{facts.num_damaged:,} lines could not be read. Everything else is shown.")
    return section(
        "damage", "Damaged lines", note, table("What is wrong", ("file", "line", "what"), rows)
    )


def _next(facts: RunFacts) -> Html:
    rows = [(what, pasted(command)) for command, what in facts.commands()]
    return section("next", "Next", table("Commands to paste", ("to", "command"), rows))


def _config(facts: RunFacts) -> Html:
    if not facts.config_text:
        return Html()
    text = shown(facts.config_text, most=1 << 16)
    return section("config", "Config", details("config.yaml", tag("pre", text), name="config"))
