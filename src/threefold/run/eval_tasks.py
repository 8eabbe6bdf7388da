"""Tasks of lm-evaluation-harness over the model as it lies on the mesh (`eval.tasks`).

The harness makes the requests and the figures; the ranks score them. All dp ranks take their share of the same batches,
so that each computes as often as the others, and exchange one number and one flag a request. What is scored is what the
harness scores of the exported model: the same tokens, cut at the same places.
"""

from __future__ import annotations

import importlib.util
import io
import logging
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from threefold.config.paths import is_task_file
from threefold.config.schema import Config
from threefold.config.text import parse
from threefold.errors import ConfigError, Problem
from threefold.export.tokenizer_files import tokenizer_of
from threefold.jsonl import Metrics
from threefold.model.model import Model
from threefold.training.progress import Progress

_PACKAGE = "lm_eval"
# float32 logits of the rows that are computed at one time.
_MOST_BYTES = 256 * 2**20
_SCORED = ("loglikelihood", "loglikelihood_rolling", "multiple_choice")
# The harness' own: each evaluation draws the same examples.
_SHOTS_SEED = 1234
# (tokens of a context, tokens of its continuation)
Request = tuple[Sequence[int], Sequence[int]]


def problems(tasks: Sequence[str]) -> list[Problem]:
    """Why these tasks cannot be evaluated, as far as it is known before anything is loaded."""
    if tasks and importlib.util.find_spec(_PACKAGE) is None:
        what = f"eval.tasks = [{', '.join(tasks)}], but lm-evaluation-harness is not installed"
        return [Problem(what, "the package that has the tasks", "pip install 'threefold[tasks]'")]
    return []


class EvalTasks:
    """Evaluates tasks after a step; every rank calls it, after the same step.

    Attributes:
        progress: where this rank is, in the steps too.
    """

    def __init__(self, config: Config, model: Model) -> None:
        """Raises: ConfigError: there is no such task, or one that is not scored by the probability of texts."""
        assert model.architecture is not None
        self.progress = Progress()
        self._rank, self._tasks = model.mesh.rank, _load(config.eval.tasks)
        longest = getattr(model.architecture.get_text_config(), "max_position_embeddings", None)
        self._scores = Scores(model, longest if isinstance(longest, int) else config.data.seq_len)
        self._harness = _harness_of(self._scores, tokenizer_of(config))

    def __call__(self, step: int) -> Metrics:
        """Each task's figures, on rank 0: task_NAME_METRIC."""
        from lm_eval.evaluator import evaluate

        self.progress.enter("evaluation")
        self._scores.tick = self.progress.tick
        for task in self._tasks["tasks"].values():
            task.set_fewshot_seed(seed=_SHOTS_SEED)
        with _random_states_kept(), redirect_stderr(io.StringIO()):  # its bars, of every rank
            found = evaluate(self._harness, self._tasks, bootstrap_iters=0, log_samples=False, verbosity="ERROR")
        return _metrics_of(found["results"]) if self._rank == 0 and found is not None else {}


def _load(names: Sequence[str]) -> Any:
    """The harness' tasks, with their data; what it says meanwhile, on every rank, is left out."""
    with redirect_stderr(io.StringIO()):
        return _loaded(names)


def _loaded(names: Sequence[str]) -> Any:
    import datasets
    from lm_eval.tasks import TaskManager

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(logging.CRITICAL)  # what fails is reported once, with its reason
    logging.getLogger(_PACKAGE).setLevel(logging.ERROR)
    manager = TaskManager(include_defaults=not all(map(is_task_file, names)))  # to list the harness' own takes its time
    known = set(manager.all_tasks)
    for name in names:
        if not is_task_file(name) and name not in known:
            expected = "a name that `lm-eval ls tasks` lists, or the path of a task's .yaml"
            raise ConfigError(f"eval.tasks has {name}, which is not known", expected=expected, fix="check the name")
    asked = [name if name in known else _own(Path(name)) for name in names]
    try:
        loaded = manager.load(asked)
    except Exception as error:  # of datasets, of the Hub, of the harness: of many families
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        expected = "tasks whose data this machine has, or can load"
        raise ConfigError(f"eval.tasks cannot be loaded: {reason}", expected=expected, fix="see the reason") from error
    for name, task in loaded["tasks"].items():
        if (kind := task.get_config("output_type")) not in _SCORED:
            what = f"eval.tasks has {name}, which is scored by {kind}"
            expected = "tasks that are scored by the probability of texts, which the model gives on any mesh"
            raise ConfigError(what, expected=expected, fix=f"leave {name} out; lm-eval runs it on an exported model")
        if task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
    return loaded


