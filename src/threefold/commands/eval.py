"""`threefold eval`: the loss of a run's checkpoint over held-out data, and its scores in tasks."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from threefold.commands.arguments import AsJson
from threefold.commands.run_argument import RunOrCheckpoint, run_here
from threefold.errors import ConfigError

if TYPE_CHECKING:
    from threefold.config.loading import LoadedConfig
    from threefold.mesh.topology import Topology


def command(
    context: typer.Context,
    run: RunOrCheckpoint,
    ema: Annotated[
        bool,
        typer.Option(
            "--ema", help="Evaluate the moving average of the weights (optimizer.ema)."
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Evaluate a run: threefold eval RUN [--eval.source SOURCE] [--eval.tasks '[NAME]'] [--section.key value ...].

    Evaluates the newest checkpoint, or the one named, exactly, every row once, on the run's mesh or the one given, and
    on the lm-evaluation-harness tasks that eval.tasks names. The run's folder stays as it is.
    """
    from threefold.checkpoint.checkpoint_folder import find
    from threefold.commands.arguments import load_config
    from threefold.config.paths import run_and_checkpoint
    from threefold.mesh import environment, local_ranks
    from threefold.mesh.topology import resolve

    place = run_here(run, state=True)
    folder, _ = run_and_checkpoint(place)
    loaded = load_config([str(folder / "config.yaml"), *context.args])
    if not (loaded.config.evaluates or loaded.config.eval.tasks):
        raise ConfigError(
            f"the run in {folder} has no held-out data",
            expected="held-out data or tasks to evaluate on",
            fix="--eval.source FILE_OR_FOLDER   (or --eval.tasks '[NAME]')",
        )
    checkpoint, info = find(place), environment.current()
    if info.launcher is not None:
        topology, _ = resolve(loaded.config.mesh, launched_world_size=info.world_size)
        sys.exit(_rank(loaded, topology, checkpoint.path, checkpoint.step, ema, as_json))
    from threefold.run.start import PRELOAD, topology_of_run

    local_ranks.preload((*PRELOAD, "threefold.run.evaluate"))
    topology, _ = topology_of_run(loaded.config)
    arguments = (loaded, topology, checkpoint.path, checkpoint.step, ema, as_json)
    if topology.world_size == 1:
        sys.exit(_rank(*arguments))
    sys.exit(local_ranks.start_ranks(_rank, arguments, num_ranks=topology.world_size))


def _rank(
    loaded: "LoadedConfig",
    topology: "Topology",
    checkpoint: Path,
    step: int,
    ema: bool,
    as_json: bool,
) -> int:
    from threefold.checkpoint.checkpoint_folder import Checkpoint
    from threefold.run.evaluate import evaluate_rank

    return evaluate_rank(
        loaded, topology, Checkpoint(checkpoint, step), ema=ema, values=as_json
    )
