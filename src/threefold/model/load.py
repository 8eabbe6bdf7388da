"""Hugging Face config and weights -> a model without storage, and the files that hold its weights.

A model is built without storage, split, and then filled (`storage`): each rank reads its own part of each tensor from
memory-mapped safetensors files. Weights that are not in such files under the model's own names (random ones, other
formats, layouts that transformers converts) are first written to such files by one process of each machine.
"""

import copy
import difflib
import hashlib
import inspect
import json
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
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
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PretrainedConfig
from transformers.dynamic_module_utils import get_relative_import_files
from transformers.modeling_rope_utils import RopeParameters

from threefold.config.paths import refuse_wrong_model
from threefold.config.schema import EMBEDDED_DEFAULT, Config, ModelConfig
from threefold.errors import ConfigError
from threefold.mesh.mesh import Mesh
from threefold.model import config_errors, weight_check
from threefold.model.context_parallel import attention_choice
from threefold.model.weight_check import Stored, Weights, readers

_CONFIG_READERS = (
    "configuration_utils",
    "masking_utils",
    "modeling_rope_utils",
    "modeling_utils",
)
# Mappings whose keys are data.
_FREE_FORM = ("label2id", "id2label", "task_specific_params")
_STAGED_FILE_BYTES = 2 * 1024**3


def read_config(asked: ModelConfig, *, vocab_size: int | None = None) -> PretrainedConfig:
    """The architecture that the user asked for.

    Args:
        vocab_size: entries of the tokenizer, used if `model.config` (or nothing) is given without a vocabulary size.

    Raises:
        ConfigError: an unknown model type, a folder without config, or a Hub model that cannot be reached.
    """
    if asked.name_or_path is None:
        values = dict(asked.config or EMBEDDED_DEFAULT)
        if vocab_size is not None:
            values.setdefault("vocab_size", vocab_size)
        return _config_from_values(values)
    refuse_wrong_model(asked.name_or_path)
    try:
        config = AutoConfig.from_pretrained(
            asked.name_or_path,
            revision=asked.revision,
            trust_remote_code=asked.trust_remote_code,
        )
    except (OSError, ValueError, HFValidationError) as error:
        raise config_errors.unreadable(asked.name_or_path, error) from error
    except Exception as error:  # transformers validates with exceptions of several families
        name = f"the config of {asked.name_or_path!r}"
        raise config_errors.refused(
            name, error, "the keys and values of its model_type"
        ) from error
    weight_check.refuse_quantised(config, name=asked.name_or_path)
    return config


def _config_from_values(values: dict[str, Any]) -> PretrainedConfig:
    model_type = values.pop("model_type")
    if str(model_type) not in CONFIG_MAPPING:
        raise config_errors.unknown_type(model_type)
    try:
        config = AutoConfig.for_model(model_type, **values)
        unknown = unknown_keys(model_type, values)
    except Exception as error:
        raise config_errors.refused(
            "model.config", error, f"the keys and values of the {model_type!r} architecture"
        ) from error
    if unknown:
        owner, dot, leaf = unknown[0].rpartition(".")
        names = [
            *(() if dot else dir(AutoConfig.for_model(model_type))),
            *RopeParameters.__annotations__,
        ]
        near = [f"{owner}{dot}{name}" for name in difflib.get_close_matches(leaf, names, n=1)]
        raise ConfigError(
            f"model.config has a key that {model_type!r} does not know: {', '.join(unknown)}",
            expected="the architecture's own keys: transformers would ignore this one, and train another model",
            fix=f"did you mean {near[0]}?" if near else f"leave {unknown[0]} out",
        )
    return config


def unknown_keys(model_type: str, values: Mapping[str, Any]) -> list[str]:
    """The keys that an architecture's config does not have, and that no source which could read them names.

    Keys of nested mappings are checked too, and have their path: `rope_parameters.rope_tpye`.
    """
    config = AutoConfig.for_model(model_type)
    # Not with `hasattr`, which a config refuses for a value that is set per layer.
    names = {*dir(config), *config.to_dict(), *config.attribute_map}
    unknown: dict[str, str] = {key: key for key in values if key not in names}
    parts: list[str] = []
    for key, value in values.items():
        if isinstance(value, dict) and key in names and key not in _FREE_FORM:
            kind = value.get("model_type") or config.to_dict().get(key, {}).get("model_type")
            if kind in CONFIG_MAPPING:
                parts += [f"{key}.{path}" for path in unknown_keys(kind, value)]
            elif kind is None:
                unknown |= {f"{key}.{path}": path.rpartition(".")[2] for path in _paths(value)}
    if not unknown:
        return parts
    files = list(Path(inspect.getfile(type(config))).parent.glob("*.py"))
    files += [Path(transformers.__file__).with_name(f"{name}.py") for name in _CONFIG_READERS]
    words = {
        word for file in files for word in re.findall(r"\w+", file.read_text(encoding="utf-8"))
    }
    # A number is that of a layer.
    return [
        path for path, key in unknown.items() if key not in words and not key.isdigit()
    ] + parts


