"""The Trainer's additions to a transformers checkpoint folder, and where a resumed run continues.

`threefold.json` holds plain values: the place in the order, and the sizes it was read with. `threefold-state/` holds
weights and optimizer of a model that transformers loaded in shards, in the format of `threefold.checkpoint`: each rank
writes its own boxes as safetensors files, sealed with checksums, and any other mesh reads its parts from them. No
pickle is read. The place of a resumed run is a position in the order, not a number of steps: transformers divides the
steps done by the steps of an epoch, which is wrong once the number of ranks or the batch size changes.
"""

import contextlib
import json
import math
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer
from transformers import TrainerCallback
from transformers.utils import logging

from threefold.checkpoint.background_saver import Save, Saver
from threefold.checkpoint.checkpoint_folder import checkpoint_at, seal_folder
from threefold.checkpoint.copies import refuse_drift, state_held
from threefold.checkpoint.state import damage_found, fit, holdings, own_parts, read_into
from threefold.checkpoint.tensor_index import Index
from threefold.errors import CheckpointError, DataError, Problem, RunError
from threefold.integrations.huggingface.training_loader import TrainLoader
from threefold.jsonl import Values
from threefold.mesh.mesh import Mesh
from threefold.mesh.topology import Topology

log = logging.get_logger(__name__)
PLACE_FILE = "threefold.json"
STATE_FOLDER = "threefold-state"
_FORMAT = 1
_COPIES = (
    "trainer.train(resume_from_checkpoint=True); look for code that changes a tensor on one rank, or unfreezes "
    "parameters after training began, as in callbacks"
)
_OLDER = "resume from an older checkpoint: trainer.train(resume_from_checkpoint='.../checkpoint-...')"
_SAME = "resume with the model and the optim that the run began with"
# What keys of the configuration are called in TrainingArguments.
_TRAINER_WORDS = {
    "--data.seed": "TrainingArguments(data_seed=...):",
    "--data.shuffle": "train_sampling_strategy:",
    "--data.num_workers 0": "dataloader_num_workers=0",
    "data.seed": "data_seed",
}
# The part of a saved order that describes only the data.
_OF_THE_DATA = ("num_rows", "data", "lengths", "weights", "num_samples")
_OTHER_DATA = (
    "with other data, resume from a checkpoint at an epoch's end, or TrainingArguments(ignore_data_skip=True), which "
    "keeps the weights and begins an epoch"
)
_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)


def save_place(checkpoint: Path, **values: Any) -> None:
    """Writes `step`, the optimizer steps done, `loader`, the state of the training loader, and `global_batch`."""
    checkpoint.mkdir(parents=True, exist_ok=True)
    partial = checkpoint / f"{PLACE_FILE}.partial"
    partial.write_text(
        json.dumps({"format": _FORMAT, **values}, indent=1) + "\n", encoding="utf-8"
    )
    partial.replace(checkpoint / PLACE_FILE)


