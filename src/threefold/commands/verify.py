"""`threefold verify`: compares the mesh with one process, on the user's own model.

If the two differ, each axis of the mesh is tried alone, to find the wrong one.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from threefold.errors import EXIT_FAILED

if TYPE_CHECKING:
    from threefold.config.loading import Loaded
    from threefold.config.schema import Config
    from threefold.mesh.topology import Topology
    from threefold.verify.comparison import Comparison, Options


def command(
    context: typer.Context,
    steps: Annotated[int, typer.Option(min=1, help="Steps to compare.")] = 3,
    layers: Annotated[int | None, typer.Option(min=1, help="Use only the first N layers.")] = None,
    random: Annotated[bool, typer.Option("--random", help="Random weights instead of the named ones.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Start more local ranks than this machine has room for.")
    ] = False,
    against: Annotated[
        tuple[Path, Path] | None, typer.Option(help="Compare the metrics of two finished runs instead.")
    ] = None,
) -> None:
    """Compare the mesh with one process on your own model: threefold verify [CONFIG.yaml] [--section.key value ...].

    Both train a few steps in float32 on the same rows. The report shows losses, gradient norms and the largest relative
    difference of the gradients; if they differ, also the first layer and the axis of the mesh that are wrong.
    """
    if against is not None:
        from threefold.verify.comparison import compare_runs

        lines, holds = compare_runs(*against)
        typer.echo("\n".join(lines))
        sys.exit(0 if holds else EXIT_FAILED)
    from threefold.commands.arguments import load_config
    from threefold.verify.comparison import Options

    sys.exit(verify_command(load_config(context.args), Options(steps, layers, random), force=force))


def verify_command(loaded: Loaded, options: Options, *, force: bool = False) -> int:
    """Verifies the mesh of the config and returns the exit code: 0 it follows the single process, 1 it does not."""
    from dataclasses import replace

    from threefold.mesh import environment, local_ranks
    from threefold.mesh.shares import refuse_impossible
    from threefold.mesh.topology import resolve
    from threefold.verify.comparison import diagnose, table

    info = environment.current()
    if info.launcher is not None:
        topology, _ = resolve(loaded.config.mesh, launched_world_size=info.world_size, num_devices=None)
        from threefold.verify.mesh_side import verify_rank

        return verify_rank(loaded.config, options, topology, None)
    from threefold.run.sources import file_lines
    from threefold.run.start import PRELOAD, topology_here

    local_ranks.preload(PRELOAD)
    topology, why = topology_here(loaded.config, force=force)
    refuse_impossible(loaded.config, topology)
    print(f"mesh {topology} on {topology.world_size} ranks ({why}) against one process, float32, {options.steps} steps")
    for line in file_lines(loaded.config):
        print(f"files: {line}")
    found = on_ranks(loaded.config, options, topology)
    if isinstance(found, int):
        return found
    print("\n".join(table(found)))
    if found.holds:
        print("the mesh follows the single process")
        return 0
    print(diagnose(topology, lambda smaller: on_ranks(loaded.config, replace(options, admission=False), smaller)))
    return EXIT_FAILED


def on_ranks(config: Config, options: Options, topology: Topology) -> Comparison | int:
    """The comparison on local ranks, or the exit code of a failed attempt."""
    import json
    import tempfile

    from threefold.mesh import local_ranks
    from threefold.verify.comparison import Comparison

    with tempfile.TemporaryDirectory(prefix="threefold-verify-") as folder:
        answer = Path(folder) / "comparison.json"
        if topology.world_size == 1:
            from threefold.verify.mesh_side import verify_rank

            code = verify_rank(config, options, topology, str(answer))
        else:
            arguments = (config, options, topology, str(answer))
            code = local_ranks.start_ranks(_rank_entry, arguments, num_ranks=topology.world_size)
        return Comparison(**json.loads(answer.read_text())) if answer.exists() else code or EXIT_FAILED


def _rank_entry(config: Config, options: Options, topology: Topology, answer: str) -> None:
    from threefold.verify.mesh_side import verify_rank

    sys.exit(verify_rank(config, options, topology, answer))
