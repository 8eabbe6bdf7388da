"""A model on the mesh as transformers has it: as a folder, and to generate with."""

from __future__ import annotations

import copy
import itertools
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from threefold.check.compare import SAME_WEIGHT, compare_tensors
from threefold.checkpoint import state as run_state
from threefold.checkpoint.layout import find
from threefold.checkpoint.shards import Index
from threefold.checkpoint.tensors import read_whole
from threefold.errors import ConfigError, RunError
from threefold.export.model_folder import MAX_SHARD_BYTES, Exported, export
from threefold.export.weights import write_weights
from threefold.model import lora
from threefold.model.model import Model
from threefold.training.saving import save


def save_pretrained(model: Model, folder: Path, *, verify: bool | None = None) -> Exported:
    """Writes the weights of a model on any mesh as a Hugging Face folder; every rank calls it.

    Each rank writes its part next to the folder, as in a checkpoint; rank 0 exports those layer by layer, with adapters
    merged, and reloads what it wrote. A classifier or T5 of transformers is written from its module.

    Raises:
        ConfigError: a module that transformers cannot reload, or a folder that is not empty. RunError: it reloads to
            different logits; on every rank.
    """
    if not isinstance(model.module, PreTrainedModel):
        _refuse_own(model, "save_pretrained", "threefold.save(folder, model=model, step=...)")
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
            done = export(parts, folder, verify=verify, trust_remote_code=trusted, with_tokenizer=False)
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
    """Writes a model of transformers that is one's own module (a classifier, T5), from the parts of its ranks."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is not empty", expected="a new or empty folder", fix="another folder")
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
    return Exported(checkpoint.step, sum(each.numel() for each in module.parameters()), tuple(files), verified)


def generate(model: Model, input_ids: Tensor, *, seed: int = 0, **options: Any) -> Tensor:
    """What transformers' `generate` writes after this dp rank's prompts, [rows, length + new ids]; on rank 0's CPU.

    Options that are tensors, as an attention_mask, are each dp rank's own; of others rank 0's are taken.

    Raises:
        ConfigError: a custom module, or what transformers refuses. DataError: cp or tp ranks have other prompts.
    """
    _refuse_own(model, "generate", "model.module, if it has a generate of its own and is not sharded")
    rows = {name: each for name, each in options.items() if isinstance(each, Tensor)} | {"input_ids": input_ids}
    mesh = model.mesh
    mesh.agree("generate", 0, lambda: ([rows], 0))
    whole, per_copy = _whole(model), mesh.world_size // mesh.dp_size

    def write(parts: list[dict[str, Any]]) -> list[Any]:
        return [_written(whole, part, seed, options) for part in parts[::per_copy]]

    found = mesh.decide("generate", {name: each.tolist() for name, each in rows.items()}, write)
    return torch.tensor(found[mesh.dp_rank], device=input_ids.device)


def _written(whole: Any, rows: dict[str, Any], seed: int, options: dict[str, Any]) -> Any:
    given = {**options, **{name: torch.tensor(values) for name, values in rows.items()}}
    given.setdefault("attention_mask", torch.ones_like(given["input_ids"]))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            return whole.generate(given.pop("input_ids"), **given).tolist()
        except (ValueError, TypeError) as error:
            raise ConfigError(
                f"generate is refused by transformers: {' '.join(str(error).split())}",
                expected="options of its generate",
                fix="model.generate(input_ids, max_new_tokens=64)",
            ) from error


@torch.no_grad()
def _whole(model: Model) -> Any:
    """The complete model on rank 0's CPU, tensor by tensor; None elsewhere. Every rank calls it."""
    config, architecture = model.asked, model.architecture
    assert config is not None
    state: dict[str, Tensor] = {}
    for name, values in model.module.state_dict().items():
        tensor = values.full_tensor() if isinstance(values, DTensor) else values
        if model.mesh.rank == 0:
            state[name] = tensor.detach().cpu()
    if model.mesh.rank != 0:
        return None
    with torch.random.fork_rng(devices=[]):
        # A copy: the config is also the one by which the model on the mesh finds its attention.
        whole: Any = AutoModelForCausalLM.from_config(
            copy.deepcopy(architecture),
            dtype=torch.float32,
            attn_implementation="eager",
            trust_remote_code=config.model.trust_remote_code,
        )
        if config.model.lora.r:
            lora.insert_whole(whole, config.model.lora, seed=config.train.seed)
    whole.load_state_dict(state)
    whole.config.use_cache = True
    return whole.eval()


def _refuse_own(model: Model, what: str, fix: str) -> None:
    if model.context is None:
        kind = type(model.module).__name__
        raise ConfigError(
            f"{what}: a {kind} is a module of your own", expected="a causal language model of transformers", fix=fix
        )
