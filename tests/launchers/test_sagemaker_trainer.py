"""Examples with transformers.Trainer as jobs of SageMaker's toolkit: their hyperparameters, folders and ranks."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from launchers import sagemaker
from ranks.runs import script

pytestmark = [
    pytest.mark.launchers,
    pytest.mark.timeout(300),
    pytest.mark.skipif(sagemaker.why_not() is not None, reason=str(sagemaker.why_not())),
]
EXAMPLE = sagemaker.ROOT / "examples" / "trainer_ddp.py"
BERT = sagemaker.ROOT / "examples" / "common" / "bert_sagemaker.py"
HOST = os.uname().nodename


def _lay_out(
    base: Path, program: Path, hyperparameters: Mapping[str, Any], channels: Mapping[str, Path]
) -> None:
    """The tree of a container whose job runs a program on two ranks."""
    toolkit: dict[str, Any] = {
        "sagemaker_program": program.name,
        "sagemaker_torch_distributed_enabled": True,
        "sagemaker_instance_type": sagemaker.INSTANCE,
        "sagemaker_job_name": "test",
        "sagemaker_container_log_level": 20,
    }
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        tar.add(program, program.name)
    sagemaker.lay_out(
        base,
        request={
            "HyperParameters": {
                key: json.dumps(value) for key, value in {**toolkit, **hyperparameters}.items()
            }
        },
        source=packed.getvalue(),
        host=HOST,
        hosts=[HOST],
        num_ranks=2,
        interface="lo",
        channels=channels,
    )


def _loss(output: str) -> float:
    found = re.search(r"2 ranks, step 12: evaluation loss ([0-9.]+)", output)
    assert found is not None, output
    return float(found[1])


@pytest.mark.long  # the entry script under the toolkit is in test_sagemaker.py, another Trainer below
def test_trainer_is_started_by_the_toolkit(tmp_path: Path) -> None:
    base = tmp_path / "ml"
    own = {
        "max_steps": 12,
        "learning_rate": 3e-3,
        "disable_tqdm": True,
        "output_dir": str(base / "checkpoints"),
    }
    _lay_out(base, EXAMPLE, own, {})
    hosted = sagemaker.run_toolkit(tmp_path, base)
    assert hosted.returncode == 0, hosted.stdout + hosted.stderr
    command = [
        "torchrun",
        "--standalone",
        "--nproc_per_node",
        "2",
        str(EXAMPLE),
        "--max_steps",
        "12",
    ]
    direct = subprocess.run(
        [*command, "--disable_tqdm", "true"],
        cwd=tmp_path,
        env=sagemaker.toolkit_environment(tmp_path, base),
        capture_output=True,
        text=True,
        timeout=140,
        check=False,
    )
    assert direct.returncode == 0, direct.stderr
    assert _loss(hosted.stdout) == pytest.approx(_loss(direct.stdout), abs=1e-6)
    assert (base / "model" / "model.safetensors").is_file()
    assert (base / "checkpoints" / "checkpoint-10" / "threefold.json").is_file()


@pytest.mark.parametrize("plain", [False, True], ids=["ours", "transformers"])
def test_bert_classifier_is_a_job_of_the_toolkit(plain: bool, tmp_path: Path) -> None:
    """On the rows of a channel, of which the example makes the same ones where there is none."""
    channel, base = tmp_path / "channel", tmp_path / "ml"
    channel.mkdir()
    words = [("bad", "good"), ("dull", "fine"), ("grim", "bright"), ("cold", "kind")]
    rows = [
        (f"film {number} was {words[number // 2 % 4][number % 2]}", number % 2)
        for number in range(192)
    ]
    lines = [json.dumps({"text": text, "label": label}) for text, label in rows]
    (channel / "train.jsonl").write_text("\n".join(lines) + "\n")
    _lay_out(
        base, BERT, {"epochs": 1, "train_batch_size": 32, "plain": plain}, {"train": channel}
    )
    hosted = sagemaker.run_toolkit(tmp_path, base)
    assert hosted.returncode == 0, hosted.stdout + hosted.stderr
    evaluated = json.loads((base / "output/data/eval_results.json").read_text())
    assert (base / "model/model.safetensors").is_file() and evaluated["eval_rows"] == 43

    def norm(printed: str, ranks: int) -> float:
        line = re.search(
            rf"gradient norm of the first step ([0-9.]+), on {ranks} ranks", printed
        )
        assert line is not None, printed
        return float(line[1])

    arguments = ["--epochs", "1", "--plain", str(plain).lower()]
    alone = script(tmp_path, str(BERT), *arguments)
    assert alone.returncode == 0, alone.stderr
    # Of two ranks as on one; transformers multiplies a classifier's gradient by the number of ranks.
    expected = norm(alone.stdout, 1) * (2 if plain else 1)
    assert norm(hosted.stdout, 2) == pytest.approx(expected, rel=2e-2)
