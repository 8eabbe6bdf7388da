"""Each config of docs/recipes.md is read as `threefold train` reads it, and needs the memory that is written there."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from threefold.commands import main
from threefold.config import loading
from threefold.config.schema import every_key, value_at

PAGE = Path(__file__).parents[2] / "docs" / "recipes.md"
BLOCKS = re.findall(r"^```yaml\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
HEAD = re.compile(r"# (\S+) on (\d+) x (\S+): ([\d.]+) GiB on each, estimated\n")


def sizes(
    kind: str,
    hidden: int,
    inner: int,
    layers: int,
    heads: tuple[int, int, int],
    vocabulary: int,
    *,
    tied: bool,
) -> dict[str, Any]:
    """A config.json with what an estimate reads of it."""
    num_heads, num_kv_heads, head_dim = heads
    return {
        "model_type": kind,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocabulary,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 8192,
    }


# As published with the weights.
MODELS = {
    "Qwen/Qwen3-0.6B": sizes("qwen3", 1024, 3072, 28, (16, 8, 128), 151_936, tied=True),
    "Qwen/Qwen3-8B": sizes("qwen3", 4096, 12288, 36, (32, 8, 128), 151_936, tied=False),
    "Qwen/Qwen3-32B": sizes("qwen3", 5120, 25600, 64, (64, 8, 128), 151_936, tied=False),
    "meta-llama/Llama-3.2-1B": sizes("llama", 2048, 8192, 16, (32, 8, 64), 128_256, tied=True),
    "meta-llama/Llama-3.1-8B": sizes(
        "llama", 4096, 14336, 32, (32, 8, 128), 128_256, tied=False
    ),
    "meta-llama/Llama-3.1-70B": sizes(
        "llama", 8192, 28672, 80, (64, 8, 128), 128_256, tied=False
    ),
    "google/gemma-3-1b-pt": sizes(
        "gemma3_text", 1152, 6912, 26, (4, 1, 256), 262_144, tied=True
    ),
    "google/gemma-7b": sizes("gemma", 3072, 24576, 28, (16, 16, 256), 256_000, tied=True),
}


def test_each_family_has_a_config_for_1_8_and_64() -> None:
    heads = [match.groups() for block in BLOCKS if (match := HEAD.match(block))]
    assert len(heads) == len(BLOCKS) == 9
    assert [int(devices) for _, devices, _, _ in heads] == [1, 8, 64] * 3
    assert {model for model, *_ in heads} == MODELS.keys()


@pytest.mark.parametrize(
    "block", BLOCKS, ids=[block.partition(":")[0].removeprefix("# ") for block in BLOCKS]
)
def test_config_is_read_and_fits_as_the_page_says(
    block: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    head = HEAD.match(block)
    assert head is not None
    model, devices, device, memory = head.groups()
    (tmp_path / "job.yaml").write_text(block)
    config = loading.load(str(tmp_path / "job.yaml"), environ={}).config
    assert config.model.name_or_path == model
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(MODELS[model]))
    mesh = {
        f"mesh.{axis}": getattr(config.mesh, axis) or 1
        for axis in ("dp", "dp_shard", "cp", "tp")
    }
    keys = [
        "train.micro_batch",
        "train.global_batch",
        "train.activation_checkpointing",
        "data.seq_len",
        "model.dtype",
    ]
    assert {*keys, *mesh} <= set(every_key())
    pairs = {**mesh, **{key: value_at(config, key) for key in keys}}
    arguments = [f"--{key}={value}" for key, value in pairs.items()]
    command = [
        "threefold",
        "plan",
        str(tmp_path / "model"),
        "--gpus",
        devices,
        "--gpu",
        device,
        "--json",
        *arguments,
    ]
    monkeypatch.setattr("sys.argv", command)
    with pytest.raises(SystemExit) as ended:
        main.run()
    assert not ended.value.code
    (setup,) = json.loads(capsys.readouterr().out)
    assert setup["fits"] and f"{setup['memory_bytes'] / 2**30:.1f}" == memory
