"""Models that transformers loads in shards (DistributedConfig): trained, saved, resumed by the Trainer on any mesh."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ranks.huggingface_cases import Sentences, arguments, causal_model, join_launcher
from ranks.reference import require
from ranks.spawn import run_ranks
from ranks.test_huggingface_training import (
    assert_same_curve,
    curve_of,
    proved,
    settings,
    stopper,
)
from threefold.check.compare import Bound, compare_tensors

pytestmark = pytest.mark.ranks

SIZE, EPOCHS = 29, 2


def train_sharded(
    source: str, folder: str, sizes: dict[str, int], more: dict[str, Any]
) -> dict[str, Any]:
    import torch.distributed as dist
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    from threefold.integrations.huggingface import Trainer

    join_launcher()
    sharded = {"distributed_config": DistributedConfig(**sizes)} if sizes else {}
    model = AutoModelForCausalLM.from_pretrained(source, **sharded)
    dp = (dist.get_world_size() if dist.is_initialized() else 1) // sizes.get("tp_size", 1)
    resume, stop = more.pop("resume", None), more.pop("stop_after", None)
    own = {
        **settings(1, num_train_epochs=EPOCHS, **more),
        "per_device_train_batch_size": 4 // dp,
    }
    own["gradient_accumulation_steps"] = 2
    trainer = Trainer(
        model,
        arguments(folder, **own),
        train_dataset=Sentences(SIZE),
        eval_dataset=Sentences(13),
    )
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


LONG = pytest.mark.long


@pytest.mark.parametrize(
    "number",
    [pytest.param(0, marks=LONG), 1, pytest.param(2, marks=LONG), pytest.param(3, marks=LONG)],
)
def test_sharded_models_stop_and_go_on_on_another_mesh(
    number: int, source: str, alone: dict[str, Any], tmp_path: Path
) -> None:
    before, after = MESHES[number], MESHES[(number + 1) % len(MESHES)]
    more = {"save_strategy": "steps", "save_steps": 100}
    stopped = run_ranks(
        train_sharded, before[0], source, str(tmp_path), before[1], {**more, "stop_after": 3}
    )
    assert all(found["moment"] == "DTensor" and found["saves_all"] for found in stopped)
    state = tmp_path / "checkpoint-3" / "threefold-state"
    assert sorted(
        path.relative_to(state).as_posix() for path in state.rglob("*") if path.is_file()
    ) == [
        *("COMPLETE", "manifest.json", "state/index.json"),
        *(f"state/rank-{rank:05d}.safetensors" for rank in range(before[0])),
    ], "no pickle is written"
    assert_loads_as_users_know_it(source, tmp_path / "checkpoint-3")
    for found in run_ranks(
        train_sharded, after[0], source, str(tmp_path), after[1], {**more, "resume": True}
    ):
        assert_same_curve(found["curve"], alone["curve"])
        assert found["curve"][:3] == stopped[0]["curve"]
        assert found["eval_loss"] == pytest.approx(alone["eval_loss"], abs=1e-4)
    assert "epoch 1: 29 of 29 rows, each exactly once" in proved(tmp_path)


def assert_loads_as_users_know_it(source: str, checkpoint: Path) -> None:
    from transformers import AutoModelForCausalLM

    begun, loaded = (
        AutoModelForCausalLM.from_pretrained(source),
        AutoModelForCausalLM.from_pretrained(checkpoint),
    )
    moved = Bound("weight", 4e-2, "three steps of AdamW at a rate of 1e-2", relative=False)
    comparison = require(compare_tensors(moved, loaded.state_dict(), begun.state_dict()))
    assert comparison.worst().figure > 1e-3


# --- what is saved ------------------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Any] = {
    "SGD": {"momentum": 0.9},
    "RMSprop": {},
    "Adagrad": {},
    "AdamW": {},
}


def _loaded(source: str, sizes: dict[str, int], optimizer: str = "AdamW") -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    join_launcher()
    model = AutoModelForCausalLM.from_pretrained(
        source, distributed_config=DistributedConfig(**sizes)
    )
    return model, getattr(torch.optim, optimizer)(
        model.parameters(), lr=1e-3, **OPTIMIZERS[optimizer]
    )


def _step(model: Any, optimizer: Any) -> None:
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = parameter.detach() * (number + 1)
    optimizer.step()
    optimizer.zero_grad()


def _whole(model: Any, optimizer: Any) -> dict[str, Any]:
    from threefold.integrations.huggingface.trainer_checkpoint import _tensors

    state = _tensors(model, optimizer)
    return {
        name: (t.full_tensor() if hasattr(t, "full_tensor") else t).numpy().copy()
        for name, t in state.items()
    }


def _every_optimizer(
    sources: list[str], folder: str, before: dict[str, int], after: dict[str, int]
) -> list[str]:
    """Saves after two steps on one mesh, loads on another; names what came back with other values."""
    from threefold.integrations.huggingface.trainer_checkpoint import load_shards, save_shards

    wrong = []
    for source in sources:
        for name in OPTIMIZERS:
            checkpoint = Path(folder) / name / Path(source).name
            model, optimizer = _loaded(source, before, name)
            _step(model, optimizer)
            _step(model, optimizer)
            save_shards(checkpoint, model, optimizer, step=2)
            saved = _whole(model, optimizer)
            model, optimizer = _loaded(source, after, name)
            load_shards(checkpoint, model, optimizer)
            found = _whole(model, optimizer)
            assert found.keys() == saved.keys() and any(
                key.startswith("optimizer.") for key in saved
            )
            wrong += [
                f"{name} {key}" for key in saved if not np.array_equal(saved[key], found[key])
            ]
    return wrong


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"tp_size": 2, "fsdp_size": 2}, {"dp_replicate_size": 2, "fsdp_size": 2}),
        ({"fsdp_size": 4}, {"tp_size": 2, "fsdp_size": 2}),
    ],
    ids=["from tp x fsdp", "to tp x fsdp"],
)
def test_state_of_every_optimizer_comes_back(
    source: str, before: dict[str, int], after: dict[str, int], tmp_path: Path
) -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {
        "vocab_size": 64,
        "hidden_size": 16,
        "intermediate_size": 12,
        "num_hidden_layers": 1,
    }
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4}
    MixtralForCausalLM(MixtralConfig(**sizes, **heads)).save_pretrained(tmp_path / "experts")
    sources = [source, str(tmp_path / "experts")]
    assert run_ranks(_every_optimizer, 4, sources, str(tmp_path), before, after) == [[]] * 4


def _saved(source: str, folder: str, sizes: dict[str, int]) -> None:
    from threefold.integrations.huggingface.trainer_checkpoint import save_shards

    model, optimizer = _loaded(source, sizes)
    _step(model, optimizer)
    save_shards(Path(folder), model, optimizer, step=1)


def _refused(source: str, folders: list[str], sizes: dict[str, int]) -> list[str]:
    """What loading each folder says; the model must stay as it is."""
    from threefold.errors import CheckpointError
    from threefold.integrations.huggingface.trainer_checkpoint import load_shards

    model, optimizer = _loaded(source, sizes)
    before, said = _whole(model, None), []
    for folder in folders:
        with pytest.raises(CheckpointError) as caught:
            load_shards(Path(folder), model, optimizer)
        said.append(str(caught.value))
        assert all(
            np.array_equal(value, before[name]) for name, value in _whole(model, None).items()
        )
    assert not optimizer.state
    return said


def test_damage_is_named_before_anything_is_loaded(source: str, tmp_path: Path) -> None:
    run_ranks(_saved, 2, source, str(tmp_path / "whole"), {"fsdp_size": 2})
    file = "state/rank-00001.safetensors"
    changes = {
        "flipped": (file, lambda path: path.write_bytes(_flipped(path.read_bytes()))),
        "cut": (file, lambda path: path.write_bytes(path.read_bytes()[:-1])),
        "dropped": (file, lambda path: path.unlink()),
        "index": (
            "state/index.json",
            lambda path: path.write_bytes(_flipped(path.read_bytes())),
        ),
        "manifest": (
            "manifest.json",
            lambda path: path.write_bytes(_flipped(path.read_bytes())),
        ),
        "unsealed": ("COMPLETE", lambda path: path.unlink()),
    }
    for name, (damaged, change) in changes.items():
        shutil.copytree(tmp_path / "whole", tmp_path / name)
        change(tmp_path / name / "threefold-state" / damaged)
    folders = [str(tmp_path / name) for name in changes]
    said, other = run_ranks(_refused, 2, source, folders, {"tp_size": 2})
    assert said == other
    size = (tmp_path / "whole" / "threefold-state" / file).stat().st_size
    reasons = [
        f"the content of {file} has changed: its checksum is not the one it was written with",
        f"{file} has {size - 1:,} bytes, not {size:,}",
        f"{file}: No such file or directory",
        "the content of state/index.json has changed: its checksum is not the one it was written with",
    ]
    fix = "resume from an older checkpoint: trainer.train(resume_from_checkpoint='.../checkpoint-...')"
    for text, folder, reason in zip(said, folders, reasons, strict=False):
        assert text == (
            f"{folder}/threefold-state is damaged: {reason}\n"
            f"  expected: the files as the Trainer wrote them\n  fix: {fix}"
        )
    assert (
        f"{folders[4]}/threefold-state/manifest.json cannot be read: the marker was written for another manifest"
        in said[4]
    )
    assert f"{folders[5]}/threefold-state/COMPLETE" in said[5]


def _flipped(content: bytes) -> bytes:
    place = len(content) // 2
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


def _no_room(source: str, folder: str) -> str:
    from threefold.errors import RunError

    Path(folder).touch()  # the superuser may write everywhere, but not below a file
    try:
        _saved(source, folder, {"fsdp_size": 2})
    except RunError as error:
        return str(error)
    return ""


def test_save_that_fails_is_told_on_every_rank(source: str, tmp_path: Path) -> None:
    one, other = run_ranks(_no_room, 2, source, str(tmp_path / "file"))
    assert one == other
    assert one.startswith("the checkpoint of step 1 could not be saved: Not a directory (")
    assert one.endswith(
        "fix: free some disk space (`df -h`), then trainer.train(resume_from_checkpoint=True)"
    )
