"""What the lines of a log show about its job: its origin, its progress, its end. No torch.

An event is a line of an `EventKind`, matched by an expression. Whether a log is of a training job is whether it has an
event of a rank: evidence of training, never the absence of something else, a genome, a climate or a solver may be what
is trained on. A run that finished has not failed, and trouble followed by progress was recovered from: both matter more
than any line that looks like an error.

Nor does a log claim a failure by itself. There must be evidence that the program ended or could not continue: an error
that was raised, a line that is no warning, a kill, or the reporter's own words; a warning or a recovered error is none.
And a log that merely stops shows no hang.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import cached_property
from itertools import chain, islice

from threefold.explain.log import Log, LogLine
from threefold.explain.sources.signs import EventKind, each_sign
from threefold.explain.sources.wording import is_mild, is_of_launcher, says_end

_GOES_ON = 2  # lines of progress that show that trouble was made good
_SKIPPED = 3  # steps in a row


class Events:
    """The events of a job in a log, by kind."""

    def __init__(self, log: Log) -> None:
        self.log = log
        self._places: dict[EventKind, list[int]] = {}

    def places(self, kind: EventKind) -> list[int]:
        """Indices of the lines of a kind, in order."""
        if kind not in self._places:
            self._places[kind] = sorted({*chain.from_iterable(each_sign(self.log, kind))})
        return self._places[kind]

    def _signs(self, kind: EventKind, most: int = 1) -> int:
        """How many of a kind's expressions the log has, up to `most`."""
        return len([*islice(each_sign(self.log, kind), most)])

    @cached_property
    def is_training(self) -> bool:
        """Whether a training job wrote the log: by its own words, or by several that it shares with other programs."""
        learning = self._signs(EventKind.LEARN, 2)
        shared = learning > 1 or (learning and self._signs(EventKind.MACHINE))
        return bool(shared or self._signs(EventKind.RANK)) and not self.is_foreign

    @cached_property
    def is_foreign(self) -> bool:
        """Whether nothing trains here: frames of other languages, tests, a server or a build without words of it."""
        serves = self._signs(EventKind.SERVING) and not self._signs(EventKind.TRAINS)
        return bool(serves or self._signs(EventKind.FOREIGN))

    def made_good(self, index: int, goes_on: int = _GOES_ON) -> bool:
        """Whether the job continued, found another way or finished after the line at `index`, as its own file shows."""
        end = self.log.source(index).stop
        return (
            self._between(EventKind.FINISHED, index, end) > 0
            or self._between(EventKind.MENDED, index, end) > 0
            or self._between(EventKind.PROGRESS, index, end) >= goes_on
        )

    def over(self, index: int) -> bool:
        """Whether the job had finished for good before the line at `index`, as lines of the same file show."""
        begin = self.log.source(index).start
        ends = [end for end in self.places(EventKind.FINISHED) if begin <= end < index]
        return bool(ends) and self._between(EventKind.PROGRESS, ends[-1], index) == 0

    def not_finite(self) -> list[LogLine]:
        """The lines whose loss or gradient norm is not a number, if this is more than one skipped step, or the scale
        of fp16 cannot shrink."""
        bad, scales = self.places(EventKind.NO_NUMBER), self.places(EventKind.SMALLEST_SCALE)
        measured = {*self.places(EventKind.MEASURED), *bad}
        if bad and (max(measured) == bad[-1] or len(bad) * 5 >= len(measured) > 2):
            return [self.log.line(index) for index in bad]
        if len(scales) >= _SKIPPED and max(measured, default=0) <= scales[-1]:
            return [self.log.line(index) for index in scales]
        return []

    def _between(self, kind: EventKind, after: int, before: int) -> int:
        return bisect_left(self.places(kind), before) - bisect_right(self.places(kind), after)


# Also where a logger or a launcher forwards it.
_ENDED_ANYWHERE = ("Traceback (most recent call last)", "closing signal SIG")


def follows_a_program(log: Log, line: LogLine) -> bool:
    """Whether the launcher's line follows output of the program that it had started."""
    before = log.raw[max(log.source(line.index).start, line.index - 5) : line.index]
    return not all(is_of_launcher(one[:300]) for one in before)


def ended(log: Log) -> bool:
    """Whether a line that is not a warning reports that something ended or failed."""
    lines = (line[:600] for line in log.raw[-20_000:])
    return any(words in log.firsts for words in _ENDED_ANYWHERE) or any(
        says_end(line) and not is_mild(line) for line in lines
    )


def telling(log: Log, ends: Sequence[LogLine]) -> list[LogLine]:
    """The three lines of an unknown log that say most: `ends` of tracebacks, lines of trouble, the last ones."""
    first = ((places[0], log.raw[places[0]][:600]) for places in log.shapes.values())
    trouble = [index for index, text in first if says_end(text) and "Traceback" not in text]
    end = range(len(log.raw) - 1, max(-1, len(log.raw) - 50), -1)
    last = [index for index in end if sum(map(str.isalpha, log.raw[index])) > 2]
    best = dict.fromkeys(
        [*(line.index for line in ends[-3:]), *trouble[:2], *trouble[-3:], *last]
    )
    return [log.line(index) for index in sorted([*best][:3])]
