"""Optimizers through the command: what the run says, keeps, goes on with, exports and refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ranks.reference import compare_curves, require
from ranks.runs import command, curve, metrics, prepare
from threefold.checkpoint.checkpoint_folder import find
from threefold.checkpoint.state import index_of
from threefold.checkpoint.tensors import read_whole

pytestmark = pytest.mark.ranks

GROUPS = "[{match: embed, lr: 1e-4, name: slow}]"
MUON = (
    "--optimizer.name",
    "muon",
    "--optimizer.lr",
    "1e-3",
    "--optimizer.ema",
    "0.5",
    "--optimizer.groups",
    GROUPS,
)
SCHEDULE = (
    "--optimizer.schedule",
    "wsd",
    "--optimizer.decay_steps",
    "3",
    "--optimizer.warmup_steps",
    "2",
)
ALL = ("config.yaml", *MUON, *SCHEDULE, "--checkpoint.every", "3")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("optimizers")
    prepare(folder)
    mesh = ("--mesh.dp", "2", "--mesh.dp_shard", "2", "--mesh.tp", "2")
    done = command(folder, "train", *ALL, *mesh, "--train.steps", "6", "--log.dir", "run")
    assert done.returncode == 0, done.stderr
    (folder / "said").write_text(done.stdout)
    return folder


def test_what_a_run_says_and_logs(folder: Path) -> None:
    said = (folder / "said").read_text()
    assert "  optimizer: muon for 14 matrices, adamw for 7 others\n" in said
    assert "  ema: a moving average of the weights, decay 0.5, one more copy of them\n" in said
    assert "  group slow: lr 0.0001 for embed\n" in said
    rates = [
        (line["lr"], line["lr_slow"]) for _, line in sorted(metrics(folder / "run").items())
    ]
    assert [rate for rate, _ in rates] == pytest.approx(
        [5e-4, 1e-3, 1e-3, 2e-3 / 3, 1e-3 / 3, 0.0]
    )
    assert [slow for _, slow in rates] == pytest.approx([0.1 * rate for rate, _ in rates])


def test_a_run_goes_on_elsewhere_and_refuses_another_optimizer(folder: Path) -> None:
    whole = curve(folder / "run")
    first = str(folder / "run" / "checkpoints" / "step-00000003")
    on_another = (
        "--checkpoint.resume",
        first,
        "--mesh.tp",
        "2",
        "--mesh.dp",
        "1",
        "--log.dir",
        "again",
    )
    done = command(folder, "train", *ALL, "--train.steps", "6", *on_another)
    assert done.returncode == 0, done.stderr
    require(compare_curves(curve(folder / "again"), whole[3:]))
    for more, said in (
        (("--optimizer.name", "adamw"), "optimizer.name = adamw, but "),
        (
            ("--optimizer.name", "adamw", "--accept-changes"),
            "the checkpoint has optimizer.momentum_buffer.",
        ),
        (
            ("--optimizer.options", "{momentum: 0.5}"),
            "optimizer.options = {momentum: 0.5}, but ",
        ),
    ):
        done = command(
            folder,
            "train",
            *ALL,
            "--train.steps",
            "9",
            "--log.dir",
            "again",
            "--mesh.dp",
            "1",
            *more,
        )
        assert done.returncode == 2 and said in done.stderr, done.stderr
        assert "Traceback" not in done.stderr


def test_the_moving_average_is_exported_and_evaluated(folder: Path) -> None:
    done = command(folder, "export", "run", "--to", "averaged", "--ema")
    assert done.returncode == 0 and "equal logits" in done.stdout, done.stderr
    checkpoint = find(folder / "run")
    index = index_of(checkpoint)
    for name, weight in load_file(folder / "averaged" / "model.safetensors").items():
        assert torch.equal(weight, read_whole(checkpoint.state, index.entries[f"ema.{name}"]))
        assert not torch.equal(
            weight, read_whole(checkpoint.state, index.entries[f"model.{name}"])
        )
    said = [
        command(folder, "eval", "run", "--eval.source", "corpus", *more).stdout
        for more in ((), ("--ema",))
    ]
    assert (
        "moving average" in said[1] and said[0].split("loss ")[1] != said[1].split("loss ")[1]
    )


def test_an_average_that_begins_in_a_resumed_run_begins_with_its_weights(folder: Path) -> None:
    mesh = ("--mesh.dp", "2", "--mesh.dp_shard", "2", "--checkpoint.every", "1")
    done = command(
        folder, "train", "config.yaml", *mesh, "--train.steps", "2", "--log.dir", "late"
    )
    assert done.returncode == 0, done.stderr
    averaged = ("--train.steps", "3", "--optimizer.ema", "0.75")
    assert command(folder, "resume", "late", *averaged).returncode == 0
    before, after = (
        (find(path).state, index_of(find(path)).entries)
        for path in sorted((folder / "late" / "checkpoints").iterdir())[-2:]
    )
    for name, entry in before[1].items():
        if name.startswith("model."):
            then, now, average = (
                read_whole(state, each)
                for state, each in (
                    (before[0], entry),
                    (after[0], after[1][name]),
                    (after[0], after[1]["ema." + name.removeprefix("model.")]),
                )
            )
            torch.testing.assert_close(average, then.lerp(now, 0.25))
            assert not torch.equal(then, now)


def test_a_run_is_evaluated_on_meshes_that_its_optimizer_does_not_train_on(
    tmp_path: Path,
) -> None:
    """torch's Adafactor, named by its path, has means of whole rows: it is refused where they are split."""
    prepare(tmp_path)
    asked = ("--optimizer.name", "torch.optim.Adafactor", "--optimizer.options", "{d: 2.0}")
    one = ("--mesh.dp", "1", "--train.steps", "1", "--log.dir", "run")
    done = command(tmp_path, "train", "config.yaml", *asked, *one)
    assert done.returncode == 0, done.stderr
    said = [
        command(tmp_path, "eval", "run", "--eval.source", "corpus", *mesh)
        for mesh in ((), ("--mesh.dp", "1", "--mesh.tp", "2"))
    ]
    assert all(each.returncode == 0 for each in said), said
    alone, split = (float(each.stdout.split("loss ")[1].split()[0]) for each in said)
    assert split == pytest.approx(alone, abs=1e-4)


def test_what_is_refused_before_the_ranks(folder: Path) -> None:
    asked = ("--optimizer.groups", "[{match: embde, lr: 1e-4}]", "--log.dir", "none")
    done = command(folder, "train", "config.yaml", "--mesh.dp", "1", *asked)
    assert done.returncode == 2 and "matches no parameter that is trained" in done.stderr
    assert "model.embed_tokens.weight" in done.stderr
    plain = ("--train.steps", "1", "--mesh.dp", "1", "--log.dir", "plain")
    assert command(folder, "train", "config.yaml", *plain).returncode == 0
    done = command(folder, "export", "plain", "--to", "other", "--ema")
    assert done.returncode != 0 and "has no moving average of the weights" in done.stderr
    assert not (folder / "none").exists() and not (folder / "other").exists()
