"""AdamW of torchao with moments in 8 bits: the command trains, resumes bit for bit, and refuses meshes that split."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ranks.runs import command, prepare
from threefold.checkpoint.checkpoint_folder import find
from threefold.checkpoint.tensor_index import Index
from threefold.checkpoint.tensors import read_whole

KEYS = (
    "--optimizer.name",
    "adamw_8bit",
    "--train.steps",
    "6",
    "--checkpoint.every",
    "3",
    "--checkpoint.keep",
    "9",
)
LARGE = "{model_type: llama, hidden_size: 64, intermediate_size: 128, num_hidden_layers: 1, num_attention_heads: 4}"


def losses(run: Path) -> list[float]:
    return [
        json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()
    ]


@pytest.mark.examples
def test_8_bit_moments_train_and_resume_bit_for_bit(tmp_path: Path) -> None:
    pytest.importorskip("torchao", reason="torchao is not installed")
    prepare(tmp_path)
    given = ("train", "config.yaml", "--model.config", LARGE, *KEYS)
    whole = command(tmp_path, *given, "--mesh.dp", "1", "--log.dir", "whole", timeout_s=300)
    assert whole.returncode == 0, whole.stderr
    state = find(tmp_path / "whole").state
    held = Index.read(state).entries
    codes = [name for name in held if name.startswith("optimizer.exp_avg.codes.")]
    assert codes and {held[name].dtype for name in codes} == {"U8"}
    one = ("--mesh.dp", "1", "--log.dir", "plain")
    plain = command(tmp_path, "train", "config.yaml", "--model.config", LARGE, *KEYS[2:], *one)
    assert plain.returncode == 0, plain.stderr
    assert losses(tmp_path / "whole") == pytest.approx(losses(tmp_path / "plain"), abs=0.05)
    assert losses(tmp_path / "whole") != losses(tmp_path / "plain")
    fork = (
        "--checkpoint.resume",
        "whole/checkpoints/step-00000003",
        "--log.dir",
        "again",
        "--mesh.dp",
    )
    back = ("train", "whole/config.yaml", *fork)
    again = command(tmp_path, *back, "1", timeout_s=300)
    assert again.returncode == 0, again.stderr
    other = find(tmp_path / "again").state
    for name, entry in Index.read(other).entries.items():
        assert bytes(read_whole(other, entry).numpy()) == bytes(
            read_whole(state, held[name]).numpy()
        ), name
    two = command(tmp_path, *back[:5], "two", "--mesh.dp", "2", timeout_s=300)
    assert two.returncode == 0, two.stderr
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "whole")[3:], abs=1e-4)


@pytest.mark.examples
def test_meshes_that_split_matrices_are_refused_before_any_rank_starts(tmp_path: Path) -> None:
    pytest.importorskip("torchao", reason="torchao is not installed")
    prepare(tmp_path)
    for mesh in ("--mesh.tp", "--mesh.cp"):
        done = command(
            tmp_path, "train", "config.yaml", "--optimizer.name", "adamw_8bit", mesh, "2"
        )
        assert done.returncode == 2 and "optimizer.name = adamw_8bit on the mesh" in done.stderr


def test_without_torchao_it_is_refused_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from threefold.errors import ConfigError
    from threefold.optim import eightbit as adamw_8bit

    monkeypatch.setattr(adamw_8bit.importlib.util, "find_spec", lambda name: None)
    adamw_8bit.adamw_8bit.cache_clear()
    with pytest.raises(
        ConfigError, match=r"torchao is not installed(.|\n)*pip install 'threefold\[torchao\]'"
    ):
        adamw_8bit.adamw_8bit()
    adamw_8bit.adamw_8bit.cache_clear()
