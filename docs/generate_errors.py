"""Writes docs/errors/ from the tables of `threefold explain`: `python docs/generate_errors.py`; `--check` compares."""

from __future__ import annotations

import sys
from pathlib import Path

from threefold.explain.explain import KNOWN, OWN_ERROR, OWN_REFUSAL
from threefold.explain.explain_install import INSTALL
from threefold.explain.explain_memory import MEMORY
from threefold.explain.explain_mesh import MESH
from threefold.explain.explain_network import NETWORK
from threefold.explain.known import KnownError

FOLDER = Path(__file__).with_name("errors")
GROUPS = {
    "The network, and where ranks meet": NETWORK,
    "A model on several ranks": MESH,
    "Memory and processes": (*MEMORY, OWN_ERROR, OWN_REFUSAL),
    "What is installed and fetched": INSTALL,
}


def page(known: KnownError) -> str:
    """The page of one error."""
    lines = [
        f"# {known.title[0].upper()}{known.title[1:]}",
        "",
        f"`{known.name}`, as `threefold explain LOG` finds it. In a log:",
        "",
        f"    {known.example}",
        "",
        "## Cause",
        "",
        _escaped(known.cause),
        "",
        "## What to do",
        "",
        *(f"{number}. {_escaped(step)}" for number, step in enumerate(known.steps, 1)),
        "",
        "[All errors](README.md)",
    ]
    return "\n".join(lines) + "\n"


def index() -> str:
    """The list of all errors."""
    lines = [
        "# Errors of distributed training",
        "",
        "Written by `python docs/generate_errors.py` from the tables of `threefold explain`, which finds them in the",
        "log of any torch.distributed program: `threefold explain train.log`, or `... 2>&1 | threefold explain`.",
    ]
    for title, group in GROUPS.items():
        lines += ["", f"## {title}", "", "| error | what has happened |", "|---|---|"]
        lines += [f"| [{known.name}]({known.name}.md) | {known.title} |" for known in group]
    return "\n".join(lines) + "\n"


def pages() -> dict[str, str]:
    """File name and text of every page."""
    return {"README.md": index(), **{f"{known.name}.md": page(known) for known in (*KNOWN, OWN_ERROR, OWN_REFUSAL)}}


def _escaped(text: str) -> str:
    return text.replace("<", "&lt;").replace("__", r"\_\_").replace("*", r"\*")


if __name__ == "__main__":
    wanted = pages()
    found = {path.name: path.read_text() for path in FOLDER.glob("*.md")}
    if "--check" in sys.argv:
        sys.exit(0 if found == wanted else "docs/errors is old: python docs/generate_errors.py")
    FOLDER.mkdir(exist_ok=True)
    for name in found.keys() - wanted.keys():
        (FOLDER / name).unlink()
    for name, text in wanted.items():
        (FOLDER / name).write_text(text)