def _own(path: Path) -> dict[str, Any]:
    """A task of one's own. One that names functions is refused: they would be run from the files beside it."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}", expected="a task's file", fix="check the path") from error
    if "!function" in text:
        expected = "a task without code of its own"
        fix = "a task of an installed package, which lm-eval finds by its name"
        raise ConfigError(f"{path} names a function, which would be run", expected=expected, fix=fix)
    values = parse(text, str(path))
    if not isinstance(values, dict) or not isinstance(values.get("task"), str):
        raise ConfigError(f"{path} is no task", expected="a mapping with `task`, its name", fix="see lm-eval's guide")
    return values


def _metrics_of(results: Mapping[str, Mapping[str, Any]]) -> Metrics:
    found: Metrics = {}
    for task, values in results.items():
        for name, value in values.items():
            metric, _, kept = name.partition(",")
            if isinstance(value, float) and not metric.endswith("_stderr"):
                suffix = "" if kept in ("", "none") else f"_{kept}"
                found[f"task_{task}_{metric}{suffix}"] = value
    return found


@contextmanager
def _random_states_kept() -> Iterator[None]:
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    states = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


class Scores:
    """(log-probability of the continuation, whether it is what the model would write greedily) of each request."""

    def __init__(self, model: Model, longest: int) -> None:
        """Args: longest: tokens that the model takes; more are cut off at the left, as the harness does."""
        self._model, self.longest = model, longest
        self.tick: Any = lambda: None

    @torch.no_grad()
    def __call__(self, requests: Sequence[Request]) -> list[tuple[float, bool]]:
        """Every rank calls it, with the same requests; all get the same.

        Raises:
            ConfigError: a continuation is longer than what the model takes.
        """
        if (most := max((len(continuation) for _, continuation in requests), default=0)) > self.longest:
            what = f"a task of eval.tasks scores a text of {most:,} tokens, but the model takes {self.longest:,}"
            raise ConfigError(what, expected="texts that the model takes whole", fix="leave the task out")
        model, mesh = self._model, self._model.mesh
        order = sorted(range(len(requests)), key=lambda number: -sum(map(len, requests[number])))
        found = torch.zeros(len(requests), 2, dtype=torch.float64, device=mesh.device)
        trained = model.module.training
        model.eval()
        try:
            for batch in self._batches(order, requests):
                own = batch[mesh.dp_rank :: mesh.dp_size]
                scored = self._of([requests[number] for number in own or batch[:1]], self._length(requests[batch[0]]))
                if own:
                    found[own] = scored
                self.tick()
        finally:
            model.train(trained)
        if (group := mesh.group("dp")) is not None:
            dist.all_reduce(found, group=group)
        return [(value, greedy > 0.5) for value, greedy in found.tolist()]

    def _length(self, request: Request) -> int:
        """Places of a row that has it, as the mesh can split them."""
        mesh = self._model.mesh
        unit = 2 * mesh.size("cp") * mesh.size("tp") if mesh.size("cp") * mesh.size("tp") > 1 else 1
        taken = min(self.longest, sum(map(len, request)) - 1)
        return max(unit, -(-taken // unit) * unit)

    def _batches(self, order: Sequence[int], requests: Sequence[Request]) -> Iterator[Sequence[int]]:
        """The requests of all dp ranks, the longest first: as many rows as their logits allow."""
        at, size = 0, self._model.mesh.dp_size
        vocabulary = self._model.architecture.get_text_config().vocab_size if self._model.architecture else 1
        while at < len(order):
            rows = max(1, _MOST_BYTES // (4 * vocabulary * self._length(requests[order[at]])))
            yield order[at : at + rows * size]
            at += rows * size

    def _of(self, requests: Sequence[Request], length: int) -> Tensor:
        """[requests, 2] float64 of requests of this dp rank; all ranks of its cp and tp compute them together."""
        ids = torch.zeros(len(requests), length, dtype=torch.int64)
        for row, (context, continuation) in enumerate(requests):
            taken = [*context, *continuation][-(self.longest + 1) : -1]
            ids[row, : len(taken)] = torch.tensor(taken)
        logits = self._model(input_ids=ids)
        found = torch.zeros(len(requests), 2, dtype=torch.float64, device=logits.device)
        for row, (context, continuation) in enumerate(requests):
            end = min(self.longest, len(context) + len(continuation) - 1)
            targets = torch.tensor(continuation, device=logits.device)
            values = logits[row, end - len(targets) : end].log_softmax(-1)
            picked = values.gather(-1, targets[:, None])
            found[row, 0] = picked.sum()
            found[row, 1] = (values.argmax(-1) == targets).all()
        return found


def _harness_of(scores: Scores, tokenizer: Any) -> Any:
    """The model as the harness sees one."""
    from lm_eval import utils
    from lm_eval.api.model import TemplateLM

    begin = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id

    class OnMesh(TemplateLM):
        backend = "causal"

        @property
        def eot_token_id(self) -> int:
            return int(tokenizer.eos_token_id)

        @property
        def prefix_token_id(self) -> int:
            return int(begin)

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
            ids: list[int] = tokenizer.encode(string, add_special_tokens=False)
            return ids

        def _loglikelihood_tokens(self, requests: Any, **_: Any) -> list[tuple[float, bool]]:
            return scores([(context, continuation) for _, context, continuation in requests])

        def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
            windows, counts = [], []
            for (text,) in (request.args for request in requests):
                tokens = self.tok_encode(text)
                rolling = utils.get_rolling_token_windows(tokens, self.prefix_token_id, scores.longest, context_len=1)
                own = [utils.make_disjoint_window(each) for each in rolling]
                windows += own
                counts.append(len(own))
            found = iter(scores(windows))
            return [math.fsum(next(found)[0] for _ in range(count)) for count in counts]

        def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
            raise ConfigError("a task asks for written texts", expected="tasks of probabilities", fix="leave it out")

    return OnMesh()
