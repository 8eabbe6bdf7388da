"""The end of each command's help: exit codes, and examples whose options and keys exist."""

from __future__ import annotations

import shlex

import pytest
from typer.testing import CliRunner

from threefold.commands import main, submit
from threefold.commands.help_examples import _ENDINGS
from threefold.config.schema import every_key

main._load(main._COMMANDS)
ENDINGS = _ENDINGS | submit.ENDINGS


@pytest.mark.parametrize("command", ENDINGS)
def test_help_ends_with_exit_codes_and_examples_that_can_be_pasted(command: str) -> None:
    shown = CliRunner().invoke(main.app, [*command.split(), "-h"], terminal_width=200)
    assert shown.exit_code == 0
    assert shown.output.startswith(f"Usage: threefold {command} {ENDINGS[command][0]}")
    body, _, end = shown.output.partition(
        "\nExit codes: " if "\nExit codes: " in shown.output else "\n  Exit codes: "
    )
    assert "2 " in end and "Examples:" in end
    for example in ENDINGS[command][2]:
        assert f"    {example}\n" in end
        words = shlex.split(example.partition("      ")[0])
        if command not in ("explain",):
            assert " ".join(words).partition("threefold ")[2].startswith(command)
        for word in words:
            if (
                word.startswith("--")
                and "threefold" not in word
                and word != "--help"
                and not {"torchrun", "accelerate"} & {*words}
            ):
                assert word[2:] in every_key() if "." in word else word in body, word


def test_every_command_has_an_ending() -> None:
    groups = {name: module.registered_commands for name, module in _groups().items()}
    plain = [name for name in main._COMMANDS if name not in groups]
    assert {
        *plain,
        *(f"{group} {each.name}" for group, found in groups.items() for each in found),
    } == set(ENDINGS)


def _groups() -> dict[str, object]:
    from threefold.commands import data, submit

    return {"data": data.app, "submit": submit.app}
