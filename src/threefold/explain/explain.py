"""`threefold explain`: what a job left behind -> what happened, on which rank or host, which line shows it, what to do.

If a log shows several errors, the one nearest to the beginning of the failure explains it: a cause before a symptom, a
symptom before a consequence (`Tier`); of two causes the earlier one. An error that has no page but ended a rank's
traceback is the program's own; it comes before symptoms, because the other ranks' lost connections and timeouts follow
from it.
A job that finished has not failed, and trouble that was recovered from does not count (`events.py`). No torch.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from threefold.checkpoint.lineage import Ending
from threefold.explain.events import Events, ended, follows_a_program, telling
from threefold.explain.facts import first_failure
from threefold.explain.known import PAGES, KnownError, Sign, Tier, known_errors
from threefold.explain.log import Log, LogLine
from threefold.explain.sources.c10d import is_retry, nccl_reason
from threefold.explain.sources.launcher import first_exit, rank_of_exit
from threefold.explain.sources.signs import EventKind
from threefold.explain.sources.tracebacks import (
    Raised,
    ignored_lines,
    is_error,
    messages,
    raised,
    unframed,
)
from threefold.explain.sources.wording import is_mild, is_talk

# What the ranks of a finished job report about one another, or about the launcher that ends them.
_CLOSING = {"own-stop", "peer-gone", "ray-worker-died", "stopped", "store-lost"}
# Launchers start any program: after lines of one that does not train, they say nothing of training.
_LAUNCHERS = {"illegal-memory-access", "mpi-start", "slurm-refused", "unschedulable"}
# What happens to a machine, a disk or a job brings errors of many kinds about, and none of them brings it about.
_BRING_OTHERS = {
    "gpu-fault",
    "oom-killed",
    "preempted",
    "time-limit",
    "pod-evicted",
    "node-failure",
}


class Status(StrEnum):
    """What a log shows."""

    FAILURE = "failure"
    FINISHED = "finished"
    SURVIVED = "survived"
    UNKNOWN = "unknown"


class Confidence(StrEnum):
    """How far an explanation holds."""

    SURE = "sure"
    LIKELY = "likely"
    SYMPTOM = "only a symptom"


@dataclass(frozen=True)
class Hit:
    """A known error in a log: the lines that show it, in order, and whether the first ended a traceback.

    Attributes:
        most: the tier that its lines prove at most: they may have several causes, or be warnings before an error.
        generic: the first line has only words that other programs write too.
    """

    known: KnownError
    lines: Sequence[LogLine]
    raised: Raised | None = None
    most: Tier = Tier.CAUSE
    generic: bool = False

    @property
    def line(self) -> LogLine:
        """The one that matters."""
        return self.lines[0]

    @property
    def tier(self) -> Tier:
        """The page's, unless the lines prove less."""
        return max(self.known.tier, self.most)


@dataclass(frozen=True)
class Explanation:
    """What happened, its evidence, and the other errors in the log.

    Attributes:
        line: the decisive line.
        frame: place in the program, if a traceback names one.
        facts: sentences with the log's numbers.
        others: known errors that follow from this one, or occur next to it.
        hint: reported as a symptom, but the page's cause is the most likely one of the line.
        ending: the run's own note of its end.
        asked: the answer to the page's question on this machine, if it was asked.
    """

    known: KnownError
    line: LogLine
    confidence: Confidence
    frame: str | None = None
    facts: Sequence[str] = ()
    others: Sequence[Hit] = ()
    hint: bool = False
    ending: Ending | None = None
    asked: str | None = None


@dataclass(frozen=True)
class Diagnosis:
    """What a log shows: an explanation if something failed; else the lines that say why not, or that say most."""

    status: Status
    explanation: Explanation | None = None
    telling: Sequence[LogLine] = ()
    notes: Sequence[str] = ()


def explain(text: str, *, pages: Path = PAGES) -> Explanation | None:
    """What happened according to one log; None if nothing failed, or nothing that is known."""
    return examine(Log.of(text), pages=pages).explanation


