"""`threefold verify`: compares the mesh with one process, on the user's own model.

If the two differ, each axis of the mesh is tried alone, to find the wrong one.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from threefold.commands.arguments import AsJson, Force, load_config
from threefold.config.loading import LoadedConfig
from threefold.config.schema import Config
from threefold.errors import EXIT_FAILED, ConfigError
from threefold.jsonl import as_json
from threefold.mesh import environment, local_ranks
from threefold.mesh.divisibility import refuse_impossible
from threefold.mesh.topology import Topology, resolve
from threefold.run.start import PRELOAD, topology_here

if TYPE_CHECKING:
    from threefold.verify.verdict import Verification, VerifyOptions


def command(
    context: typer.Context,
    steps: Annotated[
        int | None,
        typer.Option(min=1, help="Steps to compare: 3, or with --against all of both runs."),
    ] = None,
    layers: Annotated[
        int | None, typer.Option(min=1, help="Use only the first N layers.")
    ] = None,
    random: Annotated[
        bool, typer.Option("--random", help="Use random weights instead of the model's own.")
    ] = False,
    force: Force = False,
    bits: Annotated[
        bool,
        typer.Option(
            "--bits",
            help="Compare hashes across several numbers of data ranks (train.reduce: exact).",
        ),
    ] = False,
    against: Annotated[
        tuple[Path, Path] | None,
        typer.Option(help="Compare the metrics of two finished runs instead."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare the mesh with one process on your own model: threefold verify [CONFIG.yaml] [--section.key value ...].

    Both train a few steps in float32 on the same rows. The report shows losses, gradient norms and the largest relative
    difference of the gradients; if they differ, also the first layer and the axis of the mesh that are wrong. --bits
    trains with train.reduce exact on 1, 2 and 4 data ranks and on the mesh, and says whether all weights are equal.
    """
    if as_json and (bits or against is not None):
        raise ConfigError(
            f"verify --json with {'--bits' if bits else '--against'}",
            expected="a mesh and one process, whose numbers are printed",
            fix="leave out --json",
        )
    if against is not None:
        from threefold.verify.verdict import compare_runs

        if bits:
            raise ConfigError(
                "verify --bits with --against",
                expected="one of them: metrics of finished runs have no weights",
                fix="threefold hash RUN_A RUN_B   (compares their weights)",
            )

        lines, holds = compare_runs(*against, steps=steps)
        typer.echo("\n".join(lines))
        sys.exit(0 if holds else EXIT_FAILED)
    from threefold.verify.verdict import VerifyOptions

    verified = bits_command if bits else verify_command
    sys.exit(
        verified(
            load_config(context.args),
            VerifyOptions(steps or 3, layers, random, as_json=as_json),
            force=force,
        )
    )


def verify_command(loaded: LoadedConfig, options: VerifyOptions, *, force: bool = False) -> int:
    """Verifies the mesh of the config and returns the exit code: 0 it follows the single process, 1 it does not."""
    from threefold.verify.verdict import answer_of, diagnose, table

    info = environment.current()
    if info.launcher is not None:
        topology, _ = resolve(loaded.config.mesh, launched_world_size=info.world_size)
        from threefold.verify.rank import verify_rank

        return verify_rank(loaded.config, options, topology, None)
    from threefold.run.sources import file_lines

    local_ranks.preload(PRELOAD)
    topology, why = topology_here(loaded.config, force=force)
    refuse_impossible(loaded.config, topology)
    numbers = f"{topology.world_size} ranks ({why}) against one process, float32, {options.steps} steps"
    heading = [
        f"mesh {topology} on {numbers}",
        *(f"files: {line}" for line in file_lines(loaded.config)),
    ]
    print("\n".join(heading), file=sys.stderr if options.as_json else sys.stdout)
    verification = on_ranks(loaded.config, options, topology)
    if isinstance(verification, int):
        return verification
    if options.as_json:
        print(as_json(answer_of(verification, topology)))
        return 0 if verification.holds else EXIT_FAILED
    print("\n".join(table(verification)))
    if verification.holds:
        print("the mesh follows the single process")
        return 0
    print(
        diagnose(
            topology,
            lambda smaller: on_ranks(loaded.config, replace(options, admission=False), smaller),
        )
    )
    return EXIT_FAILED


def bits_command(loaded: LoadedConfig, options: VerifyOptions, *, force: bool = False) -> int:
    """Compares bits on several meshes and returns the exit code: 0 they are equal, 1 they are not.

    Raises:
        ConfigError: a run that does not promise it, a mesh that is impossible, or ranks of a launcher's.
    """
    from threefold.verify.bits import compared, meshes_of, refuse_fast

    if (launcher := environment.current().launcher) is not None:
        raise ConfigError(
            f"verify --bits under {launcher}",
            expected="one process, which starts the ranks of each mesh",
            fix="threefold verify CONFIG --bits",
        )
    config = loaded.config
    refuse_fast(config)
    local_ranks.preload(PRELOAD)
    topology, _ = topology_here(config, force=force)
    refuse_impossible(config, topology)
    meshes, by_mesh = meshes_of(config, topology), {}
    print(
        f"{options.steps} steps on {len(meshes)} meshes, {config.model.dtype}, train.reduce exact",
        flush=True,
    )
    for mesh in meshes:
        steps = _on_ranks(True, config, options, mesh)
        if isinstance(steps, int):
            return steps
        by_mesh[str(mesh)] = steps
    lines, equal = compared(by_mesh)
    print("\n".join(lines))
    return 0 if equal else EXIT_FAILED


def on_ranks(config: Config, options: VerifyOptions, topology: Topology) -> Verification | int:
    """The verification on local ranks, or the exit code of a failed attempt."""
    from threefold.verify.verdict import Verification

    answer = _on_ranks(False, config, options, topology)
    return answer if isinstance(answer, int) else Verification.from_record(answer)


def _on_ranks(bits: bool, config: Config, options: VerifyOptions, topology: Topology) -> Any:
    """The answer of rank 0 of local ranks, or the exit code of a failed attempt."""
    with tempfile.TemporaryDirectory(prefix="threefold-verify-") as folder:
        answer = Path(folder) / "answer.json"
        arguments = (bits, config, options, topology, str(answer))
        if topology.world_size == 1:
            code = _rank(*arguments)
        else:
            code = local_ranks.start_ranks(_rank, arguments, num_ranks=topology.world_size)
        return json.loads(answer.read_text()) if answer.exists() else code or EXIT_FAILED


def _rank(
    bits: bool, config: Config, options: VerifyOptions, topology: Topology, answer: str
) -> int:
    from threefold.verify.bits import bits_rank
    from threefold.verify.rank import verify_rank

    return (bits_rank if bits else verify_rank)(config, options, topology, answer)
