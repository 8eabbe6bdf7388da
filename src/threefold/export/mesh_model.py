"""A model on the mesh as a transformers model folder."""

import copy
import itertools
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from threefold.check.compare import SAME_WEIGHT, compare_tensors
from threefold.checkpoint import state as run_state
from threefold.checkpoint.checkpoint_folder import find
from threefold.checkpoint.tensor_index import Index
from threefold.checkpoint.tensors import read_whole
from threefold.errors import ConfigError, RunError
from threefold.export.model_folder import MAX_SHARD_BYTES, Exported, export, refuse_filled
from threefold.export.weights import write_weights
from threefold.model.model import Model
from threefold.training.saving import save


def save_pretrained(model: Model, folder: Path, *, verify: bool | None = None) -> Exported:
    """Writes the weights of a model on any mesh as a Hugging Face folder; every rank calls it.

    Each rank writes its part next to the folder, as in a checkpoint; rank 0 exports the parts layer by layer, with
    adapters merged, and reloads the result. A transformers classifier or T5 is written from its module.

    Raises:
        ConfigError: a module that transformers cannot reload, or a folder that is not empty. RunError: it reloads to
            different logits; on every rank.
    """
    if not isinstance(model.module, PreTrainedModel):
        raise ConfigError(
            f"save_pretrained: a {type(model.module).__name__} is a custom module",
            expected="a causal language model of transformers",
            fix="threefold.save(folder, model=model, step=...)",
        )
    mesh, config = model.mesh, model.asked

    def make() -> str:
        folder.parent.mkdir(parents=True, exist_ok=True)
        return tempfile.mkdtemp(prefix=f".{folder.name}.parts-", dir=folder.parent)

    parts = Path(mesh.share("parts", make))

    def write() -> list[Any]:
        if config is None:
            done = _export_own(model.module, parts, folder, verify=verify is not False)
        else:
            trusted = config.model.trust_remote_code
            done = export(
                parts, folder, verify=verify, trust_remote_code=trusted, with_tokenizer=False
            )
        return [done.step, done.num_parameters, list(done.files), done.verified]

    try:
        save(parts, model=model, step=0)
        step, num_parameters, files, verified = mesh.share("export", write)
    finally:
        model.saved.pop(parts.resolve(), None)
        if (lock := model.locks.pop(parts.resolve(), None)) is not None:
            lock.close()
        if mesh.rank == 0:
            shutil.rmtree(parts, ignore_errors=True)
    return Exported(step, num_parameters, tuple(files), verified)


def _export_own(module: Any, parts: Path, folder: Path, *, verify: bool) -> Exported:
    """Writes a transformers model used as a custom module (a classifier, T5), from the parts of its ranks."""
    refuse_filled(folder)
    checkpoint, to = find(parts), parts / "model"
    index = Index.read(checkpoint.state)
    names = [name.removeprefix("model.") for name in run_state.model_state(module)]
    to.mkdir()
    files = write_weights(
        checkpoint.state,
        index,
        names,
        to,
        max_shard_bytes=MAX_SHARD_BYTES,
        convert=lambda layer: revert_weight_conversion(module, layer),
    )
    kind = next(each for each in type(module).__mro__ if not issubclass(each, FSDPModule))
    config = copy.deepcopy(module.config)
    config.architectures, config.dtype = [kind.__name__], "float32"
    config.save_pretrained(to)
    verified = "not reloaded"
    if verify:
        reloaded: Any = kind.from_pretrained(to, dtype=torch.float32)  # type: ignore[attr-defined]
        held = reloaded.state_dict()
        differences = itertools.chain.from_iterable(
            compare_tensors(
                SAME_WEIGHT,
                {name: held[name]} if name in held else {},
                {name: read_whole(checkpoint.state, index.entries[f"model.{name}"])},
            )
            for name in names
        )
        if (first := next((each for each in differences if not each.holds), None)) is not None:
            raise RunError(
                f"{folder} reloads to another {first}",
                expected="equal weights; nothing was written",
                fix="report it with the model's config",
            )
        verified = "reloaded: equal weights"
    os.replace(to, folder)
    return Exported(
        checkpoint.step,
        sum(each.numel() for each in module.parameters()),
        tuple(files),
        verified,
    )
