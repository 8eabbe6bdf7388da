"""What the Trainer adds to a checkpoint folder of transformers: the place in the order, and shards of a sharded model.

`threefold.json` holds plain values: where the order stands, and the sizes it was read with. `threefold-state/` holds
weights and optimizer of a model that transformers loaded in shards: each rank writes its own part with
torch.distributed.checkpoint as safetensors files, and any other mesh reads its parts from them. No pickle is read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, Shard

from threefold.errors import CheckpointError, DataError

PLACE_FILE = "threefold.json"
STATE_FOLDER = "threefold-state"
_FORMAT = 1


@dataclass(frozen=True)
class SavedPlace:
    """Where a run stood when it was saved.

    Attributes:
        step: optimizer steps done.
        loader: state of the training loader.
        global_batch: rows of a step, for messages.
    """

    step: int
    loader: Mapping[str, Any]
    global_batch: int

    def write(self, checkpoint: Path) -> None:
        checkpoint.mkdir(parents=True, exist_ok=True)
        partial = checkpoint / f"{PLACE_FILE}.partial"
        partial.write_text(json.dumps({"format": _FORMAT, **asdict(self)}, indent=1) + "\n", encoding="utf-8")
        partial.replace(checkpoint / PLACE_FILE)


def read_place(checkpoint: Path) -> SavedPlace:
    """What `SavedPlace.write` wrote.

    Raises:
        CheckpointError: there is no such file, or it is damaged.
    """
    path = checkpoint / PLACE_FILE
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if values["format"] == _FORMAT:
            return SavedPlace(int(values["step"]), dict(values["loader"]), int(values["global_batch"]))
        found = f"has the format {values['format']}"
    except FileNotFoundError:
        raise CheckpointError(
            f"{checkpoint} has no {PLACE_FILE}: another Trainer has saved it",
            expected="a checkpoint of threefold's Trainer: where another order stood says nothing about ours, and "
            "samples would be repeated and left out",
            fix="TrainingArguments(ignore_data_skip=True) goes on with these weights and begins the epoch again; or "
            "finish the run with the Trainer that began it",
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        found = f"cannot be read ({error!r})"
    raise CheckpointError(
        f"{path} {found}",
        expected=f"what the Trainer of this version writes (format {_FORMAT})",
        fix="go on from an older checkpoint: trainer.train(resume_from_checkpoint='.../checkpoint-...')",
    )


def newest_complete(output_dir: Path) -> Path:
    """The checkpoint with the most steps that was written to its end.

    Raises:
        CheckpointError: there is none.
    """
    numbered = []
    for path in output_dir.glob("checkpoint-*"):
        step = path.name.removeprefix("checkpoint-")
        if step.isdecimal() and _is_complete(path):
            numbered.append((int(step), path))
    if not numbered:
        raise CheckpointError(
            f"resume_from_checkpoint = True, but {output_dir} has no complete checkpoint",
            expected="a folder checkpoint-STEP with a whole trainer_state.json, which is written last",
            fix="trainer.train() to begin, or resume_from_checkpoint=PATH",
        )
    return max(numbered)[1]


def _is_complete(checkpoint: Path) -> bool:
    try:
        json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return True


def save_shards(checkpoint: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """Writes weights and optimizer of a sharded model, every rank its own part; every rank calls it."""
    state = {name: _writable(tensor) for name, tensor in _tensors(model, optimizer).items()}
    writer = HuggingFaceStorageWriter(
        str(checkpoint / STATE_FOLDER), save_distributed=True, enable_consolidation=False, thread_count=1
    )
    dcp.save(state, storage_writer=writer)
    dist.barrier()


def load_shards(checkpoint: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """Fills a sharded model, and its optimizer where one is given, from any mesh's shards; every rank calls it.

    Raises:
        CheckpointError: the folder holds no shards, or those of another model.
    """
    folder = checkpoint / STATE_FOLDER
    if not folder.is_dir():
        raise CheckpointError(
            f"{checkpoint} has no {STATE_FOLDER}: the model that was saved there was not sharded",
            expected="a checkpoint of a model loaded with DistributedConfig, as this one is",
            fix="from_pretrained(CHECKPOINT, distributed_config=...) begins with its weights, without its optimizer",
        )
    live = _tensors(model, optimizer)
    read = {name: _writable(tensor) for name, tensor in live.items()}
    reader = HuggingFaceStorageReader(str(folder))
    held = set(reader.read_metadata().state_dict_metadata)
    if missing := sorted(set(read) - held):
        raise CheckpointError(
            f"{folder} has no {missing[0]}" + (f", and {len(missing) - 1} more" if len(missing) > 1 else ""),
            expected="the tensors of the same model and optimizer",
            fix="resume with the model and the optim that the run began with",
        )
    dcp.load(read, storage_reader=reader)
    with torch.no_grad():
        for name, tensor in live.items():
            _copy_back(read[name], tensor)
    if optimizer is not None:
        _set_optimizer(model, optimizer, live)


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Tensor]:
    """Live tensors by name; an optimizer that has made no step yet gets its state made."""
    state: dict[str, Any] = {f"model.{name}": tensor for name, tensor in get_model_state_dict(model).items()}
    if optimizer is not None:
        state |= {f"optimizer.{name}": value for name, value in _optimizer_state(model, optimizer).items()}
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def _optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    return dict(get_optimizer_state_dict(model, optimizer, options=options))


def _set_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, live: Mapping[str, Tensor]) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    # Settings (rates, betas) are those of now; the scheduler brings its own place.
    state = _optimizer_state(model, optimizer)
    state |= {name: live[f"optimizer.{name}"] for name in state if f"optimizer.{name}" in live}
    set_optimizer_state_dict(model, optimizer, state, options=options)


def _writable(tensor: Tensor) -> Tensor:
    """The tensor, or one in contiguous shards: torch describes each rank's part as one box."""
    if not isinstance(tensor, DTensor):
        # A tensor without dims has no place in a file of safetensors' boxes.
        return tensor.detach().reshape(1) if tensor.ndim == 0 else tensor.detach()
    placements = tuple(Shard(p.dim) if _is_split(p) and type(p) is not Shard else p for p in tensor.placements)
    return tensor.detach() if placements == tensor.placements else tensor.detach().redistribute(placements=placements)


def _is_split(placement: Any) -> bool:
    return not placement.is_replicate() and not placement.is_partial()


def _copy_back(read: Tensor, live: Tensor) -> None:
    if isinstance(live, DTensor) and isinstance(read, DTensor):
        if read.placements != live.placements:
            live.to_local().copy_(read.redistribute(placements=live.placements).to_local())
        elif read.to_local().data_ptr() != live.to_local().data_ptr():
            live.to_local().copy_(read.to_local())
    elif read.data_ptr() != live.data_ptr():
        live.copy_(read.reshape(live.shape))


def check_order(saved: Mapping[str, Any], *, loader: Any) -> None:
    """Loads a saved place into a training loader; a place of another order is refused in the Trainer's words.

    Raises:
        DataError: another seed, size or order than the run began with.
    """
    try:
        loader.load_state_dict(saved)
    except DataError as error:
        words = {"--data.seed": "TrainingArguments(data_seed=...):", "--data.shuffle": "train_sampling_strategy:"}
        raise DataError.of(_reworded(problem, words) for problem in error.problems) from None


def _reworded(problem: Any, words: Mapping[str, str]) -> Any:
    fix = problem.fix
    for theirs, ours in words.items():
        fix = fix.replace(theirs, ours)
    return type(problem)(problem.what, problem.expected, fix)
