"""Writes the table of docs/errors/README.md from the pages of the known errors: `python docs/generate_errors.py`."""

from __future__ import annotations

from pathlib import Path

from threefold.explain.known import PAGES, known_errors

README = Path(__file__).parent / "errors" / "README.md"
BEGIN = "| error | what has happened |\n|---|---|\n"


def page() -> str:
    """docs/errors/README.md: its text as it is, and below it one row for each page."""
    text = README.read_text(encoding="utf-8").partition(BEGIN)[0]
    folder = f"../../src/threefold/explain/{PAGES.name}"
    rows = (
        f"| [{name}]({folder}/{name}.md) | {known.title} |\n"
        for name, known in known_errors().items()
    )
    return text + BEGIN + "".join(rows)


if __name__ == "__main__":
    README.write_text(page(), encoding="utf-8")
