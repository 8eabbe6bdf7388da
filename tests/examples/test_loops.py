"""The examples of loops of one's own, run as their first lines say, and in one process."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from ranks.runs import environment, script, torchrun

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.examples


def run(folder: Path, example: str, *arguments: str, ranks: int = 0) -> str:
    """What an example prints under torchrun, or with `ranks` 0 in plain Python; both forked with torch imported."""
    path = str(ROOT / "examples" / example)
    done = (
        torchrun(folder, ranks, path, *arguments) if ranks else script(folder, path, *arguments)
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_cold(folder: Path, example: str, *arguments: str, ranks: int) -> str:
    """The same by the torchrun of the installation, as a page says: seconds of imports on every rank."""
    launcher = (
        str(Path(sys.executable).with_name("torchrun")),
        "--standalone",
        f"--nproc-per-node={ranks}",
    )
    done = subprocess.run(
        [*launcher, str(ROOT / "examples" / example), *arguments],
        cwd=folder,
        env={**environment(folder), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_plain_loop_is_as_good_on_two_ranks_as_in_one_process(tmp_path: Path) -> None:
    accuracies = []
    outputs = {1: run(tmp_path, "ddp_loop.py"), 2: run_cold(tmp_path, "ddp_loop.py", ranks=2)}
    for ranks, output in outputs.items():
        found = re.search(r"accuracy ([\d.]+) over 360 images on (\d) ranks", output)
        assert found is not None and int(found[2]) == ranks
        accuracies.append(float(found[1]))
    assert min(accuracies) > 0.85
    # The same rows in the same steps: only the order of sums differs.
    assert abs(accuracies[0] - accuracies[1]) <= 2 / 360


def test_sampler_goes_on_in_mid_epoch(tmp_path: Path) -> None:
    said = run(tmp_path, "ddp_sampler.py", ranks=2)
    assert "resumes after 100 of 898 images of this rank: {'epoch': 0, 'position': 200," in said
    losses = [float(loss) for loss in re.findall(r"epoch \d: loss ([\d.]+)", said)]
    assert len(losses) == 8 and losses[-1] < 0.5 * losses[0]


def test_weights_find_the_rare_classes(tmp_path: Path) -> None:
    said = run(tmp_path, "imbalanced_digits.py", ranks=2)
    rare = {
        name: float(share)
        for name, share in re.findall(
            r"(as it is|balanced): .*right, ([\d.]+) of the rare", said
        )
    }
    assert said.count("; 360 images on 2 ranks") == 2
    assert rare["balanced"] > rare["as it is"] + 0.1


def test_three_axes_read_what_they_should_and_follow_one_process(tmp_path: Path) -> None:
    losses = []
    for arguments, ranks in (((), 8), (("1", "1", "1"), 0)):
        said = run(tmp_path, "three_axes.py", *arguments, ranks=ranks)
        assert "dp ranks read distinct rows, cp and tp ranks the same" in said
        losses.append([float(loss) for loss in re.findall(r"step \d+: loss ([\d.]+)", said)])
    # The promise for 20 steps, and half of the last digit that is shown on both sides.
    assert losses[0] == pytest.approx(losses[1], abs=2e-4)
