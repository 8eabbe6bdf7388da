"""The tutorials as their reader pastes them: each command of a `console` block is run, and its output compared.

In the page, a line `...` stands for any lines, and `...` in a line for any text; the rest is compared as it is.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ranks.runs import environment

ROOT = Path(__file__).parents[2]


def blocks(page: str) -> list[str]:
    text = (ROOT / "docs" / page).read_text()
    return re.findall(r"^```console\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def commands(block: str) -> Iterator[tuple[str, list[str]]]:
    """(command with the lines that continue it, the output that the page shows)."""
    for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
        first, *rest = part.splitlines()
        continued = [line.removeprefix("> ") for line in rest if line.startswith("> ")]
        yield (
            "\n".join([first, *continued]),
            [line for line in rest if not line.startswith("> ")],
        )


def mismatch(shown: list[str], printed: list[str]) -> str | None:
    """The first line of the page that the output does not have, in order; None: it has them all."""
    rest, any_lines = list(printed), False
    for line in shown:
        if line == "...":
            any_lines = True
            continue
        pattern = re.compile(".*".join(map(re.escape, line.strip().split("..."))))
        while rest and any_lines and not pattern.fullmatch(rest[0].strip()):
            rest.pop(0)
        if not rest or not pattern.fullmatch(rest[0].strip()):
            return line
        rest.pop(0)
        any_lines = False
    return None if any_lines or not rest else f"nothing more, but it printed {rest[0]!r}"


def test_what_differs_is_found() -> None:
    printed = ["  head", "step 1/2  loss 5.1", "done: 2 steps"]
    assert mismatch(["head", "...", "done: 2 steps"], printed) is None
    assert mismatch(["...", "step 1/2  loss 5...", "..."], printed) is None
    assert mismatch(["...", "step 1/2  loss 6...", "..."], printed) == "step 1/2  loss 6..."
    assert mismatch(["head", "done: 2 steps"], printed) == "done: 2 steps"
    assert mismatch(["head", "..."], []) == "head"
    assert mismatch([], ["a warning"]) == "nothing more, but it printed 'a warning'"


@pytest.mark.examples
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("page", "num_commands"), [("first-run.md", 3), ("recipes.md", 15)])
def test_a_tutorial_prints_what_its_page_shows(
    page: str, num_commands: int, tmp_path: Path
) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    variables = environment(tmp_path)
    variables["PATH"] = f"{Path(sys.executable).parent}:{variables['PATH']}"
    variables["OMP_NUM_THREADS"] = "1"  # beside other tests, more threads take longer
    shell = ""
    steps = [step for block in blocks(page) for step in commands(block)]
    assert len(steps) == num_commands
    for command, shown in steps:
        if re.fullmatch(r"[A-Z]+=\S+", command):
            shell += f"{command}\n"
            continue
        done = subprocess.run(
            ["bash", "-c", f"{shell}{command}"],
            cwd=tmp_path,
            env=variables,
            capture_output=True,
            text=True,
            timeout=900,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        wrong = mismatch(shown, done.stdout.splitlines())
        assert wrong is None, f"{command}\nnot as on the page: {wrong}\n{done.stdout}"
