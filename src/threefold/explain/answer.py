"""What `threefold explain` says, as text and as data. No torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from threefold.checkpoint.lineage import Ending
from threefold.config.paths import JOURNAL
from threefold.errors import rows_text
from threefold.explain.evidence import JobEvidence
from threefold.explain.explain import Confidence, Diagnosis, Explanation, Hit, Status, examine
from threefold.explain.facts import Guess
from threefold.explain.groups import Divergence
from threefold.explain.known import PAGES, KnownError, Retry, Tier, known_errors
from threefold.explain.log import Log, LogLine, LogSource
from threefold.records.state import ended_text

SCHEMA = 1  # of --json: grows when a key changes its meaning or goes
_SHOWN = 300
_OF_PAGE = ("name", "title", "cause", "steps", "several", "check")
# Also what turns the direction of text around: it makes a line read as another one.
_CONTROL = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]"
)
# The pages of what a run notes of its end; any other has its three parts.
_OF_ENDING = {
    "signal": "killed",
    "signal 11": "segmentation-fault",
    "signal 7": "shared-memory",
    "memory": "oom-killed",
    "gone": "killed",
    "vanished": "killed",
    "lost": "peer-gone",
    "asked": "stopped",
    "worker": "loader-worker",
    "device": "out-of-memory",
    "disk": "disk-full",
    "numbers": "nan-loss",
    "exception": "own-error",
}


def answer(evidence: JobEvidence) -> Diagnosis:
    """What all the evidence shows: what a run has noted of its end, else the logs, with what dumps add to them."""
    found = examine(Log(evidence.sources)) if evidence.sources else Diagnosis(Status.UNKNOWN)
    explanation = found.explanation
    differences = list(evidence.differences)
    unexplained = not explanation or explanation.known.tier is Tier.CONSEQUENCE
    if (ending := evidence.ending) and (unexplained or ending.how != "vanished"):
        explanation = _of_ending(ending, evidence.sources, explanation)
        found = Diagnosis(Status.FAILURE, explanation)
    elif evidence.ended:
        found, explanation = Diagnosis(Status.FINISHED), None
    elif differences and (not explanation or explanation.known.tier > Tier.WIDE):
        explanation = _of_dumps(differences.pop(0), explanation)
        found = Diagnosis(Status.FAILURE, explanation)
    extra = [
        *(one.text for one in differences),
        *evidence.notes,
        *(f"not read: {name}" for name in evidence.unread),
    ]
    if not explanation:
        return replace(found, notes=extra)
    facts = [
        fact
        for fact in explanation.facts
        if not (evidence.differences and isinstance(fact, Guess))
    ]
    return replace(found, explanation=replace(explanation, facts=[*facts, *extra]))


def _of_ending(
    ending: Ending, sources: Sequence[LogSource], told: Explanation | None
) -> Explanation:
    """What the run has noted comes before all logs: those of other ranks tell what followed from it."""
    rank = next(iter(ending.ranks), None)
    page = _OF_ENDING.get(f"{ending.how} {ending.code}") or _OF_ENDING.get(
        ending.how, "threefold"
    )
    known = known_errors()[page]
    proved = known.tier < Tier.SYMPTOM or page == "threefold"
    facts = [*ending.error.splitlines(), *([rows_text(ending.rows)] if ending.rows else ())]
    if ending.memory_kills:
        facts.append(
            f"processes that the kernel ended meanwhile because memory ran out: {ending.memory_kills}"
        )
    line = LogLine(1, ended_text(ending), rank, ending.host, JOURNAL)
    frame = ending.at.strip() or None
    confidence = Confidence.SURE if proved else Confidence.SYMPTOM
    found = Explanation(
        known, line, confidence, frame, facts, _beside(known, told), not proved, ending
    )
    # What others raise has its words in the log of that rank.
    logs = [source for source in sources if source.rank == rank]
    own = examine(Log(logs)).explanation if page == "own-error" and logs else None
    if not own or own.known.tier is Tier.CONSEQUENCE:
        return found
    return replace(
        own,
        line=line,
        facts=[*facts, *own.facts],
        others=_beside(own.known, told),
        ending=ending,
    )


def _beside(known: KnownError, told: Explanation | None) -> list[Hit]:
    """What else the logs show."""
    others = [Hit(told.known, [told.line]), *told.others] if told else []
    return [hit for hit in others if hit.known.name != known.name]


def _of_dumps(first: Divergence, told: Explanation | None) -> Explanation:
    """Dumps say which operation and which ranks; a timeout in the log is what follows from it."""
    differs = first.kind == "different"
    known = known_errors()["collective-mismatch" if differs else "nccl-timeout"]
    rank = first.ranks[0] if first.ranks else None
    line = LogLine(1, first.text, rank, None, "Flight Recorder dumps")
    confidence = Confidence.SURE if differs else Confidence.LIKELY
    return Explanation(
        known, line, confidence, None, told.facts if told else (), _beside(known, told)
    )


def text(found: Diagnosis) -> str:
    """The finding as text; what a log would do to a terminal is taken out."""
    return _CONTROL.sub("?", _text(found))


def _text(found: Diagnosis) -> str:
    if found.explanation:
        return _explanation(found.explanation)
    lines = [_shown(line) for line in found.telling]
    notes = [f"  {note}" for note in found.notes]
    if found.status is Status.UNKNOWN:
        title = "unknown: threefold does not know any error in this log"
        heading = ["  its most telling lines:"] if lines else []
        known = f"  the errors that it does know: {PAGES}"
        return "\n".join([title, *heading, *(f"    {line}" for line in lines), *notes, known])
    what = (
        "the job finished"
        if found.status is Status.FINISHED
        else "the job went on after what looks like errors"
    )
    return "\n".join([f"no failure: {what}", *(f"  {line}" for line in lines), *notes])


def _explanation(found: Explanation) -> str:
    known = found.known
    lines = [f"{known.title}  [{known.name}]", f"  {_shown(found.line)}"]
    if found.frame:
        lines.append(f"  at {found.frame}")
    lines += [f"  {fact}" for fact in found.facts]
    unproved = "only a symptom, its cause is not in this log"
    if found.hint:
        unproved = "the usual cause, which no line proves"
    elif known.name == "own-error":
        unproved = "first error, its cause may be earlier"
    cause = (
        "one of several causes"
        if known.several and found.confidence is not Confidence.SURE
        else "cause"
    )
    told = unproved if found.confidence is Confidence.SYMPTOM else cause
    lines += [
        "",
        f"{told}: {known.cause}",
        f"confidence: {found.confidence}",
        f"retry: {known.retry}",
        "what to do:",
    ]
    lines += [f"  {number}. {step}" for number, step in enumerate(known.steps, 1)]
    lines.append(
        f"to settle it: {known.check}" if found.asked is None else f"asked here: {found.asked}"
    )
    if found.others:
        lines += ["", "also in this log:"]
        lines += [
            f"  {hit.line.where()}: {hit.known.title}  [{hit.known.name}]"
            for hit in found.others
        ]
    return "\n".join([*lines, "", f"more: {PAGES / known.name}.md"])


def data(found: Diagnosis) -> dict[str, Any]:
    """The finding for other programs; docs/troubleshooting.md describes the keys."""
    told: dict[str, Any] = {
        "schema": SCHEMA,
        "status": str(found.status),
        # What happened for a reason that nobody knows is not started again.
        "retry": str(Retry.NO),
        "telling": [_line(line) for line in found.telling],
        "notes": found.notes,
    }
    if not (explanation := found.explanation):
        return told
    known = explanation.known
    return told | {
        "retry": str(known.retry),
        "ending": explanation.ending and asdict(explanation.ending),
        **{key: getattr(known, key) for key in _OF_PAGE},
        "confidence": str(explanation.confidence),
        "line": _line(explanation.line),
        "frame": explanation.frame,
        "facts": explanation.facts,
        "asked": explanation.asked,
        "page": f"{PAGES / known.name}.md",
        "others": [
            {"name": hit.known.name, "title": hit.known.title, "line": _line(hit.line)}
            for hit in explanation.others
        ],
    }


def _line(line: LogLine) -> dict[str, Any]:
    return {
        "file": line.file or None,
        "number": line.number,
        "rank": line.rank,
        "host": line.host,
        "text": _shortened(line.text),
    }


def _shown(line: LogLine) -> str:
    return f"{line.where()}: {_shortened(line.text)}"


def _shortened(line: str) -> str:
    return line.strip()[:_SHOWN] + (" ..." if len(line.strip()) > _SHOWN else "")
