"""The config.json of a model that a command names: a Hub id, a folder, or the file itself."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from threefold.config.paths import RUN_CONFIG, is_run
from threefold.errors import ConfigError, first_line
from threefold.jsonl import from_json

if TYPE_CHECKING:
    from threefold.config.schema import Config, ModelConfig


def model_keys(model: str) -> list[str]:
    """The keys of the config that name a model."""
    path = Path(model)
    if is_run(path):
        return [str(path / RUN_CONFIG)]
    if path.suffix in (".yaml", ".yml"):
        return [model]  # the config of a run, which names it
    if path.suffix != ".json":
        return ["--model.name_or_path", model]
    values = _read(path)
    if "model_type" not in values:
        raise ConfigError(
            f"{model} has no model_type",
            expected="an object with a model_type, as transformers writes it",
            fix="check the path",
        )
    return ["--model.config", json.dumps(values)]


def planned_config(arguments: Sequence[str]) -> tuple[Config, frozenset[str]]:
    """The config of a run that is planned, on a GPU, and which keys were given."""
    from threefold.commands.arguments import load_config
    from threefold.plan.choices import Device, with_dtype

    loaded = load_config(arguments)
    config, given = loaded.config, frozenset(loaded.origins)
    if config.data.document_mask is None and {"data.source", "data.mixture"} & given:
        _say_if_masked(config)
    return with_dtype(_with_default_model(config), Device("cuda")), given


def _say_if_masked(config: Config) -> None:
    from threefold.config.paths import source_names
    from threefold.run.sources import formats_of

    if any(name.startswith("hf:") for name in source_names(config)):
        return
    if {*formats_of(config).values()} - {"text"}:
        note = "planned without data.document_mask, which a run sets for rows that are not text"
        typer.echo(f"{note}: with it by --data.document_mask true", err=True)


def _with_default_model(config: Config) -> Config:
    """The same, with the values of the model that a run trains: its default, and the vocabulary of its tokenizer."""
    from threefold.config.schema import EMBEDDED_DEFAULT

    if config.model.name_or_path is not None:
        return config
    values = dict(config.model.config or EMBEDDED_DEFAULT)
    # A model's own file without a vocabulary has it further inside, or is of transformers' default.
    if not {"vocab_size", "text_config", "architectures"} & values.keys():
        from threefold.run.sources import tokenizer_of

        values["vocab_size"] = tokenizer_of(config).vocab_size
    return config.changed(model={"config": values})


def values_of(model: ModelConfig) -> dict[str, Any]:
    """The object of the model's config.json, of a folder or from the Hub or its cache.

    Raises:
        ConfigError: there is none.
    """
    if model.config is not None:
        return model.config
    path = Path(model.name_or_path or "") / "config.json"
    return _read(path if path.is_file() else _from_hub(str(model.name_or_path), model.revision))


def _read(path: Path) -> dict[str, Any]:
    expected = "a model's config.json, as transformers writes it"
    try:
        values = from_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} cannot be read: {error}", expected=expected, fix="check the path"
        ) from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} is not an object", expected=expected, fix="check the path")
    return values


def _from_hub(model: str, revision: str | None) -> Path:
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(model, "config.json", revision=revision))
    except Exception as error:
        # Exceptions of several families: no such model, no network, an invalid name.
        raise ConfigError(
            f"{model} has no config.json that can be read: {first_line(error)}",
            expected="a Hub id, a folder with a config.json, or a config.json",
            fix="check it",
        ) from error
