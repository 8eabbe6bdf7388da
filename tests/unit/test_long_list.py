"""The list of long tests marks what it names, and names what is there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from long_tests import mark_long


@dataclass
class Item:
    nodeid: str
    marked: list[str] = field(default_factory=list)

    def add_marker(self, mark: pytest.MarkDecorator) -> None:
        self.marked.append(mark.name)


@pytest.fixture
def marked(tmp_path: Path) -> Callable[..., list[str]]:
    def of(*lines: str, all_there: bool = True) -> list[str]:
        listed = tmp_path / "long.txt"
        listed.write_text("\n".join(["# a comment", "", *lines, ""]))
        items = [Item(f"tests/test_a.py::test_b[{case}]") for case in ("1", "10", "2")]
        mark_long(items, all_there=all_there, path=listed)  # type: ignore[arg-type]
        return [item.nodeid.partition("[")[2] for item in items if item.marked == ["long"]]

    return of


def test_what_is_listed_is_marked_and_nothing_else(marked: Callable[..., list[str]]) -> None:
    assert marked("tests/test_a.py::test_b[1]") == ["1]"]
    assert marked("tests/test_a.py::test_b[1*") == ["1]", "10]"]
    assert marked("tests/test_other.py::test_b[1]") == []


def test_what_is_not_there_is_an_error_unless_a_part_was_asked_for(
    marked: Callable[..., list[str]],
) -> None:
    with pytest.raises(
        pytest.UsageError, match=r"there is no test tests/test_a.py::test_b\[3\]"
    ):
        marked("tests/test_a.py::test_b[3]")
    assert marked("tests/test_a.py::test_b[3]", all_there=False) == []
