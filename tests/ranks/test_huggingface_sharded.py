"""Models that transformers loads in shards (DistributedConfig): trained, saved, resumed by the Trainer on any mesh."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ranks.huggingface_cases import Sentences, arguments, causal_model, join_launcher
from ranks.spawn import run_ranks
from ranks.test_huggingface_training import assert_same_curve, curve_of, proved, settings, stopper

SIZE, EPOCHS = 29, 2


def train_sharded(source: str, folder: str, sizes: dict[str, int], more: dict[str, Any]) -> dict[str, Any]:
    import torch.distributed as dist
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    from threefold.integrations.huggingface import Trainer

    join_launcher()
    sharded = {"distributed_config": DistributedConfig(**sizes)} if sizes else {}
    model = AutoModelForCausalLM.from_pretrained(source, **sharded)
    dp = (dist.get_world_size() if dist.is_initialized() else 1) // sizes.get("tp_size", 1)
    resume, stop = more.pop("resume", None), more.pop("stop_after", None)
    own = {**settings(1, num_train_epochs=EPOCHS, **more), "per_device_train_batch_size": 4 // dp}
    own["gradient_accumulation_steps"] = 2
    trainer = Trainer(model, arguments(folder, **own), train_dataset=Sentences(SIZE), eval_dataset=Sentences(13))
    if stop is not None:
        trainer.add_callback(stopper(stop))
    trainer.train(resume_from_checkpoint=resume)
    first = next(iter(trainer.optimizer.optimizer.state.values()))
    return {
        "curve": curve_of(trainer.state.log_history),
        "eval_loss": trainer.evaluate()["eval_loss"],
        "moment": type(first["exp_avg"]).__name__,
        "saves_all": not trainer.args.save_only_model,
    }


MESHES = [
    (2, {"tp_size": 2}),
    (2, {"fsdp_size": 2}),
    (4, {"tp_size": 2, "fsdp_size": 2}),
    (4, {"dp_replicate_size": 2, "fsdp_size": 2}),
]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    causal_model().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def alone(source: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One process, uninterrupted."""
    return train_sharded(source, str(tmp_path_factory.mktemp("alone")), {}, {})


LONG = pytest.mark.examples


@pytest.mark.parametrize(
    "number", [pytest.param(0, marks=LONG), 1, pytest.param(2, marks=LONG), pytest.param(3, marks=LONG)]
)
def test_sharded_models_stop_and_go_on_on_another_mesh(
    number: int, source: str, alone: dict[str, Any], tmp_path: Path
) -> None:
    before, after = MESHES[number], MESHES[(number + 1) % len(MESHES)]
    more = {"save_strategy": "steps", "save_steps": 100}
    stopped = run_ranks(train_sharded, before[0], source, str(tmp_path), before[1], {**more, "stop_after": 3})
    assert all(found["moment"] == "DTensor" and found["saves_all"] for found in stopped)
    state = tmp_path / "checkpoint-3" / "threefold-state"
    assert sorted({path.suffix for path in state.iterdir()}) == [".safetensors"], "no pickle is written"
    assert_loads_as_users_know_it(source, tmp_path / "checkpoint-3")
    for found in run_ranks(train_sharded, after[0], source, str(tmp_path), after[1], {**more, "resume": True}):
        assert_same_curve(found["curve"], alone["curve"])
        assert found["curve"][:3] == stopped[0]["curve"]
        assert found["eval_loss"] == pytest.approx(alone["eval_loss"], abs=1e-4)
    assert "epoch 1: 29 of 29 rows, each exactly once" in proved(tmp_path)


def assert_loads_as_users_know_it(source: str, checkpoint: Path) -> None:
    from transformers import AutoModelForCausalLM

    begun, loaded = AutoModelForCausalLM.from_pretrained(source), AutoModelForCausalLM.from_pretrained(checkpoint)
    pairs = zip(loaded.state_dict().values(), begun.state_dict().values(), strict=True)
    moved = [(one - other).abs().max().item() for one, other in pairs]
    # Three steps of AdamW at a rate of 1e-2.
    assert 1e-3 < max(moved) < 4e-2
    assert all(torch.isfinite(value).all() for value in loaded.state_dict().values())
