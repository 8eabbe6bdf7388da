"""The commands of SKILL.md, in its order, in an empty folder with a text."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from ranks.runs import command

pytestmark = pytest.mark.ranks
PAGE = Path(__file__).parents[2] / "SKILL.md"


def test_each_command_does_what_the_page_says(tmp_path: Path) -> None:
    commands = re.findall(r"^    threefold (.+)$", PAGE.read_text(), re.M)
    assert len(commands) >= 10
    (tmp_path / "book.txt").write_text(
        "".join(f"line {number} of a book\n" for number in range(2000))
    )
    for line in commands:
        done = command(tmp_path, *shlex.split(line))
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
        if "--json" in line:
            assert all(isinstance(json.loads(each), dict) for each in _objects(done.stdout)), (
                line
            )
    refused = command(tmp_path, "train", "--data.source", "bok.txt")
    assert refused.returncode == 2 and "fix: --data.source book.txt" in refused.stderr


def _objects(text: str) -> list[str]:
    """A JSON object over several lines, or one a line."""
    try:
        json.loads(text)
    except json.JSONDecodeError:
        return text.splitlines()
    return [text]


def test_front_matter_is_what_a_skill_has() -> None:
    front = PAGE.read_text().split("---\n")[1]
    assert re.search(r"^name: threefold$", front, re.M) and re.search(
        r"^description: .{50,1000}$", front, re.M
    )
