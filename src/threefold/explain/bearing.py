"""Whether what looks like an error ended anything: a warning does not, nor does what was made good. No torch.

A log claims no failure by itself. Something must say that the program ended or could not continue: an error that was
raised, a line that is no warning, a kill, or the reporter's own words. And a log that merely stops shows no hang.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from threefold.explain.events import EventKind, Events
from threefold.explain.log import Log, LogLine

# The program itself says that it continues: warnings, information. NCCL warns of what ends it; a Pod's events too.
_MILD = re.compile(
    r"^(?!.*NCCL (?:WARN|INFO bootstrap.cc:\d+ -> ))"
    r"(?!\s*(?:\w+\s+)?Warning\s+(?:[A-Z][a-z]+[A-Z]|Failed\s|Evicted\s))(?!.*retry(?:ing)? \(?(\d+)/\1\b)(?:"
    r".{0,160}?\b(?:[A-Z]\w*Warning|WARN(?:ING)?|[Ww]arning|INFO|DEBUG)(?![a-z])|.{0,60}\[info\]|.*NCCL INFO"
    r"|\[[WI]\d{0,4} |[WI]\d{4} |.{0,160}\[rank\d+\]:\s?[WI]\d{4} |.{0,60}[\d\]:] [WI] [a-z]\w+/|.{0,60}\[[WI]\d* )"
    r"|^NET/OFI |failed call to cuInit|dso_loader\.cc|Unable to register cu\w+ factory"
    r"|A module that was compiled using NumPy|_ARRAY_API not found|^wandb: ERROR "
)
_ENDED = re.compile(
    r"Traceback \(most|[A-Za-z]Error\b|\b(?:ERROR|FATAL|[Ee]rror:)|[Ff]atal\b|\b[Aa]bort(?:ed|ing)?\b|\b[Kk]illed\b"
    r"|\bexit(?:ed)?(?: with)?(?: exit)? ?(?:code|status)|\bexitcode\b|core dumped|[Ss]egmentation"
    r"|\b(?:terminat(?:ed|ing)|fail(?:s|ed|ure)?|crash(?:es|ed)?|cannot|can't|[Uu]nable|do(?:es)?(?:n't| not) work)\b"
    r"|available\S*:? False|^False\b|\b(?:gpu|device)\w* ?count\W{1,4}0\b"
)
# Also where a logger or a launcher hands it on.
_ENDED_ANYWHERE = ("Traceback (most recent call last)", "closing signal SIG")
# Tests that report on errors, commands that look for them, and prose, code and options that speak of them.
_TALK = re.compile(
    r"\.\.\. (?:ok|expected failure|skipped)|\b(?:PASSED|XFAIL)\b|^SKIPPED \[|^\s*(?:\$ |sudo |• |\* - )|\bgrep\b"
    r"|\"(?:GET|POST|PUT|HEAD|DELETE|PATCH) \S+ HTTP/|\b[Ii]f you (?:see|get|hit|encounter|run into) "
    r"|^#+ |^(?:\S+:\d+:)?[-+]?\s*(?:except|elif|raise|import)\b|^\s+--[\w-]+ "
    r"|^\s*[-*] (?:\*\*|(?:Fix|Add|Handle|Catch|Avoid|Improve)\w*\b)"
    r"|^\{\"(?:text|prompt|instruction|question|content|input|messages)\": "
)
_PROSE = re.compile(r'(?<!\bFile) (?<=[a-z] )"[^"]*$')  # words before a quotation
_TROUBLE = re.compile(r"error|fail|exception|warn|kill", re.IGNORECASE)
_QUOTED = re.compile(r"^Error .*\d")
# Who quotes an error has met it.
_MET = re.compile(
    r"^(?!.*(?:\b[Ii]f\b|[Ff]ix|[Ss]olve|[Aa]void|[Pp]revent|no longer)).*"
    r"\b(?:I|[Ww]e)(?:'m| am)? (?:get|got|getting|have|had|met|run|ran|encounter|see)"
)
# The line itself says that the program continues.
_GOES_ON = re.compile(
    r"\bRetrying (?:\(|in |after )|\b[Ww]ill (?:be )?retr(?:y|ied)\b|\bretry \d+/\d+|\bTrial \S+ (?:failed|errored)"
    r"|\b(?:[Ss]kipp(?:ing|ed)|[Ii]gnoring|[Ff]alling back|[Cc]ontinuing)\b|thrown while requesting (?:HEAD|GET) "
    r"|\bfrom scratch\b|\b[Ww]ill (?:use|proceed)\b|\b[Pp]roceeding\b|\bdid not (?:occur|happen)\b|you can ignore this"
    r"|\bus(?:e|ing) (?:eager|sdpa|vanilla|xformers) "
)

# Lines before a launcher's that are its own, a shell's, or what somebody says: no output of what it started.
_OF_LAUNCHER = re.compile(
    r"^GPU core dump|nvidia-|NVRM|amdgpu"
    r"|slurm|srun|sbatch|salloc|ssh|[Mm][Pp][Ii]|O[RM]TE|PRTE|OPAL|PMI|UCX|ucx|[Ww]arning|^\W*$"
    r"|^\S*[$#>] |^\[?node|^[*=#+|-]|^\w+: +\S+$"
    r"|\b(?:I|[Ww]e|[Mm]y|[Tt]his|these|following)\b"
)
_RETRY = re.compile(r"\[W\S* .*socket\.cpp")
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


def is_mild(line: str) -> bool:
    """Whether the line says that it is a warning or an information."""
    return _MILD.search(line) is not None


def is_retry(line: LogLine) -> bool:
    """Whether torch says that it tries to connect, and will again."""
    return _RETRY.search(line.text) is not None


def follows_a_program(log: Log, line: LogLine) -> bool:
    """Whether the launcher's line stands after what the program wrote that it had started."""
    before = log.raw[max(log.source_begin(line.index), line.index - 5) : line.index]
    return not all(_OF_LAUNCHER.search(one[:300]) for one in before)


def ended(log: Log) -> bool:
    """Whether a line that is no warning says that something ended or failed."""
    lines = (line[:600] for line in log.raw[-20_000:])
    return any(map(log.has, _ENDED_ANYWHERE)) or any(
        _ENDED.search(line) and not is_mild(line) for line in lines
    )


def said_to_hang(events: Events) -> LogLine | None:
    """The last line of a job of several ranks that somebody says hangs; None if nobody does."""
    log, ranks = events.log, events.places(EventKind.GROUP)
    if not ranks or all(is_mild(log.raw[index]) for index in events.places(EventKind.HANGS)):
        return None
    return log.line(max(ranks))


def is_talk(line: str, anchor: str) -> bool:
    """Whether the line speaks of the error that `anchor` is part of, or says that the program continues after it."""
    if _TALK.search(line) or _GOES_ON.search(line):
        return True
    before, after = line[: line.find(anchor)], line[line.find(anchor) :]
    said, _, begin = before.rpartition("`")
    end, _, rest = after.partition("`")
    if (
        before.count("`") % 2 == 1
        and "`" in after
        and "Error" not in said
        and "Assertion" not in said
    ):
        # A whole line, or an error with its numbers, is quoted from a log.
        return (
            any(map(str.isalnum, said + rest))
            and not _QUOTED.search(begin + end)
            and not _MET.search(said)
        )
    in_quotes = before.count('"') % 2 == 1 and '"' in after and _PROSE.search(before)
    return bool(in_quotes) and not _TROUBLE.search(before.rpartition('"')[0])


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
