"""Results that were found before, so that a model is probed once for each way in which it is computed.

A result is one file in the cache, named after everything that it depends on: the sources of the model's class and of
this package, the versions of torch and transformers, the reduced architecture, the mesh, the kernels and the device.
Only a result that holds is kept.
"""

from __future__ import annotations

import inspect
import json
import os
import platform
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
import xxhash

from threefold.build_id import build_id, source_digest
from threefold.check.compare import Comparison, Difference
from threefold.check.probes import Subject
from threefold.mesh.environment import cache_folder
from threefold.mesh.mesh import Mesh


def key_of(subject: Subject, mesh: Mesh) -> str:
    """Identifies what the probes of a subject depend on."""
    config, described = subject.config, type(subject.architecture)
    device = torch.cuda.get_device_name(mesh.device) if mesh.device.type == "cuda" else platform.machine()
    parts: list[Any] = [
        *(build_id(), torch.__version__, transformers.__version__, platform.python_version()),
        # The folder of a config's class has its model's sources.
        *(described.__qualname__, source_digest(Path(inspect.getfile(described)).parent)),
        *(mesh.device.type, device, mesh.topology.sizes, vars(subject.mode), subject.narrow),
        *(config.mesh.cp_method, config.mesh.sequence_parallel, config.mesh.ep, config.model.attention),
        *(config.train.fused_loss, config.train.activation_checkpointing),
        *(config.train.reduce, config.train.accumulate),
        subject.architecture.to_json_string(use_diff=False),
    ]
    return xxhash.xxh3_128_hexdigest(json.dumps(parts).encode())


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