def examine(log: Log, *, pages: Path = PAGES) -> Diagnosis:
    """What the logs of a job show."""
    events = Events(log)
    errors = raised(log)
    known = known_errors(pages)
    hits = sorted(_hits(events, errors, known.values()), key=lambda hit: _precedence(log, hit))
    if hits and hits[0].known.name == "nccl-internal" and (reason := nccl_reason(log)):
        # What its reason shows explains the error itself.
        hits.sort(key=lambda hit: not any(reason in line.text for line in hit.lines))
    if not hits and (numbers := events.not_finite()):
        hits = [Hit(known["nan-loss"], numbers)]
    left, own = _not_made_good(events, hits, errors)
    if not errors and all(
        hit.tier > Tier.WIDE and all(is_retry(line.text) for line in hit.lines) for hit in left
    ):
        left = []  # torch warns of attempts to connect that succeed later
    claims = [line.text for hit in left if hit.known.name != "nan-loss" for line in hit.lines]
    if claims and not own and all(map(is_mild, claims)) and not ended(log):
        left = []
    if explanation := _explanation(events, left, own, known):
        return Diagnosis(Status.FAILURE, explanation)
    finished = events.places(EventKind.FINISHED)
    if finished and (hits or not errors or events.made_good(errors[-1].line.index)):
        return Diagnosis(Status.FINISHED, telling=[log.line(finished[-1])])
    if hits and not left and events.places(EventKind.PROGRESS):
        return Diagnosis(Status.SURVIVED, telling=[hit.line for hit in hits[:3]])
    return Diagnosis(Status.UNKNOWN, telling=telling(log, [error.line for error in errors]))


def _explanation(
    events: Events, hits: Sequence[Hit], errors: Sequence[Raised], known: dict[str, KnownError]
) -> Explanation | None:
    log = events.log
    if hits and hits[0].tier <= Tier.HINT:
        return _explained(log, hits, errors)
    for fix in log.containing("  fix: "):
        if fix.index >= 2 and (expected := log.line(fix.index - 1)).text.startswith(
            "  expected: "
        ):
            facts = [expected.text.strip(), fix.text.strip()]
            return Explanation(
                known["threefold"], log.line(fix.index - 2), Confidence.SURE, None, facts, hits
            )
    if own := _own_errors(events, errors, hits):
        mine, page = own[0], known["own-error"]
        facts = page.facts(log, [error.line for error in own])
        # Even a name that is missing follows from an import that failed, an unbound one from a loop without rows.
        return Explanation(page, mine.line, Confidence.SYMPTOM, mine.frame, facts, hits)
    return _explained(log, hits, errors) if hits else None


def _explained(log: Log, hits: Sequence[Hit], errors: Sequence[Raised]) -> Explanation:
    first, *others = hits
    line = first.line
    if line.rank is None and first.known.facts is first_failure:
        line = replace(line, rank=rank_of_exit(log, line))  # only the launcher names it
    frame = first.raised.frame if first.raised else None
    facts = first.known.facts(log, first.lines)
    confidence = _confidence(first, others, _unknown(errors, hits))
    hint = confidence is Confidence.SYMPTOM and first.tier <= Tier.HINT
    return Explanation(first.known, line, confidence, frame, facts, others, hint)


def _confidence(first: Hit, others: Sequence[Hit], unknown: Sequence[Raised]) -> Confidence:
    """What ended in an error that no page (`unknown`) or only a wide one describes may not have ended by the first."""
    rivals = any(
        hit.tier is Tier.CAUSE and hit.line.index != first.line.index for hit in others
    )
    # A line that other programs write too does not explain an error that it is not part of.
    worst = Tier.SYMPTOM if first.generic else Tier.HINT
    otherwise = unknown or any(hit.raised and Tier.CAUSE < hit.tier <= worst for hit in others)
    doubts = rivals or (otherwise and not first.raised)
    bare = first.generic and not first.raised
    vague = bare and first.tier is Tier.WIDE and not is_error(first.line)
    if vague or first.tier > Tier.WIDE or (doubts and first.known.name not in _BRING_OTHERS):
        return Confidence.SYMPTOM
    unclear = first.known.several or first.tier is Tier.WIDE or doubts or bare
    return Confidence.LIKELY if unclear else Confidence.SURE


