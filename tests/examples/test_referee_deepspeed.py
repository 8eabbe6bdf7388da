"""The referee on programs with DeepSpeed's ZeRO, on two real ranks: each stage proved, and its faults refuted."""

from __future__ import annotations

from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest

from examples.test_referee_programs import REFEREE, TORCHRUN, WATCHED, not_judged, refuted, run

pytestmark = [
    pytest.mark.examples,
    pytest.mark.skipif(
        find_spec("deepspeed") is None,
        reason="DeepSpeed is not installed: make test-examples does it",
    ),
]
PROGRAM = str(WATCHED / "deepspeed_loop.py")
PROVED = (
    "gradients: in steps 1 to 3 each of 25 parameters has the gradient of the "
    "mean over all targets (283 in step 1)"
)
FAULTS = [
    (
        "q_norm",
        1,
        "have a different factor from the rest: model.layers.*.self_attn.q_norm.weight x2\n",
    ),
    ("means", 2, "count 1.22 x those of row 1 of micro-batch 1 of rank 1 (5 targets)"),
    (
        "ranks",
        3,
        "each gradient is x2.0000: the number of ranks or the number of micro-batches of a rank\n",
    ),
    (
        "q_norm",
        3,
        "have a different factor from the rest: model.layers.*.self_attn.q_norm.weight x2\n",
    ),
]


@pytest.fixture(autouse=True)
def _on_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.mark.parametrize(
    ("kind", "stage"), [("clean", 1), ("clean", 2), ("clean", 3), ("own_loss", 3)]
)
def test_stages_of_zero_are_proved(tmp_path: Path, kind: str, stage: int) -> None:
    watched = run(tmp_path, *REFEREE, "--", *TORCHRUN, PROGRAM, kind, str(stage))
    assert watched.returncode == 0, watched.stdout + watched.stderr
    assert PROVED in watched.stdout and "DeepSpeedEngine shows the data ranks" in watched.stdout
    assert "gradients are clipped by the norm of all of them in 3 steps" in watched.stdout
    assert (
        "updates: in steps 1 to 2 each of 25 parameters moves as torch's AdamW says"
        in watched.stdout
    )
    # The referee changes nothing of what is trained.
    alone = run(tmp_path, *TORCHRUN, PROGRAM, kind, str(stage))
    assert alone.returncode == 0, alone.stdout + alone.stderr
    weights = [line for line in alone.stdout.splitlines() if line.startswith("weights ")]
    assert len(weights) == 1 and weights[0] in watched.stdout.splitlines()


def test_a_loss_of_the_model_with_accumulation(tmp_path: Path) -> None:
    watched = run(tmp_path, *REFEREE, "--", *TORCHRUN, PROGRAM, "own_loss", "1")
    # DeepSpeed 0.19.0 divides by the number of micro-batches at the loss and at the logits that the model returns.
    is_wrong = version("deepspeed") == "0.19.0"
    assert watched.returncode == int(is_wrong), watched.stdout + watched.stderr
    assert refuted(watched.stdout) == ["gradients"] * is_wrong
    assert ("each gradient is x0.5000: one over" if is_wrong else PROVED) in watched.stdout


@pytest.mark.parametrize(("kind", "stage", "what"), FAULTS)
def test_faults_under_zero_are_refuted(
    tmp_path: Path, kind: str, stage: int, what: str
) -> None:
    watched = run(
        tmp_path, *REFEREE, "--steps", "2", "--", *TORCHRUN, PROGRAM, kind, str(stage)
    )
    assert watched.returncode == 1, watched.stdout + watched.stderr
    assert refuted(watched.stdout) == ["gradients"]
    assert what in watched.stdout


@pytest.mark.parametrize("stage", [0, 2])
def test_what_is_not_judged_of_deepspeed(tmp_path: Path, stage: int) -> None:
    kind = "bf16" if stage else "clean"
    watched = run(tmp_path, *REFEREE, "--", *TORCHRUN, PROGRAM, kind, str(stage))
    assert watched.returncode == 3, watched.stdout + watched.stderr
    assert refuted(watched.stdout) == [] and "Traceback" not in watched.stderr
    if stage:
        assert (
            not_judged(watched.stdout) == ["updates"]
            and "weights in bfloat16 round away most" in watched.stdout
        )
    else:
        assert (
            "DeepSpeed shows its gradients only under ZeRO, and not in float16"
            in watched.stdout
        )
