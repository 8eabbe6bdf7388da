"""The default run, shortened, under every real launcher: the same losses as when the command launches itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from launchers.launches import LAUNCHES, SELF, STEPS
from ranks.runs import curve

pytestmark = [pytest.mark.launchers, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield tmp_path_factory.mktemp("launchers")


@pytest.fixture(scope="module")
def reference(folder: Path) -> list[tuple[float, float]]:
    """(loss, gradient norm) of each step; the folder's cache holds the prepared data afterwards."""
    code, printed = SELF.start(folder, folder / "self")
    assert code == 0, printed
    return curve(folder / "self")


@pytest.mark.parametrize("name", LAUNCHES)
def test_losses_are_those_of_the_command_alone(name: str, folder: Path, reference: list[tuple[float, float]]) -> None:
    launch = LAUNCHES[name]
    if (reason := launch.why_not()) is not None:
        pytest.skip(reason)
    run = folder / name.replace(" ", "-").replace(",", "").replace("'", "")
    code, printed = launch.start(folder, run)
    assert code == 0, printed
    assert "dp=2 x cp=1 x tp=2 on 4 ranks" in printed
    assert len(reference) == STEPS
    assert curve(run) == reference
