"""Threefold trains Hugging Face language models on a data x context x tensor mesh, exactly, and can prove it.

The public names are loaded on first use, so that `import threefold` and `threefold --help` load no torch.
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

if TYPE_CHECKING:
    from threefold import errors as errors
    from threefold.data.sampling.distribute import distribute as distribute
    from threefold.data.sampling.sampler import DistributedSampler as DistributedSampler
    from threefold.mesh.mesh import Mesh as Mesh
    from threefold.mesh.mesh import init_mesh
    from threefold.model.model import Model as Model
    from threefold.model.model import freeze as freeze
    from threefold.referee.block import Referee as Referee
    from threefold.referee.callback import RefereeCallback as RefereeCallback
    from threefold.run.load_model import load_model as load_model
    from threefold.run.load_model import optimizer as optimizer
    from threefold.run.run import Run as Run
    from threefold.run.start import Result as Result
    from threefold.run.start import train
    from threefold.run.user_objects import Callback as Callback
    from threefold.run.user_objects import Facts as Facts
    from threefold.training.evaluation import EvalNumbers as EvalNumbers
    from threefold.training.evaluation import EvalStep as EvalStep
    from threefold.training.numbers import StepNumbers as StepNumbers
    from threefold.training.saving import Loaded as Loaded
    from threefold.training.saving import Saving as Saving
    from threefold.training.saving import load as load
    from threefold.training.saving import save as save
    from threefold.training.step import TrainStep as TrainStep

_HOME_OF_NAME = {
    "Callback": "threefold.run.user_objects",
    "DistributedSampler": "threefold.data.sampling.sampler",
    "EvalNumbers": "threefold.training.evaluation",
    "EvalStep": "threefold.training.evaluation",
    "Facts": "threefold.run.user_objects",
    "Loaded": "threefold.training.saving",
    "Mesh": "threefold.mesh.mesh",
    "Model": "threefold.model.model",
    "Referee": "threefold.referee.block",
    "RefereeCallback": "threefold.referee.callback",
    "Result": "threefold.run.start",
    "Run": "threefold.run.run",
    "Saving": "threefold.training.saving",
    "StepNumbers": "threefold.training.numbers",
    "TrainStep": "threefold.training.step",
    "distribute": "threefold.data.sampling.distribute",
    "freeze": "threefold.model.model",
    "generate": "threefold.model.generation",  # as a method of Model
    "init_mesh": "threefold.mesh.mesh",
    "load": "threefold.training.saving",
    "load_model": "threefold.run.load_model",
    "optimizer": "threefold.run.load_model",
    "save": "threefold.training.saving",
    "save_pretrained": "threefold.export.mesh_model",  # as a method of Model
    "train": "threefold.run.start",
}

__all__ = [
    "Callback",
    "DistributedSampler",
    "EvalNumbers",
    "EvalStep",
    "Facts",
    "Loaded",
    "Mesh",
    "Model",
    "Referee",
    "RefereeCallback",
    "Result",
    "Run",
    "Saving",
    "StepNumbers",
    "TrainStep",
    "__version__",
    "distribute",
    "errors",
    "freeze",
    "init_mesh",
    "load",
    "load_model",
    "optimizer",
    "save",
    "train",
]


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name == "errors":
        return import_module("threefold.errors")
    if name not in _HOME_OF_NAME:
        raise AttributeError(f"module 'threefold' has no attribute {name!r}")
    return getattr(import_module(_HOME_OF_NAME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
