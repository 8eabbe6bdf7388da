"""The command's root: its subcommands, `--version`, and how errors leave the process.

Each command is a file of this folder. Only the one that was asked for is loaded, or all of them for `--help`; each
imports what it uses.
"""

import contextlib
import itertools
import re
import sys
import time
from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import Annotated, Any

import typer

from threefold.commands.arguments import CONTEXT, WithKeys
from threefold.commands.help_examples import ending
from threefold.config.dropped import DROPPED
from threefold.errors import ConfigError, Problem, ThreefoldError, full_disk, refused_path
from threefold.mesh import environment
from threefold.progress_bars import print_any_text

app = typer.Typer(
    name="threefold",
    help="Train Hugging Face language models on a data x context x tensor mesh: exact, and it can prove it.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
# typer brings its own click, or uses click's: the errors of either.
_AnyError: Any = typer.BadParameter.__mro__[2]
# In the order of `--help`; those with CONTEXT take any key of the config.
_COMMANDS = {
    "init": CONTEXT,
    "train": CONTEXT,
    "resume": CONTEXT,
    "eval": CONTEXT,
    "sample": None,
    "verify": CONTEXT,
    "export": None,
    "hash": None,
    "import": CONTEXT,
    "doctor": CONTEXT,
    "explain": None,
    "data": None,
    "submit": None,
    "plan": CONTEXT,
    "profile": None,
    "report": None,
    "why": None,
    "referee": {"allow_interspersed_args": False},  # what follows COMMAND is its own
    "view": None,
}


_SPEAKS_WITHIN_S = 2.0

# A module cannot have this name.
_MODULES = {"import": "import_checkpoint"}


def _load(names: Iterable[str]) -> None:
    loaded = {each.name for each in app.registered_commands}
    loaded |= {each.name for each in app.registered_groups}
    for name in names:
        if name in loaded:
            continue
        module = import_module(f"threefold.commands.{_MODULES.get(name, name)}")
        if hasattr(module, "app"):
            app.add_typer(module.app, name=name)
        else:
            kind = WithKeys if _COMMANDS[name] is CONTEXT else None
            app.command(name, cls=kind, context_settings=_COMMANDS[name], **ending(name))(
                module.command
            )


def _show_version(wanted: bool) -> None:
    if wanted:
        from threefold.build_id import build_id

        typer.echo(f"threefold {build_id()}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_show_version,
            is_eager=True,
            help="Show the version and exit.",
        ),
    ] = False,
) -> None:
    pass


def _print_keys(words: str) -> None:
    """Prints the keys of a section of the config, the one key, or those that a search finds."""
    from threefold.config.described import keys_about, nearest_name
    from threefold.config.schema import Config

    if not (matching := keys_about(words)):
        raise ConfigError(
            f"no key is about {words!r}",
            expected=f"a section ({', '.join(Config.model_fields)}), section.key, or words of a key's meaning",
            fix=f"threefold train --help {nearest_name(words)}",
        )
    for key, each in matching.items():
        values = " | ".join(each.values).replace("`", "")
        typer.echo(f"--{key}  {values}  (default: {each.default})\n      {each.meaning}")


def _refuse_empty(arguments: Sequence[str]) -> None:
    """ConfigError for an empty value; that of a key is refused with the config, and a watched command's are its own."""
    for before, argument in itertools.pairwise(arguments):
        loose = before[:1] != "-" != argument[:1]
        if argument == "--" or (loose and arguments[0] == "referee"):
            break
        option = f"{before} " if loose else argument or f"{before}="
        if (loose and not argument) or re.fullmatch(r"--[^.=]+=", option):
            raise ConfigError(
                f"nothing after {option[:-1]}",
                expected="a value: an empty or unset variable of the shell has none",
                fix=f"{option}VALUE",
            )


def _speaks_for_all() -> bool:
    # All ranks of a host find the same error, but hosts may differ. A wrongly set up launcher has no rank to choose.
    try:
        return environment.current().local_rank == 0
    except ThreefoldError:
        return True


def run() -> None:
    """Runs the command line; prints a user's error in its three parts and exits with its code."""
    print_any_text()
    arguments = sys.argv[1:]
    asked = next((argument for argument in arguments if not argument.startswith("-")), None)
    _load([asked] if asked in _COMMANDS else _COMMANDS)
    try:
        _refuse_empty(arguments)
        match arguments:
            case [name, "-h" | "--help", _, *_] if _COMMANDS.get(name) is CONTEXT:
                return _print_keys(" ".join(arguments[2:]))
        sys.exit(app(standalone_mode=False))
    except _AnyError as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            error.show()
            sys.exit(error.exit_code)
        path = f"threefold {asked}" if asked in _COMMANDS else "threefold"
        path = getattr(getattr(error, "ctx", None), "command_path", path)
        dropped = (
            DROPPED.get(f"{path} {argument.partition('=')[0]}") for argument in arguments
        )
        fix = next(filter(None, dropped), f"`{path} --help` shows its options")
        sys.stderr.write(
            f"{Problem(error.format_message(), f'{path} as its help describes it', fix)}\n"
        )
        sys.exit(error.exit_code)
    except typer.Abort as abort:
        # Ctrl-C; but typer takes any EOFError for the end of input.
        raise abort.__cause__ or KeyboardInterrupt from None
    except ThreefoldError as error:
        if _speaks_for_all():
            environment.tell_failure(str(error))
            sys.stderr.write(f"{error}\n")
        else:
            # A launcher ends all ranks with the first: the one that speaks may need longer on a busy host.
            with contextlib.suppress(KeyboardInterrupt):
                time.sleep(_SPEAKS_WITHIN_S)
        sys.exit(error.exit_code)
    except Exception as error:
        if (user_error := full_disk(error) or refused_path(error)) is None:
            raise
        sys.stderr.write(f"{user_error}\n")
        sys.exit(user_error.exit_code)
