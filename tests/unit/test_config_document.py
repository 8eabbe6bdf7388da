"""A config as a document for people reads back as the same config, whatever its values are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from threefold.config import loading
from threefold.config.loading import LoadedConfig
from threefold.config.schema import Config, every_key
from threefold.config.yaml_document import with_meanings, with_values
from threefold.config.yaml_text import parse
from threefold.plan.shown_choices import automatic

CONFIGS = {
    "the default": (),
    "nested": (
        ("model.lora.r", "4"),
        ("model.config", "{model_type: llama, rope_parameters: {factor: 2.0}}"),
    ),
    "a mixture": (
        (
            "data.mixture",
            "{a: {source: [b.txt, 'c #1.txt'], weight: 2}, d: {source: stdlib, weight: 1e-3}}",
        ),
    ),
    "text that YAML would change": (
        ("log.dir", "'a: b # c'"),
        ("data.source", '"two\\nlines"'),
        ("data.tokenizer", "'null'"),
        ("model.revision", "'012'"),
    ),
    "lists": (
        ("optimizer.groups", "[{match: '^a.*: #', lr: 1e-5}]"),
        ("data.skip", "[[3, 4]]"),
        ("optimizer.betas", "[0.9, 0.95]"),
    ),
    "a mesh": (("mesh.dp", "4"), ("mesh.dp_shard", "auto"), ("mesh.cp", "2")),
}


def load(pairs: Sequence[tuple[str, str]], path: Path | None = None) -> LoadedConfig:
    return loading.load(str(path) if path else None, pairs, environ={})


def here(config: Config) -> dict[str, str]:
    return automatic(config, launched_world_size=None, num_devices=None)


@pytest.mark.parametrize("pairs", CONFIGS.values(), ids=CONFIGS)
def test_both_forms_read_back_as_the_same_config(
    pairs: Sequence[tuple[str, str]], tmp_path: Path
) -> None:
    loaded = load(pairs)
    for text in (with_values(loaded, here(loaded.config)), with_meanings(loaded)):
        path = tmp_path / "again.yaml"
        path.write_text(text)
        assert load((), path).config == loaded.config


def test_every_key_is_named_once_in_both_forms() -> None:
    loaded = load(())
    content = parse(with_values(loaded, {}), "printed")
    lora = content["model"].pop("lora")
    named = [f"{section}.{key}" for section, keys in content.items() for key in keys]
    assert {*named, *(f"model.lora.{key}" for key in lora)} == set(every_key())
    assert len(named) + len(lora) == len(every_key())
    commented = with_meanings(loaded)
    assert parse(commented, "init") == dict.fromkeys(Config.model_fields)


def test_without_its_marks_the_commented_form_is_the_default(tmp_path: Path) -> None:
    """What `threefold init` tells its reader to do works for every key: a # removed, it is that key."""
    lines = with_meanings(load(())).splitlines()
    path = tmp_path / "all.yaml"
    path.write_text(
        "\n".join(
            line.replace("  # ", "  ", 1) if line.startswith("  # ") else line for line in lines
        )
    )
    assert load((), path).config == Config()


def test_a_path_with_a_line_break_stays_a_comment(tmp_path: Path) -> None:
    path = tmp_path / "a\ntrain: {steps: 3}\n.yaml"
    path.write_text("train: {seed: 5}")
    loaded = load((), path)
    again = tmp_path / "again.yaml"
    again.write_text(with_values(loaded, {}))
    assert load((), again).config == loaded.config


def test_automatic_keys_have_their_value_and_the_reason() -> None:
    settled = here(Config())
    assert settled["optimizer.lr"] == "0.002: the weights are random"
    assert settled["train.steps"] == "120: neither steps nor epochs were given"
    assert [settled[f"mesh.{axis}"] for axis in ("dp", "cp", "tp")] == [
        "2: the default on a CPU"
    ] * 3
    assert settled["train.compile"].startswith("false: on a cpu ")
    assert "mesh.cp_method" not in settled  # cp 2: that depends on the model's heads
    given = load((("optimizer.lr", "1e-4"), ("mesh.dp", "4"), ("train.epochs", "2"))).config
    settled = automatic(given, launched_world_size=None, num_devices=4)
    assert not {"optimizer.lr", "mesh.dp", "train.steps"} & settled.keys()
    assert settled["mesh.device"] == "cuda: torch sees 4 CUDA devices"
    assert settled["mesh.cp_method"] == "gather: rows are not split"
