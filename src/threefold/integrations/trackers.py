"""Trackers besides the metrics file and the screen: TensorBoard, Weights & Biases, trackio, MLflow.

They get the same metrics as the metrics file, on rank 0, after the config, the mesh and the versions. If a tracker
fails, this is reported once, training continues, and it later gets the metrics that it missed. A tracker that is not
installed is refused before training begins.
"""

import importlib.util
import json
import logging
import math
import os
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from threefold.config.paths import METRICS
from threefold.errors import Problem, first_line
from threefold.jsonl import Lines, Metrics, Tracker, Values

log = logging.getLogger("threefold")

_IDS = "trackers.json"
# A tracker that has failed is tried again after so long, then after twice as long each time, and at most after so long;
# so many lines are kept for it.
_TRY_AGAIN_S, _AT_MOST_S, _MOST_MISSED = 60.0, 600.0, 100_000
# A login prompt, or an upload without a network, must not block the other ranks.
_LOGIN_TIMEOUT_S, _FINISH_TIMEOUT_S = 10, 300
_MLFLOW = {
    "MLFLOW_ALLOW_FILE_STORE": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
}
# MLflow's limits: values per call, and length of a value.
_MOST_PARAMS, _LONGEST_PARAM = 100, 6000


@dataclass(frozen=True)
class RunDescription:
    """The description that a tracker gets before the first step of a run.

    Attributes:
        folder: the run's; its name is the run's name, and ids of trackers are kept in it.
        config: plain values.
        facts: the mesh, the versions.
        first_step: the first new step; a tracker that can, deletes what it has of this and later steps.
    """

    folder: Path
    project: str
    config: Values
    facts: Values
    first_step: int = 1

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @property
    def values(self) -> dict[str, Any]:
        """Config and facts together."""
        return {**self.config, "run": dict(self.facts)}

    def gone_back(self) -> list[Metrics] | None:
        """The logged lines that remain valid, if a run goes back over later steps that it has logged; else None."""
        lines = [
            line.values
            for line in Lines(self.folder / METRICS).read()
            if type(line.values.get("step")) is int
        ]
        if all(line["step"] < self.first_step for line in lines):
            return None
        standing: list[Metrics] = []
        for line in lines:
            # Another pass over steps that were trained before replaces them.
            if "loss" in line:
                standing = [each for each in standing if each["step"] < line["step"]]
            standing.append(line)
        return [line for line in standing if line["step"] < self.first_step]

    @property
    def ids(self) -> dict[str, str]:
        """The run's ids, by tracker."""
        path = self.folder / _IDS
        return json.loads(path.read_text()) if path.exists() else {}

    def id_of(self, tracker: str, make: Callable[[], str], *, anew: bool = False) -> str:
        """The run's id in a tracker, the same in every resume; `anew`: another one from now on."""
        path, ids = self.folder / _IDS, self.ids
        if anew or tracker not in ids:
            ids[tracker] = make()
            temporary = path.with_name(f".{_IDS}")
            temporary.write_text(json.dumps(ids))
            os.replace(temporary, path)
        return ids[tracker]


def problems(names: Sequence[str]) -> list[Problem]:
    """Requested trackers that are not installed; each is a package and an extra of the same name."""
    return [
        Problem(
            f"log.trackers has {name}, and the package {name} is not installed",
            "a tracker that is installed when training begins",
            f"pip install 'threefold[{name}]', or leave {name} out of log.trackers",
        )
        for name in names
        if name in _OPENERS and importlib.util.find_spec(name) is None
    ]


def open_trackers(
    names: Sequence[str], run: RunDescription, say: Callable[[str], None]
) -> list[Tracker]:
    """The trackers of these names, each guarded, with `say` to print a line; rank 0 calls it."""
    return [Guarded(name, partial(_OPENERS[name], run), say) for name in names]


class Guarded:
    """A tracker whose failure is reported once and stops nothing else; it is tried again, and misses nothing.

    Args:
        now_s: the time, by a clock that never goes back.
    """

    def __init__(
        self,
        name: str,
        open_tracker: Callable[[], Tracker],
        say: Callable[[str], None],
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name = name
        self._say = say
        self._open = open_tracker
        self._now_s = now_s
        self._tracker: Tracker | None = None
        self._missed: deque[Metrics] = deque(maxlen=_MOST_MISSED)
        self._wait_s, self._again_s = 0.0, -math.inf
        self._catch_up()

    def log(self, metrics: Metrics) -> None:
        """Passes metrics on, or keeps them until the tracker works again."""
        self._missed.append(metrics)
        if self._now_s() >= self._again_s:
            self._catch_up()

    def close(self) -> None:
        if self._tracker is not None:
            self._catch_up()
            self._try("did not close", self._tracker.close, again="")
            self._tracker = None

    def _catch_up(self) -> None:
        if self._tracker is None and not self._try(
            "did not open", lambda: setattr(self, "_tracker", self._open())
        ):
            return
        assert self._tracker is not None
        while self._missed:
            if not self._try("failed", partial(self._tracker.log, self._missed[0])):
                return
            self._missed.popleft()
        if self._wait_s:
            self._say(f"tracker {self._name} works again, and received what it had missed")
            self._wait_s = 0.0

    def _try(
        self, what: str, act: Callable[[], None], *, again: str = ", and it is retried"
    ) -> bool:
        try:
            act()
            return True
        except (Exception, SystemExit) as error:  # a library's exit must not end training
            log.warning("tracker %s %s", self._name, what, exc_info=True)
            if not self._wait_s:
                self._say(
                    f"tracker {self._name} {what}: {first_line(error)} (training continues{again}; see the rank's log)"
                )
            # A try may take many seconds, in which the other ranks wait.
            self._wait_s = min(max(_TRY_AGAIN_S, 2 * self._wait_s), _AT_MOST_S)
            self._again_s = self._now_s() + self._wait_s
            return False


class TensorBoard:
    """Event files in the run's folder, below `tensorboard`; repeated steps replace the earlier ones."""

    def __init__(self, run: RunDescription) -> None:
        from torch.utils.tensorboard import SummaryWriter

        from threefold.config.yaml_text import as_yaml

        self._writer: Any = SummaryWriter(
            str(run.folder / "tensorboard"), purge_step=run.first_step
        )
        for section, values in run.values.items():
            lines = [f"    {key}: {as_yaml(value)}" for key, value in values.items()]
            self._writer.add_text(section, "\n".join(lines), run.first_step - 1)
        self._writer.flush()

    def log(self, metrics: Metrics) -> None:
        """Numbers as scalars of `train` or `eval`."""
        part = "eval" if "eval_loss" in metrics else "train"
        for name, value in _numbers(metrics).items():
            self._writer.add_scalar(
                f"{part}/{name.removeprefix('eval_')}", value, metrics["step"]
            )
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
            config=run.values,
            settings=wandb.Settings(
                silent=True,
                console="off",
                login_timeout=_LOGIN_TIMEOUT_S,
                finish_timeout=_FINISH_TIMEOUT_S,
            ),
        )
        # A resumed run may repeat steps that wandb's own counter has already passed.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, metrics: Metrics) -> None:
        self._run.log({"step": metrics["step"], **_numbers(metrics)})

    def close(self) -> None:
        self._run.finish()


