"""Threefold trains Hugging Face language models on a data x context x tensor mesh, exactly, and can prove it.

The public names are loaded on first use, so that `import threefold` and `threefold --help` load no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from threefold.data.sampling.distribute import distribute as distribute
    from threefold.data.sampling.sampler import DistributedSampler as DistributedSampler
    from threefold.mesh.mesh import init_mesh
    from threefold.model.model import Model as Model
    from threefold.run.load_model import load_model as load_model
    from threefold.run.start import train
    from threefold.training.evaluation import EvalStep as EvalStep
    from threefold.training.saving import load as load
    from threefold.training.saving import save as save
    from threefold.training.step import TrainStep as TrainStep

_HOME_OF_NAME = {
    "DistributedSampler": "threefold.data.sampling.sampler",
    "EvalStep": "threefold.training.evaluation",
    "Model": "threefold.model.model",
    "TrainStep": "threefold.training.step",
    "distribute": "threefold.data.sampling.distribute",
    "generate": "threefold.export.mesh_model",  # as methods of Model
    "init_mesh": "threefold.mesh.mesh",
    "load": "threefold.training.saving",
    "load_model": "threefold.run.load_model",
    "save": "threefold.training.saving",
    "save_pretrained": "threefold.export.mesh_model",
    "train": "threefold.run.start",
}

__all__ = [
    "DistributedSampler",
    "EvalStep",
    "Model",
    "TrainStep",
    "__version__",
    "distribute",
    "init_mesh",
    "load",
    "load_model",
    "save",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF_NAME:
        raise AttributeError(f"module 'threefold' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOME_OF_NAME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
