"""Hugging Face config and weights -> the shards of this rank.

A model is built without storage, split, and then filled: each rank reads its own part of each tensor from memory-mapped
safetensors files. Weights that are not in such files under the model's own names (random ones, other formats, layouts
that transformers converts) are first written to such files by one process of each machine.
"""

from __future__ import annotations

import copy
import difflib
import inspect
import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
import xxhash
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor.placement_types import Placement
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from threefold.config.schema import EMBEDDED_DEFAULT, ModelConfig
from threefold.errors import ConfigError
from threefold.mesh.mesh import Mesh
from threefold.model import weight_check
from threefold.model.collectives import local_part
from threefold.model.model_path import refuse_wrong_path, unreachable
from threefold.model.weight_check import Stored, is_adapter, original, stored_tensors

_CONFIG_READERS = ("configuration_utils", "masking_utils", "modeling_rope_utils", "modeling_utils")
_STAGED_FILE_BYTES = 2 * 1024**3
_SEEN_BYTES = 1024**2


def read_config(asked: ModelConfig, *, vocab_size: int | None = None) -> PretrainedConfig:
    """The architecture that the user asked for.

    Args:
        vocab_size: entries of the tokenizer, used if `model.config` (or nothing) is given without a size of its own.

    Raises:
        ConfigError: an unknown model type, a folder without config, or a Hub model that cannot be reached.
    """
    if asked.name_or_path is None:
        values = dict(asked.config or EMBEDDED_DEFAULT)
        if vocab_size is not None:
            values.setdefault("vocab_size", vocab_size)
        return _config_from_values(values)
    refuse_wrong_path(asked.name_or_path)
    try:
        config = AutoConfig.from_pretrained(
            asked.name_or_path, revision=asked.revision, trust_remote_code=asked.trust_remote_code
        )
    except (OSError, ValueError, HFValidationError) as error:
        raise unreachable(asked.name_or_path, error) from error
    weight_check.refuse_quantised(config, name=asked.name_or_path)
    return config


def _config_from_values(values: dict[str, Any]) -> PretrainedConfig:
    if (model_type := values.pop("model_type", None)) is None:
        raise ConfigError(
            "model.config has no model_type",
            expected="the architecture's name in transformers, next to its sizes",
            fix="--model.config '{model_type: llama, hidden_size: 128, num_hidden_layers: 4}'",
        )
    try:
        config = AutoConfig.for_model(model_type, **values)
        unknown = unknown_keys(model_type, values)
    except Exception as error:  # transformers validates with exceptions of several families
        raise ConfigError(
            f"model.config is refused by transformers: {' '.join(str(error).split())}",
            expected=f"the keys and values of the {model_type!r} architecture",
            fix="see the architecture's config page in the transformers documentation",
        ) from error
    if unknown:
        near = difflib.get_close_matches(unknown[0], dir(AutoConfig.for_model(model_type)), n=1)
        raise ConfigError(
            f"model.config has a key that {model_type!r} does not know: {', '.join(unknown)}",
            expected="the architecture's own keys: transformers would ignore this one, and train another model",
            fix=f"did you mean {near[0]}?" if near else f"leave {unknown[0]} out",
        )
    return config


def unknown_keys(model_type: str, keys: Iterable[str]) -> list[str]:
    """The keys that an architecture's config does not have, and that no source which could read them names."""
    known = AutoConfig.for_model(model_type)
    if not (unknown := [key for key in keys if not hasattr(known, key)]):
        return []
    files = list(Path(inspect.getfile(type(known))).parent.glob("*.py"))
    files += [Path(transformers.__file__).with_name(f"{name}.py") for name in _CONFIG_READERS]
    words = {word for file in files for word in re.findall(r"\w+", file.read_text(encoding="utf-8"))}
    return [key for key in unknown if key not in words]


