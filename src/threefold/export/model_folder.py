"""Exports a checkpoint as a Hugging Face folder that reloads to equal logits, and generates a sample: one process.

A checkpoint may be untrusted, so none of its code is run. Its config names a model class that transformers has. Code
from elsewhere is loaded only if the caller allows it, whatever the run that saved the checkpoint allowed.
"""

from __future__ import annotations

import os
import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig
from transformers.core_model_loading import revert_weight_conversion

from threefold.checkpoint import state as run_state
from threefold.checkpoint.boxes import Index
from threefold.checkpoint.layout import Checkpoint, damaged, find
from threefold.checkpoint.manifest import read_manifest
from threefold.config.loading import validate
from threefold.config.schema import Config
from threefold.data.tokens import Tokenizer
from threefold.errors import CheckpointError, ConfigError, RunError
from threefold.export.adapters import load_with_peft, model_with_adapters, write_adapter
from threefold.export.descriptions import save_descriptions, save_tokenizer
from threefold.export.weights import write_weights
from threefold.model import lora
from threefold.model.load import build_without_storage

MAX_SHARD_BYTES = 5 * 1000**3
# Config keys that can make transformers fetch code or kernels.
_CODE = ("auto_map", "attn_implementation", "experts_implementation", "quantization_config", "use_kernels")
_PROBE_TOKENS = 32


@dataclass(frozen=True)
class Exported:
    """What an export wrote: step of the checkpoint, number of parameters, weight files, and the result of reloading."""

    step: int
    num_parameters: int
    files: tuple[str, ...]
    verified: str


def export(
    run: Path,
    to: Path,
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    verify: bool | None = None,
    trust_remote_code: bool = False,
    adapter: bool = False,
) -> Exported:
    """Writes the checkpoint of a run (or a checkpoint itself) to a new folder, and removes the folder on failure.

    A run that trained adapters is written whole, with the adapters merged.

    Args:
        adapter: write only the adapters, in peft's form.
        verify: reload and compare logits; None: only if the model fits into the free memory.

    Raises:
        CheckpointError: there is no complete checkpoint, or it is damaged. ConfigError: the folder is not empty.
        RunError: the folder reloads to different logits.
    """
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise ConfigError(
            f"{to} is not empty",
            expected="a new or empty folder, so that no other model's files are mixed in",
            fix="--to ANOTHER_FOLDER",
        )
    transformers.utils.logging.disable_progress_bar()
    checkpoint = find(run)
    if (reason := checkpoint.damage()) is not None:
        raise damaged(checkpoint, reason)
    config, architecture = _described(checkpoint, trust_remote_code)
    if adapter and not config.model.lora.r:
        raise ConfigError(
            f"{run} has no adapters",
            expected="a run with model.lora.r above 0",
            fix="leave --adapter out: the whole model is written",
        )
    made = not to.exists()
    to.mkdir(parents=True, exist_ok=True)
    try:
        if adapter:
            return _export_adapter(checkpoint, to, config, architecture, verify)
        if config.model.lora.r:
            return _export_merged(checkpoint, to, config, architecture, max_shard_bytes, verify)
        return _export_weights(checkpoint, to, config, architecture, max_shard_bytes, verify, trust_remote_code)
    except BaseException:
        shutil.rmtree(to, ignore_errors=True)
        if not made:
            to.mkdir()
        raise


def _export_weights(
    checkpoint: Checkpoint,
    to: Path,
    config: Config,
    architecture: PretrainedConfig,
    max_shard_bytes: int,
    verify: bool | None,
    trust_remote_code: bool,
) -> Exported:
    index = Index.read(checkpoint.state)
    model = build_without_storage(architecture, attention="eager", trust_remote_code=trust_remote_code)
    tensors = run_state.model_state(model)
    run_state.fit(tensors, index)
    files = write_weights(
        checkpoint.state,
        index,
        [name.removeprefix("model.") for name in tensors],
        to,
        max_shard_bytes=max_shard_bytes,
        convert=lambda layer: revert_weight_conversion(model, layer),
    )
    save_descriptions(model, config, to)
    num_bytes = sum(index.entries[name].num_bytes for name in tensors)
    verified = _verified(checkpoint, to, num_bytes, verify, trust_remote_code)
    return Exported(checkpoint.step, sum(p.numel() for p in model.parameters()), tuple(files), verified)


def _export_adapter(
    checkpoint: Checkpoint, to: Path, config: Config, architecture: PretrainedConfig, verify: bool | None
) -> Exported:
    model = model_with_adapters(checkpoint, config, architecture)
    files, verified = write_adapter(model, config, to), "not reloaded"
    save_tokenizer(config, to)
    if verify is not False:
        _compare(model, load_with_peft(config, architecture, to), to, trained="the run's")
        verified = "reloaded by peft: equal logits"
    num_parameters = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return Exported(checkpoint.step, num_parameters, tuple(files), verified)


