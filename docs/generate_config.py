"""Writes docs/config.md from the schema: `python docs/generate_config.py`. `--check` only compares."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from threefold.config.described import keys_in
from threefold.config.schema import Config

PAGE = Path(__file__).with_name("config.md")


def page() -> str:
    """The whole page."""
    lines = [
        "# Configuration",
        "",
        "Written by `python docs/generate_config.py` from the classes in `src/threefold/config`. You can set every",
        "key in a YAML file, below its section's name, or as `--section.key value`. Values are YAML 1.2.",
        "",
        "    threefold init job.yaml --train.steps 500    # a config with every key and its meaning",
        "    threefold train --help learning rate         # the keys about these words; or of a section, or one key",
        "    threefold train job.yaml --print-config      # every value, its origin, and what auto becomes",
        "    threefold --install-completion               # the shell completes keys, their values and runs",
        "",
        "The output of `--print-config` is itself a config, and trains the same run.",
    ]
    for section, field in Config.model_fields.items():
        kind: Any = field.annotation
        lines += [
            "",
            f"## {section}",
            "",
            str(kind.__doc__),
            "",
            "| key | default | values | what it does |",
        ]
        lines += ["|---|---|---|---|"]
        lines += [
            f"| `{each.key}` | `{each.default}` | {', '.join(each.values)} | {each.meaning} |"
            for each in keys_in(section)
        ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    if "--check" in sys.argv:
        sys.exit(
            0
            if PAGE.read_text() == page()
            else "docs/config.md is old: python docs/generate_config.py"
        )
    PAGE.write_text(page())
