"""`threefold verify --bits`: equal where they are promised, and what differs first where they are not."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from ranks.runs import command, prepare
from ranks.spawn import run_ranks
from threefold.config.loading import validate
from threefold.mesh.topology import Topology
from threefold.verify.bits import compared, meshes_of

EXACT = ("--train.reduce", "exact", "--train.micro_batch", "2")
STEPS: list[dict[str, Any]] = [
    {
        "loss": 1.5,
        "gradient norm": 2.5,
        "weights": {"embedding": "a", "layer": "b", "head": "c"},
    },
    {
        "loss": 1.25,
        "gradient norm": 2.25,
        "weights": {"embedding": "d", "layer": "e", "head": "f"},
    },
]


def changed(step: int, **values: Any) -> list[dict[str, Any]]:
    found = copy.deepcopy(STEPS)
    for name, value in values.items():
        found[step - 1].update({name: value}) if name == "loss" else found[step - 1][
            "weights"
        ].update({name: value})
    return found


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (STEPS, "equal: 3 tensors, losses and norms, in each of 2 steps"),
        (changed(1, layer="x"), "not equal: dp=2 and dp=1: step 1 differs first, in layer"),
        (
            changed(2, layer="x", head="y"),
            "step 2 differs first, in layer and 1 more of 3 tensors",
        ),
        (changed(2, loss=1.3, head="y"), "step 2 differs first, in head; so does its loss"),
        (changed(1, loss=1.6), "step 1 differs first, in its loss"),
    ],
)
def test_the_first_step_and_tensor_that_differ_are_named(other: list[Any], said: str) -> None:
    lines, equal = compared({"dp=1": STEPS, "dp=2": other})
    assert lines[-1].endswith(said) and equal == said.startswith("equal")


def test_meshes_are_those_that_the_batch_can_be_dealt_to() -> None:
    asked = {"global_batch": 12, "micro_batch": 2, "reduce": "exact"}
    meshes = meshes_of(validate({"train": asked}), Topology(3, 1, 2, 1))
    assert meshes == [Topology(1, 1, 2, 1), Topology(1, 2, 2, 1), Topology(3, 1, 2, 1)]
    assert meshes_of(validate({"train": asked}), Topology(1, 2)) == [Topology(), Topology(1, 2)]


def test_what_it_does_not_compare_is_refused(tmp_path: Path) -> None:
    prepare(tmp_path)
    fast = command(tmp_path, "verify", "config.yaml", "--bits")
    assert (
        fast.returncode == 2
        and "fix: --train.reduce exact --train.micro_batch 1" in fast.stderr
    )
    both = command(tmp_path, "verify", "--bits", "--against", "a", "b")
    assert both.returncode == 2 and "verify --bits with --against" in both.stderr


@pytest.mark.examples
def test_the_command_on_a_run_with_dropout_on_its_own_mesh(tmp_path: Path) -> None:
    prepare(tmp_path)
    settings = (
        *EXACT,
        "--model.lora.r",
        "2",
        "--model.lora.dropout",
        "0.1",
        "--mesh.device",
        "cpu",
    )
    done = command(
        tmp_path,
        "verify",
        "config.yaml",
        "--bits",
        *settings,
        "--mesh.dp",
        "4",
        "--mesh.tp",
        "2",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(done.stdout.splitlines()) == 7 and "equal: " in done.stdout.splitlines()[-1], (
        done.stdout
    )


def _steps(folder: str) -> Any:
    import os

    from threefold.config.loading import load
    from threefold.mesh.mesh import init_mesh
    from threefold.verify.bits import steps_on
    from threefold.verify.verdict import VerifyOptions

    os.chdir(folder)
    fast = load(
        "config.yaml", [("train.micro_batch", "2"), ("mesh.device", "cpu")], environ={}
    ).config
    return steps_on(init_mesh(device="cpu"), fast, VerifyOptions(2))


def test_plain_sums_are_told_apart(tmp_path: Path) -> None:
    """What is hashed shows the last bit of a weight."""
    prepare(tmp_path)
    found = {f"dp={ranks}": run_ranks(_steps, ranks, str(tmp_path))[0] for ranks in (1, 2)}
    lines, equal = compared(found)
    assert not equal and "not equal: dp=2 and dp=1: step 1 differs first, in " in lines[-1]
