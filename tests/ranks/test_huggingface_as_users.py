"""The Trainer as users start it: their launchers, peft, and every example by the command of its page."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from ranks.huggingface_cases import Sentences, arguments, causal_model
from ranks.runs import command, environment, script, torchrun
from ranks.spawn import run_ranks
from ranks.test_huggingface_training import assert_same_curve, curve_of, settings, stopper

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
# As the pages start their examples: cold, once each. What is started again is forked, see start_warm.
TORCHRUN = ("torchrun", "--standalone", "--nproc_per_node")


def start(folder: Path, *command: str, timeout_s: float = 240, **variables: str) -> str:
    """Output of a command in `folder` that must succeed; examples/ is there as in a clone."""
    if not (folder / "examples").exists():
        (folder / "examples").symlink_to(ROOT / "examples")
    done = subprocess.run(
        [str(BIN / command[0]), *command[1:]],
        cwd=folder,
        env={**environment(folder), "OMP_NUM_THREADS": "1", **variables},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout + done.stderr


def start_warm(
    folder: Path, num_ranks: int, example: str, *arguments: str, **variables: str
) -> str:
    """The same of an example under torchrun whose agent and ranks are forked with transformers imported."""
    done = torchrun(
        folder, num_ranks, str(ROOT / example), *arguments, OMP_NUM_THREADS="1", **variables
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout + done.stderr


def tune(
    folder: str, batch_size: int, more: dict[str, Any]
) -> tuple[list[tuple[float, float]], float, list[str]]:
    from peft import LoraConfig, get_peft_model

    from threefold.integrations.huggingface import Trainer

    resume, stop = more.pop("resume", None), more.pop("stop_after", None)
    torch.manual_seed(1)
    model = get_peft_model(causal_model(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    trainer = Trainer(
        model,
        arguments(folder, **settings(batch_size, **more)),
        train_dataset=Sentences(29),
        eval_dataset=Sentences(7),
    )
    if stop is not None:
        trainer.add_callback(stopper(stop))
    trainer.train(resume_from_checkpoint=resume)
    saved = sorted(path.name for path in Path(folder).glob("checkpoint-3/adapter*"))
    return curve_of(trainer.state.log_history), trainer.evaluate()["eval_loss"], saved


@pytest.mark.skipif(
    find_spec("peft") is None, reason="peft is not installed (pip install 'threefold[lora]')"
)
def test_adapters_of_peft(tmp_path: Path) -> None:
    more = {"num_train_epochs": 2, "save_strategy": "steps", "save_steps": 100}
    whole, loss, _ = tune(str(tmp_path / "alone"), 8, dict(more))
    tune(str(tmp_path / "stopped"), 8, {**more, "stop_after": 3})
    for curve, found, saved in run_ranks(
        tune, 2, str(tmp_path / "stopped"), 4, {**more, "resume": True}
    ):
        assert_same_curve(curve, whole)
        assert found == pytest.approx(loss, abs=1e-4)
        assert saved == ["adapter_config.json", "adapter_model.safetensors"]


def loss_in(output: str) -> float:
    return float(re.findall(r"evaluation loss ([0-9.]+)", output)[-1])


@pytest.mark.examples
def test_trainer_ddp(tmp_path: Path) -> None:
    example, quiet = (
        "examples/trainer_ddp.py",
        ("--disable_tqdm", "true", "--lr_scheduler_type", "constant"),
    )
    start(tmp_path, *TORCHRUN, "2", example, "--max_steps", "20", *quiet)
    output = start_warm(tmp_path, 2, example, "--max_steps", "40", *quiet)
    assert "2 ranks, step 40" in output
    proof = command(tmp_path, "data", "audit", "runs/trainer").stdout
    assert "proved: 640 reads, each by exactly one dp rank in exactly one step" in proof
    # The same with accelerate's launcher, as one process, and by SageMaker's hyperparameters.
    whole = ("--max_steps", "40", "--output_dir")
    launched = start(
        tmp_path,
        *(
            "accelerate",
            "launch",
            "--multi_gpu",
            "--num_processes",
            "2",
            "--main_process_port",
            "0",
        ),
        *(example, *whole, "runs/accelerate", *quiet),
    )
    assert loss_in(launched) == pytest.approx(loss_in(output), abs=1e-4)
    rows = ("--per_device_train_batch_size", "16")
    alone = script(tmp_path, str(ROOT / example), *whole, "runs/alone", *rows, *quiet)
    assert alone.returncode == 0, alone.stderr
    assert loss_in(alone.stdout + alone.stderr) == pytest.approx(loss_in(output), abs=1e-3)
    given = '{"max_steps": 40, "output_dir": "runs/sagemaker", "disable_tqdm": true, "lr_scheduler_type": "constant"}'
    model = str(tmp_path / "model")
    hosted = start_warm(tmp_path, 2, example, SM_HPS=given, SM_MODEL_DIR=model)
    assert loss_in(hosted) == pytest.approx(loss_in(output), abs=1e-4)
    assert (tmp_path / "model" / "model.safetensors").is_file()


@pytest.mark.examples
def test_trainer_evaluation(tmp_path: Path) -> None:
    example = "examples/trainer_evaluation.py"
    outputs = [
        start(tmp_path, *TORCHRUN, "2", example),
        *(start_warm(tmp_path, ranks, example) for ranks in (1, 3)),
    ]
    for output in outputs:
        by_hand = float(re.search(r"by hand: ([0-9.]+)", output).group(1))  # type: ignore[union-attr]
        loss, whole, parts = re.search(
            r"threefold +evaluation loss (\S+) +gradient norm (\S+), .*batches (\S+)", output
        ).groups()  # type: ignore[union-attr]
        assert float(loss) == pytest.approx(by_hand, abs=1e-6)
        assert whole == parts == "2.7252"


@pytest.mark.examples
def test_trainer_accelerate(tmp_path: Path) -> None:
    example = ("examples/trainer_accelerate.py", "--epochs", "2")
    assert "stopped after 7 steps" in start(
        tmp_path, *TORCHRUN, "2", *example, "--stop_after", "7"
    )
    resumed = start_warm(tmp_path, 4, *example, "--rows", "2")
    alone = start_warm(tmp_path, 1, *example, "--rows", "8", "--state", "runs/alone")
    assert loss_in(resumed) == pytest.approx(loss_in(alone), abs=1e-5)


@pytest.mark.examples
@pytest.mark.timeout(1800)
@pytest.mark.skipif(
    find_spec("deepspeed") is None,
    reason="deepspeed is not installed (pip install 'threefold[deepspeed]')",
)
@pytest.mark.skipif(
    shutil.which("c++") is None, reason="there is no C++ compiler for DeepSpeed's kernels"
)
def test_deepspeed_zero(tmp_path: Path) -> None:
    # Kept between runs: on a CPU the kernel takes a minute or more to compile.
    kept = os.environ.get(
        "TORCH_EXTENSIONS_DIR", str(Path.home() / ".cache" / "torch_extensions")
    )
    losses = []
    for stage in ("2", "3"):
        command = (
            "torchrun",
            "--standalone",
            "--nproc_per_node",
            "2",
            "examples/deepspeed_zero.py",
            "--stage",
            stage,
        )
        first = start(tmp_path, *command, timeout_s=900, TORCH_EXTENSIONS_DIR=kept)
        assert f"DeepSpeedEngine, ZeRO-{stage}, 2 ranks, step 20" in first
        again = start(tmp_path, *command, "--steps", "30", TORCH_EXTENSIONS_DIR=kept)
        assert f"DeepSpeedEngine, ZeRO-{stage}, 2 ranks, step 30" in again
        proof = start(tmp_path, "threefold", "data", "audit", f"runs/deepspeed/zero-{stage}")
        assert "epoch 0: 301 of 301 rows, each exactly once" in proof
        losses.append((loss_in(first), loss_in(again)))
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
