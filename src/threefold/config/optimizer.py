"""The section `optimizer`, and the one table of optimizers that have a name.

Everything that the project knows of an optimizer without torch is its row in `OPTIMIZERS`; its class is a module of
`optim` or torch's. To add one, add both.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from threefold.config.section import (
    Count,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Section,
)


@dataclass(frozen=True)
class NamedOptimizer:
    """The properties of a named optimizer.

    Attributes:
        path: of its class, or of a function without arguments that returns it: `package.module:name`.
        moment_bytes: kept for each trained parameter with its default options; None: it depends on the shapes.
        has_betas: optimizer.betas and optimizer.eps are Adam's.
        options: arguments beyond those that its constructor shows.
        needs_whole_matrices: its update of a matrix reads all of the matrix, which the ranks gather; on no host.
        splits: a rank that holds a part of a matrix updates that part as one process would.
        exact_path: of the class that was compared under train.reduce exact; None: it is refused there.
        exact_options: optimizer.options that were compared with it.
    """

    path: str
    moment_bytes: float | None = None
    has_betas: bool = False
    options: tuple[str, ...] = ()
    needs_whole_matrices: bool = False
    splits: bool = True
    exact_path: str | None = None
    exact_options: tuple[str, ...] = ()


OPTIMIZERS: Mapping[str, NamedOptimizer] = {
    "adamw": NamedOptimizer(
        "torch.optim:AdamW",
        moment_bytes=8.0,
        has_betas=True,
        exact_path="threefold.optim.exact:ExactAdamW",
    ),
    # Two bytes, and two scales of float32 for 256 parameters.
    "adamw_8bit": NamedOptimizer(
        "threefold.optim.eightbit:adamw_8bit",
        moment_bytes=2.0 + 8 / 256,
        has_betas=True,
        splits=False,
    ),
    "muon": NamedOptimizer(
        "threefold.optim.muon:Muon", has_betas=True, needs_whole_matrices=True
    ),
    # Its eps are two other things than Adam's.
    "adafactor": NamedOptimizer(
        "threefold.optim.adafactor:Adafactor", options=("eps",), needs_whole_matrices=True
    ),
    "sgd": NamedOptimizer(
        "torch.optim:SGD",
        moment_bytes=0.0,
        exact_path="threefold.optim.exact:ExactSGD",
        exact_options=("momentum", "dampening", "nesterov"),
    ),
}


class GroupConfig(Section):
    """Parameters with a rate or a decay of their own."""

    match: str = Field(description="regular expression, found in the parameters' names")
    lr: PositiveFloat | None = Field(
        None, description="peak learning rate; default: optimizer.lr"
    )
    weight_decay: NonNegativeFloat | None = Field(
        None, description="for all that match; default: as without groups"
    )
    name: str | None = Field(
        None, description="name in metrics (lr_NAME); default: group0, group1, .."
    )


class OptimizerConfig(Section):
    """The optimizer ([page](optimizers.md)), and the learning rate as a function of the step."""

    name: str = Field(
        "adamw",
        description=f"{', '.join(OPTIMIZERS)}, or the path of an installed class: torch.optim.NAdam",
    )
    options: dict[str, Any] = Field(
        {}, description="further arguments to its class: {momentum: 0.9}"
    )
    lr: PositiveFloat | Literal["auto"] = Field(
        "auto",
        description="peak learning rate; auto: 2e-3 for random weights, 2e-5 for pretrained ones, 2e-4 for LoRA",
    )
    betas: Annotated[tuple[float, float], Field(strict=False)] = Field(
        (0.9, 0.95), description="Adam's two decay rates"
    )
    eps: PositiveFloat = Field(1e-8, description="added to the root of the second moment")
    moments: Literal["float32", "bfloat16"] = Field(
        "float32",
        description="dtype of adamw's two moments between steps; bfloat16: half their memory",
    )
    weight_decay: NonNegativeFloat = Field(0.1, description="decoupled, on matrices only")
    groups: Annotated[tuple[GroupConfig, ...], Field(strict=False)] = Field(
        (),
        description="[{match: REGEX, lr: 1e-4, weight_decay: 0, name: NAME}, ..]; the first match applies",
    )
    warmup_steps: Count = Field(10, description="steps of linear warm-up")
    schedule: Literal["constant", "linear", "cosine", "wsd", "inverse_sqrt"] = Field(
        "cosine",
        description="shape after the warm-up; wsd: constant, then a decay over the last decay_steps",
    )
    decay_steps: PositiveInt | None = Field(
        None, description="wsd: number of final steps over which the rate decays"
    )
    decay_shape: Literal["linear", "1-sqrt"] = Field(
        "linear",
        description="wsd: shape of the decay; 1-sqrt: by the square root of the fraction of decay_steps done",
    )
    ema: Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False)] | None = Field(
        None,
        description="decay of a moving average of the weights, kept alongside them: 0.999; null: none",
    )
    min_lr: NonNegativeFloat = Field(
        0.0, description="learning rate at the last step of a decaying schedule"
    )
