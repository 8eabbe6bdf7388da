"""The fix of a value that is not accepted leads to what was meant: pasted, it is accepted, and not the default."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

import pytest

from threefold.config import loading
from threefold.config.schema import Config, every_key, value_at
from threefold.config.yaml_text import as_yaml
from threefold.errors import ConfigError

NAMED = [
    ("model.dtype", "bf16", "bfloat16"),
    ("model.dtype", "fp16", "bfloat16"),
    ("model.dtype", "FP32", "float32"),
    ("mesh.device", "gpu", "cuda"),
    ("train.objective", "DPO", "dpo"),
    ("train.objective", "sft", "next_token"),
    ("train.steps", "1e3", 1000),
    ("train.steps", "1,000", 1000),
    ("train.steps", "500.0", 500),
    ("train.steps", "1.5K", 1500),
    ("data.seq_len", "4k", 4096),
    ("train.timeout_s", "30m", 1800),
    ("log.stall_s", "2 h", 7200),
    ("data.seq_len", "128K", 131072),
    ("train.compile", "yes", True),
    ("train.compile", "Off", False),
    ("train.float8", "true", "tensorwise"),
    ("train.activation_checkpointing", "true", "full"),
    ("log.trackers", "wandb", ("wandb",)),
    ("log.trackers", "wandb, tensorboard", ("wandb", "tensorboard")),
    ("eval.tasks", "hellaswag", ("hellaswag",)),
    ("model.config", "llama", {"model_type": "llama"}),
    ("model.lora.target_modules", "q_proj", ("q_proj",)),
    ("model.lora.r", "8.0", 8),
    ("data.packing", "best-fit", "best_fit"),
    ("optimizer.name", "AdamW8bit", "adamw_8bit"),
    ("optimizer.name", "adamw_torch", "adamw"),
    ("optimizer.name", "Muon", "muon"),
    ("optimizer.schedule", "constant_with_warmup", "constant"),
    ("optimizer.schedule", "cosin", "cosine"),
    ("optimizer.betas", "0.9,0.99", (0.9, 0.99)),
]


def _fix(key: str, value: str) -> str:
    with pytest.raises(ConfigError) as caught:
        loading.load(None, [(key, value)], environ={})
    (problem,) = [each for each in caught.value.problems if each.what.startswith(f"{key} = ")]
    return problem.fix


def _pasted(fix: str) -> Any:
    """The value under the key of `--key VALUE`, as the command takes it."""
    option, value = shlex.split(re.split(r" {3}\(", fix)[0])
    key = option.removeprefix("--")
    return value_at(loading.load(None, [(key, value)], environ={}).config, key)


@pytest.mark.parametrize(("key", "value", "meant"), NAMED, ids=str)
def test_what_is_pasted_is_what_was_meant(key: str, value: str, meant: Any) -> None:
    fix = _fix(key, value)
    assert fix.startswith(f"--{key} ") and "(the default)" not in fix, fix
    # What belongs to it (pairs for dpo) is said by the next error, of other keys.
    assert as_yaml(_value(fix)) == as_yaml(meant) or _pasted(fix) == meant
    try:
        assert _pasted(fix) == meant
    except ConfigError as error:
        assert all(
            not each.what.startswith(f"{key} = ") or " not accepted" not in each.what
            for each in error.problems
        )


def _value(fix: str) -> Any:
    from threefold.config.yaml_text import parse

    return parse(shlex.split(re.split(r" {3}\(", fix)[0])[1], "the fix")


def _words(annotation: Any) -> Iterator[str]:
    if get_origin(annotation) is Literal:
        yield from (each for each in get_args(annotation) if isinstance(each, str))
    for part in get_args(annotation):
        yield from _words(part)


def _annotation(key: str) -> Any:
    owner: Any = Config
    *sections, name = key.split(".")
    for section in sections:
        owner = owner.model_fields[section].annotation
    return owner.model_fields[name].annotation


WORDS = [
    (key, word) for key in every_key() for word in _words(_annotation(key)) if len(word) > 2
]


@pytest.mark.parametrize(("key", "word"), WORDS, ids=str)
def test_every_word_is_found_in_capitals_and_with_a_letter_missing(key: str, word: str) -> None:
    for written in (
        word.upper(),
        f" {word.replace('_', '-')}!"[1:],
        word[:-1] if len(word) > 4 else word.title(),
    ):
        try:
            loading.load(None, [(key, written)], environ={})
        except ConfigError as error:
            mine = [
                each
                for each in error.problems
                if each.what.startswith(f"{key} = ") and "not accepted" in each.what
            ]
            assert not mine or _value(mine[0].fix) in (word, [word]), (written, mine[0].fix)


def test_float16_is_said_not_to_be_there() -> None:
    assert "float16 is not supported" in _fix("model.dtype", "half")


@pytest.mark.parametrize(
    ("key", "value"), [("optimizer.lr", "3e-4x"), ("train.steps", "soon"), ("mesh.dp", "-1")]
)
def test_what_is_like_nothing_gets_the_default_or_is_left_out(key: str, value: str) -> None:
    assert "(the default)" in _fix(key, value) or _fix(key, value) == f"leave {key} out"
