"""`threefold profile`: where the time of a run's traced steps went."""

import json
from pathlib import Path
from typing import Annotated

import typer

from threefold.commands.arguments import AsJson
from threefold.commands.run_argument import only_here, runs_here
from threefold.errors import ConfigError, shell_word
from threefold.jsonl import Values

_SHARES = ("compute", "communication", "host", "idle", "overlapped")


def command(
    run: Annotated[
        Path,
        typer.Argument(
            autocompletion=runs_here,
            callback=only_here,
            help="A run's folder, trained with --log.profile '[10, 12]'.",
        ),
    ],
    as_json: AsJson = False,
) -> None:
    """Print what the traces of a run show: threefold profile RUN.

    For each rank, the time of a step and its shares: computing; exposed communication; host work; idle, which is
    waiting for data or for nothing in the trace. Then the longest kernels of the slowest rank.
    """
    from threefold.config.paths import PROFILE_FOLDER, run_and_checkpoint

    folder = run_and_checkpoint(run)[0] / PROFILE_FOLDER
    ranks = {
        path.name.partition(".")[0]: _read(path)
        for path in sorted(folder.glob("rank-*.summary.json"))
    }
    if not ranks:
        raise ConfigError(
            f"{run} has no traces",
            expected="a run whose steps were traced",
            fix=f"threefold resume {shell_word(run)} --log.profile '[10, 12]'   (future steps), or a new run with it",
        )
    if as_json:
        for rank, values in ranks.items():
            typer.echo(json.dumps({"rank": int(rank.removeprefix("rank-")), **values}))
        return
    for line in _lines(ranks):
        typer.echo(line)
    typer.echo(f"traces for https://ui.perfetto.dev: {folder}/rank-*.json.gz")


def _read(path: Path) -> Values:
    from threefold.records.files import json_of

    try:
        values = json_of(path)
        if {"steps", "step_s", "phases", "kernels", *_SHARES} <= set(values):
            return values
        reason = "some of its figures are missing"
    except (OSError, ValueError) as error:
        reason = str(error)
    raise ConfigError(
        f"{path} cannot be read: {reason}",
        expected="the summary that a rank wrote after the last step that it traced",
        fix="remove it, and trace once more",
    )


def _lines(ranks: dict[str, Values]) -> list[str]:
    lines = ["           s/step  " + "  ".join(f"{name:>13}" for name in _SHARES)]
    for rank, values in ranks.items():
        shares = "  ".join(f"{values[name]:13.1%}" for name in _SHARES)
        lines.append(f"{rank:9}  {values['step_s']:6.3f}  {shares}")
    rank, slowest = max(ranks.items(), key=lambda item: item[1]["compute"] * item[1]["step_s"])
    lines.append(f"{rank} computes longest; its phases, s a step, of {slowest['steps']} steps:")
    lines.append(
        "  " + ", ".join(f"{name} {time:.3f}" for name, time in slowest["phases"].items())
    )
    lines.append("its longest kernels:")
    lines += [
        f"  {time:9.4f} s  {calls:7.1f} calls a step  {name[:90]}"
        for name, calls, time in slowest["kernels"]
    ]
    return lines
