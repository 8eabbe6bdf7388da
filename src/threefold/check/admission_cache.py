"""Cached results, so that a model is probed once for each way in which it is computed.

A result is one file in the cache, named after everything that it depends on: the code of the model and of this package
(`code_digest`), the versions of torch and transformers, the reduced architecture, the config, the mesh and the device.
Only a result that holds is kept.
"""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Any

import torch
import transformers
import xxhash

from threefold.build_id import build_id
from threefold.check.compare import Comparison, Difference
from threefold.check.probes import Subject
from threefold.jsonl import write_whole
from threefold.mesh.environment import cache_folder
from threefold.mesh.mesh import Mesh

# What the probes do not depend on, which a run may change under a kept pass. Everything else in the sections `model`,
# `train` and `mesh` is part of the key.
_IRRELEVANT = {
    "model": {
        # Weights are not probed here; the class is in the code's digest.
        "name_or_path",
        "revision",
        "init_missing",
        # The architecture itself is in the key.
        "config",
        "admission",
    },
    "train": {
        # The probes have their own rows and seeds.
        "steps",
        "epochs",
        "global_batch",
        "micro_batch",
        "seed",
        # Of what follows the gradients probed.
        "grad_clip",
        "label_smoothing",
        "z_loss",
        "objective",
        "nonfinite",
        # Of the process.
        "memory_check",
        "timeout_s",
    },
    # The topology and the device are in the key.
    "mesh": {"dp", "dp_shard", "cp", "tp", "device", "timeout_s"},
}


def key_of(subject: Subject, mesh: Mesh, code: str) -> str:
    """Identifies what the probes of a subject depend on; `code` is the digest of what computes them."""
    config = subject.config
    device = (
        torch.cuda.get_device_name(mesh.device)
        if mesh.device.type == "cuda"
        else platform.machine()
    )
    parts: list[Any] = [
        build_id(),
        torch.__version__,
        transformers.__version__,
        platform.python_version(),
        code,
        mesh.device.type,
        device,
        mesh.topology.sizes,
        vars(subject.mode),
        subject.narrow and subject.narrow.train.compile,
        *(
            getattr(config, name).model_dump(mode="json", exclude=left)
            for name, left in _IRRELEVANT.items()
        ),
        subject.architecture.to_json_string(use_diff=False),
        (config.data.seq_len, subject.longer),
        *(
            (real.architecture.to_json_string(use_diff=False), real.seq_len)
            for real in subject.real
        ),
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
        content = json.dumps([vars(result) for result in results]).encode()
        write_whole(_folder() / f"{key}.json", [content])
    except OSError:
        return


def _folder() -> Path:
    return cache_folder() / "admission"
