"""Whether a named model's files hold its weights: every tensor once, under its own name, in its own shape, as floats.

In: the names and shapes of the architecture, and the files' headers (the tensors themselves are not read), or what
transformers reports about its load. Out: nothing, or one error that names missing, unexpected, misshapen,
quantised or damaged tensors. A missing tensor would be trained from random numbers, and a tensor that the model lacks
would be left out, and no curve would show it. `model.init_missing` allows weights that are meant to be new.
"""

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from threefold.config.schema import ModelConfig
from threefold.errors import ConfigError, Problem

Shape = tuple[int, ...]
# A tensor's name -> what reads it, complete.
Weights: TypeAlias = Mapping[str, Callable[[], Tensor]]

_FLOATS = {"F64", "F32", "F16", "BF16"}
# Computed from the config; older checkpoints store them, and transformers passes over them too.
_COMPUTED = (r"rotary_emb\.inv_freq$",)
_NUM_NAMED = 4


@dataclass(frozen=True)
class Stored:
    """The contents of a model's files.

    Attributes:
        shapes: of its parameters and stored buffers, tied ones once.
        tied: further names of tensors, and the name under which each is stored.
        passed_over: patterns of names that the architecture does not load.
        integers: names of stored buffers that are no weights (deepseek_v4's table of experts by token).
    """

    shapes: Mapping[str, tuple[int, ...]]
    tied: Mapping[str, str]
    passed_over: tuple[str, ...]
    integers: frozenset[str] = frozenset()


def stored_in_files(model: PreTrainedModel) -> Stored:
    """The contents of a model's files, before it is split."""
    tied = dict(model.all_tied_weights_keys)
    # With two names of one tensor, the model may give the tied one first; the files have the other.
    tensors = stored_tensors(model)
    shapes = {tied.get(name, name): tuple(tensor.shape) for name, tensor in tensors}
    integers = frozenset(name for name, tensor in tensors if not tensor.is_floating_point())
    return Stored(shapes, tied, tuple(model._keys_to_ignore_on_load_unexpected or ()), integers)


def stored_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters and stored buffers by name, alive; tied ones once, by the name that comes first."""
    volatile = {name for name, _ in model.named_buffers()} - set(
        model.state_dict(keep_vars=True)
    )
    buffers = [(name, buffer) for name, buffer in model.named_buffers() if name not in volatile]
    return [*model.named_parameters(), *buffers]


def readers(files: Mapping[str, Path]) -> Weights:
    """A reader for each tensor, from the safetensors file that holds it."""
    return {name: partial(_read, file, name) for name, file in files.items()}


def _read(file: Path, name: str) -> Tensor:
    with safe_open(file, framework="pt") as tensors:
        return tensors.get_tensor(name)


def refuse_quantised(config: PretrainedConfig, *, name: str) -> None:
    """ConfigError if a model's config declares that its tensors are quantised."""
    settings = getattr(config, "quantization_config", None)
    if settings:
        method = (
            settings.get("quant_method")
            if isinstance(settings, Mapping)
            else getattr(settings, "quant_method", None)
        )
        raise ConfigError(
            f"model.name_or_path = {name!r} is quantised ({method or 'quantization_config'})",
            expected="floating-point weights: codes and scales cannot be trained, and read as weights they are noise",
            fix="use the unquantised model",
        )


def check_files(files: Mapping[str, Path], stored: Stored, *, name: str) -> None:
    """Compares the headers of safetensors files (tensor -> file) with what a model's files hold.

    If they lack a tensor, transformers is to convert them: then only codes are refused, integers of two dims or 8-bit
    floats, and `check_loaded` does the rest.

    Raises:
        ConfigError: everything that is wrong with them.
    """
    headers, shapes = _headers(files, name), stored.shapes
    if not shapes.keys() <= files.keys():
        converted = [
            f"{tensor} ({dtype})"
            for tensor, (dtype, shape) in headers.items()
            if dtype.startswith("F8") or (dtype not in {*_FLOATS, "I64"} and len(shape) == 2)
        ]
        return _refuse(name, quantised=converted)
    own = {tensor: header for tensor, header in headers.items() if tensor in shapes}
    numbers = {tensor: dtype for tensor, (dtype, _) in own.items() if dtype not in _FLOATS}
    quantised = [
        f"{tensor} ({dtype})"
        for tensor, dtype in numbers.items()
        if tensor not in stored.integers
    ]
    misshapen = [
        f"{tensor} {list(shape)} instead of {list(shapes[tensor])}"
        for tensor, (dtype, shape) in own.items()
        if (dtype in _FLOATS or tensor in stored.integers) and shape != tuple(shapes[tensor])
    ]
    others = sorted(files.keys() - shapes.keys() - stored.tied.keys())
    skipped = (*stored.passed_over, *_COMPUTED)
    unexpected = [
        each for each in others if not any(re.search(pattern, each) for pattern in skipped)
    ]
    _refuse(
        name,
        quantised=quantised,
        misshapen=misshapen,
        unexpected=[] if quantised else unexpected,
    )


