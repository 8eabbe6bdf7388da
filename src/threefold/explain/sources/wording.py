"""The meaning of a line by its words, from any writer: a warning, talk of an error, the end of a program. No torch."""

import re
from collections.abc import Sequence

# The program itself continues: warnings, information. But NCCL warns of fatal errors; so do a Pod's events.
is_mild = re.compile(
    r"^(?!.*(?:NCCL (?:WARN|INFO bootstrap.cc:\d+ -> )|death signal))"
    r"(?!\s*(?:\w+\s+)?Warning\s+(?:[A-Z][a-z]+[A-Z]|(?:Failed|Evicted|Preempted)\s))(?!.*retry(?:ing)? \(?(\d+)/\1\b)"
    r"(?:.{0,160}?(?<!=)\b(?:[A-Z]\w*Warning|WARN(?:ING)?|[Ww]arning|INFO|DEBUG)(?![a-z])|.{0,60}\[info\]|.*NCCL INFO"
    r"|\[[WI]\d{0,4} |[WI]\d{4} |.{0,160}\[rank\d+\]:\s?[WI]\d{4} |.{0,60}[\d\]:] [WI] [a-z]\w+/|.{0,60}\[[WI]\d* )"
    r"|^NET/OFI |failed call to cuInit|dso_loader\.cc|Unable to register cu\w+ factory"
    r"|A module that was compiled using NumPy|_ARRAY_API not found|^wandb: ERROR "
).search
says_end = re.compile(
    r"Traceback \(most|[A-Za-z]Error\b|\b(?:ERROR|FATAL|[Ee]rror:)|[Ff]atal\b|\b[Aa]bort(?:ed|ing)?\b|\b[Kk]illed\b"
    r"|\bexit(?:ed)?(?: with)?(?: exit)? ?(?:code|status)|\bexitcode\b|core dumped|[Ss]egmentation|terminate called"
    r"|\b(?:terminat(?:ed|ing)|fail(?:s|ed|ure)?|crash(?:es|ed)?|cannot|can't|[Uu]nable|do(?:es)?(?:n't| not) work)\b"
    r"|available\S*:? False|^False\b|\b(?:gpu|device)\w* ?count\W{1,4}0\b"
).search
# Tests that report on errors, commands that look for them, and prose, code and options that speak of them.
_TALK = re.compile(
    r"\.\.\. (?:ok|expected failure|skipped)|\b(?:PASSED|XFAIL)\b|^SKIPPED \[|^\s*(?:\$ |sudo |• |\* - )|\bgrep\b"
    r"|\"(?:GET|POST|PUT|HEAD|DELETE|PATCH) \S+ HTTP/|\b[Ii]f you (?:see|get|hit|encounter|run into) "
    r"|^#+ |^(?:\S+:\d+:)?[-+]?\s*(?:except|elif|raise|import)\b|^\s+--[\w-]+ "
    r"|^\s*[-*] (?:\*\*|(?:Fix|Add|Handle|Catch|Avoid|Improve)\w*\b)"
    r"|^\{\"(?:text|prompt|instruction|question|content|input|messages)\": "
    # The line itself states that the program continues.
    r"|\bRetrying (?:\(|in |after )|\b[Ww]ill (?:be )?retr(?:y|ied)\b|\bretry \d+/\d+|\bTrial \S+ (?:failed|errored)"
    r"|\b(?:[Ss]kipp(?:ing|ed)|[Ii]gnoring|[Ff]alling back|[Cc]ontinuing)\b|thrown while requesting (?:HEAD|GET) "
    r"|\bfrom scratch\b|\b[Ww]ill (?:use|proceed)\b|\b[Pp]roceeding\b|\bdid not (?:occur|happen)\b|you can ignore this"
    r"|\bus(?:e|ing) (?:eager|sdpa|vanilla|xformers) "
)
_PROSE = re.compile(r'(?<!\bFile) (?<=[a-z] )"[^"]*$')  # words before a quotation
_TROUBLE = re.compile(r"error|fail|exception|warn|kill", re.IGNORECASE)
_QUOTED = re.compile(r"^Error .*\d")
# Who quotes an error has met it.
_MET = re.compile(
    r"^(?!.*(?:\b[Ii]f\b|[Ff]ix|[Ss]olve|[Aa]void|[Pp]revent|no longer)).*"
    r"\b(?:I|[Ww]e)(?:'m| am)? (?:get|got|getting|have|had|met|run|ran|encounter|see)"
)
# Lines before a launcher's that are its own, a shell's, or a person's: not output of the processes it started.
is_of_launcher = re.compile(
    r"^GPU core dump|nvidia-|NVRM|amdgpu"
    r"|slurm|srun|sbatch|salloc|ssh|[Mm][Pp][Ii]|O[RM]TE|PRTE|OPAL|PMI|UCX|ucx|[Ww]arning|^\W*$"
    r"|^\S*[$#>] |^\[?node|^[*=#+|-]|^\s*(?:- )?\w+: +\S+$|^NAME |^\S+ +\d+/\d+ "
    r"|\b(?:I|[Ww]e|[Mm]y|[Tt]his|these|following)\b"
).search

# A progress bar of the data that ranks read, and how far it came.
_PREPARED = re.compile(
    r"((?:Running tokenizer|[Tt]okeniz|Map\b|Filter|Generating|Download|[Pp]re-?process|Group)[^:%|\n]*: +(\d+)%)\|"
)


def still_prepared(lines: Sequence[str]) -> str:
    """How far the last preparation of data came, if it had not ended."""
    bars = _PREPARED.findall("\n".join(lines))
    return bars[-1][0] if bars and bars[-1][1] != "100" else ""


def is_talk(line: str, anchor: str) -> bool:
    """Whether the line talks about the error that `anchor` is part of, or that the program continues after it."""
    if _TALK.search(line):
        return True
    before, _, after = line.partition(anchor)
    after = anchor + after
    lead, _, begin = before.rpartition("`")
    end, _, rest = after.partition("`")
    if (
        before.count("`") % 2
        and "`" in after
        and "Error" not in lead
        and "Assertion" not in lead
    ):
        # A whole line, or an error with its numbers, is quoted from a log.
        return (
            any(map(str.isalnum, lead + rest))
            and not _QUOTED.search(begin + end)
            and not _MET.search(lead)
        )
    in_quotes = before.count('"') % 2 and '"' in after and _PROSE.search(before)
    return bool(in_quotes) and not _TROUBLE.search(before.rpartition('"')[0])