def _read_place(checkpoint: Path) -> tuple[int, Values, int]:
    """(steps done, the saved state of the loader, rows of a step), as `save_place` wrote them."""
    path = checkpoint / PLACE_FILE
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if values["format"] == _FORMAT:
            return (
                int(values["step"]),
                dict(values["loader"]),
                int(values.get("global_batch", 1)),
            )
        problem = f"has the format {values['format']}"
    except FileNotFoundError:
        raise CheckpointError(
            f"{checkpoint} has no {PLACE_FILE}: another Trainer saved it",
            expected="a checkpoint of threefold's Trainer: a position in another order means nothing here, and samples "
            "would be repeated or left out",
            fix="TrainingArguments(ignore_data_skip=True) keeps these weights and begins the epoch again; or finish "
            "the run with the Trainer that began it",
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        problem = f"cannot be read ({error!r})"
    raise CheckpointError(
        f"{path} {problem}",
        expected=f"what the Trainer of this version writes (format {_FORMAT})",
        fix=_OLDER,
    )


def newest_complete(output_dir: Path) -> Path:
    """The checkpoint with the most steps that was written to its end; CheckpointError if there is none."""
    steps = (
        (path.name.removeprefix("checkpoint-"), path)
        for path in output_dir.glob("checkpoint-*")
    )
    numbered = [
        (int(step), path) for step, path in steps if step.isdecimal() and _is_complete(path)
    ]
    if not numbered:
        raise CheckpointError(
            f"resume_from_checkpoint = True, but {output_dir} has no complete checkpoint",
            expected="a folder checkpoint-STEP with a complete trainer_state.json, which is written last",
            fix="trainer.train() to begin, or resume_from_checkpoint=PATH",
        )
    return max(numbered)[1]


def refuse_weights_alone(checkpoint: Path) -> None:
    """CheckpointError if a checkpoint has no state of an optimizer, as with save_only_model=True."""
    if not any(checkpoint.glob("optimizer*")):
        raise CheckpointError(
            f"{checkpoint} has weights, but no state of the optimizer",
            expected="both, to continue: a new optimizer and schedule would take other steps",
            fix="save with save_only_model=False; to begin again from these weights: from_pretrained, and train()",
        )


def _is_complete(checkpoint: Path) -> bool:
    try:
        json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return True


def save_shards(
    checkpoint: Path, model: nn.Module, optimizer: Optimizer | None, *, step: int
) -> None:
    """Writes weights and optimizer of a sharded model; every rank calls it, and gets RunError if one cannot write."""
    optimizer = getattr(optimizer, "optimizer", optimizer)  # accelerate's has torch's inside
    state, mesh = _tensors(model, optimizer), all_ranks()
    final = checkpoint / STATE_FOLDER
    partial = checkpoint / f".{STATE_FOLDER}.partial"

    def begin() -> None:
        shutil.rmtree(partial, ignore_errors=True)
        (partial / "state").mkdir(parents=True)

    job = Save(
        step,
        partial / "state",
        begin,
        lambda seals: seal_folder(partial, final, step, {}, seals),
        lambda: shutil.rmtree(partial, ignore_errors=True),
    )
    saver = Saver(
        mesh,
        lambda: own_parts(state, holdings(state, mesh)),
        background=False,
        continue_on_error=False,
    )
    try:
        saver.save(job)
    except RunError as error:
        fix = "free some disk space (`df -h`), then trainer.train(resume_from_checkpoint=True)"
        raise RunError.of([replace(error.problems[0], fix=fix)]) from None


def refuse_other_copies(args: Any, model: nn.Module, optimizer: Any, *, step: int) -> None:
    """RunError on every rank if ranks that hold the same part of a tensor hold other numbers; every rank calls it.

    FSDP's and DeepSpeed's own flat shards are not compared: no other rank has a copy of them.
    """
    if args.deepspeed or args.fsdp or not dist.is_initialized():
        return
    held = state_held(model, getattr(optimizer, "optimizer", optimizer), buffers=False)
    refuse_drift(held, all_ranks(), when=f"after step {step}", fix=_COPIES)


def load_shards(checkpoint: Path, model: nn.Module, optimizer: Optimizer | None) -> None:
    """Fills a sharded model, and its optimizer if one is given, from any mesh's shards; every rank calls it.

    Raises:
        CheckpointError: the folder holds no shards, damaged ones, or those of another model; nothing is changed.
    """
    folder = checkpoint / STATE_FOLDER
    if not folder.is_dir():
        raise CheckpointError(
            f"{checkpoint} has no {STATE_FOLDER}: the model that was saved there was not sharded",
            expected="a checkpoint of a model that was loaded with DistributedConfig, as this one was",
            fix="from_pretrained(CHECKPOINT, distributed_config=...) begins with its weights, without its optimizer",
        )
    mesh = all_ranks()
    if (reason := damage_found(checkpoint_at(folder), mesh)) is not None:
        what = f"{folder} is damaged: {reason}"
        raise CheckpointError(what, expected="the files as the Trainer wrote them", fix=_OLDER)
    files = folder / "state"
    index = Index.read(files)
    optimizer = getattr(optimizer, "optimizer", optimizer)
    live = _tensors(model, optimizer)
    if missing := sorted(live.keys() - index.entries.keys()):
        raise CheckpointError(
            f"{folder} has no {missing[0]}"
            + (f", and {len(missing) - 1} more" if len(missing) > 1 else ""),
            expected="the tensors of the same model and optimizer",
            fix=_SAME,
        )
    fit(live, index, fix=_SAME)
    read_into(live, files, index, mesh)
    if optimizer is not None:
        # Settings (learning rates, betas) are the current ones; the scheduler restores its own place.
        state = get_optimizer_state_dict(model, optimizer, options=_OPTIONS)
        state = {name: live.get(f"optimizer.{name}", value) for name, value in state.items()}
        set_optimizer_state_dict(model, optimizer, state, options=_OPTIONS)


@contextlib.contextmanager
def may_save_shards(model: Any, args: Any) -> Iterator[None]:
    """Passes transformers' constructor, which refuses to save the optimizer of a model in shards; here it can be."""
    shards = (
        getattr(model, "is_distributed_loading_by_transformers", False) and args is not None
    )
    if asked := shards and not args.save_only_model:
        args.save_only_model = True
    try:
        yield
    finally:
        if asked:
            args.save_only_model = False


def all_ranks(topology: Topology | None = None) -> Mesh:
    """All ranks of the process group as a mesh, of data ranks by default; every rank calls it equally often."""
    if not dist.is_initialized():
        return Mesh(Topology(), 0, torch.device("cpu"))
    rank = dist.get_rank()
    store = dist.distributed_c10d._get_default_store()
    # Ranks save and load in the same order, so a counter gives each of these calls its own keys.
    number = store.add(f"threefold/states/{rank}", 1)
    topology = topology or Topology(dp_replicate=dist.get_world_size())
    return Mesh(
        topology, rank, torch.device("cpu"), store=dist.PrefixStore(f"state-{number}", store)
    )


def _tensors(model: nn.Module, optimizer: Optimizer | None) -> dict[str, Tensor]:
    """Live tensors by name; an optimizer that has made no step yet gets its state made."""
    state: dict[str, Any] = {
        f"model.{name}": tensor for name, tensor in get_model_state_dict(model).items()
    }
    if optimizer is not None:
        flat = get_optimizer_state_dict(model, optimizer, options=_OPTIONS)
        state |= {f"optimizer.{name}": value for name, value in flat.items()}
    return {name: value.detach() for name, value in state.items() if isinstance(value, Tensor)}


def check_order(saved: Values, *, loader: Any) -> None:
    """Loads a saved place into a training loader; DataError, in the Trainer's words, if its order is another one."""
    try:
        loader.load_state_dict(saved)
    except DataError as error:
        problems = [in_trainer_words(problem) for problem in error.problems]
        here = loader.state_dict()["fingerprint"]
        then = saved.get("fingerprint")
        if isinstance(then, Mapping) and any(
            here.get(name) != then.get(name) for name in _OF_THE_DATA
        ):
            problems = [
                replace(problem, fix=f"{problem.fix}; {_OTHER_DATA}") for problem in problems
            ]
        raise DataError.of(problems) from None


def _at_next_epoch(saved: Values, global_batch: int, loader: TrainLoader) -> Values | None:
    """The place at the next epoch's head in a dataset of another size; None within an epoch, or for the same data.

    An epoch that was read to its end has no rows left that another dataset could move.
    """
    own = loader.state_dict()
    made_from = saved.get("fingerprint")
    if not isinstance(made_from, Mapping) or made_from == own["fingerprint"]:
        return None
    size = made_from.get("num_samples", made_from.get("num_rows"))
    position = saved.get("position")
    if (
        not isinstance(size, int)
        or not isinstance(position, int)
        or not isinstance(saved.get("epoch"), int)
    ):
        return None
    left_out = global_batch if loader.sampler.tail == "drop" else 1
    if position and size - position >= left_out:
        return None
    of_data = {
        name: own["fingerprint"][name] for name in _OF_THE_DATA if name in own["fingerprint"]
    }
    kept = {name: value for name, value in made_from.items() if name not in _OF_THE_DATA}
    return {
        **saved,
        "epoch": saved["epoch"] + bool(position),
        "position": 0,
        "fingerprint": {**kept, **of_data},
    }


def in_trainer_words(problem: Problem) -> Problem:
    """The problem with the arguments of the Trainer in place of keys of the configuration."""
    expected, fix = problem.expected, problem.fix
    for key, argument in _TRAINER_WORDS.items():
        expected = expected.replace(key, argument)
        fix = fix.replace(key, argument)
    return Problem(problem.what, expected, fix)


class Resumed:
    """A run that continues from a checkpoint.

    Attributes:
        epoch: in which it continues.
        batches_left: of this rank in that epoch, if it continues inside it; 0: it continues at the epoch's head.
    """

    def __init__(self, checkpoint: Path, loader: TrainLoader, *, accumulation: int) -> None:
        """Moves the loader to the saved place, or to the head of the next epoch if this one is over.

        Raises:
            CheckpointError: the checkpoint has no readable place. DataError: the place belongs to another order.
        """
        self._step, saved, global_batch = _read_place(checkpoint)
        if (anew := _at_next_epoch(saved, global_batch, loader)) is not None:
            log.warning(
                f"The data have changed at an epoch's end: epoch {anew['epoch']} begins with the new ones."
            )
            saved, loader.continues = anew, False
        check_order(saved, loader=loader)
        left = loader.batches_left()
        self.epoch = saved["epoch"] + (not left)
        self.batches_left = left if saved["position"] else 0
        self._updates_left = math.ceil(self.batches_left / accumulation)

    def plan(self, args: Any, *, per_epoch: int, max_steps: int) -> tuple[int, int]:
        """(epochs until the end, steps at the end), from the steps of an entire epoch with the current sizes."""
        # Steps that would have led here if all had been made with these sizes.
        done = self.epoch * per_epoch + (
            per_epoch - self._updates_left if self.batches_left else 0
        )
        if args.max_steps > 0:
            return math.ceil((done + max_steps - self._step) / per_epoch), max_steps
        return math.ceil(args.num_train_epochs), self._step + max(0, max_steps - done)


class EpochByRows(TrainerCallback):
    """Keeps `state.epoch` true in an epoch that began in its middle; elsewhere transformers' value stays."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        resumed, loader = self._trainer._resumed, self._trainer._train_loader
        if (
            resumed is None
            or not resumed.batches_left
            or int(state.epoch - 1e-9) != resumed.epoch
        ):
            return
        state.epoch = (
            resumed.epoch
            + 1
            - loader.batches_left() / max(len(loader), loader.batches_left(), 1)
        )
