"""Objectives other than the cross entropy of the next token."""

from typing import Annotated, Literal

from pydantic import Field

from threefold.config.section import PositiveFloat, Section


class DpoConfig(Section):
    """Preference learning from pairs of answers (arXiv:2305.18290), for train.objective dpo."""

    beta: PositiveFloat = Field(
        0.1,
        description="scale of the rewards: how closely the model is held to the one it started from",
    )
    loss: Literal["sigmoid", "ipo", "hinge"] = Field(
        "sigmoid",
        description="loss on a pair's margin: DPO's; squared, on means over tokens (IPO); or hinge (SLiC)",
    )
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5, allow_inf_nan=False)] = Field(
        0.0, description="sigmoid: fraction of pairs whose answers are assumed to be swapped"
    )
