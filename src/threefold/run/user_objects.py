"""Objects passed to `threefold.train` besides the config: rows and a tokenizer, a loss, an optimizer, callbacks.

Rows and tokenizer are written once, by their content, and are sources like any other from then on. The rest are objects
of the program. Ranks started here import them by name, as functions and classes of a module. Callbacks are called with
plain facts, on rank 0: after logged steps, evaluations, saves, and at the end.
"""

import contextlib
import hashlib
import io
import os
import shutil
import traceback
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Protocol

from threefold.checkpoint.checkpoint_folder import Checkpoint
from threefold.config.optimizer import OptimizerConfig
from threefold.config.schema import Config
from threefold.config.yaml_text import as_yaml
from threefold.errors import ConfigError, Problem, RunError, first_line
from threefold.jsonl import Metrics, Values
from threefold.mesh.environment import cache_folder

HOOKS = ("on_step", "on_eval", "on_save", "on_stop")


@dataclass(frozen=True)
class UserObjects:
    """Objects that a run uses in place of the built-in ones.

    Attributes:
        loss: (outputs, batch) -> (sum, count), as for `threefold.TrainStep`, in training and evaluation.
        loss_on: the loss's input: `logits` or `hidden_states`.
        optimizer: makes a torch optimizer for a `threefold.Model`.
        callbacks: objects with some of the methods HOOKS, called on rank 0.
    """

    loss: Callable[..., Any] | None = None
    loss_on: Literal["logits", "hidden_states"] = "logits"
    optimizer: Callable[[Any], Any] | None = None
    callbacks: tuple[Any, ...] = ()

    @property
    def described(self) -> Values:
        """Names of what changes the run's results, for its checkpoints."""
        own = {"loss": self.loss, "optimizer": self.optimizer}
        names = {key: name_of(value) for key, value in own.items() if value is not None}
        return {**names, **({"loss_on": self.loss_on} if self.loss is not None else {})}


def name_of(value: Any) -> str:
    """`package.module.name` of a function, a class or an object's class."""
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"


def check(user_objects: UserObjects, config: Config) -> None:
    """Refuses objects that cannot be used, and keys that then have no effect; all at once, before any process."""
    ConfigError.raise_for(_problems(user_objects, config))


def _problems(user_objects: UserObjects, config: Config) -> Iterator[Problem]:
    for each in user_objects.callbacks:
        yield from _callback_problems(each)
    if user_objects.loss is not None and not callable(user_objects.loss):
        yield Problem(
            f"loss = {user_objects.loss!r}",
            "a function of outputs and batch that returns a sum and a count",
            "loss=None",
        )
    if user_objects.loss_on not in ("logits", "hidden_states"):
        yield Problem(
            f"loss_on = {user_objects.loss_on!r}", "logits or hidden_states", "leave it out"
        )
    elif user_objects.loss is None and user_objects.loss_on != "logits":
        yield Problem(
            f"loss_on = {user_objects.loss_on!r} without a loss",
            "loss_on with a loss",
            "leave it out",
        )
    if user_objects.loss is not None:
        yield from _loss_problems(config)
    if config.train.exact:
        for name, value in (("loss", user_objects.loss), ("optimizer", user_objects.optimizer)):
            if value is not None:
                yield Problem(
                    f"train.reduce = exact with a custom {name}",
                    f"no custom {name}: its bits were not compared on several meshes",
                    f"{name}=None, or --train.reduce fast",
                )
    if user_objects.optimizer is not None:
        yield from _optimizer_problems(user_objects.optimizer, config.optimizer)


def _loss_problems(config: Config) -> Iterator[Problem]:
    train = config.train
    for key, value in (("label_smoothing", train.label_smoothing), ("z_loss", train.z_loss)):
        if value:
            yield Problem(
                f"train.{key} = {value} has no effect with a custom loss",
                "what the loss itself adds",
                f"--train.{key} 0",
            )
    if train.objective != "next_token":
        yield Problem(
            f"train.objective = {train.objective} and a custom loss",
            "one of them",
            "loss=None, or --train.objective next_token",
        )
    if train.fused_loss is True:
        yield Problem(
            "train.fused_loss = true has no effect with a custom loss",
            "the kernels compute the cross entropy alone",
            "--train.fused_loss auto",
        )
    if config.audit.rows is True:
        yield Problem(
            "audit.rows = true with a custom loss",
            "the loss of each row: a custom loss returns only their sum",
            "--audit.rows auto",
        )


