"""The files and folders that a config names, and the same config from another folder."""

from __future__ import annotations

import glob
from pathlib import Path
from typing import Any

from threefold.config.schema import Config
from threefold.config.section import Sources

# In a run's folder: what the run is, and the config with which it is resumed.
RUN_FILE, RUN_CONFIG = "run.json", "config.yaml"
# The logger of the line with which each start begins in a rank's log: a JSON object with its process.
LOG_START = "threefold.start"
PROFILE_FOLDER = "profile"  # what the ranks traced
EXPORT_FOLDER = "exports"  # what transformers loads
_NAMES = {"stdlib", "bytes"}


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