class Trackio:
    """A run in trackio's local database (TRACKIO_DIR), which `trackio show` serves; resumed by its own name.

    If a run goes back over steps, which it cannot forget, another run with what remains valid replaces that one.
    """

    def __init__(self, run: RunDescription) -> None:
        import trackio

        before = run.ids.get("trackio")
        again = run.gone_back()
        make = partial(_named, run.name)  # folders may have equal names
        name = run.id_of("trackio", make, anew=again is not None)
        with redirect_stdout(None):  # it prints a long explanation
            off: dict[str, Any] = dict.fromkeys(
                ("embed", "auto_log_gpu", "auto_log_cpu"), False
            )
            self._run: Any = trackio.init(
                project=run.project, name=name, config=run.values, resume="allow", **off
            )
            for line in again or ():
                self.log(line)
            if again is not None and before is not None:
                for each in trackio.Api().runs(run.project):
                    if each.name == before:
                        each.delete()

    def log(self, metrics: Metrics) -> None:
        self._run.log(_numbers(metrics), step=metrics["step"])

    def close(self) -> None:
        import trackio

        with redirect_stdout(None):
            trackio.finish()


class MLflow:
    """A run of MLflow: at MLFLOW_TRACKING_URI, else in files below `mlflow` in the run's folder; resumed by its id.

    If a run goes back over steps, another run with what remains valid replaces that one, which MLflow can restore.
    """

    def __init__(self, run: RunDescription) -> None:
        # Read only by mlflow: it calls its files deprecated, and would retry a dead server for many minutes.
        for name, value in _MLFLOW.items():
            os.environ.setdefault(name, value)
        import mlflow
        from mlflow.entities import Metric, RunTag

        is_set = mlflow.tracking.is_tracking_uri_set()
        self._client: Any = mlflow.MlflowClient(
            None if is_set else (run.folder / "mlflow").resolve().as_uri()
        )
        self._metric: Any = Metric
        before = run.ids.get("mlflow")
        again = run.gone_back()
        self._id = run.id_of("mlflow", lambda: self._created(run), anew=again is not None)
        for line in again or ():
            self.log(line)
        if again is not None and before is not None:
            self._client.delete_run(before)
        self._client.update_run(self._id, status="RUNNING")
        # Keys that a resume may have changed; MLflow keeps the first values of parameters.
        self._client.log_batch(
            self._id, tags=[RunTag(name, str(value)) for name, value in run.facts.items()]
        )

    def _created(self, run: RunDescription) -> str:
        from mlflow.entities import Param

        experiment = self._client.get_experiment_by_name(run.project)
        place = (
            experiment.experiment_id
            if experiment is not None
            else self._client.create_experiment(run.project)
        )
        number = self._client.create_run(place, run_name=run.name).info.run_id
        values = {
            f"{section}.{key}": each
            for section, keys in run.config.items()
            for key, each in keys.items()
        }
        params = [Param(name, str(value)[:_LONGEST_PARAM]) for name, value in values.items()]
        for first in range(0, len(params), _MOST_PARAMS):
            self._client.log_batch(number, params=params[first : first + _MOST_PARAMS])
        return number

    def log(self, metrics: Metrics) -> None:
        logged = (
            datetime.fromisoformat(metrics["time"]).timestamp()
            if "time" in metrics
            else time.time()
        )
        points = [
            self._metric(name, value, int(logged * 1000), metrics["step"])
            for name, value in _numbers(metrics).items()
        ]
        self._client.log_batch(self._id, metrics=points)

    def close(self) -> None:
        self._client.set_terminated(self._id)


def _named(folder: str) -> str:
    return f"{folder}-{uuid.uuid4().hex[:8]}"


def _numbers(metrics: Metrics) -> dict[str, float]:
    values = (
        (name, value)
        for name, value in metrics.items()
        if name != "step" and not isinstance(value, bool)
    )
    return {name: value for name, value in values if isinstance(value, int | float)}


_OPENERS: dict[str, Callable[[RunDescription], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "trackio": Trackio,
    "mlflow": MLflow,
}