def _optimizer_problems(make: Any, config: OptimizerConfig) -> Iterator[Problem]:
    if not callable(make) or not hasattr(make, "__qualname__"):
        yield Problem(
            f"optimizer is a {type(make).__name__}",
            "a function of the model that returns an optimizer, called on each rank",
            "def optimizer(model): return torch.optim.SGD(model.parameters(), lr=0.01)",
        )
    usual = OptimizerConfig()
    for name in ("name", "options", "betas", "eps", "weight_decay", "groups", "moments"):
        if getattr(config, name) != getattr(usual, name):
            yield Problem(
                f"optimizer.{name} = {as_yaml(getattr(config, name))} has no effect with a custom optimizer",
                "the optimizer's own settings",
                f"leave optimizer.{name} out",
            )


def _callback_problems(callback: Any) -> Iterator[Problem]:
    name, shown = name_of(callback), ", ".join(HOOKS)
    begun = [each for each in dir(callback) if each.startswith("on_")]
    if isinstance(callback, type):
        yield Problem(
            f"the callback {name} is a class",
            "an instance of it",
            f"callbacks=[{callback.__name__}()]",
        )
    elif unknown := [each for each in begun if each not in HOOKS]:
        yield Problem(
            f"the callback {name} has {unknown[0]}, which nothing calls",
            f"one of {shown}",
            "rename it",
        )
    elif not begun or not all(callable(getattr(callback, each)) for each in begun):
        yield Problem(
            f"the callback {name} has no hook", f"a method of {shown}", "callbacks=[...]"
        )


def refuse_unsendable(user_objects: UserObjects, num_ranks: int) -> None:
    """ConfigError if an object cannot reach ranks that are started here, each its own process."""
    own = (("loss", user_objects.loss), ("optimizer", user_objects.optimizer))
    for name, value in (*own, *(("callbacks", each) for each in user_objects.callbacks)):
        if value is not None and (why := _unsendable(value)) is not None:
            raise ConfigError(
                f"{name}: {name_of(value)} cannot reach {num_ranks} ranks: {why}",
                expected="a function or class of a module that the ranks can import, and plain values in its objects",
                fix="move it to a module of its own, or start the script by torchrun --nproc-per-node "
                f"{num_ranks} SCRIPT.py, or train in this process: mesh: {{dp: 1}}",
            )


def _unsendable(value: Any) -> str | None:
    class Pickler(ForkingPickler):  # what sends it to a process
        def reducer_override(self, each: Any) -> Any:
            if getattr(each, "__module__", None) == "__main__" and hasattr(
                each, "__qualname__"
            ):
                raise TypeError("it is defined in the script, which ranks do not run")
            return NotImplemented

    try:
        Pickler(io.BytesIO()).dump(value)
    except Exception as error:  # an object's own methods may fail in any way
        return first_line(error)[:200]
    return None


# Placeholders for rows and a tokenizer in the config until they are written, by their keys.
PLACES = {
    "dataset": "data.source",
    "eval_dataset": "eval.source",
    "tokenizer": "data.tokenizer",
}


def place_of(name: str) -> str:
    """The placeholder value of a key whose object is passed by the program."""
    return f"{name}="


def with_rows(config: Config, handed: Values) -> Config:
    """The config with rows and a tokenizer as its sources, written to the cache.

    Args:
        handed: of the names in PLACES; in the config, their places hold `place_of(name)`.

    Raises:
        ConfigError: the config names others. DataError: the rows are not such that can be written.
    """
    problems = []
    for name in handed:
        section, _, key = PLACES[name].partition(".")
        if getattr(getattr(config, section), key) != place_of(name):
            problems.append(
                Problem(
                    f"{name}= and {PLACES[name]} are both given",
                    f"one of them: {name}=, or {PLACES[name]}",
                    f"leave {PLACES[name]} out",
                )
            )
    ConfigError.raise_for(problems)
    if "tokenizer" in handed:
        path = str(_written_tokenizer(handed["tokenizer"]))
        config = config.changed(data={"tokenizer": path})
    for name, section in (("dataset", "data"), ("eval_dataset", "eval")):
        if name in handed:
            path = str(_written_rows(handed[name], name, config))
            config = config.changed(**{section: {"source": path}})
    return config


