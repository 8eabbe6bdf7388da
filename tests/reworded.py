"""Other words for everything that is said to people: what a program decides by must not be among them.

`reword` changes, in this process, the texts of all problems and errors, of what the screen and the logs of a run show,
of the reasons in a run's head, and of the sentences of explain. Labels that are a format (`expected:`, `fix:`, a log's
level, JSON) stay, and so do paths, numbers and the names in them.
"""

from __future__ import annotations

import dataclasses
import logging
import re
from typing import Any

import pytest

# A word of prose: no part of a path, of a key or of an option.
_WORD = re.compile(r"(?<![\w./=-])[A-Za-z]{3,}(?![\w./=-])")
_LABELS = {"expected", "fix"}


def other_words(text: str) -> str:
    """The text with each of its words spelled from its end."""
    reworded = _WORD.sub(
        lambda word: word[0] if word[0] in _LABELS else f"{word[0][::-1]}q", text
    )
    return type(text)(reworded)  # a sentence may have a type of its own


def reword(patch: pytest.MonkeyPatch) -> None:
    """Changes all words until the patch is undone."""
    from threefold.commands import main
    from threefold.errors import Problem
    from threefold.explain import facts
    from threefold.run import console, rank
    from threefold.run.terminal import Screen

    del main

    def problem(self: Problem, what: str, expected: str, fix: str) -> None:
        for name, text in (("what", what), ("expected", expected), ("fix", fix)):
            object.__setattr__(self, name, other_words(text))

    patch.setattr(Problem, "__init__", problem)
    show, message = Screen._show, logging.LogRecord.getMessage
    patch.setattr(
        Screen,
        "_show",
        lambda self, text, level, **options: show(self, other_words(text), level, **options),
    )

    def logged(record: logging.LogRecord) -> str:
        return other_words(message(record)) if record.name == "threefold" else message(record)

    patch.setattr(logging.LogRecord, "getMessage", logged)
    head_of = console.head_of

    def head(*arguments: Any) -> Any:
        made = head_of(*arguments)
        pairs = {
            name: [(what, other_words(why)) for what, why in getattr(made, name)]
            for name in ("choices", "notes", "labels", "changed")
        }
        return dataclasses.replace(made, mesh_why=other_words(made.mesh_why), **pairs)

    patch.setattr(rank, "head_of", head)
    stood = facts.where_ranks_stood
    patch.setattr(facts, "where_ranks_stood", lambda works: other_words(stood(works)))
