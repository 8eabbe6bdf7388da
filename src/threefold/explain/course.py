"""How a job went on, as its log tells: its progress, whether it finished, and numbers that are not finite. No torch.

A run that finished has not failed, and trouble that progress follows was made good: both matter more than any line that
looks like an error.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from functools import cached_property

from threefold.explain.log import Log, LogLine

_NUMBER = r"[-+]?(?:\d[\d.,]*(?:[eE][-+]?\d+)?|nan|inf)"
_PROGRESS = re.compile(
    rf"\d+%\|.*(?:it/s|s/it)|\b\w*loss\w*['\"]?\s*[:=]?\s*{_NUMBER}|\biteration\s+\d+/\s*\d+|^step\s+\d+/\d+|^\s*Normal\s+(?:Scheduled|Started)\b",
    re.IGNORECASE,
)
_MEASURING = ("%|", "loss", "Loss", "LOSS", "iteration", "Iteration", "step", "Normal ", "norm")
_FINISHED = ("Finished training", "Finished Training", "train_runtime", "`Trainer.fit` stopped",
             "WorkerState.SUCCEEDED", "worker group successfully finished", "Application startup complete",
             "OK (expected failures", " passed in ")  # fmt: skip
_FINISHED_FORM = re.compile(
    r"(?:^|INFO threefold: )done: \d+ steps, |^Status:\s+Succeeded|^\s+Reason:\s+Completed|^\d+\s+\S+\s+COMPLETED\s+0:0"
    r"|^=+ .*\d+ passed.* in |^\d+ passed\b(?!.*(?:fail|error)).* in [\d.]+s|^OK(?: \(|$)"
    r"|\b[Tt]raining (?:is |has |was )?(?:now )?(?:successfully )?(?:complete|finished|done)"
    r"|\b(?:[Jj]ob|[Rr]un|Pod|Task) \S{0,60} ?(?:has )?(?:successfully )?"
    r"(?:succeeded|completed|finished) ?(?:successfully)?(?:[.!]|$)"
)
_FORM_WORDS = ("done: ", "Succeeded", "Completed", "COMPLETED", " passed", "OK", "raining ", "succeeded", "completed",
               "finished")  # fmt: skip
_NOT_FINITE = re.compile(
    r"(?:\b|(?<!val)(?<!eval)(?<!test)_)(?:loss|grad[ _]?norm)\w*['\"]?\s*[:=]?\s*nan\b"
    r"|Nan grad norm|\bloss is (?:nan|not finite)",
    re.IGNORECASE,
)
_FINITE_LOSS = re.compile(r"loss\w*['\"]?\s*[:=]\s*\d", re.IGNORECASE)
_NORM = re.compile(r"grad(?:ient)?[ _]?norm\w*['\"]?\s*[:=]?\s*nan\b", re.IGNORECASE)
_MEASURED = re.compile(r"(?:\b|_)(?:loss|grad[ _]?norm)\w*['\"]?\s*[:=]?\s*(?:nan|\d)", re.IGNORECASE)
# The loss scale cannot shrink any more, or is no number that scales.
_SMALLEST = re.compile(
    r"loss scale: (\d+(?:\.0)?), reducing to \1(?:\.0)?\b|reducing loss scale to (?:0\.0\b|[\d.]+e-[1-9]\d)"
)
_SKIPPED = 3  # steps in a row
# Another way was found.
_MENDED = ("NET/OFI Selected ", "Rendezvous complete", "econnected ", "econnection successful", "alling back to",
           "ell back to", "alls back to", "onnection re-established", "onnection restored")  # fmt: skip
_GOES_ON = 2  # lines of progress that show that trouble was made good


class Course:
    """The course of the job in a log."""

    def __init__(self, log: Log) -> None:
        self.log = log

    @cached_property
    def progress(self) -> list[int]:
        """Indices of the lines that report progress, in order."""
        return sorted({index for line, places in self._measuring if _PROGRESS.search(line[-600:]) for index in places})

    @cached_property
    def _measuring(self) -> list[tuple[str, list[int]]]:
        """The shapes that may report progress or numbers, each once."""
        found = {
            places[0]: (line, places) for words in _MEASURING for line, places in self.log.shapes_containing(words)
        }
        return list(found.values())

    @cached_property
    def finished(self) -> list[int]:
        """Indices of the lines that say that the job finished, in order."""
        found = {index for words in _FINISHED for _, places in self.log.shapes_containing(words) for index in places}
        for words in _FORM_WORDS:
            for _, places in self.log.shapes_containing(words):
                found |= {index for index in places if _FINISHED_FORM.search(self.log.line(index).text)}
        return sorted(found)

    @cached_property
    def mended(self) -> list[int]:
        """Indices of the lines that say that another way was found, in order."""
        return sorted(index for words in _MENDED for _, places in self.log.shapes_containing(words) for index in places)

    def made_good(self, index: int) -> bool:
        """Whether the job went on, found another way or finished after the line at `index`; told by its own file."""
        end = self.log.source_end(index)
        good = _between(self.finished, index, end) + _between(self.mended, index, end)
        return _between(self.progress, index, end) >= _GOES_ON or good > 0

    def over(self, index: int) -> bool:
        """Whether the job had finished for good before the line at `index`; told by lines of the same file."""
        place = bisect_right(self._ends, index - 1)
        if place == 0 or (end := self._ends[place - 1]) < self.log.source_begin(index):
            return False
        return _between(self.progress, end, index) == 0

    @cached_property
    def _ends(self) -> list[int]:
        """The lines of `finished`, without those that say that a server has started."""
        return [index for index in self.finished if "startup" not in self.log.raw[index]]

    def not_finite(self) -> list[LogLine]:
        """The lines whose loss or gradient norm is not a number, if this is more than one skipped step."""
        if not any(map(self.log.has, ("nan", "NaN", "Nan"))):
            return []
        bad, measured = [], 0
        for line, places in self._measuring:
            text = line[-600:]
            if _NOT_FINITE.search(text) and (_NORM.search(text) or not _FINITE_LOSS.search(text)):
                bad += places
            elif _MEASURED.search(text):
                measured += len(places)
        bad.sort()
        if not bad:
            return []
        last = _last_measured(self.log, bad, measured)
        return [self.log.line(index) for index in bad] if last or len(bad) * 5 >= measured + len(bad) > 2 else []

    def smallest_scale(self) -> list[LogLine]:
        """The lines of skipped steps whose loss scale is the smallest, if no step follows them."""
        bad = {index for words in ("loss scale: ", "loss scale to ") for _, places in self.log.shapes_containing(words)
               for index in places if _SMALLEST.search(self.log.raw[index])}  # fmt: skip
        lines = sorted(bad)
        return (
            [self.log.line(index) for index in lines]
            if len(bad) >= _SKIPPED and _last_measured(self.log, lines, 1)
            else []
        )


def _last_measured(log: Log, bad: Sequence[int], measured: int) -> bool:
    """Whether no finite number follows the last one that is not."""
    if not measured:
        return True
    after = (log.raw[index][-600:] for index in range(bad[-1] + 1, min(len(log.raw), bad[-1] + 2000)))
    return not any(_MEASURED.search(text) for text in after)


def _between(places: Sequence[int], after: int, before: int) -> int:
    return bisect_right(places, before - 1) - bisect_right(places, after)
