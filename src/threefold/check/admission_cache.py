"""Results that were found before, so that a model is probed once for each way in which it is computed.

A result is one file in the cache, named after everything that it depends on: the sources of the model's class and of
this package, the versions of torch and transformers, the reduced architecture, the mesh, the kernels and the device.
Only a result that holds is kept.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import platform
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers
import xxhash

from threefold.check.compare import Comparison, Difference
from threefold.check.probes import Subject
from threefold.mesh.environment import cache_folder
from threefold.mesh.mesh import Mesh

_OWN_SOURCES = ("check", "model", "training")


def key_of(subject: Subject, mesh: Mesh) -> str:
    """Identifies what the probes of a subject depend on."""
    config, described = subject.config, type(subject.architecture)
    device = torch.cuda.get_device_name(mesh.device) if mesh.device.type == "cuda" else platform.machine()
    parts: list[Any] = [
        *(version("threefold"), torch.__version__, transformers.__version__, platform.python_version()),
        _digest_of(Path(__file__).parents[1], *_OWN_SOURCES),
        # The folder of a config's class has its model's sources.
        *(described.__qualname__, _digest_of(Path(inspect.getfile(described)).parent)),
        *(mesh.device.type, device, mesh.topology.sizes, vars(subject.mode), subject.narrow),
        *(config.mesh.cp_method, config.mesh.sequence_parallel, config.mesh.ep, config.model.attention),
        *(config.train.fused_loss, config.train.activation_checkpointing),
        subject.architecture.to_json_string(use_diff=False),
    ]
    return xxhash.xxh3_128_hexdigest(json.dumps(parts).encode())


@functools.cache
def _digest_of(folder: Path, *parts: str) -> str:
    """Of the names and contents of the Python files of a folder, or of its parts with all folders below."""
    files = [file for part in parts for file in (folder / part).rglob("*.py")] or list(folder.glob("*.py"))
    seen = xxhash.xxh3_128()
    for file in sorted(files):
        seen.update(f"{file.relative_to(folder)} {file.stat().st_size} ".encode())
        seen.update(file.read_bytes())
    return seen.hexdigest()


def read(key: str) -> list[Difference] | None:
    """The results kept under a key, if they can be read and hold."""
    try:
        values = json.loads((_folder() / f"{key}.json").read_text())
        results = [Difference(**result) for result in values]
        return results if Comparison(results).holds else None
    except (OSError, ValueError, TypeError):
        return None


def keep(key: str, results: list[Difference]) -> None:
    """Keeps results under a key; a cache that cannot be written is left as it is."""
    try:
        _folder().mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=_folder(), suffix=".part", delete=False) as file:
            file.write(json.dumps([vars(result) for result in results]))
        os.replace(file.name, _folder() / f"{key}.json")
    except OSError:
        return


def _folder() -> Path:
    return cache_folder() / "admission"
