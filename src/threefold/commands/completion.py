"""Shell completion beyond commands and options: config keys, their values, and runs. No torch."""

from __future__ import annotations

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