def _written_rows(rows: Any, name: str, config: Config) -> Path:
    from threefold.data.store.in_memory import written
    from threefold.run.sources import tokenizer_of

    return written(
        rows, name=name, cache=cache_folder(), tokenizer=lambda: tokenizer_of(config)
    )


def _written_tokenizer(tokenizer: Any) -> Path:
    if not hasattr(tokenizer, "save_pretrained"):
        raise ConfigError(
            f"tokenizer is a {type(tokenizer).__name__}",
            expected="a tokenizer of transformers, or its name in data.tokenizer",
            fix="tokenizer=AutoTokenizer.from_pretrained(NAME)",
        )
    folder = cache_folder() / "handed"
    partial = folder / f".{uuid.uuid4().hex}.partial"
    partial.mkdir(parents=True)
    try:
        tokenizer.save_pretrained(str(partial))
        digest = hashlib.blake2b(digest_size=16)
        for file in sorted(path for path in partial.rglob("*") if path.is_file()):
            digest.update(
                f"{file.relative_to(partial)} {file.stat().st_size}\n".encode()
                + file.read_bytes()
            )
        place = folder / f"tokenizer-{digest.hexdigest()}"
        with contextlib.suppress(OSError):  # it exists
            os.replace(partial, place)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return place


def callbacks_of(values: Sequence[Any]) -> tuple[Any, ...]:
    """A tuple of callbacks; one by itself is one too."""
    return tuple(values) if isinstance(values, list | tuple) else (values,)


@dataclass(frozen=True)
class Facts:
    """The argument of a hook.

    Attributes:
        run: the run's folder.
        step: the step after which the hook is called.
        metrics: on_step and on_eval: the line of metrics.jsonl, read-only; else empty.
        checkpoint: on_save: the folder of the complete checkpoint.
        reason: on_stop: `done`, `signal` or `hook`.
    """

    run: Path
    step: int
    metrics: Values = field(default_factory=dict)
    checkpoint: Path | None = None
    reason: str = ""


class Callback(Protocol):
    """Base class for `threefold.train(callbacks=)`; override the hooks that you need."""

    def on_step(self, facts: Facts) -> bool | None:
        """Called after a logged step; returning True stops the run."""

    def on_eval(self, facts: Facts) -> bool | None:
        """Called after an evaluation; returning True stops the run."""

    def on_save(self, facts: Facts) -> None:
        """A checkpoint is complete."""

    def on_stop(self, facts: Facts) -> None:
        """The run has ended."""


class Hooks:
    """A tracker that calls the hooks of some callbacks.

    Args:
        stop: asks all ranks to stop; called when on_step or on_eval returns True.
    """

    def __init__(self, callbacks: Sequence[Any], run: Path, stop: Callable[[], None]) -> None:
        self._callbacks, self._run, self._stop = callbacks, run, stop
        self._saved: int | None = None

    def log(self, metrics: Metrics) -> None:
        """A logged step or evaluation."""
        facts = Facts(self._run, metrics["step"], MappingProxyType(dict(metrics)))
        if "eval_loss" in metrics:
            answers = self._call("on_eval", facts)
        elif "loss" in metrics:
            answers = self._call("on_step", facts)
        else:
            return
        if any(answers):
            self._stop()

    def saved(self, checkpoint: Checkpoint) -> None:
        """A checkpoint is complete; a repeated report of it calls nothing."""
        if checkpoint.step != self._saved:
            self._saved = checkpoint.step
            self._call("on_save", Facts(self._run, checkpoint.step, checkpoint=checkpoint.path))

    def ended(self, step: int, reason: str) -> None:
        """The run has ended, and is saved."""
        self._call("on_stop", Facts(self._run, step, reason=reason))

    def close(self) -> None:
        """Nothing is open."""

    def _call(self, name: str, facts: Facts) -> list[bool]:
        return [self._one(each, name, facts) for each in self._callbacks if hasattr(each, name)]

    def _one(self, callback: Any, name: str, facts: Facts) -> bool:
        try:
            answer = getattr(callback, name)(facts)
            return answer is not None and bool(answer == True)  # noqa: E712  (NumPy's and torch's too)
        except (Exception, SystemExit) as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            raise RunError(
                f"{name_of(callback)}.{name} raised {type(error).__name__} after step {facts.step}: {error} "
                f"({where.filename}, line {where.lineno})",
                expected="a hook that returns (True to stop the run); steps since the last checkpoint are not saved",
                fix="fix the hook and train again: the run resumes from its last checkpoint",
            ) from error
