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
    done = torchrun(folder, ranks, path, *arguments) if ranks else script(folder, path, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_cold(folder: Path, example: str, *arguments: str, ranks: int) -> str:
    """The same by the torchrun of the installation, as a page says: seconds of imports on every rank."""
    launcher = (str(Path(sys.executable).with_name("torchrun")), "--standalone", f"--nproc-per-node={ranks}")
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
        name: float(share) for name, share in re.findall(r"(as it is|balanced): .*right, ([\d.]+) of the rare", said)
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


def test_a_sampler_on_the_dp_part_of_a_device_mesh_and_without_it(tmp_path: Path) -> None:
    said = run(tmp_path, "common/device_mesh_sampler.py", ranks=8)
    assert "the tp and cp ranks of a dp rank read the same rows" in said
    assert "dp ranks share 0 rows, and read 1000 of 1,000" in said
    plain = run(tmp_path, "common/device_mesh_sampler.py", "--plain", ranks=8)
    assert "the tp and cp ranks of a dp rank read different rows" in plain
    assert "and read 250 of 1,000" in plain


def test_a_plain_loader_under_ddp_reads_every_row_on_every_rank(tmp_path: Path) -> None:
    said = run(tmp_path, "common/plain_loader.py", ranks=2).splitlines()
    assert said[:2] == [
        f"{form}: 256 of 256 rows, 256 of them twice; 32 rows in the first step"
        for form in ("without shuffling", "shuffled, all ranks with one seed")
    ]
    assert said[2].startswith("shuffled, each rank with its own seed: 256 of 256 rows, 256 of them twice; ")
    assert said[3] == "threefold.distribute(loader): 256 of 256 rows, 0 of them twice; 32 rows in the first step"


def test_a_bert_job_has_one_gradient_on_any_ranks_and_transformers_a_multiple(tmp_path: Path) -> None:
    found = {}
    for form, arguments in (("ours", ()), ("plain", ("--plain",))):
        for ranks in (0, 2):
            said = run(tmp_path, "common/bert_sagemaker.py", *arguments, ranks=ranks)
            norm = re.search(r"gradient norm of the first step ([\d.]+), on (\d) ranks", said)
            loss = re.search(r"evaluation loss ([\d.]+), accuracy", said)
            assert norm is not None and loss is not None and int(norm[2]) == max(ranks, 1), said
            found[form, ranks] = (float(norm[1]), float(loss[1]))
    assert found["ours", 2] == pytest.approx(found["ours", 0], rel=2e-3)
    assert [two / one for one, two in zip(found["plain", 0], found["plain", 2], strict=True)] == pytest.approx(
        [2, 2], rel=2e-2
    )
    assert (tmp_path / "runs/bert/model/model.safetensors").is_file()


def test_tensor_parallelism_of_transformers_and_what_its_usual_form_does(tmp_path: Path) -> None:
    said = run(tmp_path, "common/tensor_parallel.py", ranks=4).splitlines()
    assert [re.sub(r" of 1,024.*", "", line) for line in said] == [
        "DistributedConfig(tp_size=2, fsdp_size=2): 256",
        "fully_shard(model): 256",
        "DistributedDataParallel(model): 1024",
    ]
    losses = [float(line.rpartition(" ")[2]) for line in said]
    assert losses == pytest.approx([losses[0]] * 3, abs=2e-5)
    plain = run(tmp_path, "common/tensor_parallel.py", "--plain", ranks=4)
    assert "RuntimeError: shape '[4, 16, -1, 8]' is invalid for input of size 256" in plain
