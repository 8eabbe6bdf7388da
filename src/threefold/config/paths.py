"""The files and folders that a config names, and the same config from another folder."""

from __future__ import annotations

import glob
from pathlib import Path
from typing import Any

from threefold.config.schema import Config
from threefold.config.section import Sources

# In a run's folder: what the run is, and the config with which it is resumed.
RUN_FILE, RUN_CONFIG = "run.json", "config.yaml"
PROFILE_FOLDER = "profile"  # what the ranks traced
EXPORT_FOLDER = "exports"  # what transformers loads
TIMELINE_FOLDER = "timeline"  # when each rank was in which phase
_NAMES = {"stdlib", "bytes"}
FORMER = {"tail": "drop", "end_target": "keep", "bos": False, "control_tokens": "ids"}
"""Keys of the section `data` that version 0.1.0 did not have, with what it did."""


def run_of(config: Path) -> Path | None:
    """The folder of the run whose own config this file is; None for any other file."""
    return config.parent if config.name == RUN_CONFIG and config.with_name(RUN_FILE).exists() else None


def tokenizer_name(config: Config) -> tuple[str, str]:
    """Returns the tokenizer's name, and the reason for it."""
    if config.data.tokenizer is not None:
        return config.data.tokenizer, "as given"
    if config.model.name_or_path is not None:
        return config.model.name_or_path, "the model's own"
    return "bytes", "the model has random weights and none was given"


def former_keys(config: Path) -> dict[str, Any]:
    """The keys that a run's own config lacks if version 0.1.0 wrote it, with what that did."""
    of_a_run = config.name == RUN_CONFIG and any(
        config.with_name(name).exists() for name in (RUN_FILE, "metrics.jsonl")
    )
    return {f"data.{name}": value for name, value in FORMER.items()} if of_a_run else {}


def with_absolute_paths(config: Config) -> Config:
    """The config with absolute paths in place of relative ones that exist here; names of the Hub stay as they are."""
    data = config.data
    mixture = data.mixture and {
        name: source.model_copy(update={"source": _absolutes(source.source)}) for name, source in data.mixture.items()
    }
    updates: dict[str, dict[str, Any]] = {
        "model": {"name_or_path": _absolute(config.model.name_or_path)},
        "data": {
            "source": _absolutes(data.source),
            "tokenizer": _absolute(data.tokenizer),
            "chat_template": _absolute(data.chat_template),
            "mixture": mixture,
        },
        "eval": {
            "source": _absolutes(config.eval.source),
            "tasks": tuple(_absolute(each) if is_task_file(each) else each for each in config.eval.tasks),
        },
    }
    return config.model_copy(
        update={section: getattr(config, section).model_copy(update=values) for section, values in updates.items()}
    )


def is_task_file(named: str) -> bool:
    """Whether one of `eval.tasks` is a file, not a name."""
    return named.endswith((".yaml", ".yml"))


def _absolutes(named: Sources | None) -> Sources | None:
    return tuple(str(_absolute(each)) for each in named) if isinstance(named, tuple) else _absolute(named)


def _absolute(named: str | None) -> str | None:
    if named is None or named in _NAMES or ":" in named:
        return named
    exists = Path(named).exists() or (glob.has_magic(named) and any(glob.iglob(named, recursive=True)))
    return str(Path(named).absolute()) if exists else named