def check_loaded(info: Mapping[str, Any], asked: ModelConfig) -> None:
    """Compares what transformers reports of a load (`output_loading_info`) with a complete one.

    Weights that match `model.init_missing` are meant to be new.

    Raises:
        ConfigError: everything that is wrong with it.
    """
    unexpected = sorted(info["unexpected_keys"])
    missing = sorted(
        key
        for key in info["missing_keys"]
        if not any(fnmatchcase(key, each) for each in asked.init_missing)
    )
    misshapen = [
        f"{key} {list(stored)} instead of {list(own)}"
        for key, stored, own in info["mismatched_keys"]
    ]
    _refuse(
        str(asked.name_or_path),
        _fix_of_missing(missing[0], unexpected) if missing else "",
        missing=missing,
        unexpected=[] if missing else unexpected,
        misshapen=misshapen,
    )


def refuse_not_finite(by_rank: Sequence[Sequence[str]]) -> None:
    """ConfigError where any rank has read a weight that is NaN or infinite; `by_rank` has their names."""
    names = sorted({each for own in by_rank for each in own})
    if names:
        raise ConfigError(
            f"the model has {len(names):,} tensors with NaN or infinite values: {_first_names(names)}",
            expected="finite weights: one NaN makes every loss NaN",
            fix="use weights from before the values overflowed, or download the files again",
        )


def _headers(files: Mapping[str, Path], name: str) -> dict[str, tuple[str, Shape]]:
    """(type, shape) of each tensor, from the files' headers."""
    headers: dict[str, tuple[str, Shape]] = {}
    for file in sorted(set(files.values())):
        try:
            with safe_open(file, framework="pt") as tensors:
                held = set(tensors.keys())
                for tensor in (each for each, where in files.items() if where == file):
                    if tensor not in held:
                        raise KeyError(
                            f"its index names {tensor}, which the file does not hold"
                        )
                    part = tensors.get_slice(tensor)
                    headers[tensor] = part.get_dtype(), tuple(part.get_shape())
        except (OSError, SafetensorError, KeyError) as error:
            raise damaged(file, error, name=name) from error
    return headers


def damaged(file: Path, error: Exception, *, name: str) -> ConfigError:
    """The error for a weight file that cannot be read."""
    return ConfigError(
        f"model.name_or_path = {name!r}: {file.name} cannot be read: {str(error).strip() or type(error).__name__}",
        expected="complete safetensors files; a truncated or altered one would train other weights",
        fix=f"copy or download {file.name} again",
    )


def _first_names(names: Sequence[str]) -> str:
    more = len(names) - _NUM_NAMED
    return ", ".join(names[:_NUM_NAMED]) + (f" and {more:,} more" if more > 0 else "")


def _fix_of_missing(first: str, unexpected: Sequence[str]) -> str:
    if unexpected and all(each.startswith("module.") for each in unexpected):
        return "save the model inside the wrapper (model.module), so that names do not begin with 'module.'"
    if near := difflib.get_close_matches(first, unexpected, n=1):
        return f"rename {near[0]} to {first} in the files"
    return f"use complete files; for weights that are meant to be new: --model.init_missing '[{first!r}]'"


# Problems of some tensors: (text around their number; expected; fix).
_KINDS = {
    "missing": (
        "lacks {} tensors of the model",
        "every tensor of the model in its files: one that is missing would be trained from random numbers",
        "",
    ),
    "unexpected": (
        "has {} tensors that the model does not have",
        "the model's own tensors: others would be ignored, and the model would be another one",
        "check config.json (num_hidden_layers, biases, model_type) against the files",
    ),
    "misshapen": (
        "has {} tensors of another shape",
        "the shapes that config.json describes",
        "check config.json against the files",
    ),
    "quantised": (
        "has {} tensors that are not floating-point weights",
        "float32, bfloat16 or float16 tensors: codes of a quantisation, read as weights, are noise",
        "use the unquantised model",
    ),
}


def _refuse(model: str, fix_of_missing: str = "", **kinds: Sequence[str]) -> None:
    """ConfigError with one problem for each of these kinds that has tensors, in the order given."""
    problems = []
    for kind, names in kinds.items():
        what, expected, fix = _KINDS[kind]
        what = f"model.name_or_path = {model!r} {what.format(f'{len(names):,}')}: {_first_names(names)}"
        problems += [Problem(what, expected, fix or fix_of_missing)] if names else []
    ConfigError.raise_for(problems)


def is_adapter(name: str) -> bool:
    """Whether a parameter belongs to an adapter."""
    return ".lora_A." in name or ".lora_B." in name


def original(name: str) -> str:
    """The name that a frozen parameter has in the model without adapters."""
    return name.replace(".base_layer.", ".")


def parameters_named(model: nn.Module, names: frozenset[str]) -> set[nn.Parameter]:
    """The parameters that had these names when the model was whole; adapters rename what they are added to."""
    return {each for name, each in model.named_parameters() if original(name) in names}
