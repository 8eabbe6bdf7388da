"""The intended value behind a refused one: by type, by spelling, or by its name in other libraries.

A pasted fix must have the intended effect, so a guess counts only if its key accepts it.
"""

import difflib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import ValidationError

from threefold.config.paths import RUN_CONFIG, is_run
from threefold.config.schema import Config
from threefold.errors import shell_word

_YES_NO = dict.fromkeys(("yes", "y", "on", "1", "true"), True)
_YES_NO |= dict.fromkeys(("no", "n", "off", "0", "false"), False)
# By what others call it: torch, transformers, bitsandbytes, accelerate, DeepSpeed.
_ALIASES: dict[str, dict[str, Any]] = {
    "model.dtype": dict.fromkeys(("bf16", "half", "fp16", "float16", "f16"), "bfloat16")
    | {"fp32": "float32"},
    "model.attention": {"flash_attention_2": "auto", "eager": "auto", "flex_attention": "flex"},
    "mesh.device": dict.fromkeys(("gpu", "gpus", "nccl"), "cuda") | {"gloo": "cpu"},
    "data.seq_len": {f"{1 << i}k": 1024 << i for i in range(11)},
    "train.objective": dict.fromkeys(
        ("sft", "clm", "causal_lm", "cross_entropy"), "next_token"
    ),
    "train.float8": {"true": "tensorwise", "false": "none"},
    "train.activation_checkpointing": {"true": "full", "false": "none"},
    "optimizer.name": {
        **dict.fromkeys(
            ("adamw8bit", "adamw_bnb_8bit", "paged_adamw_8bit", "adam8bit"), "adamw_8bit"
        ),
        **dict.fromkeys(("adam", "adamw_torch", "adamw_torch_fused", "adamw_hf"), "adamw"),
    },
    "optimizer.schedule": {"constant_with_warmup": "constant", "cosine_with_min_lr": "cosine"},
    "data.packing": {"true": "best_fit", "false": "none"},
}
_UNITS = {"": 1, "%": 100, "k": 1e-3}
_SECONDS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86_400}
# Of which something is lost on the way, and what.
_NOT_THERE = {"half", "fp16", "float16", "f16"}


def meant_value(key: str, value: Any) -> tuple[Any, str] | None:
    """The value that was meant under a key, and a remark (maybe empty); None if nothing that is accepted is near.

    Args:
        key: `section.key`, or `section.key.key` inside a section of a section.
        value: a plain value that the key does not accept.
    """
    *sections, name = key.split(".")
    owner: Any = Config.model_fields[sections[0]].annotation
    for section in sections[1:]:
        owner = owner.model_fields[section].annotation
    for guess in _guesses(key, value, list(_choices(owner.model_fields[name].annotation))):
        if _accepts(key, guess):
            return guess, "float16 is not supported" if _spelled(value) in _NOT_THERE else ""
    return None


def meant_word(key: str, value: str, words: Iterable[str]) -> str | None:
    """Which of some words was meant by a key whose words are not in its type; None if none is near."""
    choices = list(words)
    return next((guess for guess in _guesses(key, value, choices) if guess in choices), None)


def meant_path(name: str) -> str | None:
    """What to write for a path that is there, but not a config by its name: a run, a model or data."""
    path = Path(name)
    if not path.exists() or path.suffix in (".yaml", ".yml"):
        return None
    if is_run(path):
        return f"{shell_word(path / RUN_CONFIG)}   (its config; to resume it: threefold resume {shell_word(path)})"
    key = "model.name_or_path" if (path / "config.json").is_file() else "data.source"
    return f"instead: --{key} {shell_word(path)}   (a config is a .yaml)"


def _accepts(key: str, value: Any) -> bool:
    values = value
    for part in reversed(key.split(".")):
        values = {part: values}
    try:
        Config.model_validate(values)
    except ValidationError:
        return False
    return True


def _guesses(key: str, value: Any, choices: list[str]) -> Iterator[Any]:
    """Values that may have been meant, the likeliest first."""
    spelled = _spelled(value)
    if (alias := _ALIASES.get(key, {}).get(spelled)) is not None:
        yield alias
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        if (number := _whole(value)) is not None:
            yield number
        if isinstance(value, str) and (decimal := _decimal(value)) is not None:
            yield decimal
    if key.endswith("_s") and (match := re.fullmatch(r"(\d+)_?(s|m|min|h|d)", spelled)):
        yield int(match[1]) * _SECONDS[match[2]]
    if spelled in _YES_NO:
        yield _YES_NO[spelled]
    by_spelling = {_spelled(choice): choice for choice in choices}
    if spelled in by_spelling:
        yield by_spelling[spelled]
    for near in difflib.get_close_matches(spelled, by_spelling, n=1, cutoff=0.7):
        yield by_spelling[near]
    if isinstance(value, str) and "," in value:
        parts = [part.strip() for part in value.split(",")]
        yield tuple(parts)
        yield tuple(map(_decimal, parts))
    if isinstance(value, str | int | float | bool):
        yield (value,)
    if key == "model.config" and isinstance(value, str):
        yield {"model_type": value}


def _choices(annotation: Any) -> Iterator[str]:
    """The words that a key accepts."""
    if get_origin(annotation) is Literal:
        yield from (each for each in get_args(annotation) if isinstance(each, str))
    else:
        for part in get_args(annotation):
            yield from _choices(part)


def _spelled(value: Any) -> str:
    return re.sub(r"[\s-]+", "_", str(value).strip().lower())


def _whole(value: str | int | float) -> int | None:
    """1e3, 1k, 1_000 and "1,000" as 1000; None for anything but a whole number."""
    number = _decimal(value) if isinstance(value, str) else float(value)
    return (
        int(number)
        if number is not None and abs(number) < 2**53 and number == int(number)
        else None
    )


def _decimal(text: str) -> float | None:
    plain = re.sub(r"(?<=\d)[,_](?=\d{3}\b)", "", text.strip())
    number = re.fullmatch(r"([+-]?\d+(?:\.\d*)?(?:e[+-]?\d+)?)\s*([%k]?)", plain.lower())
    return float(number[1]) / _UNITS[number[2]] if number else None
