"""Writes docs/config.md from the schema: `python docs/generate_config.py`. `--check` only compares."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from threefold.config.schema import Config
from threefold.config.text import as_yaml

PAGE = Path(__file__).with_name("config.md")


def page() -> str:
    """The whole page."""
    lines = [
        "# Configuration",
        "",
        "Written by `python docs/generate_config.py` from `src/threefold/config/schema.py`. You can set every key in a",
        "YAML file, below its section's name, or as `--section.key value`. Values are YAML 1.2.",
        "`threefold train --print-config` shows the value of each key and where it came from.",
    ]
    for section, field in Config.model_fields.items():
        kind: Any = field.annotation
        lines += ["", f"## {section}", "", str(kind.__doc__), "", "| key | default | values | what it does |"]
        lines += ["|---|---|---|---|"]
        lines += _rows(kind)
    return "\n".join(lines) + "\n"


def _rows(kind: Any, prefix: str = "") -> list[str]:
    lines = []
    for key, entry in kind.model_fields.items():
        if hasattr(entry.annotation, "model_fields"):
            lines += _rows(entry.annotation, f"{key}.")
            continue
        values = _values(entry.annotation)
        lines.append(f"| `{prefix}{key}` | `{as_yaml(entry.default)}` | {values} | {entry.description} |")
    return lines


def _values(annotation: Any) -> str:
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return ", ".join(f"`{as_yaml(value)}`" for value in inner)
    if origin is Annotated:
        return _values(inner[0])
    if origin in (dict, tuple, list):
        return "mapping" if origin is dict else "list"
    if inner:
        return ", ".join(dict.fromkeys(_values(part) for part in inner if part is not type(None)))
    names = {int: "whole number", float: "number", str: "text", bool: "true, false"}
    return names.get(annotation, "mapping")


if __name__ == "__main__":
    if "--check" in sys.argv:
        sys.exit(0 if PAGE.read_text() == page() else "docs/config.md is old: python docs/generate_config.py")
    PAGE.write_text(page())
