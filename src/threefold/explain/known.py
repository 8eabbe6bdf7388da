r"""Each known error is one Markdown page in `pages/`: the lines that show it, its cause, and what to do.

An error needs only a page: the command reads the pages and prints from them. The file name is the error's name.

    # what happened, in one line

        tier: wide                          (or hint, symptom, consequence: see `Tier`; else a cause)
        facts: gpu_memory                   (a function of `facts.py`; else the ranks that show it)
        retry: other node                   (whether to start the job again as it is: `Retry`; else no)
        causes: several                     (the page is of one of several causes, so it is never sure)
        check: nvidia-smi                   (the one command that would settle whether it is this, or else)
        ask: df -P /dev/shm                 (the same that only reads, which `--ask` runs here, and what is so
          yes 100% => it is full here        if its output has an expression: that the page is right, or not)
          no \d% => it has room here
        signs:                              (regular expressions, each found in one line of a log)
          CUDA out of memory
        generic:                            (the same, of lines that other programs write too: they count in
          No space left on device            the log of a training job only)
        weak:                               (the same, of lines that follow from several causes: alone they are
          DataLoader worker .* exited        reported as a symptom)
        unsure:                             (the same, of lines that mostly this error writes: reported as a
          .Errno 2. No such file             symptom, but before other symptoms and the program's own errors)
        generic unsure:                     (both; so too `generic weak`)
          json.decoder.JSONDecodeError
        raised by: PIL torch/serialization  (files of installed packages: an error that they raised and that no
                                            page's signs show is mostly this one, reported like `unsure`)
        unless:                             (what a line has that shows another error, whatever signs it has)
          /dev/shm

    Why it happens.

    - what to do, the most likely first
    - ...

Each sign has a literal part of four characters or more (`anchor`): the log is searched for that first.
"""

import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from functools import cache
from pathlib import Path

from threefold.explain import facts
from threefold.explain.log import Log, LogLine
from threefold.explain.sources.signs import anchor

PAGES = Path(__file__).with_name("pages")


class Retry(StrEnum):
    """Whether a launcher should start the job again as it is; NO also if it is unknown what another start would do."""

    NO = "no"
    YES = "yes"
    OTHER_NODE = "other node"


class Tier(IntEnum):
    """How near to the beginning of a failure an error occurs: if a log has several, the nearest explains it."""

    CAUSE = 0
    WIDE = 1  # a cause, in words that wrap others: "failed to import X because of ..."
    HINT = 2  # what mostly causes such a line, but not always: no cause is claimed
    SYMPTOM = 3
    CONSEQUENCE = 4


# The lists of signs of a page.
_KINDS = ("signs", "generic", "weak", "unsure", "generic weak", "generic unsure")
_KEYS = {"tier", "facts", "retry", "causes", "check", "ask", "raised by", "unless", *_KINDS}
_PROVED = {"weak": Tier.SYMPTOM, "unsure": Tier.HINT}
_PAGE = re.compile(
    r"# (?P<title>.+)\n\n(?P<keys>(?:    .+\n)+)\n(?P<cause>.+)\n\n(?P<steps>(?:- .+\n)+)"
)
_KEY = re.compile(r"^    (\w[\w ]*):(?: (.+))?\n((?:      .+\n)*)", re.MULTILINE)


@dataclass(frozen=True)
class Sign:
    """What shows an error in a line: `anchor` is a literal part of it; `generic`: other programs write this too;
    `most`: the tier that it proves at most, `SYMPTOM` if it follows from several causes, `HINT` if mostly from this;
    `unless`: what lines of another error have."""

    pattern: re.Pattern[str]
    anchor: str
    generic: bool
    most: Tier
    unless: Sequence[re.Pattern[str]]

    def shows_in(self, line: str) -> bool:
        """Whether the line shows the error."""
        return self.pattern.search(line) is not None and not any(
            other.search(line) for other in self.unless
        )


@dataclass(frozen=True)
class SettlingQuestion:
    """A command without effects, and its answers: (whether the page is right, what the output has then, in words)."""

    command: Sequence[str]
    answers: Sequence[tuple[bool, re.Pattern[str], str]]


@dataclass(frozen=True)
class KnownError:
    """One error, as its page describes it.

    Attributes:
        several: the page is of one of several causes.
        check: the command that would settle whether it is this.
        question: what settles it on this machine, if one command does.
        signs: empty if another rule finds the error: the program's own error, or a message from threefold.
        facts: returns sentences about the lines that show the error: sizes, ranks, ports.
    """

    name: str
    title: str
    tier: Tier
    retry: Retry
    several: bool
    check: str
    question: SettlingQuestion | None
    signs: Sequence[Sign]
    cause: str
    steps: Sequence[str]
    facts: Callable[[Log, Sequence[LogLine]], list[str]]


def read_page(path: Path) -> KnownError:
    """The error that a page describes; ValueError if it does not have the form in this module's docstring."""
    page = _PAGE.fullmatch(path.read_text(encoding="utf-8"))
    keys = _KEY.findall(page["keys"]) if page else []
    values = {key: value for key, value, _ in keys}
    lists = {key: re.findall(r"^ {6}(.+)", lines, re.MULTILINE) for key, _, lines in keys}
    if not page or not values.keys() <= _KEYS or _KEY.sub("", page["keys"]):
        raise ValueError(
            f"{path} is not written as threefold/explain/known.py describes a page"
        )
    unless = [re.compile(text) for text in lists.get("unless", ())]
    if files := values.get("raised by"):
        # `messages` appends the file that raised an error to its words. Other ranks fail anywhere.
        lists.setdefault("generic unsure", []).append(
            f"^(?!.*(NCCL|closed by|reset by|imeout)).* < .*-packages/({files.replace(' ', '|')})"
        )
    signs = [
        Sign(
            re.compile(text),
            anchor(text),
            "generic" in kind,
            _PROVED.get(kind.split()[-1], Tier.CAUSE),
            unless,
        )
        for kind in _KINDS
        for text in lists.get(kind, ())
    ]
    return KnownError(
        path.stem,
        page["title"],
        Tier[values.get("tier", "cause").upper()],
        Retry(values.get("retry", "no")),
        "causes" in values,
        values.get("check") or values.get("ask", ""),
        _question(values["ask"], lists["ask"]) if "ask" in values else None,
        signs,
        page["cause"],
        re.findall(r"^- (.+)", page["steps"], re.MULTILINE),
        getattr(facts, values.get("facts", "ranks")),
    )


def _question(command: str, answers: Sequence[str]) -> SettlingQuestion:
    parts = re.findall(r"^(yes|no) (.+) => (.+)$", "\n".join(answers), re.MULTILINE)
    outcomes = [
        (kind == "yes", re.compile(sign, re.MULTILINE), text) for kind, sign, text in parts
    ]
    return SettlingQuestion(shlex.split(command), outcomes)


@cache
def known_errors(folder: Path = PAGES) -> dict[str, KnownError]:
    """The errors of all pages in a folder, by name."""
    return {path.stem: read_page(path) for path in sorted(folder.glob("*.md"))}
