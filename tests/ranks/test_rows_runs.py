"""Runs keep the loss of every row: the rows of a step add up to its loss on every mesh, and are the same rows."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from ranks.runs import command, metrics, prepare
from threefold.audit import record, row_losses
from threefold.audit.lookup import find_step
from threefold.errors import visible

pytestmark = pytest.mark.ranks

MESHES = {
    "alone": (),
    "dp2": ("--mesh.dp", "2"),
    "exact": (
        "--mesh.dp",
        "2",
        "--train.reduce",
        "exact",
        "--train.micro_batch",
        "2",
        "--mesh.device",
        "cpu",
    ),
    "cp2": ("--mesh.cp", "2"),
    "tp2": ("--mesh.tp", "2", "--train.micro_batch", "4"),
    "cube": ("--mesh.dp", "2", "--mesh.dp_shard", "2", "--mesh.cp", "2", "--mesh.tp", "2"),
}
DATA = (
    "--data.source",
    "texts.jsonl",
    "--data.packing",
    "best_fit",
    "--data.seq_len",
    "48",
    "--data.document_mask",
    "true",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of three steps on each mesh, from the same weights."""
    folder = tmp_path_factory.mktemp("rows")
    prepare(folder)
    texts = (
        " ".join(f"word{number * index % 89}" for index in range(2 + number * 7 % 23))
        for number in range(90)
    )
    texts = (
        f"\x1b[31m\u202ered {text}" if number % 3 else text for number, text in enumerate(texts)
    )
    (folder / "texts.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in texts)
    )
    for name, mesh in MESHES.items():
        done = command(
            folder,
            "train",
            "config.yaml",
            *DATA,
            *mesh,
            "--train.steps",
            "3",
            "--log.dir",
            name,
        )
        assert done.returncode == 0, done.stderr
    return folder


def losses_of(run: Path) -> dict[int, dict[int, tuple[float, int]]]:
    """Step -> row -> (summed loss, targets), after a comparison of their sum with the step's own loss."""
    segments = record.read(run / record.FILE)
    kept, logged = row_losses.read(run, segments), metrics(run)
    assert kept.damaged == [] and kept.steps == sorted(logged)
    found = {}
    for step in kept.steps:
        losses, read = kept.of(step), find_step(segments, step)
        assert losses is not None and read is not None
        assert losses.sums.sum() / losses.counts.sum() == pytest.approx(
            logged[step]["loss"], rel=1e-6
        )
        values = zip(losses.sums.tolist(), losses.counts.tolist(), strict=True)
        found[step] = dict(zip(read.rows.tolist(), values, strict=True))
    return found


@pytest.mark.parametrize("mesh", MESHES)
def test_rows_of_a_step_add_up_to_its_loss_and_are_those_of_one_process(
    folder: Path, mesh: str
) -> None:
    alone, found = losses_of(folder / "alone"), losses_of(folder / mesh)
    assert list(found) == [1, 2, 3]
    for step, rows in found.items():
        assert rows.keys() == alone[step].keys()
        for row, (total, count) in rows.items():
            assert count == alone[step][row][1]
            assert total == pytest.approx(alone[step][row][0], rel=1e-4), (
                f"row {row} of step {step}"
            )
    assert len({count for _, count in found[1].values()}) > 1, "rows differ in their targets"


def test_why_shows_rows_with_documents_and_text_that_no_terminal_obeys(folder: Path) -> None:
    done = command(folder, "why", "cube", "--step", "2")
    assert done.returncode == 0, done.stderr
    assert "nothing unusual" in done.stdout and "(documents " in done.stdout
    assert (
        "\x1b" not in done.stdout
        and "\u202e" not in done.stdout
        and "\\x1b[31m\\u202ered word" in done.stdout
    )
    told = json.loads(command(folder, "why", "cube", "--step", "2", "--json").stdout)
    assert told["missing"] is None and len(told["rows"]) == 8
    shown = command(folder, "data", "order", "cube", "--step", "2", "--show").stdout
    assert "\x1b" not in shown
    losses = losses_of(folder / "cube")[2]
    for row in told["rows"]:
        assert row["loss"] * row["targets"] == pytest.approx(losses[row["row"]][0], rel=1e-6)
        # Here with the token after it, if that is the label of its last one.
        assert visible(row["text"]).split("\n")[0].removesuffix(" ...")[:-1] in shown
    assert command(folder, "why", "alone").stdout.startswith(
        "alone: steps 1 to 3, the rows' losses of 3 of them"
    )
    refused = command(folder, "why", "alone", "--step", "4")
    assert refused.returncode == 2 and "fix: threefold why alone --step 3" in refused.stderr


