"""Prefixes that launchers, containers and journals put before lines: removed once, and kept as rank and host. No torch.

A prefix of every line of a source was added on the way: a Pod's name, an actor's, a time. Without it, a line is as its
program wrote it, from the first column on, wherever it was run.
"""

import json
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

# torch's own handler and its C++ log, torchrun --tee, srun --label, Open MPI, Horovod, Megatron, kubectl --prefix, Ray.
_OF_LINE = re.compile(
    r"^(?:\[rank(?P<torch>\d+)\]:? ?|\[[a-z]*?(?P<role>\d+)(?:\|\d+)?\]:|\s{0,3}(?P<task>\d{1,5}): "
    r"|\[(?:\d+,)?(?P<mpi>\d+)\]<std(?:out|err)>: ?|\[Rank (?P<megatron>\d+)\] ?"
    r"|\[pod/(?P<pod>[\w.-]+)[^\]]*\] ?|\((?:\w+ )?pid=\d+(?:, ip=(?P<ip>[\w.:]+))?\) ?)"
)
# The prefix of a container's runtime or a logger.
_STAMP = re.compile(
    r"^\d{4}-\d{2}-\d{2}[T ]\d{2}:\d{2}:\d{2}\S*\s(?:std(?:out|err) [FP] |\[ERROR\] )?"
)
_JOURNAL = r"(?:[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d|\d{4}-\d\d-\d\dT\S+) (?P<host>[\w.-]+) [\w./@-]+(?:\[\d+\])?: ?"
# Before every line of a source, each other than the line before (a time) or one of a few (who wrote it).
_TIMES = (
    r"(?:\d{4}-\d\d-\d\dT)?\d\d:\d\d:\d\d(?:\.\d+)?(?:Z|[+-]\d\d:?\d\d)? (?:std(?:out|err) [FP] )?",
    _JOURNAL,
)
_WRITERS = (
    r"\[pod/[\w.-]+[^\]]*\] ?",
    r"\((?:\w+ )?pid=\d+(?:, ip=[\w.:]+)?\) ?",
    r"[\w.-]{1,80} *\| ?|\[[a-z][\w.-]*\] (?=20\d\d-)",  # docker compose
    r"\[(?!rank)[a-z]*\d+(?:\|\d+)?\]: ?",  # torchrun --tee; torch's own is the program's
    r"\[(?:\d+,)?\d+\]<std(?:out|err)>: ?|[a-z][\w.]*/\d+ ",  # MPI, Horovod, TorchX
    r"\s{0,3}\d{1,5}: ?",
)
_TIME = re.compile(r"(20\d\d-\d\d-\d\d)[T _](\d\d:\d\d:\d\d)")
# The rank that a line names behind a bracket; within a process group that is not the default one it counts differently.
_INSIDE = re.compile(
    r"^(?!.*\bPG (?:ID |GUID )*0*[1-9])(?:(?![Rr]ank[ :=]*\d)[^\[])*\[.*?\b[Rr]ank[ :=]*(\d+)\b"
)
_TASK_OF = re.compile(r"srun: error: (?P<host>[\w.-]+): tasks? (?P<task>\d+)")
_NCCL_HOST = re.compile(r"^(?:\[[^\]]*\] )?(?P<host>[A-Za-z][\w.-]*):\d+:\d+ \[\d+\] ")
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
# A line with a time, a host, a rank or an error's name is no rest of the line before.
_NEW_LINE = re.compile(
    r"\S+:\d+:\d+ \[|\[|Traceback|\d{4}[-/]\d\d[-/]\d\d|\S+/\d+ \[|\w+: |\s*\d+%\|"
)
# Ours, and torchrun's --log-dir: attempt_0/3/stderr.log.
_OF_FILE = re.compile(
    r"(?:rank[-_]?(?=\d+\.\w+$)|/(?=\d+/(?:std(?:out|err)|error)\.\w+$))(\d+)"
)
_ROUNDS = 4  # a container's runtime, a launcher and torch may each have put one
_SAMPLE, _SHARE = 400, 0.9
_Split = Callable[[str], tuple[str, str] | None]
_Written = tuple[str, int | None, str | None]
_MESSAGES = ("log", "message", "msg")
_TIME_KEYS = ("time", "ts", "timestamp", "@timestamp")
_LONGEST_JSON = 2**16
_ESCAPED = "(most recent call last):\\n"  # a traceback within a string of JSON, or a repr


