"""The list of long tests, long.txt, beside those that are marked where they stand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

LONG = Path(__file__).parent / "long.txt"


def mark_long(items: Sequence[pytest.Item], *, all_there: bool, path: Path = LONG) -> None:
    """Marks the tests that are listed, by their numbers or by what these begin with (`*`).

    Args:
        all_there: all tests of a file are here, so that a listed one that is absent is a mistake.

    Raises:
        pytest.UsageError: it is.
    """
    by_file: dict[str, dict[str, pytest.Item]] = {}
    for item in items:
        by_file.setdefault(item.nodeid.partition("::")[0], {})[item.nodeid] = item
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line or line.startswith("#"):
            continue
        name = line.removesuffix("*")
        there = by_file.get(name.partition("::")[0], {})
        found = [
            item
            for test, item in there.items()
            if test == line or (name != line and test.startswith(name))
        ]
        for item in found:
            item.add_marker(pytest.mark.long)
        if all_there and there and not found:
            raise pytest.UsageError(f"{path.name}: there is no test {line}")


def chosen(request: pytest.FixtureRequest, parameter: str) -> list[Any]:
    """What a parameter is in the cases of the file that are run.

    For what is computed once for all of them: a case that is only in the list need not be.
    """
    file = request.node.nodeid.partition("::")[0]
    calls = [
        item.callspec.params
        for item in request.session.items
        if item.nodeid.startswith(f"{file}::") and hasattr(item, "callspec")
    ]
    return [call[parameter] for call in calls if parameter in call]
