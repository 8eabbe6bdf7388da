"""Every fix that is printed for a value can be pasted, and leads to what was meant: over all keys and wrong values.

Pasted, a fix is accepted, or what is then refused is something else, whose own fix leads on; in the end a run would
begin, and with a number at least as near to what was asked as the default is.
"""

from __future__ import annotations

import ast
import math
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import threefold
from threefold.config import loading
from threefold.config.schema import every_key, value_at
from threefold.errors import ConfigError, Problem

WRONG = (
    "-1", "0", "1.5", "1e30", "nan", "-inf", "yes", "none", "auto", "True", "[]", "[1, 2]", "{a: 1}", "x", "'1'", "3,5",
    "999999999999", "0x10", "1_000", "1 000", "on", "float16", "all", "1k", "50%", "10M", "best-fit", "adamw8bit", "é",
)  # fmt: skip
# What a user has to know: no command can.
OPEN = re.compile(r"FILE|FOLDER|SOURCE|MODEL|NAME|VALUE|\.\.\.")
MOST_PASTES = 3


def pasted(fix: str) -> dict[str, str] | None:
    """The options of a fix, without the remark behind them; {} for `leave KEY out`, None for what is not pasted."""
    command = re.split(r" {3}\(", fix)[0]
    if command.startswith("leave ") and command.endswith(" out"):
        return {}
    words = shlex.split(command)
    if not words or len(words) % 2 or not all(word.startswith("--") for word in words[::2]):
        return None
    return {
        word.removeprefix("--"): value
        for word, value in zip(words[::2], words[1::2], strict=True)
    }


def problems_of(options: dict[str, str]) -> list[Problem]:
    try:
        loading.load(None, list(options.items()), environ={})
    except ConfigError as error:
        return list(error.problems)
    return []


def followed(key: str, wrong: str) -> tuple[dict[str, str], list[str]]:
    """The options after all fixes are pasted, and what was refused on the way."""
    options, refused = {key: wrong}, []
    for _ in range(MOST_PASTES + 1):
        problems = problems_of(options)
        if not problems:
            return options, refused
        problem = problems[0]
        assert problem.what not in refused, (
            f"--{key} {wrong}: its fix leads back: {problem.fix}"
        )
        refused.append(problem.what)
        fix = pasted(problem.fix)
        assert fix is not None, f"--{key} {wrong}: cannot be pasted: {problem.fix}"
        if not fix:
            options.pop(problem.fix.split()[1], None)
        options |= fix
    raise AssertionError(f"--{key} {wrong}: still refused: {refused}")


def number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


@pytest.mark.parametrize("key", every_key())
def test_what_a_wrong_value_leads_to(key: str) -> None:
    default = value_at(loading.load(None, [], environ={}).config, key)
    for wrong in WRONG:
        options, refused = followed(key, wrong)
        config = loading.load(None, list(options.items()), environ={}).config
        asked, got = number(wrong), number(value_at(config, key))
        # Of what needs another key, leaving it out is offered last: the first fix gives that key.
        if (
            refused
            and math.isfinite(asked)
            and not math.isnan(got)
            and not math.isnan(number(default))
        ):
            nearer = abs(got - asked) <= abs(number(default) - asked)
            assert nearer, (
                f"--{key} {wrong}: {got} is farther from it than the default {default}"
            )


def texts_of_fixes() -> Iterator[tuple[str, str]]:
    """The constant beginnings of texts in the source that name an option first: (file, text)."""
    root = Path(threefold.__file__).parent
    for path in sorted(root.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [
                    part.value if isinstance(part, ast.Constant) else "X"
                    for part in node.values
                ]
                yield str(path.relative_to(root)), "".join(map(str, parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield str(path.relative_to(root)), node.value


def test_a_second_way_stands_behind_what_is_pasted() -> None:
    """`--key value   (or ...)`: a shell would take `--key value, or ...` for a value that ends in a comma."""
    wrong = [
        f"{file}: {text}"
        for file, text in texts_of_fixes()
        if re.match(r"--[a-z_]+[.\w-]* \S", text)
        and re.search(r", or (--|leave )", re.split(r" {3}\(", text)[0])
    ]
    assert wrong == []
