"""Keys of the config as a command takes them, and shell completion of keys, their values and runs. No torch."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import Any

from typer.core import TyperCommand


def runs_here(incomplete: str) -> list[str]:
    """The runs in the folder `runs`, and in the folder that is being typed."""
    from threefold.config.paths import is_run

    folders = {Path("runs"), Path(f"{incomplete}x").parent}
    return sorted(str(path) for folder in folders for path in folder.glob("*") if is_run(path))


class WithKeys(TyperCommand):
    """A command that takes `--section.key value`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Takes the keys, each with the argument after it: RUN or MODEL may follow them."""
        own, keys, rest = list[str](), list[str](), [*args]
        while rest:
            key = re.match(r"--\w+\.[^=]*(=?)", rest[0])
            (keys if key else own).append(rest.pop(0))
            if key and not key[1] and rest and not re.match("--|-h$", rest[0]):
                keys.append(rest.pop(0))
        super().parse_args(ctx, own)
        ctx.args += keys
        return ctx.args

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """Options and keys; after a key, the words that it takes."""
        from threefold.config.described import every_key_described

        # typer brings its own click, or uses click's.
        click = TyperCommand.__mro__[1].__module__.rpartition(".")[0]
        item = import_module(f"{click}.shell_completion").CompletionItem
        keys = {f"--{key}": about for key, about in every_key_described()}
        if incomplete.startswith("-"):
            matching = [
                item(key, help=about.meaning)
                for key, about in keys.items()
                if key.startswith(incomplete)
            ]
            return super().shell_complete(ctx, incomplete) + matching
        about = keys.get(ctx.args[-1]) if ctx.args else None
        words = "".join(about.values).split("`")[1::2] if about is not None else []
        return [item(word) for word in words if word.startswith(incomplete)]
