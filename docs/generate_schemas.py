"""What each command prints with --json, and docs/schemas of it as JSON Schema: `python docs/generate_schemas.py`.

One object on stdout, or a line of JSON for each row, rank or folder; `plan --gpus` has a list. An error has no object:
it is on stderr, in its three parts, and the exit code says so. What is not finite is null. A field that is not declared
here depends on what the machine or the run has.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal, NotRequired

from pydantic import TypeAdapter
from typing_extensions import TypedDict

FOLDER = Path(__file__).parent / "schemas"
DIALECT = "https://json-schema.org/draft/2020-12/schema"
# Of objects whose fields another room describes.
Values = dict[str, Any]


class DoctorAnswer(TypedDict):
    schema: int
    findings: list[Values]
    stop: bool
    machine: NotRequired[Values]
    store: NotRequired[Values]


class EvalAnswer(TypedDict):
    checkpoint: str
    ema: bool
    metrics: Values


class ExplainAnswer(TypedDict):
    """From `name` on only where a known error explains what happened."""

    schema: int
    status: str
    retry: Literal["no", "yes", "other node"]
    telling: list[Values]
    notes: list[str]
    name: NotRequired[str]
    title: NotRequired[str]
    confidence: NotRequired[str]
    line: NotRequired[Values]
    frame: NotRequired[str | None]
    ending: NotRequired[Values | None]
    facts: NotRequired[list[str]]
    cause: NotRequired[str]
    steps: NotRequired[list[str]]
    several: NotRequired[bool]
    check: NotRequired[str | None]
    asked: NotRequired[str | None]
    page: NotRequired[str]
    others: NotRequired[list[Values]]


class ExportAnswer(TypedDict):
    folder: str
    step: int
    num_parameters: int
    files: list[str]
    verified: str


class HashAnswer(TypedDict):
    path: str
    step: NotRequired[int]
    sha256: str
    num_tensors: int
    num_parameters: int


class ImportAnswer(TypedDict):
    folder: str
    program: str
    step: int
    num_weights: int
    left_out: list[str]


class OrderAnswer(TypedDict):
    """`rows` of a step by dp rank, or where a row was `read`."""

    step: NotRequired[int]
    mesh: NotRequired[str]
    rows: NotRequired[list[list[int]]]
    row: NotRequired[int]
    read: NotRequired[list[Values]]


class AuditAnswer(TypedDict):
    run: str
    proved: str
    epochs: list[Values]


class OverlapAnswer(TypedDict):
    """`exact` and `alike`: which documents are trained on, and where; empty: none is."""

    num_documents: int
    exact: list[Values]
    alike: list[Values]
    share_read: float
    step: int


class PlanAnswer(TypedDict):
    mesh: str | Values
    flops_per_token: float
    fits: NotRequired[bool]


class ProfileAnswer(TypedDict):
    rank: int
    steps: int
    step_s: float
    phases: Values
    kernels: list[tuple[str, float, float]]


class ReportAnswer(TypedDict):
    page: str
    bytes: int
    runs: list[str]


class SampleAnswer(TypedDict):
    """`text` begins with the prompt."""

    checkpoint: str
    step: int
    prompt: str
    text: str


class ShowAnswer(TypedDict):
    row: int
    ids: list[int]
    loss_mask: list[bool]
    documents: list[int]


class SubmitAnswer(TypedDict):
    """`text`: the job, or what the cluster answered."""

    cluster: str
    submitted: bool
    hosts: int
    text: str


class VerifyAnswer(TypedDict):
    """Losses and norms are pairs: of the mesh, and of one process. Null in them is a number that is not finite."""

    mesh: str
    holds: bool
    losses: list[tuple[float | None, float | None]]
    norms: list[tuple[float | None, float | None]]
    gradients: list[Values]
    not_finite: list[Values]
    first_difference: str | None
    departed_layer: int | None
    admitted: bool
    admission: str


class RefereeAnswer(TypedDict):
    schema: int
    record: str
    command: list[str]
    command_exit_code: int | None
    ranks: int
    steps: int
    verdict: Literal["proved", "refuted", "not judged"]
    exit_code: int
    parts: list[Values]


class WhyAnswer(TypedDict):
    run: str
    steps: list[int]
    step: int | None
    findings: list[Values]
    rows: NotRequired[list[Values]]
    damaged: list[str]
    missing: str | None


ANSWERS: dict[str, Any] = {
    "data audit": AuditAnswer,
    "data order": OrderAnswer,
    "data overlap": OverlapAnswer,
    "data show": ShowAnswer,
    "doctor": DoctorAnswer,
    "eval": EvalAnswer,
    "explain": ExplainAnswer,
    "export": ExportAnswer,
    "hash": HashAnswer,
    "import": ImportAnswer,
    "plan": PlanAnswer,
    "profile": ProfileAnswer,
    "referee": RefereeAnswer,
    "report": ReportAnswer,
    "sample": SampleAnswer,
    "submit kubernetes": SubmitAnswer,
    "submit sagemaker": SubmitAnswer,
    "submit slurm": SubmitAnswer,
    "verify": VerifyAnswer,
    "why": WhyAnswer,
}


def schemas() -> dict[str, str]:
    """The text of each file, by its name."""
    values = {
        name: {"$schema": DIALECT, **TypeAdapter(answer).json_schema()}
        for name, answer in ANSWERS.items()
    }
    return {
        f"{name.replace(' ', '-')}.json": json.dumps(value, indent=2) + "\n"
        for name, value in values.items()
    }


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for path in FOLDER.glob("*.json"):
        path.unlink()
    for name, text in schemas().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
