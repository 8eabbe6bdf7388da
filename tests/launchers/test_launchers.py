"""Every real launcher: each rank knows its place. Under some, also the default run, shortened, with equal losses.

A launcher's ranks differ from the command's own only in what `threefold.mesh.environment` reads.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from launchers.launches import LAUNCHES, SELF, STEPS, two
from launchers.places import check_places, places
from ranks.runs import curve

pytestmark = [pytest.mark.launchers, pytest.mark.timing, pytest.mark.timeout(240)]


def _folder(name: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in name)


# Slurm's is in test_slurm.py, with the cluster of all tests.
@pytest.mark.parametrize("name", [name for name in LAUNCHES if name != "Slurm"])
def test_ranks_know_their_places(name: str, tmp_path: Path) -> None:
    launch = LAUNCHES[name]
    if (reason := launch.why_not()) is not None:
        pytest.skip(reason)
    check_places(places(tmp_path, launch.start, 4), launch)


@pytest.mark.parametrize("name", ["torchrun", "Open MPI"])
def test_two_ranks_train_as_the_command_alone(
    name: str, launch_folder: Path, losses_of_two: list[tuple[float, float]]
) -> None:
    launch = LAUNCHES[name]
    if (reason := launch.why_not()) is not None:
        pytest.skip(reason)
    run = launch_folder / f"two-{_folder(name)}"
    code, printed = launch.start(launch_folder, two(run), 2)
    assert code == 0, printed
    assert "dp=2 x cp=1 x tp=1 on 2 ranks" in printed
    assert len(losses_of_two) == STEPS
    assert curve(run) == losses_of_two


@pytest.fixture(scope="module")
def reference(launch_folder: Path) -> list[tuple[float, float]]:
    """(loss, gradient norm) of each step."""
    code, printed = SELF.train(launch_folder, launch_folder / "self-4")
    assert code == 0, printed
    return curve(launch_folder / "self-4")


@pytest.mark.long
@pytest.mark.parametrize("name", LAUNCHES)
def test_losses_are_those_of_the_command_alone(
    name: str, launch_folder: Path, reference: list[tuple[float, float]]
) -> None:
    launch = LAUNCHES[name]
    if (reason := launch.why_not()) is not None:
        pytest.skip(reason)
    run = launch_folder / _folder(name)
    code, printed = launch.train(launch_folder, run)
    assert code == 0, printed
    assert "dp=2 x cp=1 x tp=2 on 4 ranks" in printed
    assert len(reference) == STEPS
    assert curve(run) == reference
