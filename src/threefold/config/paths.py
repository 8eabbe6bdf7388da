"""The files and folders that a config names, and the same config from another folder."""

from __future__ import annotations

import glob
from pathlib import Path
from typing import Any

from threefold.config.schema import Config, Sources

# In a run's folder: what the run is, and the config with which it is resumed.
RUN_FILE, RUN_CONFIG = "run.json", "config.yaml"
_NAMES = {"stdlib", "bytes"}


def run_of(config: Path) -> Path | None:
    """The folder of the run whose own config this file is; None for any other file."""
    return config.parent if config.name == RUN_CONFIG and config.with_name(RUN_FILE).exists() else None


def with_absolute_paths(config: Config) -> Config:
    """The config with absolute paths in place of relative ones that exist here; names of the Hub stay as they are."""
    data = config.data
    mixture = data.mixture and {
        name: source.model_copy(update={"source": _absolutes(source.source)}) for name, source in data.mixture.items()
    }
    updates: dict[str, dict[str, Any]] = {
        "model": {"name_or_path": _absolute(config.model.name_or_path)},
        "data": {"source": _absolutes(data.source), "tokenizer": _absolute(data.tokenizer), "mixture": mixture},
        "eval": {"source": _absolutes(config.eval.source)},
    }
    return config.model_copy(
        update={section: getattr(config, section).model_copy(update=values) for section, values in updates.items()}
    )


def _absolutes(named: Sources | None) -> Sources | None:
    return tuple(str(_absolute(each)) for each in named) if isinstance(named, tuple) else _absolute(named)


def _absolute(named: str | None) -> str | None:
    if named is None or named in _NAMES or ":" in named:
        return named
    exists = Path(named).exists() or (glob.has_magic(named) and any(glob.iglob(named, recursive=True)))
    return str(Path(named).absolute()) if exists else named