def _hits(
    events: Events, errors: Sequence[Raised], known: Iterable[KnownError]
) -> Iterator[Hit]:
    log = events.log
    ended = {error.line.index: error for error in errors}
    training, other = events.is_training, events.is_foreign
    following, ignored = messages(log, errors), ignored_lines(log)
    for one in known:
        shown: dict[int, list[Sign]] = {}
        for sign in one.signs:
            if training or not (other or sign.generic):
                for index in _places(log, sign, following):
                    shown.setdefault(index, []).append(sign)
        # A line that ended a traceback is stronger evidence than an earlier warning.
        places = sorted(shown.keys() - ignored, key=lambda index: (index not in ended, index))
        lines = [log.line(index) for index in places]
        if not lines or (
            not training and one.name in _LAUNCHERS and follows_a_program(log, lines[0])
        ):
            continue
        first = places[0]
        most = min(sign.most for index in places for sign in shown[index])
        if first not in ended and all(is_mild(line.text) for line in lines):
            # An error that came after, but for attempts to connect: the program continued past the warning.
            overtaken = max(following, default=-1) > places[-1] and not any(
                is_retry(line.text) for line in lines
            )
            most = max(most, Tier.SYMPTOM if overtaken else Tier.HINT)
        generic = all(sign.generic for sign in shown[first])
        yield Hit(one, lines, ended.get(first), most, generic)


def _places(log: Log, sign: Sign, following: dict[int, str]) -> Iterator[int]:
    for index in log.indices(sign.anchor):
        line = log.raw[index]
        if index not in following and sign.shows_in(line) and not is_talk(line, sign.anchor):
            yield index
    for index, message in following.items():
        if sign.anchor in message and sign.shows_in(message):
            yield index


def _precedence(log: Log, hit: Hit) -> tuple[Any, ...]:
    time = log.time(hit.line.index) if len(log.sources) > 1 else None
    text = hit.line.text
    size = max((len(sign.anchor) for sign in hit.known.signs if sign.shows_in(text)), default=0)
    return (
        hit.tier,
        hit.tier is Tier.SYMPTOM > hit.known.tier,  # its lines follow from several causes
        hit.raised is None,
        time or "",
        hit.generic and hit.tier is Tier.SYMPTOM,
        hit.line.index,
        hit.generic,
        -size,
    )


def _not_made_good(
    events: Events, hits: Sequence[Hit], errors: Sequence[Raised]
) -> tuple[list[Hit], list[Raised]]:
    """The hits and errors after which the job did not continue."""
    left = []
    for hit in hits:
        if hit.known.name in _CLOSING and all(events.over(line.index) for line in hit.lines):
            continue
        stays = hit.known.name == "nan-loss"  # the steps that follow are of the same failure
        if lines := [line for line in hit.lines if stays or not events.made_good(line.index)]:
            kept = hit.raised if hit.line in lines else None
            left.append(replace(hit, lines=lines, raised=kept))
    own = [error for error in errors if not events.made_good(error.line.index)]
    return left, own


def _own_errors(
    events: Events, errors: Sequence[Raised], hits: Sequence[Hit]
) -> Sequence[Raised]:
    """The errors of a training job that no page describes, that of the rank which failed first before the others."""
    log = events.log
    # Libraries that train also only run models: a rank, or a word of training.
    trains = events.is_training and (events.places(EventKind.TRAINS) or "[rank" in log.firsts)
    if events.is_foreign or not (hits or trains):
        return []
    first = first_exit(log).rank
    if not (errors or events.places(EventKind.FINISHED)) and all(
        hit.tier is Tier.CONSEQUENCE for hit in hits
    ):
        errors = [error for error in unframed(log) if not events.made_good(error.line.index, 1)]
    return sorted(
        _unknown(errors, hits), key=lambda error: first is not None and error.line.rank != first
    )


def _unknown(errors: Sequence[Raised], hits: Sequence[Hit]) -> list[Raised]:
    """The errors that no page describes."""
    shown = {line.index for hit in hits for line in hit.lines}
    return [error for error in errors if error.line.index not in shown]