def _paths(values: Mapping[Any, Any]) -> Iterator[str]:
    for key, value in values.items():
        yield str(key)
        yield from (
            f"{key}.{path}" for path in _paths(value if isinstance(value, dict) else {})
        )


def build_without_storage(
    config: PretrainedConfig,
    asked: ModelConfig | None = None,
    *,
    attention: str,
    dtype: torch.dtype = torch.float32,
) -> Any:
    """The model's modules with parameters on the meta device.

    Args:
        asked: says whether code that came with the model is trusted.
        attention: `eager`, or the name of registered masks, and of the attention that `backend` lets the model use.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config,
            attn_implementation="eager",
            dtype=dtype,
            trust_remote_code=asked is not None and asked.trust_remote_code,
        )
    if attention != "eager":
        attention_choice.use(model, attention)
    return model


def outline(
    config: PretrainedConfig,
    asked: ModelConfig | None = None,
    *,
    dtype: torch.dtype = torch.float32,
) -> Any:
    """The model without storage, with eager attention, to look at.

    Args:
        asked: as of `build_without_storage`.

    Raises:
        ConfigError: its class cannot be built from this config.
    """
    try:
        return build_without_storage(
            copy.deepcopy(config), asked, attention="eager", dtype=dtype
        )
    except Exception as error:  # whatever a model's code may raise
        known = type(config) in AutoModelForCausalLM._model_mapping
        if not known and not (asked is not None and asked.trust_remote_code):
            raise ConfigError(
                f"transformers has no causal language model of type {config.model_type!r}",
                expected="an architecture that predicts the next token, as llama, qwen3 and gemma3_text do",
                fix="--model.config '{model_type: llama, ...}'   (or --model.name_or_path MODEL)",
            ) from error
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ConfigError(
            f"transformers cannot build a {config.model_type!r}: {reason}",
            expected="sizes that fit one another, and the packages that the architecture uses",
            fix="see the architecture's config page in the transformers documentation",
        ) from error


@contextmanager
def weights_of(
    asked: ModelConfig, config: PretrainedConfig, stored: Stored, *, seed: int, mesh: Mesh
) -> Iterator[Weights]:
    """For each of the model's tensors, by its own name, how to read it: from a safetensors file that holds it.

    Args:
        seed: of random weights; they depend on it and not on the mesh.

    Raises:
        ConfigError: the files do not hold the model's weights (`weight_check`); on every rank.
    """
    names = set(stored.shapes)
    if asked.name_or_path is not None:
        files = _index(Path(mesh.once_per_host("download", lambda: _checked(asked, stored))))
        if names <= files.keys():
            yield readers(files)
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
        yield readers(_index(staged))
        mesh.barrier()
    finally:
        if mesh.rank == mesh.host_leader:
            shutil.rmtree(staged, ignore_errors=True)


def _checked(asked: ModelConfig, stored: Stored) -> str:
    """The folder of a named model, whose files were compared with what the model holds as far as headers show."""
    folder = _download(asked)
    weight_check.check_files(_index(folder), stored, name=str(asked.name_or_path))
    return str(folder)


def _download(asked: ModelConfig) -> Path:
    assert asked.name_or_path is not None
    folder = Path(asked.name_or_path)
    if not folder.is_dir():
        try:
            patterns = ["*.safetensors", "*.bin", "*.json"]
            folder = Path(
                snapshot_download(
                    asked.name_or_path, revision=asked.revision, allow_patterns=patterns
                )
            )
        except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
            raise config_errors.unreadable(asked.name_or_path, error) from error
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
    files, whole = {}, folder / "model.safetensors"
    # Without an index transformers reads that one file; others (adapters, another layout) are not the model's.
    for file in [whole] if whole.exists() else sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as tensors:
                files.update(dict.fromkeys(tensors.keys(), file))
        except (OSError, SafetensorError) as error:
            raise weight_check.damaged(file, error, name=str(folder)) from error
    return files


def _stage(
    asked: ModelConfig, config: PretrainedConfig, names: set[str], *, seed: int, folder: Path
) -> None:
    model = whole(
        asked,
        config,
        seed=seed,
        dtype="auto" if asked.name_or_path is not None else torch.float32,
    )
    state = {name: tensor for name, tensor in model.state_dict().items() if name in names}
    part: dict[str, Tensor] = {}
    parts = 0
    for name in list(state):
        part[name] = state.pop(name).contiguous()
        if sum(tensor.nbytes for tensor in part.values()) >= _STAGED_FILE_BYTES or not state:
            save_file(part, folder / f"part-{parts:05d}.safetensors")
            part, parts = {}, parts + 1


def whole(
    asked: ModelConfig, config: PretrainedConfig, *, seed: int, dtype: torch.dtype | str
) -> Any:
    """The model in this process alone, with the weights that a run begins with."""
    torch.manual_seed(seed)  # weights that are meant to be new are the same on every host
    if asked.name_or_path is None:
        return AutoModelForCausalLM.from_config(
            copy.deepcopy(config), attn_implementation="eager", dtype=dtype
        )
    model, info = AutoModelForCausalLM.from_pretrained(
        asked.name_or_path,
        revision=asked.revision,
        trust_remote_code=asked.trust_remote_code,
        attn_implementation="eager",
        dtype=dtype,
        ignore_mismatched_sizes=True,
        output_loading_info=True,
    )
    weight_check.check_loaded(info, asked)
    return model


def fingerprint(asked: ModelConfig) -> str:
    """Identifies the weight files of a named model: by their names, sizes and all their bytes.

    `random` for random weights, which config and seed identify.
    """
    if asked.name_or_path is None:
        return "random"
    hasher = xxhash.xxh3_128()
    for file in sorted(
        path for path in _download(asked).iterdir() if path.suffix in (".safetensors", ".bin")
    ):
        hasher.update(f"{file.name} {file.stat().st_size} ".encode())
        with file.open("rb") as opened:
            hasher.update(hashlib.file_digest(opened, xxhash.xxh3_128).digest())  # type: ignore[arg-type]
    return f"xxh3:{hasher.hexdigest()}"


def base_of(config: Config, mesh: Mesh) -> str | None:
    """Identifies what adapters are based on, and pairs are compared with; None: neither. Every rank calls it."""
    if config.model.lora.r or config.train.objective == "dpo":
        return mesh.once_per_host("base", lambda: fingerprint(config.model))
    return None


def own_code(model: nn.Module) -> str | None:
    """Identifies the code that came with a named model; None: an installed package has it.

    Of the files of its classes, and those that they import: a tokenizer's may be beside them, or not yet.
    """
    classes = {base for module in model.modules() for base in type(module).__mro__}
    files = {
        path
        for each in classes
        if each.__module__.startswith("transformers_modules.")
        for own in [inspect.getfile(each)]
        for path in (own, *get_relative_import_files(own))
    }
    code = b"".join(sorted(Path(path).read_bytes() for path in files))
    return f"xxh3:{xxhash.xxh3_128_hexdigest(code)}" if files else None


def as_argument(key: str, value: Any) -> str:
    """The argument that sets this config key in a program."""
    name, _, inner = key.partition(".")[2].partition(".")
    argument = {inner: value} if inner else value
    return f"threefold.load_model(..., {name}={argument!r})"


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The model's repeated blocks, in order; of a module that names none, what its longest list of one class holds.

    Not parts of one, nor what has the embedding (bert's), whose weight may be the head's too.
    """
    if blocks := set(getattr(model, "_no_split_modules", None) or ()):
        layers, inside = list[nn.Module](), set[nn.Module]()
        for module in model.modules():
            if type(module).__name__ in blocks and module not in inside:
                inside.update(module.modules())
                if not any(isinstance(part, nn.Embedding) for part in module.children()):
                    layers.append(module)
        return layers
    lists = [[*each.children()] for each in model.modules() if isinstance(each, nn.ModuleList)]
    alike = [each for each in lists if len({type(module) for module in each}) == 1]
    return max(alike, key=len, default=[])