def _export_merged(
    checkpoint: Checkpoint,
    to: Path,
    config: Config,
    architecture: PretrainedConfig,
    max_shard_bytes: int,
    verify: bool | None,
) -> Exported:
    model = model_with_adapters(checkpoint, config, architecture)
    lora.merge(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # transformers' own warning, about an internal name
        model.save_pretrained(to, max_shard_size=max_shard_bytes)
    save_descriptions(model, config, to)
    verified = "not reloaded" if verify is False else _reloaded(model, checkpoint, to, config.model.trust_remote_code)
    files = sorted(path.name for path in to.glob("*.safetensors"))
    return Exported(checkpoint.step, sum(p.numel() for p in model.parameters()), tuple(files), verified)


def _verified(checkpoint: Checkpoint, to: Path, num_bytes: int, verify: bool | None, trust_remote_code: bool) -> str:
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if verify is False or (verify is None and num_bytes * 1.5 > free):
        return "not reloaded" if verify is False else "not reloaded: the model does not fit into the free memory"
    model, _ = load_whole(checkpoint, trust_remote_code=trust_remote_code)
    return _reloaded(model, checkpoint, to, trust_remote_code)


def _reloaded(model: Any, checkpoint: Checkpoint, to: Path, trust_remote_code: bool) -> str:
    reloaded: Any = AutoModelForCausalLM.from_pretrained(
        to, dtype=torch.float32, attn_implementation="eager", trust_remote_code=trust_remote_code
    )
    _compare(model, reloaded, to, trained=str(checkpoint.path))
    return "reloaded: equal logits"


def _compare(model: Any, reloaded: Any, to: Path, *, trained: str) -> None:
    expected, found = _probe(model.eval()), _probe(reloaded.eval())
    if not torch.equal(found, expected):
        raise RunError(
            f"{to} reloads to other logits than {trained}: they differ by up to "
            f"{(found - expected).abs().max().item():.3g}",
            expected="equal logits; the folder has been removed",
            fix="report it with the model's config; --no-verify writes the folder all the same",
        )


@torch.no_grad()
def _probe(model: Any) -> Tensor:
    vocabulary = model.config.get_text_config().vocab_size
    ids = torch.randint(vocabulary, (1, _PROBE_TOKENS), generator=torch.Generator().manual_seed(0))
    logits: Tensor = model(input_ids=ids, use_cache=False).logits
    return logits


def load_whole(checkpoint: Checkpoint, *, trust_remote_code: bool = False) -> tuple[Any, Config]:
    """Returns the checkpoint's whole model on the CPU, and the config it was trained with."""
    config, architecture = _described(checkpoint, trust_remote_code)
    if config.model.lora.r:
        return model_with_adapters(checkpoint, config, architecture).eval(), config
    model: Any = AutoModelForCausalLM.from_config(
        architecture, dtype=torch.float32, attn_implementation="eager", trust_remote_code=trust_remote_code
    )
    run_state.read_weights(model, checkpoint.state, Index.read(checkpoint.state))
    return model.eval(), config


def _described(checkpoint: Checkpoint, trust_remote_code: bool) -> tuple[Config, PretrainedConfig]:
    """Returns the run's config and the model's, as in the manifest."""
    manifest = read_manifest(checkpoint)
    values = manifest["config"]
    # The caller decides, whatever the run that saved it allowed.
    config = validate({**values, "model": {**values["model"], "trust_remote_code": trust_remote_code}})
    values = _without_code(manifest["architecture"])
    try:
        if trust_remote_code and config.model.name_or_path is not None:
            return config, AutoConfig.from_pretrained(
                config.model.name_or_path, revision=config.model.revision, trust_remote_code=True
            )
        return config, AutoConfig.for_model(values.pop("model_type"), **values)
    except Exception as error:  # transformers validates with exceptions of several families
        raise CheckpointError(
            f"transformers has no model for {checkpoint.path}: {' '.join(str(error).split())}",
            expected="an architecture that the installed transformers knows",
            fix="install the transformers release that trained it; or, if you trust the code of its model's "
            "repository, --trust-remote-code",
        ) from error


def _without_code(values: Any) -> Any:
    if not isinstance(values, dict):
        return values
    return {key: _without_code(value) for key, value in values.items() if key.lstrip("_") not in _CODE}


def generate_sample(checkpoint: Checkpoint, tokenizer: Tokenizer, prompt: list[int], *, num_tokens: int) -> str:
    """Returns the prompt and its continuation by the model of this process' own run, sampled with a fixed seed."""
    trusted = bool(checkpoint.manifest()["config"]["model"]["trust_remote_code"])
    model, _ = load_whole(checkpoint, trust_remote_code=trusted)
    torch.manual_seed(0)
    with torch.no_grad():
        ids = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=num_tokens,
            do_sample=True,
            temperature=0.8,
            use_cache=True,
            pad_token_id=tokenizer.end_id,
            eos_token_id=tokenizer.end_id,
        )
    return tokenizer.decode(ids[0].tolist())
