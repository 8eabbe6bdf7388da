"""The short loops of docs/own-loop.md: the same lines in one process and on every mesh, at most 40 lines each.

The loop that writes what it learns from has 60; its loss is TRL's.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
from pathlib import Path
from typing import Any

import pytest

from ranks.spawn import run_ranks

LOOPS = Path(__file__).parents[2] / "examples" / "loops"
MESHES = [(2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 2)]  # dp, cp, tp
ON_ANY_MESH = ("own_loss", "evaluate", "collectives")


def _main(name: str, *arguments: Any) -> str:
    """What an example prints on this rank."""
    spec = importlib.util.spec_from_file_location(name, LOOPS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with contextlib.redirect_stdout(io.StringIO()) as said:
        module.main(*arguments)
    return said.getvalue()


def numbers(text: str) -> list[float]:
    found = [float(each) for each in re.findall(r"-?\d+\.?\d*", text)]
    assert found
    return found


@pytest.mark.parametrize("path", sorted(LOOPS.glob("*.py")), ids=lambda path: path.name)
def test_a_loop_is_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= (60 if path.stem == "grpo" else 40)


# All axes at once; each axis of its own is a long case.
SHORT_AND_LONG = [
    pytest.param([MESHES[-1]], marks=pytest.mark.examples, id="all axes"),
    pytest.param(MESHES[:-1], marks=pytest.mark.long, id="each axis"),
]


@pytest.mark.parametrize("meshes", SHORT_AND_LONG)
@pytest.mark.parametrize("name", ON_ANY_MESH)
def test_every_mesh_prints_the_same(name: str, meshes: list[tuple[int, int, int]]) -> None:
    alone = numbers(run_ranks(_main, 1, name)[0])
    for sizes in meshes:
        said = run_ranks(_main, sizes[0] * sizes[1] * sizes[2], name, *sizes)[0]
        assert numbers(said) == pytest.approx(alone, abs=2e-4, rel=2e-3), sizes


@pytest.mark.parametrize("sizes", MESHES[:-1], ids=str)
@pytest.mark.examples
def test_grpo_learns_the_same_on_every_mesh_from_what_the_mesh_writes(
    sizes: tuple[int, int, int],
) -> None:
    rounds = re.compile(r"round \d+: score ([\d.]+) of this rank's, loss (\S+)")
    alone = rounds.findall(run_ranks(_main, 1, "grpo", 1, 1, 1, 8)[0])
    assert float(alone[-1][0]) > float(alone[0][0]) + 0.1
    found = rounds.findall(run_ranks(_main, 2, "grpo", *sizes, 8)[0])
    assert [float(loss) for _, loss in found] == pytest.approx(
        [float(loss) for _, loss in alone], abs=2e-5
    )


@pytest.mark.examples
def test_a_classifier_prints_the_same_on_copies_and_shards() -> None:
    alone = numbers(run_ranks(_main, 1, "classifier")[0])
    for sizes in ((2, 1), (2, 2)):
        assert numbers(run_ranks(_main, 2, "classifier", *sizes)[0]) == pytest.approx(
            alone, abs=2e-4, rel=2e-3
        )


def _two_runs(name: str, folder: str, first: tuple[int, ...], second: tuple[int, ...]) -> str:
    """What both runs of the loop print, each on its mesh."""
    size = first[0] * first[1] * first[2]
    begun = run_ranks(_main, size, name, folder, 3, *first)[0]
    return (
        begun + run_ranks(_main, second[0] * second[1] * second[2], name, folder, 6, *second)[0]
    )


@pytest.mark.parametrize("meshes", SHORT_AND_LONG)
@pytest.mark.parametrize("name", ["save_and_resume", "run"])
def test_a_loop_stops_and_goes_on_on_another_mesh(
    name: str, tmp_path: Path, meshes: list[tuple[int, int, int]]
) -> None:
    unbroken = numbers(run_ranks(_main, 1, name, str(tmp_path / "unbroken"), 6)[0])
    for number, sizes in enumerate(meshes):
        then = MESHES[(MESHES.index(sizes) + 1) % len(MESHES)]
        assert numbers(
            _two_runs(name, str(tmp_path / str(number)), sizes, then)
        ) == pytest.approx(unbroken, abs=2e-4, rel=2e-3)


@pytest.mark.examples
def test_a_run_with_objects_of_the_script_stops_early(tmp_path: Path) -> None:
    from ranks import warm
    from ranks.runs import environment, run

    done = run(warm.script, tmp_path, (str(LOOPS / "hooks.py"), "run"), environment(tmp_path))
    assert done.returncode == 0, done.stderr
    assert (
        "ended by hook at step " in done.stdout
        and "loss: __main__.confident, of logits: as given" in done.stdout
    )
