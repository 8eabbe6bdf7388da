"""Logging, tracking and the audit of a run."""

import warnings
from typing import Annotated, Literal

from pydantic import Field

from threefold.config.section import Count, PositiveFloat, PositiveInt, Section, StepRange

# The trackers that log.trackers may name.
TRACKERS = ("tensorboard", "wandb", "trackio", "mlflow")


with warnings.catch_warnings():
    warnings.filterwarnings("ignore", 'Field name "json"', UserWarning)

    class LogConfig(Section):
        """What to log, and where."""

        dir: str | None = Field(None, description="the run's folder; default runs/<time>")
        every: PositiveInt = Field(
            10, description="steps between metrics lines; first and last are always logged"
        )
        trackers: Annotated[tuple[str, ...], Field(strict=False)] = Field(
            (),
            description="trackers that get the metrics besides metrics.jsonl: tensorboard, wandb, trackio, mlflow",
        )
        project: str = Field(
            "threefold", description="project name in wandb and trackio, experiment in mlflow"
        )
        profile: StepRange | None = Field(
            None,
            description="[first, last] steps to trace on every rank, into the run's folder; see threefold profile",
        )
        stall_s: PositiveFloat = Field(
            120.0, description="time without progress after which the late rank is named, s"
        )
        json: bool = Field(  # type: ignore[assignment]  # the name of a method that pydantic no longer wants to be used
            False,
            description="print JSON lines, each with its kind: head, step, evaluation, skipped, text",
        )
        sample_tokens: Count = Field(
            64,
            description="tokens to generate at the end, and for each of eval.sample; 0: none",
        )


class AuditConfig(Section):
    """Proof of what was read: every rank's digests, compared during the run and kept in audit.jsonl."""

    every: Count = Field(
        10,
        description="steps between audits; each save and the end of the run are audited too; 0: none",
    )
    rows: bool | Literal["auto"] = Field(
        "auto",
        description="keep the loss of every row of every step (threefold why); auto: where the loss gives it",
    )
