"""The errors that ended Python's tracebacks in a log, each with the innermost frame of the program's own. No torch."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from threefold.explain.log import Log, LogLine

_ERROR = re.compile(
    r"^(?:\s*[│|]\s*|\s{0,2})(?P<kind>(?:[\w<>]+\.)*[A-Z]\w*(?:Error|Exception|Exit|Interrupt|Missing|Failed\w*|Warning"
    r"|Elapsed|Timeout|OutOfResources|LimitHit|Invalid|Iteration)\w*|Exception|\w+\.(?:error|timeout|gaierror)"
    r"|(?:[a-z_]\w*\.)+[A-Z]\w*)(?::|$)"
)
_TRACEBACK = "Traceback (most recent call last)"
_CHAINED = (
    "During handling of the above exception",
    "The above exception was the direct cause",
)
# Python's; Rich's in a box; IPython's, of which older ones show no line.
_FRAME = re.compile(
    r'^\s*(?:[│|]\s*)?(?:File )?\\?"?(?P<file>(?<=")[^"]+?|[^\s"│]+\.pyx?|<[\w. -]+>)\\?"?'
    r"(?:(?:, line |:)(?P<line>\d+))?,? in (?P<function>[\w<>.]+)"
)
_INSTALLED = re.compile(
    r"site-packages|dist-packages|<frozen|/lib/python3|runpy\.py|<string>|/bin/"
)
_LOGGED = re.compile(r".{0,160}\b(?:CRITICAL|FATAL|[Uu]ncaught)\b.*Error: ")
_LONGEST = 400  # lines of one traceback
_MOST = 500
_CONTINUED = 2  # lines that may continue the message of an error
_NEXT = re.compile(
    r"[EWI]\d{4} |\[|Traceback|During|The above|\d{4}-|\w+:[\w.]+:|(?:ERROR|WARNING|INFO)"
    r"|\S*(?:Error|Exception):|[=*-]{4}|$"
)
# They only say that another process of Python's failed; a compiler that did is the program's own error.
_REPORTS = re.compile(
    r"[\w.]*(?:ChildFailedError|Process(?:Raised|Exited)Exception|SystemExit|ExceptionGroup"
    r"|CalledProcessError(?!: (?!.*(?:python|run\b|launch|deepspeed))))"
)


@dataclass(frozen=True)
class Raised:
    """The error that ended a traceback, and the innermost frame that belongs to no installed package.

    Attributes:
        file: of the innermost frame of all, and its function.
    """

    line: LogLine
    frame: str | None = None
    file: str = ""


def raised(log: Log) -> list[Raised]:
    """The errors of all tracebacks, in order, without those that only report another process's; of chained errors only
    the last one. Of many, the first and last 500."""
    errors: list[Raised] = []
    # Ranks write at the same time, so each may have an open traceback: its innermost frame, and the program's own.
    frames: dict[int | None, tuple[re.Match[str] | None, re.Match[str] | None]] = {}
    chained: set[int | None] = set()
    ignored = ignored_lines(log)
    for line in _near_tracebacks(log):
        if line.index in ignored:
            continue
        if _TRACEBACK in line.text:  # may follow a progress bar on the same line
            frames[line.rank] = None, None
            continue
        if line.text.startswith(_CHAINED):
            chained.add(line.rank)
        if frame := _FRAME.match(line.text):  # opens one too: the heading may be cut off
            installed = _INSTALLED.search(frame["file"])
            _, own = frames.get(line.rank, (None, None))
            frames[line.rank] = frame, own if installed else frame
            continue
        # An error's message may name a rank that the frames before it do not.
        rank = line.rank if line.rank in frames else None
        if rank in frames and (error := _ERROR.match(line.text)):
            innermost, own = frames.pop(rank)
            if _REPORTS.match(line.text, error.start("kind")):
                continue
            if rank in chained:
                chained.discard(rank)
                for before in [one for one in errors if one.line.rank == rank][-1:]:
                    errors.remove(before)
            place = f"{own['file']}:{own['line'] or '?'} in {own['function']}" if own else None
            file = " ".join(innermost.group("file", "function")) if innermost else ""
            errors.append(Raised(line, place, file))
    return errors


def unframed(log: Log) -> list[Raised]:
    """The errors that a log names without a traceback: it was cut, or lines were picked from it."""
    ignored = ignored_lines(log)
    return [
        Raised(line)
        for line in named(log)
        if line.index not in ignored and not _REPORTS.match(line.text)
    ]


def messages(log: Log, errors: Sequence[Raised]) -> dict[int, str]:
    """The whole message of each error: the next lines, if it continues there, and the file that raised it.

    An error without words has those of the line that raised it.
    """
    files = {error.line.index: error.file for error in errors}
    texts = {}
    for first in [*(error.line for error in errors), *named(log)]:
        parts, begin = [first.text], first.index + 1
        if first.text.endswith("Error"):
            parts += log.raw[max(0, first.index - 2) : first.index]
        for line in map(log.line, range(begin, min(begin + _CONTINUED, len(log.raw)))):
            if line.rank != first.rank or _NEXT.match(line.text):
                break
            parts.append(line.text.strip())
        file = files.get(first.index)
        texts[first.index] = " ".join(parts)[:2000] + (f" < {file}" if file else "")
    return texts


def named(log: Log) -> list[LogLine]:
    """The lines that name an error first, each once, also where the log lacks its traceback."""
    lines = (log.line(places[0]) for places in log.shapes_containing("Error: "))
    return [
        line for line in islice(lines, 2 * _MOST) if is_error(line) or _LOGGED.match(line.text)
    ]


def ignored_lines(log: Log) -> set[int]:
    """Indices of the lines of tracebacks that Python ignored: in a finalizer, or while it wrote a log."""
    ignored: set[int] = set()
    for words in ("Exception ignored in", "--- Logging error ---"):
        for begin in islice(log.indices(words), _MOST):
            lines = range(begin + 1, min(begin + _LONGEST, log.source(begin).stop))
            end = next((index for index in lines if is_error(log.line(index))), begin)
            ignored.update(range(begin, end + 1))
    return ignored


def is_error(line: LogLine) -> bool:
    """Whether the line looks like the last one of a traceback."""
    return _ERROR.match(line.text) is not None


def _near_tracebacks(log: Log) -> Iterator[LogLine]:
    """The lines from each traceback's beginning on, in order, each once."""
    begins = sorted(log.indices(_TRACEBACK)) or sorted(log.indices('File "'))
    near = {
        index
        for begin in begins[:_MOST] + begins[-_MOST:]
        for index in range(begin, min(begin + _LONGEST, len(log.raw)))
    }
    return map(log.line, sorted(near))
