"""The example with transformers.Trainer as a job of SageMaker's toolkit: its hyperparameters, folders and ranks."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest

from launchers import sagemaker

pytestmark = [
    pytest.mark.launchers,
    pytest.mark.long,  # the entry script under the toolkit is in test_sagemaker.py
    pytest.mark.timeout(300),
    pytest.mark.skipif(sagemaker.why_not() is not None, reason=str(sagemaker.why_not())),
]
EXAMPLE = sagemaker.ROOT / "examples" / "trainer_ddp.py"
HOST = os.uname().nodename


def _lay_out(base: Path) -> None:
    toolkit: dict[str, Any] = {
        "sagemaker_program": EXAMPLE.name,
        "sagemaker_torch_distributed_enabled": True,
        "sagemaker_instance_type": sagemaker.INSTANCE,
        "sagemaker_job_name": "test",
        "sagemaker_container_log_level": 20,
    }
    own = {"max_steps": 12, "learning_rate": 3e-3, "disable_tqdm": True, "output_dir": str(base / "checkpoints")}
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        tar.add(EXAMPLE, EXAMPLE.name)
    sagemaker.lay_out(
        base,
        request={"HyperParameters": {key: json.dumps(value) for key, value in {**toolkit, **own}.items()}},
        source=packed.getvalue(),
        host=HOST,
        hosts=[HOST],
        num_ranks=2,
        interface="lo",
        channels={},
    )


def _loss(output: str) -> float:
    found = re.search(r"2 ranks, step 12: evaluation loss ([0-9.]+)", output)
    assert found is not None, output
    return float(found[1])


def test_trainer_is_started_by_the_toolkit(tmp_path: Path) -> None:
    base = tmp_path / "ml"
    _lay_out(base)
    hosted = sagemaker.run_toolkit(tmp_path, base)
    assert hosted.returncode == 0, hosted.stdout + hosted.stderr
    command = ["torchrun", "--standalone", "--nproc_per_node", "2", str(EXAMPLE), "--max_steps", "12"]
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
