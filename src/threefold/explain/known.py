r"""Each known error is one Markdown page in `pages/`: the lines that show it, its cause, and what to do.

An error needs only a page: the command reads the pages and prints from them. The file name is the error's name.

    ---
    tier: cause                                  (or symptom, or consequence: see `Tier`)
    facts: gpu_memory                            (optional: a function of `facts.py`)
    signs: |                                     (regular expressions, each found in one line of a log)
      CUDA out of memory
    ---

    # what happened, in one line

        a line from a log

    Why it happens.

    1. what to do, the most likely first
    2. ...
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from threefold.explain import facts
from threefold.explain.log import Line, Log

PAGES = Path(__file__).with_name("pages")
_PAGE = re.compile(
    r"---\ntier: (?P<tier>\w+)\n(?:facts: (?P<facts>\w+)\n)?(?:signs: \|\n(?P<signs>(?:  .+\n)+))?---\n\n"
    r"# (?P<title>.+)\n\n    (?P<example>.+)\n\n(?P<cause>.+)\n\n(?P<steps>(?:\d+\. .+\n)+)"
)


class Tier(IntEnum):
    """How near to the beginning of a failure an error occurs: if a log has several, the nearest explains it."""

    CAUSE = 0
    SYMPTOM = 1
    CONSEQUENCE = 2


@dataclass(frozen=True)
class KnownError:
    """One error, as its page describes it.

    Attributes:
        signs: empty if another rule finds the error: the program's own error, or a message from threefold.
        facts: returns sentences about the lines that show the error: sizes, ranks, ports.
    """

    name: str
    title: str
    tier: Tier
    signs: Sequence[re.Pattern[str]]
    example: str
    cause: str
    steps: Sequence[str]
    facts: Callable[[Log, Sequence[Line]], list[str]]


def read_page(path: Path) -> KnownError:
    """The error that a page describes; ValueError if it does not have the form in this module's docstring."""
    page = _PAGE.fullmatch(path.read_text(encoding="utf-8"))
    if page is None:
        raise ValueError(f"{path} is not written as threefold/explain/known.py describes a page")
    return KnownError(
        path.stem,
        page["title"],
        Tier[page["tier"].upper()],
        tuple(re.compile(line[2:], re.MULTILINE) for line in (page["signs"] or "").splitlines()),
        page["example"],
        page["cause"],
        tuple(line.partition(". ")[2] for line in page["steps"].splitlines()),
        getattr(facts, page["facts"] or "none"),
    )


def known_errors(folder: Path = PAGES) -> dict[str, KnownError]:
    """The errors of all pages in a folder, by name."""
    return {path.stem: read_page(path) for path in sorted(folder.glob("*.md"))}
