"""Common base of config sections, which are frozen and strict, and the bounds of their numbers."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

PositiveInt = Annotated[int, Field(gt=0)]
Count = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
AxisSize = PositiveInt | Literal["auto"] | None
# Distinguished before they are checked, so that an error is about the intended one.
Sources = Annotated[
    Annotated[str, Tag("one source")]
    | Annotated[tuple[str, ...], Field(strict=False, min_length=1), Tag("sources")],
    Discriminator(lambda entry: "sources" if isinstance(entry, list | tuple) else "one source"),
]
StepRange = Annotated[tuple[PositiveInt, PositiveInt], Field(strict=False)]


class Section(BaseModel):
    """A section of a config."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        ser_json_inf_nan="constants",  # in model.config
        protected_namespaces=(),
    )
