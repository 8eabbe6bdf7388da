"""`threefold explain`: the log of any torch.distributed program -> what happened, the line that matters, what to do.

If a log shows several errors, the one nearest to the beginning of the failure explains it: a cause before a symptom, a
symptom before a consequence (`Tier`). An error that has no page but ended a rank's traceback is the program's own; it
comes before symptoms, because the other ranks' lost connections and timeouts follow from it. No torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from threefold.explain.known import PAGES, KnownError, Tier, known_errors
from threefold.explain.log import Line, Log, Raised

_SHOWN = 300
# A full disk or a lost connection has the same words in every program; only logs of training programs are explained.
_FIELD = re.compile(
    r"torch|c10d|\bgloo|NCCL|\[rank\d|transformers|huggingface|accelerate|deepspeed|threefold|flash_attn|CUDA|cuda:\d"
    r"|vllm|tensor parallel|mp_size|world[_ ]size"
)
_WARNING = re.compile(r"\[?W\d{3,4} |WARNING|\S*Warning:")
_THREE_PARTS = re.compile(r"^.+\n  expected: (?P<expected>.+)\n  fix: (?P<fix>.+)$", re.MULTILINE)


@dataclass(frozen=True)
class Hit:
    """A known error in a log: the lines that show it, in order, and whether the first ended a traceback."""

    known: KnownError
    lines: Sequence[Line]
    raised: Raised | None = None


@dataclass(frozen=True)
class Explanation:
    """What happened, its evidence, and the other errors in the log.

    Attributes:
        line: the one that matters.
        frame: place in the program, if a traceback names one.
        facts: sentences with the log's numbers.
        others: known errors that follow from this one, or occur next to it.
    """

    known: KnownError
    line: Line
    frame: str | None = None
    facts: Sequence[str] = ()
    others: Sequence[Hit] = ()

    def text(self) -> str:
        """The explanation as text."""
        lines = [f"{self.known.title}  [{self.known.name}]", f"  {self.line.where()}: {_shortened(self.line.text)}"]
        if self.frame:
            lines.append(f"  at {self.frame}")
        lines += [f"  {fact}" for fact in self.facts]
        lines += ["", f"cause: {self.known.cause}", "what to do:"]
        lines += [f"  {number}. {step}" for number, step in enumerate(self.known.steps, 1)]
        if self.others:
            lines += ["", "also in this log:"]
            lines += [f"  {hit.lines[0].where()}: {hit.known.title}  [{hit.known.name}]" for hit in self.others]
        return "\n".join([*lines, "", f"more: {PAGES / self.known.name}.md"])


def explain(text: str, *, pages: Path = PAGES) -> Explanation | None:
    """What happened according to the log; None if it has no known error or is from another kind of program."""
    log = Log.of(text)
    if not _FIELD.search(log.text):
        return None
    raised, known = log.raised(), known_errors(pages)
    hits = sorted(_hits(log, raised, known.values()), key=_precedence)
    if not raised and all(_WARNING.match(line.text) for hit in hits for line in hit.lines):
        hits = []  # torch warns of attempts that succeed later
    if hits and hits[0].known.tier is Tier.CAUSE:
        return _explained(log, hits)
    if (ours := _THREE_PARTS.search(log.text)) is not None:
        facts = [f"expected: {ours['expected']}", f"fix: {ours['fix']}"]
        return Explanation(known["threefold"], log.line_at(ours.start()), None, facts, hits)
    if (own := _own_error(text, raised, hits)) is not None:
        facts = [f"it ended rank {own.line.rank}"] if own.line.rank is not None else []
        return Explanation(known["own-error"], own.line, own.frame, facts, hits)
    return _explained(log, hits) if hits else None


def _explained(log: Log, hits: Sequence[Hit]) -> Explanation:
    first, *others = hits
    frame = first.raised.frame if first.raised is not None else None
    return Explanation(first.known, first.lines[0], frame, first.known.facts(log, first.lines), others)


def last_error(text: str) -> Line | None:
    """The line that ended the last traceback; for a log that cannot be explained."""
    raised = Log.of(text).raised()
    return raised[-1].line if raised else None


def _hits(log: Log, raised: Sequence[Raised], errors: Iterable[KnownError]) -> list[Hit]:
    ended = {error.line.number: error for error in raised}
    found = []
    for known in errors:
        offsets = sorted({match.start() for sign in known.signs for match in sign.finditer(log.text)})
        lines = {line.number: line for line in map(log.line_at, offsets)}
        # A line that ended a traceback says more than an earlier warning.
        ordered = sorted(lines.values(), key=lambda line: (line.number not in ended, line.number))
        if ordered:
            found.append(Hit(known, ordered, ended.get(ordered[0].number)))
    return found


def _precedence(hit: Hit) -> tuple[int, bool, int]:
    return (hit.known.tier, hit.raised is None, hit.lines[0].number)


def _own_error(text: str, raised: Sequence[Raised], hits: Sequence[Hit]) -> Raised | None:
    """The first error of a rank that no page describes, in the log of a program of several ranks."""
    known = {line.number for hit in hits for line in hit.lines}
    own = [error for error in raised if error.line.number not in known and not error.reports_another]
    several = hits or any(error.line.rank is not None for error in raised) or "torch.distributed" in text
    if not own or not several:
        return None
    _, found, failure = text.partition("Root Cause (first observed failure)")
    rank = re.search(r"\brank +: (\d+)", failure) if found else None
    named = [error for error in own if rank is not None and error.line.rank == int(rank[1])]
    return (named or own)[0]


def _shortened(text: str) -> str:
    return text.strip()[:_SHOWN] + (" ..." if len(text.strip()) > _SHOWN else "")
