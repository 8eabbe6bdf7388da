"""The part of a command line that is the config: a file and `--section.key value` pairs; a shell completes them too."""

import difflib
import re
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from threefold.config.dropped import DROPPED
from threefold.errors import ConfigError, Problem
from threefold.mesh import environment

if TYPE_CHECKING:
    from threefold.config.loading import LoadedConfig
    from threefold.config.schema import Config

# What typer needs to leave the config's part to `split`.
CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True}
# Version of each command that prints results; docs/generate_schemas.py has its fields.
AsJson = Annotated[
    bool, typer.Option("--json", help="Print the answer as JSON, as docs/schemas describes it.")
]

MaxRestarts = Annotated[
    int,
    typer.Option(
        "--max-restarts", min=0, help="How often to restart the ranks after a failure."
    ),
]
Force = Annotated[
    bool, typer.Option("--force", help="Start more local ranks than this machine has room for.")
]
TrustRemoteCode = Annotated[
    bool,
    typer.Option("--trust-remote-code", help="Allow code from the model's repository to run."),
]
AcceptChanges = Annotated[
    bool, typer.Option("--accept-changes", help="Resume even if keys change what is trained.")
]
Quiet = Annotated[
    bool, typer.Option("--quiet", help="Print only errors; the run's logs keep everything.")
]


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
        options = [option for each in self.params for option in each.opts]
        for name in ctx.args:
            near = difflib.get_close_matches(name.partition("=")[0], options, n=1, cutoff=0.85)
            if near and name.startswith("--"):
                raise ConfigError(
                    f"unknown option {name}",
                    expected="an option of this command, or a key of the config: --section.key value",
                    fix=f"did you mean {near[0]}?",
                )
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


def load_config(arguments: Sequence[str]) -> "LoadedConfig":
    """The config of a command line, over what a launcher suggests and a managed job sets."""
    from threefold.config import loading

    return loading.load(
        *split(arguments),
        environ=environment.variables(),
        defaults=environment.defaults(),
        settings=environment.settings(),
    )


def is_address(text: str) -> bool:
    """Whether this means a store, rightly written or not; a path has no scheme."""
    if match := re.match(r"\w[\w+.-]*://|(s3|gs|hf):", text):
        from threefold.places.url import refuse_key

        refuse_key(text)
    return match is not None


def on_this_machine(to: Path | None) -> Path | None:
    """A path to write to, unless it is a store's address."""
    if to is not None and is_address(str(to)):
        raise ConfigError(
            f"--to {to} is an address of a store",
            expected="a path on this machine: only exports are sent to a store",
            fix=f"--to {to.name or 'DIR'}",
        )
    return to


def settled(config: "Config") -> dict[str, str]:
    """section.key -> what an automatic key becomes in this place, and why."""
    from threefold.plan.shown_choices import automatic

    num_devices = None
    if config.mesh.device != "cpu":
        import torch

        num_devices = torch.cuda.device_count() or None
    info = environment.current()
    launched = info.world_size if info.launcher is not None else None
    return automatic(config, launched_world_size=launched, num_devices=num_devices)


def split(arguments: Sequence[str]) -> tuple[str | None, list[tuple[str, str]]]:
    """(config file or None, (section.key, value text) pairs) from the arguments that are not the command's own options.

    Each `--key` takes exactly one value, as its next argument or after `=`.

    Raises:
        ConfigError: a key without a value, a second file, or a single-dash option; all at once.
    """
    path: str | None = None
    overrides: list[tuple[str, str]] = []
    problems: list[Problem] = []
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if argument.startswith("--"):
            key, equals, value = argument[2:].partition("=")
            if not equals:
                if not rest or rest[0].startswith("--"):
                    fix = DROPPED.get(key, f"--{key} VALUE")
                    problems.append(
                        Problem(f"--{key} has no value", "exactly one value for each key", fix)
                    )
                    continue
                value = rest.pop(0)
            overrides.append((key, value))
        elif argument.startswith("-") and argument != "-":
            fix = "`threefold train --help` shows the options"
            problems.append(Problem(f"unknown option {argument}", "--section.key value", fix))
        elif path is None:
            path = argument
        else:
            problems.append(
                Problem(
                    f"a second config file: {argument}",
                    f"one config file ({path}) and --section.key value pairs",
                    f"a value comes after its key: --section.key {argument}",
                )
            )
    ConfigError.raise_for(problems)
    return path, overrides


_UNITS = {
    "": 1,
    "KB": 1000,
    "MB": 1000**2,
    "GB": 1000**3,
    "KIB": 1024,
    "MIB": 1024**2,
    "GIB": 1024**3,
}


def num_bytes(text: str, *, option: str) -> int:
    """A size such as 500MB or 2GiB in bytes; ConfigError if it is not a size."""
    digits = text.rstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ ")
    factor = _UNITS.get(text[len(digits) :].strip().upper())
    if factor is None or not digits.isascii() or not digits.isdecimal() or int(digits) == 0:
        raise ConfigError(
            f"{option} = {text!r} is not a size",
            expected="a whole number with KB, MB, GB, KiB, MiB or GiB",
            fix=f"{option} 5GB",
        )
    return int(digits) * factor
