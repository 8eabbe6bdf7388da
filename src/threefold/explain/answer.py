"""The answer of `threefold explain`, as text and as data. No torch."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from threefold.checkpoint.lineage import Ending
from threefold.config.paths import JOURNAL
from threefold.errors import rows_text, visible
from threefold.explain.evidence import JobEvidence
from threefold.explain.explain import Confidence, Diagnosis, Explanation, Hit, Status, examine
from threefold.explain.facts import Guess
from threefold.explain.groups import Divergence
from threefold.explain.known import PAGES, KnownError, Retry, Tier, known_errors
from threefold.explain.log import Log, LogLine, LogSource
from threefold.records.state import ended_text

SCHEMA = 1  # of --json: grows when a key changes its meaning or is removed
_SHOWN = 300
_OF_PAGE = ("name", "title", "cause", "steps", "several", "check")
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
    diagnosis = (
        examine(Log(evidence.sources)) if evidence.sources else Diagnosis(Status.UNKNOWN)
    )
    explanation = diagnosis.explanation
    differences = list(evidence.differences)
    unexplained = not explanation or explanation.known.tier is Tier.CONSEQUENCE
    if (ending := evidence.ending) and (unexplained or ending.how != "vanished"):
        explanation = _of_ending(ending, evidence.sources, explanation)
        diagnosis = Diagnosis(Status.FAILURE, explanation)
    elif evidence.ended:
        diagnosis, explanation = Diagnosis(Status.FINISHED), None
    elif differences and (not explanation or explanation.known.tier > Tier.WIDE):
        explanation = _of_dumps(differences.pop(0), explanation)
        diagnosis = Diagnosis(Status.FAILURE, explanation)
    extra = [
        *(one.text for one in differences),
        *evidence.notes,
        *(f"not read: {name}" for name in evidence.unread),
    ]
    if not explanation:
        return replace(diagnosis, notes=extra)
    facts = [
        fact
        for fact in explanation.facts
        if not (evidence.differences and isinstance(fact, Guess))
    ]
    return replace(diagnosis, explanation=replace(explanation, facts=[*facts, *extra]))


def _of_ending(
    ending: Ending, sources: Sequence[LogSource], logged: Explanation | None
) -> Explanation:
    """What the run has noted takes precedence over all logs: those of other ranks show what followed from it."""
    rank = next(iter(ending.ranks), None)
    page = _OF_ENDING.get(f"{ending.how} {ending.code}") or _OF_ENDING.get(
        ending.how, "threefold"
    )
    known = known_errors()[page]
    proved = known.tier < Tier.SYMPTOM or page == "threefold"
    facts = [*ending.error.splitlines(), *([rows_text(ending.rows)] if ending.rows else ())]
    if ending.memory_kills:
        facts.append(
            f"processes that the kernel killed meanwhile because memory ran out: {ending.memory_kills}"
        )
    line = LogLine(1, ended_text(ending), rank, ending.host, JOURNAL)
    frame = ending.at.strip() or None
    confidence = Confidence.SURE if proved else Confidence.SYMPTOM
    explanation = Explanation(
        known, line, confidence, frame, facts, _beside(known, logged), not proved, ending
    )
    # The message of an error that other code raised is in the log of that rank.
    logs = [source for source in sources if source.rank == rank]
    own = examine(Log(logs)).explanation if page == "own-error" and logs else None
    if not own or own.known.tier is Tier.CONSEQUENCE:
        return explanation
    return replace(
        own,
        line=line,
        facts=[*facts, *own.facts],
        others=_beside(own.known, logged),
        ending=ending,
    )


def _beside(known: KnownError, logged: Explanation | None) -> list[Hit]:
    """What else the logs show."""
    others = [Hit(logged.known, [logged.line]), *logged.others] if logged else []
    return [hit for hit in others if hit.known.name != known.name]


def _of_dumps(first: Divergence, logged: Explanation | None) -> Explanation:
    """Dumps show which operation and which ranks; a timeout in the log is what follows from it."""
    differs = first.kind == "different"
    known = known_errors()["collective-mismatch" if differs else "nccl-timeout"]
    rank = first.ranks[0] if first.ranks else None
    line = LogLine(1, first.text, rank, None, "Flight Recorder dumps")
    confidence = Confidence.SURE if differs else Confidence.LIKELY
    return Explanation(
        known, line, confidence, None, logged.facts if logged else (), _beside(known, logged)
    )


def text(diagnosis: Diagnosis) -> str:
    """The diagnosis as text, without what would control a terminal."""
    return visible(_text(diagnosis))


def _text(diagnosis: Diagnosis) -> str:
    if diagnosis.explanation:
        return _explanation(diagnosis.explanation)
    lines = [_shown(line) for line in diagnosis.telling]
    notes = [f"  {note}" for note in diagnosis.notes]
    if diagnosis.status is Status.UNKNOWN:
        title = "unknown: threefold does not know any error in this log"
        heading = ["  its most telling lines:"] if lines else []
        pages = f"  the errors that it does know: {PAGES}"
        return "\n".join([title, *heading, *(f"    {line}" for line in lines), *notes, pages])
    what = (
        "the job finished"
        if diagnosis.status is Status.FINISHED
        else "the job continued after what looks like errors"
    )
    return "\n".join([f"no failure: {what}", *(f"  {line}" for line in lines), *notes])


def _explanation(explanation: Explanation) -> str:
    known = explanation.known
    lines = [f"{known.title}  [{known.name}]", f"  {_shown(explanation.line)}"]
    if explanation.frame:
        lines.append(f"  at {explanation.frame}")
    lines += [f"  {fact}" for fact in explanation.facts]
    unproved = "only a symptom"
    if not explanation.facts:
        unproved += ", its cause is not in this log"
    if explanation.hint:
        unproved = "the usual cause, which no line proves"
    elif known.name == "own-error":
        unproved = "first error, its cause may be earlier"
    cause = (
        "one of several causes"
        if known.several and explanation.confidence is not Confidence.SURE
        else "cause"
    )
    heading = unproved if explanation.confidence is Confidence.SYMPTOM else cause
    lines += [
        "",
        f"{heading}: {known.cause}",
        f"confidence: {explanation.confidence}",
        f"retry: {known.retry}",
        "what to do:",
    ]
    lines += [f"  {number}. {step}" for number, step in enumerate(known.steps, 1)]
    lines.append(
        f"to settle it: {known.check}"
        if explanation.asked is None
        else f"asked here: {explanation.asked}"
    )
    if explanation.others:
        lines += ["", "also in this log:"]
        lines += [
            f"  {hit.line.where()}: {hit.known.title}  [{hit.known.name}]"
            for hit in explanation.others
        ]
    return "\n".join([*lines, "", f"more: {PAGES / known.name}.md"])


def data(diagnosis: Diagnosis) -> dict[str, Any]:
    """The diagnosis for other programs; docs/troubleshooting.md describes the keys."""
    fields: dict[str, Any] = {
        "schema": SCHEMA,
        "status": str(diagnosis.status),
        # A job that failed for an unknown reason is not started again.
        "retry": str(Retry.NO),
        "telling": [_line(line) for line in diagnosis.telling],
        "notes": diagnosis.notes,
    }
    if not (explanation := diagnosis.explanation):
        return fields
    known = explanation.known
    return fields | {
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