def test_a_row_is_of_the_files_of_its_documents(folder: Path) -> None:
    """Each document of a folder of texts is a file; of several files of rows it is not known which one."""
    for number in range(7):
        (folder / "texts" / f"{number}.txt").parent.mkdir(exist_ok=True)
        (folder / "texts" / f"{number}.txt").write_text(f"text{number} " * (9 + 3 * number))
    (folder / "rows").mkdir(exist_ok=True)
    for name in "ab":
        (folder / "rows" / f"{name}.jsonl").write_text((folder / "texts.jsonl").read_text())
    for source in ("texts", "rows"):
        settings = (
            "--data.source",
            source,
            "--data.packing",
            "none",
            "--train.steps",
            "1",
            "--log.dir",
            f"of-{source}",
        )
        done = command(
            folder,
            "train",
            "config.yaml",
            *settings,
            "--data.seq_len",
            "64",
            "--train.global_batch",
            "2",
        )
        assert done.returncode == 0, done.stderr
    named = json.loads(command(folder, "why", "of-texts", "--step", "1", "--json").stdout)[
        "rows"
    ]
    for row in named:
        (document,) = row["documents"]
        assert row["files"] == [str(folder / "texts" / f"{document}.txt")]
        assert f"text{document} " in row["text"]
    assert (
        len(named) == 2
        and f"of {folder}/texts/" in command(folder, "why", "of-texts", "--step", "1").stdout
    )
    assert {json.dumps(row["files"]) for row in json.loads(
        command(folder, "why", "of-rows", "--step", "1", "--json").stdout)["rows"]} == {"[]"}  # fmt: skip
    (one,) = {json.dumps(row["files"]) for row in json.loads(
        command(folder, "why", "cube", "--step", "2", "--json").stdout)["rows"]}  # fmt: skip
    assert json.loads(one) == [str(folder / "texts.jsonl")]


def test_a_resume_on_another_mesh_goes_on_with_its_rows(folder: Path) -> None:
    go_on = (
        "--train.steps",
        "5",
        "--mesh.dp",
        "2",
        "--mesh.cp",
        "1",
        "--mesh.tp",
        "1",
        "--mesh.dp_shard",
        "1",
    )
    done = command(folder, "resume", "cube", *go_on)
    assert done.returncode == 0, done.stderr
    assert list(losses_of(folder / "cube")) == [1, 2, 3, 4, 5]
    # Steps that are trained again, on yet another mesh, replace those that were.
    back = (
        "--checkpoint.resume",
        "cube/checkpoints/step-00000003",
        "--train.steps",
        "4",
        "--mesh.dp",
        "1",
    )
    done = command(folder, "resume", "cube", *back)
    assert done.returncode == 0, done.stderr
    segments = record.read(folder / "cube" / record.FILE)
    kept = row_losses.read(folder / "cube", segments)
    assert kept.steps == [1, 2, 3, 4]
    again = kept.of(4)
    assert again is not None and np.isfinite(again.means).all()
    assert again.sums.sum() / again.counts.sum() == pytest.approx(
        metrics(folder / "cube")[4]["loss"], rel=1e-6
    )


def test_nothing_is_kept_where_it_is_not_asked_for(folder: Path) -> None:
    off = ("--mesh.dp", "1", "--audit.rows", "false", "--train.steps", "1", "--log.dir", "off")
    done = command(folder, "train", "config.yaml", *off)
    assert done.returncode == 0, done.stderr
    assert not (folder / "off" / row_losses.FOLDER).exists()


def test_data_that_has_changed_gives_no_text_of_a_run(folder: Path) -> None:
    prefix = record.read(folder / "alone" / record.FILE)[-1].start.stores[0][2]
    path = Path(f"{prefix}.bin")
    content = path.read_bytes()
    assert "word" in command(folder, "why", "alone", "--step", "1").stdout
    path.write_bytes(content[:100] + bytes([content[100] ^ 1]) + content[101:])
    try:
        told = command(folder, "why", "alone", "--step", "1").stdout
    finally:
        path.write_bytes(content)
    assert "word" not in told and "have changed since the run read them" in told
    assert told.count("  row ") == 8