def read(text: str, rank: int | None = None, host: str | None = None) -> _Written:
    """(the line without its prefixes, the rank and the host: as the prefixes name them, or else as passed)."""
    if journal := re.fullmatch(_JOURNAL, text):
        return "", rank, journal["host"]
    text = _STAMP.sub("", text)
    for _ in range(_ROUNDS):
        prefix = _OF_LINE.match(text)
        if not prefix:
            break
        named = prefix.lastgroup
        if named in ("pod", "ip"):
            host = prefix[named]
        # What torchrun --tee names counts if nothing else does.
        elif named and (named != "role" or rank is None):
            rank = int(prefix[named])
        text = text[prefix.end() :]
    return text, rank, host


def written(line: str, rank: int | None, host: str | None) -> _Written:
    """(the line without its prefixes, the rank and the host named by them, by its words or by known facts)."""
    last = line.rstrip("\r").rpartition("\r")[2]  # the rest of a progress bar's line
    text, rank, host = read(last, rank, host)
    if task := _TASK_OF.search(text):
        rank, host = int(task["task"]), task["host"]
    elif nccl := _NCCL_HOST.match(text):
        host = nccl["host"]
    if rank is None and "ank" in text and (inside := _INSIDE.match(text)):
        rank = int(inside[1])
    return text.rstrip(), rank, host


def rank_of_file(name: str) -> int | None:
    """The rank in the name of a log."""
    match = _OF_FILE.search(name)
    return match and int(match[1])


def time_of(line: str) -> str | None:
    """When a line was written, in seconds as text that sorts, if its beginning shows it."""
    match = _TIME.search(line[:80])
    return match and f"{match[1]} {match[2]}"


class PrefixedLine(NamedTuple):
    """A line as its program wrote it, what was before it, and its number in the source, from 1."""

    text: str
    prefix: str
    number: int


def taken_off(lines: Sequence[str]) -> list[PrefixedLine]:
    """The lines without what (nearly) all of them begin with."""
    stripped = [PrefixedLine(line, "", number) for number, line in enumerate(lines, 1)]
    for _ in range(_ROUNDS):
        if not (split := _split([line.text for line in stripped])):
            break
        stripped = [
            PrefixedLine(text, line.prefix + prefix, line.number)
            for line in stripped
            for prefix, message in [split(line.text) or ("", line.text)]
            for text in message.removesuffix("\n").split("\n")
        ]
    return [
        line._replace(text=text)
        for line in stripped
        for text in (line.text.split("\\n") if _ESCAPED in line.text else [line.text])
    ]


def lines_of(text: str) -> list[PrefixedLine]:
    """The lines of a log as programs wrote them: without prefixes and colours, and as long as they were."""
    return _unwrapped(taken_off(_COLOURS.sub("", text).replace("\r\n", "\n").split("\n")))


def _unwrapped(lines: list[PrefixedLine]) -> list[PrefixedLine]:
    """The lines as they were before a terminal cut them at its width, if one did."""
    width = max(len(line.text) for line in lines)
    cut = [place for place, line in enumerate(lines[:-1]) if len(line.text) == width]
    if not (70 <= width <= 400 and 2 <= len(cut) <= 5000) or any(
        lines[place].text[-1] in "-=*#_ │╮╯]}" or _NEW_LINE.match(lines[place + 1].text)
        for place in cut
    ):
        return lines
    for place in reversed(cut):
        rest = lines.pop(place + 1).text
        lines[place] = lines[place]._replace(text=lines[place].text + rest)
    return lines


def _split(lines: Sequence[str]) -> _Split | None:
    """What splits the lines into prefixes and the rest, if all of them have a prefix."""
    written = [line for line in lines[:: max(1, len(lines) // _SAMPLE)] if line.strip()]
    times = [partial(_begin, re.compile(form)) for form in _TIMES]
    writers = [partial(_begin, re.compile(form)) for form in _WRITERS]
    splits: list[_Split] = [_message, *times, *writers]
    for split in splits:
        begins = [parts[0].strip() for line in written if (parts := split(line))]
        # Numbered lines, or a table's first column, are no names of a few writers.
        few = split not in writers or len(set(begins)) <= max(1, len(begins) // 2)
        if written and len(begins) >= _SHARE * len(written) and few:
            return split
    return None


def _begin(form: re.Pattern[str], line: str) -> tuple[str, str] | None:
    begin = form.match(line)
    return begin and (begin[0], line[begin.end() :])


def _message(line: str) -> tuple[str, str] | None:
    """(time and rank as a prefix, message) of a line of JSON that a logger or a container's runtime has written."""
    if not line.startswith("{") or len(line) > _LONGEST_JSON:
        return None
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        return None
    message, time = (
        next((values[key] for key in keys if isinstance(values.get(key), str)), None)
        for keys in (_MESSAGES, _TIME_KEYS)
    )
    if message is None:
        return None
    rank = f"[rank{values['rank']}]: " if type(values.get("rank")) is int else ""
    return (f"{time} " if time else "") + rank, message
