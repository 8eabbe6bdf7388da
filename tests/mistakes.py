"""The page of mistakes, run: each section's lines, on the ranks that its chapter names, and what they print.

PYTHONPATH=tests python tests/mistakes.py     writes what is printed now into docs/mistakes.md
"""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import Any, NamedTuple

PAGE = Path(__file__).parents[1] / "docs" / "mistakes.md"
_SECTION = re.compile(
    r"### (?P<title>[^\n]+)\n(?P<said>[^`]*)```(?P<kind>\w+)\n(?P<lines>.*?)```\n\n```text\n(?P<printed>.*?)```",
    re.S,
)
_CHAPTER = re.compile(r"^## .*\n", re.M)
_SIZES = re.compile(r"`init_mesh\((.*?)\)`")


class Section(NamedTuple):
    """One mistake: its title, `python` or `console`, the lines, what they print, and the mesh of its chapter."""

    title: str
    kind: str
    lines: str
    printed: str
    sizes: dict[str, int]


def setup() -> str:
    """The lines before all sections of Python."""
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)[0]


def sections() -> list[Section]:
    """The sections of the page."""
    text, found = PAGE.read_text(), []
    chapters = [*_CHAPTER.finditer(text)]
    for chapter, after in zip(chapters, [*chapters[1:], None], strict=True):
        body = text[chapter.end() : after.start() if after else len(text)]
        named = _SIZES.search(body.split("###")[0])
        sizes = (
            {axis: int(size) for axis, size in re.findall(r"(\w+)=(\d+)", named[1])}
            if named
            else {}
        )
        for each in _SECTION.finditer(body):
            found.append(
                Section(each["title"], each["kind"], each["lines"], each["printed"], sizes)
            )
    return found


def said_by_ranks(
    sizes: dict[str, int], begin: str, lines: list[str], folder: str
) -> list[str]:
    """What each section's lines raise on this rank; called on every rank of a mesh."""
    import os

    import threefold

    os.chdir(folder)
    mesh = threefold.init_mesh(**sizes)
    said = []
    for each in lines:
        names: dict[str, Any] = {"mesh": mesh, "__name__": "mistake"}
        exec(begin.replace("mesh = threefold.init_mesh()\n", ""), names)
        try:
            exec(each, names)
            said.append("nothing\n")
        except threefold.errors.ThreefoldError as error:
            said.append(f"{error}\n")
        except ZeroDivisionError as error:  # the program's own error, of one rank
            said.append(f"{type(error).__name__}: {error}\n")
    mesh.close()
    return said


def said_by_command(lines: str, folder: Path) -> str:
    """What the last command of a section prints on stderr; the others are run before."""
    from ranks.runs import command

    done = None
    for line in lines.splitlines():
        done = command(folder, *shlex.split(line.removeprefix("$ threefold ")))
    assert done is not None
    return done.stderr.replace(str(folder), "/here")


def printed(found: list[Section], folder: Path) -> list[str]:
    """What each section prints now, of rank 0; in the order of the sections."""
    from ranks.spawn import run_ranks

    said: dict[str, str] = {}
    for sizes in {
        str(each.sizes): each.sizes for each in found if each.kind == "python"
    }.values():
        own = [each for each in found if each.kind == "python" and each.sizes == sizes]
        place = folder / ("-".join(f"{axis}{size}" for axis, size in sizes.items()) or "one")
        place.mkdir()
        num_ranks = max([1, *sizes.values()])
        ranks = run_ranks(
            said_by_ranks, num_ranks, sizes, setup(), [each.lines for each in own], str(place)
        )
        for section, *texts in zip(own, *ranks, strict=True):
            assert "nothing\n" not in texts, (section.title, texts)
            said[section.title] = texts[0]
    commands = folder / "commands"
    commands.mkdir()
    write_files(commands)
    for each in found:
        if each.kind == "console":
            said[each.title] = said_by_command(each.lines, commands)
    return [said[each.title] for each in found]


def write_files(folder: Path) -> None:
    """The files that the page's commands name."""
    import json

    (folder / "book.txt").write_text(
        "".join(f"line {number} of a book\n" for number in range(400))
    )
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"what is the number after {n} in a row?"},
                {"role": "assistant", "content": "yes"},
            ]
        }
        for n in range(40)
    ]
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    (folder / "chat.jinja").write_text(
        template + "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    asked = [{"messages": row["messages"][:1]} for row in rows]
    (folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asked))
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def main() -> None:
    """Writes the page with what is printed now."""
    import tempfile

    found, text = sections(), PAGE.read_text()
    with tempfile.TemporaryDirectory() as folder:
        for section, now in zip(found, printed(found, Path(folder)), strict=True):
            print(f"--- {section.title}\n{now}")
            before = f"{section.lines}```\n\n```text\n"
            start = text.index(before, text.index(f"### {section.title}\n")) + len(before)
            text = text[:start] + now + text[start + len(section.printed) :]
    PAGE.write_text(text)


if __name__ == "__main__":
    sys.exit(main())
