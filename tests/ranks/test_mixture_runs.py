"""A mixture in whole runs of the real command: another mesh goes on as the first would have."""

from __future__ import annotations

from pathlib import Path

import pytest

from ranks.runs import command, metrics, prepare

MIXTURE = "{most: {source: 'corpus/part-[012].txt', weight: 3}, rest: {source: corpus/part-3.txt, weight: 1}}"


def test_mixture_goes_on_on_another_mesh(tmp_path: Path) -> None:
    prepare(tmp_path)
    config = (tmp_path / "config.yaml").read_text()
    (tmp_path / "config.yaml").write_text(
        config.replace("source: corpus", f"mixture: {MIXTURE}")
    )
    saved = ("--checkpoint.every", "6", "--mesh.dp", "2", "--log.dir", "whole")
    whole = command(tmp_path, "train", "config.yaml", *saved)
    assert whole.returncode == 0, whole.stderr
    assert "3 most + 1 rest (bytes)" in whole.stdout
    assert "\n  shares asked most 75 %, rest 25 %; kept exactly\n" in whole.stdout
    assert "\nread: 96 rows\n" in whole.stdout
    checkpoint = str(tmp_path / "whole" / "checkpoints" / "step-00000006")
    moved = command(
        tmp_path,
        "train",
        "config.yaml",
        "--mesh.dp",
        "1",
        "--log.dir",
        "moved",
        "--checkpoint.resume",
        checkpoint,
    )
    assert moved.returncode == 0, moved.stderr
    found, expected = metrics(tmp_path / "moved"), metrics(tmp_path / "whole")
    assert sorted(found) == list(range(7, 13))
    for step, line in found.items():
        assert line["loss"] == pytest.approx(expected[step]["loss"], abs=1e-4)


def test_sources_of_the_same_rows_are_named(tmp_path: Path) -> None:
    prepare(tmp_path)
    config = (tmp_path / "config.yaml").read_text()
    twice = MIXTURE.replace("part-[012].txt", "part-*.txt").replace("part-3.txt", "*.txt")
    (tmp_path / "config.yaml").write_text(config.replace("source: corpus", f"mixture: {twice}"))
    done = command(tmp_path, "train", "config.yaml", "--mesh.dp", "1", "--train.steps", "1")
    assert done.returncode == 0, done.stderr
    assert "warning: most and rest are the same rows, read once for each" in done.stdout


def test_weights_as_numbers_of_tokens_are_kept_and_said(tmp_path: Path) -> None:
    prepare(tmp_path)
    config, weights = (
        (tmp_path / "config.yaml").read_text(),
        MIXTURE.replace("weight: 3", "weight: 1234567"),
    )
    (tmp_path / "config.yaml").write_text(
        config.replace("source: corpus", f"mixture: {weights}")
    )
    done = command(
        tmp_path,
        "train",
        "config.yaml",
        "--mesh.dp",
        "2",
        "--log.dir",
        "run",
        "--train.steps",
        "4",
    )
    assert done.returncode == 0, done.stderr
    shares = "asked most 99.999919 %, rest 8.09999935e-05 %; kept exactly"
    assert f"\n  shares {shares}\n" in done.stdout
    more = command(tmp_path, "resume", "run", "--mesh.dp", "1", "--train.steps", "6")
    assert more.returncode == 0, more.stderr
    proved = command(tmp_path, "data", "audit", "run", "--contents")
    assert proved.returncode == 0, proved.stderr
    assert f"\n  shares: {shares}\n" in proved.stdout
    assert "  rest: 0 reads of " in proved.stdout, (
        "version 1 read one row in 10,000, 123 times as many as asked"
    )
    row = (
        command(tmp_path, "data", "order", "run", "--step", "5")
        .stdout.splitlines()[1]
        .split()[-1]
    )
    assert command(tmp_path, "data", "order", "run", "--sample", row).stdout.startswith(
        f"row {row}: step 5 (epoch 0, "
    )
