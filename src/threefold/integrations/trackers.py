"""Trackers beside the metrics file: TensorBoard, Weights & Biases, trackio.

They hear what the metrics file hears, on rank 0, and are told the config, the mesh and the versions first. A tracker
may fail as it likes: it is said once, and training goes on without it. What is asked for and not installed is refused
before training begins.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from threefold.errors import Problem
from threefold.jsonl import Metrics, Tracker

log = logging.getLogger("threefold")

_IDS = "trackers.json"
# A login that a terminal asks for, and an upload without a network, must not hold the other ranks.
_ASKED_FOR_S, _FINISHED_WITHIN_S = 10, 300
# The module that each needs; the extra of the same name brings it.
_MODULES = {"tensorboard": "tensorboard", "wandb": "wandb", "trackio": "trackio"}


@dataclass(frozen=True)
class RunDescription:
    """What a tracker is told of a run before its first step.

    Attributes:
        folder: the run's; its name is the run's name, and ids of trackers are kept in it.
        config: plain values.
        facts: the mesh, the versions.
        first_step: steps from this one on are new; a tracker that can forget does so with what it has of them.
    """

    folder: Path
    project: str
    config: Mapping[str, Any]
    facts: Mapping[str, Any]
    first_step: int = 1

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @property
    def told(self) -> dict[str, Any]:
        """Config and facts together."""
        return {**self.config, "run": dict(self.facts)}

    def id_of(self, tracker: str, make: Callable[[], str]) -> str:
        """The id that a tracker knows this run by, the same over its resumes."""
        path = self.folder / _IDS
        ids = json.loads(path.read_text()) if path.exists() else {}
        if tracker not in ids:
            ids[tracker] = make()
            temporary = path.with_name(f".{_IDS}")
            temporary.write_text(json.dumps(ids))
            os.replace(temporary, path)
        return ids[tracker]


def problems(names: Sequence[str]) -> list[Problem]:
    """Trackers that are asked for and not installed."""
    missing = [name for name in names if name in _MODULES and importlib.util.find_spec(_MODULES[name]) is None]
    return [
        Problem(
            f"log.trackers has {name}, and the package {_MODULES[name]} is not installed",
            "a tracker that is there when training begins",
            f"pip install 'threefold[{name}]', or leave {name} out of log.trackers",
        )
        for name in missing
    ]


def open_trackers(names: Sequence[str], run: RunDescription, say: Callable[[str], None]) -> list[Tracker]:
    """The trackers of these names, each guarded; rank 0 calls it.

    Args:
        say: prints a line for people.
    """
    openers: dict[str, Callable[[RunDescription], Tracker]] = {
        "tensorboard": TensorBoard,
        "wandb": WeightsAndBiases,
        "trackio": Trackio,
    }
    return [Guarded(name, partial(openers[name], run), say) for name in names]


class Guarded:
    """A tracker whose failure is said once and ends nothing but itself."""

    def __init__(self, name: str, open_tracker: Callable[[], Tracker], say: Callable[[str], None]) -> None:
        self._name, self._say = name, say
        self._tracker: Tracker | None = None
        self._try("did not open", lambda: setattr(self, "_tracker", open_tracker()))

    def log(self, metrics: Metrics) -> None:
        """Passes metrics on, as long as the tracker works."""
        if (tracker := self._tracker) is not None:
            self._try("failed", lambda: tracker.log(metrics))

    def close(self) -> None:
        """Closes the tracker."""
        if (tracker := self._tracker) is not None:
            self._try("did not close", tracker.close)
            self._tracker = None

    def _try(self, what: str, act: Callable[[], None]) -> None:
        try:
            act()
        except (Exception, SystemExit) as error:  # a library's exit would be training's
            self._tracker = None
            log.warning("tracker %s %s", self._name, what, exc_info=True)
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            self._say(f"tracker {self._name} {what} and is left out: {reason} (training goes on; see the rank's log)")


class TensorBoard:
    """Event files in the run's folder, below `tensorboard`; steps that are done again replace those before."""

    def __init__(self, run: RunDescription) -> None:
        from torch.utils.tensorboard import SummaryWriter

        from threefold.config.text import as_yaml

        self._writer: Any = SummaryWriter(str(run.folder / "tensorboard"), purge_step=run.first_step)
        for section, values in run.told.items():
            lines = [f"    {key}: {as_yaml(value)}" for key, value in values.items()]
            self._writer.add_text(section, "\n".join(lines), run.first_step - 1)
        self._writer.flush()

    def log(self, metrics: Metrics) -> None:
        """Numbers as scalars of `train` or `eval`."""
        part = "eval" if "eval_loss" in metrics else "train"
        for name, value in _numbers(metrics).items():
            self._writer.add_scalar(f"{part}/{name.removeprefix('eval_')}", value, metrics["step"])
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run at Weights & Biases, or offline in the run's folder (WANDB_MODE=offline); resumed under the same id."""

    def __init__(self, run: RunDescription) -> None:
        import wandb

        self._run: Any = wandb.init(
            project=run.project,
            name=run.name,
            id=run.id_of("wandb", lambda: uuid.uuid4().hex[:8]),
            resume="allow",
            dir=str(run.folder),
            config=run.told,
            settings=wandb.Settings(
                silent=True, console="off", login_timeout=_ASKED_FOR_S, finish_timeout=_FINISHED_WITHIN_S
            ),
        )
        # Steps that a resumed run does again come with a number that wandb's own counter has passed.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, metrics: Metrics) -> None:
        """All numbers, over `step`."""
        self._run.log({"step": metrics["step"], **_numbers(metrics)})

    def close(self) -> None:
        self._run.finish()


class Trackio:
    """A run in trackio's local database (TRACKIO_DIR), which `trackio show` serves; resumed by its name."""

    def __init__(self, run: RunDescription) -> None:
        import trackio

        name = run.id_of("trackio", lambda: run.name)
        with redirect_stdout(None):  # it explains itself at length
            self._run: Any = trackio.init(
                project=run.project,
                name=name,
                config=run.told,
                resume="allow",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )

    def log(self, metrics: Metrics) -> None:
        """All numbers of the step."""
        self._run.log(_numbers(metrics), step=metrics["step"])

    def close(self) -> None:
        import trackio

        with redirect_stdout(None):
            trackio.finish()


def _numbers(metrics: Metrics) -> dict[str, float]:
    return {
        name: value
        for name, value in metrics.items()
        if name != "step" and isinstance(value, int | float) and not isinstance(value, bool)
    }
