"""Tasks of lm-evaluation-harness (`eval.tasks`): the harness makes requests and metrics, the ranks the scores.

Scores are over the same tokens, cut at the same places, as those of the harness for the exported model.
"""

import importlib.util
import io
import logging
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr
from typing import Any

from threefold.config.paths import is_task_file, task_text
from threefold.config.schema import Config
from threefold.config.yaml_text import parse
from threefold.errors import ConfigError, Problem, first_line
from threefold.export.tokenizer_files import tokenizer_of
from threefold.jsonl import Metrics, Values
from threefold.model import noise
from threefold.model.model import Model
from threefold.run.task_scores import Scores, harness_of
from threefold.training.progress import Progress

_PACKAGE = "lm_eval"
_SCORED = ("loglikelihood", "loglikelihood_rolling", "multiple_choice")
# The harness' own: each evaluation draws the same examples.
_SHOTS_SEED = 1234


def problems(tasks: Sequence[str]) -> list[Problem]:
    """Why these tasks cannot be evaluated, as far as it is known before anything is loaded."""
    if tasks and importlib.util.find_spec(_PACKAGE) is None:
        what = f"eval.tasks = [{', '.join(tasks)}], but lm-evaluation-harness is not installed"
        return [
            Problem(what, "the package that has the tasks", "pip install 'threefold[tasks]'")
        ]
    return []


class EvalTasks:
    """Evaluates tasks after a step; every rank calls it, after the same step.

    Attributes:
        progress: where this rank is, in the steps too.
    """

    def __init__(self, config: Config, model: Model) -> None:
        """Raises: ConfigError: there is no such task, or one that is not scored by the probability of texts."""
        self.progress = Progress()
        self._mesh = model.mesh
        self._tasks = _load(config.eval.tasks)
        longest = model.positions or config.data.seq_len
        # The harness takes the length that a config names, also where its positions are scaled beyond.
        text = model.module.config.get_text_config()
        named = getattr(text, "max_position_embeddings", None) or longest
        self._scores = Scores(model, min(longest, named))
        self._harness = harness_of(self._scores, tokenizer_of(config))

    def __call__(self, step: int) -> Metrics:
        """Each task's figures, on rank 0: task_NAME_METRIC."""
        from lm_eval.evaluator import evaluate

        self.progress.enter("evaluation")
        self._scores.tick = self.progress.tick
        for task in self._tasks["tasks"].values():
            task.set_fewshot_seed(seed=_SHOTS_SEED)
        # Hides its progress bars on every rank.
        with noise.preserved(self._mesh.device), redirect_stderr(io.StringIO()):
            evals = evaluate(
                self._harness,
                self._tasks,
                bootstrap_iters=0,
                log_samples=False,
                verbosity="ERROR",
            )
        return (
            _metrics_of(evals["results"]) if self._mesh.rank == 0 and evals is not None else {}
        )


def _load(names: Sequence[str]) -> Any:
    """The harness' tasks, with their data; its output meanwhile is suppressed on every rank."""
    with redirect_stderr(io.StringIO()):
        return _loaded(names)


def _loaded(names: Sequence[str]) -> Any:
    import datasets
    from lm_eval.tasks import TaskManager

    datasets.disable_progress_bars()
    # A failure is reported once, with its reason.
    datasets.logging.set_verbosity(logging.CRITICAL)
    logging.getLogger(_PACKAGE).setLevel(logging.ERROR)
    # Listing the harness's own tasks takes time.
    manager = TaskManager(include_defaults=not all(map(is_task_file, names)))
    listed = set(manager.all_tasks)
    for name in names:
        if not is_task_file(name) and name not in listed:
            raise ConfigError(
                f"eval.tasks has {name}, which is not known",
                expected="a name that `lm-eval ls tasks` lists, or the path of a task's .yaml",
                fix="check the name",
            )
    asked = [name if name in listed else _own(name) for name in names]
    try:
        loaded = manager.load(asked)
    except Exception as error:  # from datasets, the Hub or the harness: of many families
        raise ConfigError(
            f"eval.tasks cannot be loaded: {first_line(error)}",
            expected="tasks whose data this machine has, or can load",
            fix="see the reason",
        ) from error
    for name, task in loaded["tasks"].items():
        if (kind := task.get_config("output_type")) not in _SCORED:
            raise ConfigError(
                f"eval.tasks has {name}, which is scored by {kind}",
                expected="tasks scored by the probability of texts, which any mesh computes",
                fix=f"leave {name} out; lm-eval runs it on an exported model",
            )
        if task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
    return loaded


def _own(path: str) -> Values:
    """A custom task. One that names functions is refused: they would be run from the files beside it."""
    text = task_text(path)
    if "!function" in text:
        raise ConfigError(
            f"{path} names a function, which would be run",
            expected="a task without code of its own",
            fix="a task of an installed package, which lm-eval finds by its name",
        )
    values = parse(text, path)
    if not isinstance(values, dict) or not isinstance(values.get("task"), str):
        raise ConfigError(
            f"{path} is not a task",
            expected="a mapping with `task`, its name",
            fix="see lm-eval's guide",
        )
    return values


def _metrics_of(results: Mapping[str, Values]) -> Metrics:
    metrics = {}
    for task, values in results.items():
        for name, value in values.items():
            metric, _, kept = name.partition(",")
            if isinstance(value, float) and not metric.endswith("_stderr"):
                suffix = "" if kept in ("", "none") else f"_{kept}"
                metrics[f"task_{task}_{metric}{suffix}"] = value
    return metrics
