"""Whether an apparent error ended anything: a warning does not, nor does a recovered error. No torch.

A log claims no failure by itself. There must be evidence that the program ended or could not continue: an error that
was raised, a line that is no warning, a kill, or the reporter's own words. And a log that merely stops shows no hang.
"""

from __future__ import annotations

from collections.abc import Sequence

from threefold.explain.events import Events
from threefold.explain.log import Log, LogLine
from threefold.explain.sources.signs import EventKind
from threefold.explain.sources.wording import is_mild, is_of_launcher, says_end

# Also where a logger or a launcher forwards it.
_ENDED_ANYWHERE = ("Traceback (most recent call last)", "closing signal SIG")
_TELLING = (
    "rror",
    "atal",
    "ailed",
    "xception",
    "WARN",
    "illed",
    "bort",
    "anic",
    "timed out",
    "refused",
    "denied",
)


def follows_a_program(log: Log, line: LogLine) -> bool:
    """Whether the launcher's line follows output of the program that it had started."""
    before = log.raw[max(log.source(line.index).start, line.index - 5) : line.index]
    return not all(is_of_launcher(one[:300]) for one in before)


def ended(log: Log) -> bool:
    """Whether a line that is not a warning reports that something ended or failed."""
    lines = (line[:600] for line in log.raw[-20_000:])
    return any(map(log.has, _ENDED_ANYWHERE)) or any(
        says_end(line) and not is_mild(line) for line in lines
    )


def said_to_hang(events: Events) -> LogLine | None:
    """The last line of a job of several ranks that is reported to hang; None otherwise."""
    log, ranks = events.log, events.places(EventKind.GROUP)
    if not ranks or all(is_mild(log.raw[index]) for index in events.places(EventKind.HANGS)):
        return None
    return log.line(max(ranks))


def telling(log: Log, ends: Sequence[LogLine]) -> list[LogLine]:
    """The three lines of an unknown log that say most: `ends` of tracebacks, lines of trouble, the last ones."""
    trouble = sorted(
        {places[0] for words in _TELLING for places in log.shapes_containing(words)}
    )
    end = range(len(log.raw) - 1, max(-1, len(log.raw) - 50), -1)
    last = [index for index in end if sum(map(str.isalpha, log.raw[index])) > 2]
    best = dict.fromkeys(
        [*(line.index for line in ends[-3:]), *trouble[:2], *trouble[-3:], *last]
    )
    return [log.line(index) for index in sorted([*best][:3])]
