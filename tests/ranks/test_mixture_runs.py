"""A mixture in whole runs of the real command: another mesh goes on as the first would have."""

from __future__ import annotations

from pathlib import Path

import pytest

from ranks.runs import command, metrics, prepare

MIXTURE = "{most: {source: 'corpus/part-[012].txt', weight: 3}, rest: {source: corpus/part-3.txt, weight: 1}}"


def test_mixture_goes_on_on_another_mesh(tmp_path: Path) -> None:
    prepare(tmp_path)
    config = (tmp_path / "config.yaml").read_text()
    (tmp_path / "config.yaml").write_text(config.replace("source: corpus", f"mixture: {MIXTURE}"))
    saved = ("--checkpoint.every", "6", "--mesh.dp", "2", "--log.dir", "whole")
    whole = command(tmp_path, "train", "config.yaml", *saved)
    assert whole.returncode == 0, whole.stderr
    assert "3 most + 1 rest (bytes)" in whole.stdout
    checkpoint = str(tmp_path / "whole" / "checkpoints" / "step-00000006")
    moved = command(
        tmp_path, "train", "config.yaml", "--mesh.dp", "1", "--log.dir", "moved", "--checkpoint.resume", checkpoint
    )
    assert moved.returncode == 0, moved.stderr
    found, expected = metrics(tmp_path / "moved"), metrics(tmp_path / "whole")
    assert sorted(found) == list(range(7, 13))
    for step, line in found.items():
        assert line["loss"] == pytest.approx(expected[step]["loss"], abs=1e-4)