def build_without_storage(config: PretrainedConfig, *, attention: str, trust_remote_code: bool = False) -> Any:
    """The model's modules with parameters on the meta device."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(
            config, attn_implementation=attention, dtype=torch.float32, trust_remote_code=trust_remote_code
        )


def plan_of(config: PretrainedConfig, *, trust_remote_code: bool = False) -> Mapping[str, str]:
    """The tensor-parallel plan that transformers has for this architecture, if any."""
    model = build_without_storage(copy.deepcopy(config), attention="eager", trust_remote_code=trust_remote_code)
    return dict(model.tp_plan or {})


@contextmanager
def weight_files(
    asked: ModelConfig, config: PretrainedConfig, stored: Stored, *, seed: int, mesh: Mesh
) -> Iterator[Mapping[str, Path]]:
    """For each of the model's tensors the safetensors file that holds it under its own name.

    Args:
        seed: of random weights; they depend on it and not on the mesh.

    Raises:
        ConfigError: the files do not hold the model's weights (`weight_check`); on every rank.
    """
    names = set(stored.shapes)
    if asked.name_or_path is not None:
        found = _index(Path(mesh.once_per_host("download", lambda: _checked(asked, stored))))
        if names <= found.keys():
            yield found
            return

    def stage() -> str:
        staged = Path(tempfile.mkdtemp(prefix="threefold-weights-"))
        try:
            _stage(asked, config, names, seed=seed, folder=staged)
        except BaseException:
            shutil.rmtree(staged, ignore_errors=True)
            raise
        return str(staged)

    staged = Path(mesh.once_per_host("weights", stage))
    try:
        yield _index(staged)
        mesh.barrier()
    finally:
        if mesh.rank == mesh.host_leader:
            shutil.rmtree(staged, ignore_errors=True)


def _checked(asked: ModelConfig, stored: Stored) -> str:
    """The folder of a named model, whose files were compared with what the model holds as far as headers tell."""
    folder = _download(asked)
    weight_check.check_files(_index(folder), stored, name=str(asked.name_or_path))
    return str(folder)


def _download(asked: ModelConfig) -> Path:
    assert asked.name_or_path is not None
    folder = Path(asked.name_or_path)
    if not folder.is_dir():
        try:
            patterns = ["*.safetensors", "*.bin", "*.json"]
            folder = Path(snapshot_download(asked.name_or_path, revision=asked.revision, allow_patterns=patterns))
        except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
            raise unreachable(asked.name_or_path, error) from error
    if not list(folder.glob("*.safetensors")) and not list(folder.glob("*.bin")):
        raise ConfigError(
            f"model.name_or_path = {asked.name_or_path!r} has a config but no weights",
            expected="*.safetensors files next to config.json",
            fix="point to a complete folder, or --model.config '{model_type: ...}' for random weights",
        )
    return folder


def _index(folder: Path) -> dict[str, Path]:
    if (index := folder / "model.safetensors.index.json").exists():
        try:
            weight_map = json.loads(index.read_text())["weight_map"]
            # Only names inside the folder: an index is somebody else's text.
            return {name: folder / Path(file).name for name, file in weight_map.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise weight_check.damaged(index, error, name=str(folder)) from error
    found, whole = {}, folder / "model.safetensors"
    # Without an index transformers reads that one file; others (adapters, another layout) are not the model's.
    for file in [whole] if whole.exists() else sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as tensors:
                found.update({name: file for name in tensors.keys()})  # noqa: SIM118 (no mapping)
        except (OSError, SafetensorError) as error:
            raise weight_check.damaged(file, error, name=str(folder)) from error
    return found


def _stage(asked: ModelConfig, config: PretrainedConfig, names: set[str], *, seed: int, folder: Path) -> None:
    model = whole(asked, config, seed=seed, dtype="auto" if asked.name_or_path is not None else torch.float32)
    state = {name: tensor for name, tensor in model.state_dict().items() if name in names}
    part: dict[str, Tensor] = {}
    parts = 0
    for name in list(state):
        part[name] = state.pop(name).contiguous()
        if sum(tensor.nbytes for tensor in part.values()) >= _STAGED_FILE_BYTES or not state:
            save_file(part, folder / f"part-{parts:05d}.safetensors")
            part, parts = {}, parts + 1


def whole(asked: ModelConfig, config: PretrainedConfig, *, seed: int, dtype: torch.dtype | str) -> Any:
    """The model in this process alone, with the weights that a run begins with."""
    torch.manual_seed(seed)  # weights that are meant to be new are the same on every host
    if asked.name_or_path is None:
        return AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="eager", dtype=dtype)
    model, info = AutoModelForCausalLM.from_pretrained(
        asked.name_or_path,
        revision=asked.revision,
        trust_remote_code=asked.trust_remote_code,
        attn_implementation="eager",
        dtype=dtype,
        ignore_mismatched_sizes=True,
        output_loading_info=True,
    )
    weight_check.check_loaded(info, name=asked.name_or_path, allowed=asked.init_missing)
    return model


def fingerprint(asked: ModelConfig) -> str:
    """Identifies the weight files of a named model: by their names and sizes, and a MiB of either end of each.

    `random` for random weights, which config and seed identify.
    """
    if asked.name_or_path is None:
        return "random"
    seen = xxhash.xxh3_128()
    for file in sorted(path for path in _download(asked).iterdir() if path.suffix in (".safetensors", ".bin")):
        size = file.stat().st_size
        seen.update(f"{file.name} {size} ".encode())
        with file.open("rb") as opened:
            seen.update(opened.read(_SEEN_BYTES))
            opened.seek(max(0, size - _SEEN_BYTES))
            seen.update(opened.read())
    return f"xxh3:{seen.hexdigest()}"


def fill(
    model: PreTrainedModel,
    files: Mapping[str, Path],
    *,
    mesh: Mesh,
    tp_placements: Mapping[str, Placement],
    fsdp_sharded: bool,
    first_value: Callable[[str, torch.Size], Tensor],
    offloaded: bool = False,
) -> None:
    """Gives a split model its storage on the mesh's device and reads this rank's part of every tensor.

    A tensor is cut first over tp by its placement, then over fsdp along dim 0, the order in which it was split. Peak
    memory beyond the shards is one tensor.

    Args:
        first_value: (name, shape) -> first values of an adapter's whole weight, which no file has.
    """
    model.to_empty(device="cpu" if offloaded else mesh.device)
    for buffer_owner in model.modules() if offloaded else ():
        for name, buffer in buffer_owner.named_buffers(recurse=False):
            buffer_owner._buffers[name] = torch.empty_like(buffer, device=mesh.device)
    # `to_empty` gave each module parameters of its own: tie again those that were tied.
    for name, source in model.all_tied_weights_keys.items():
        owner, _, own = name.rpartition(".")
        model.get_submodule(owner)._parameters[own] = model.get_parameter(source)
    tied = dict(model.all_tied_weights_keys)
    not_finite = []
    fsdp_rank = mesh.topology.coordinates(mesh.rank)[1] * mesh.topology.cp + mesh.cp_rank
    fsdp_size = mesh.size("fsdp") if fsdp_sharded else 1
    with torch.no_grad():
        for name, target in stored_tensors(model):
            stored = original(name)
            if stored not in files and not is_adapter(name):
                stored = tied[stored]  # of two names of one tensor, the file has the other
            whole = first_value(name, target.shape) if is_adapter(name) else _read(files[stored], stored)
            part = _cut(whole, tp_placements.get(name), mesh=mesh)
            if fsdp_size > 1 and isinstance(target, nn.Parameter):
                pieces = part.chunk(fsdp_size, dim=0)
                part = pieces[fsdp_rank] if fsdp_rank < len(pieces) else part[:0]
            if part.is_floating_point() and part.numel() and not all(map(torch.isfinite, part.aminmax())):
                not_finite.append(stored)
            local_part(target).copy_(part)
            target._is_hf_initialized = True  # type: ignore[union-attr]
    mesh.decide("finite weights", not_finite, weight_check.refuse_not_finite)
    # Buffers that are not stored (rotary frequencies) are computed by the model's own initialisation.
    for parameter in model.parameters():
        parameter._is_hf_initialized = True  # type: ignore[attr-defined]
    model.initialize_weights()


def _read(file: Path, name: str) -> Tensor:
    with safe_open(file, framework="pt") as tensors:
        return tensors.get_tensor(name)


def _cut(whole: Tensor, placement: Placement | None, *, mesh: Mesh) -> Tensor:
    if placement is None:
        return whole
    assert mesh.device_mesh is not None
    with torch.device("cpu"):
        return distribute_tensor(whole, mesh.device_mesh["tp"], [placement], src_data_rank=None).to_local()


def layers_of(model: PreTrainedModel) -> list[nn.Module]:
    """The model's repeated blocks, in order."""
    blocks = set(model._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in blocks]
