"""Checkpoints of a custom loop: written like those of `threefold train`, by the same saver, in `FOLDER/checkpoints`.

Sealed by checksums and independent of the mesh: weights and moments as named tensors, the loader's place and further
values as JSON. Nothing is pickled. `threefold export FOLDER --to DIR` reads them like those of a run.
"""

import copy
import hashlib
import json
import shlex
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from threefold.checkpoint import state as run_state
from threefold.checkpoint.background_saver import Save, Saver
from threefold.checkpoint.checkpoint_folder import (
    Checkpoint,
    CheckpointFolder,
    checkpoint_at,
    damaged,
)
from threefold.checkpoint.copies import refuse_drift, state_held
from threefold.checkpoint.lineage import Identity
from threefold.checkpoint.lock import RunLock
from threefold.checkpoint.manifest import (
    manifest_of,
    read_manifest,
    refuse_other,
    refuse_other_base,
    refuse_other_code,
)
from threefold.checkpoint.seal import Seal
from threefold.checkpoint.tensor_index import Index
from threefold.checkpoint.tensors import TensorPart
from threefold.config.schema import Config
from threefold.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    check_argument,
    in_program,
    shell_word,
)
from threefold.jsonl import Values
from threefold.model import load as weights
from threefold.model.model import Model, check_model
from threefold.model.weight_check import is_adapter
from threefold.optim.build import begin_state
from threefold.training.step import TrainStep


@dataclass(frozen=True)
class Loaded:
    """A loaded checkpoint: the step after which it was saved, and the `extra` values saved with it."""

    step: int
    extra: dict[str, Any]


@dataclass(frozen=True)
class Held:
    """The contents of the checkpoints of a custom loop."""

    model: Model
    optimizer: Optimizer | TrainStep | None = None
    loader: Any = None

    @property
    def inner(self) -> Optimizer | None:
        """The optimizer itself."""
        given = self.optimizer
        return given.optimizer if isinstance(given, TrainStep) else given

    def described(self, extra: Values) -> Values:
        """The part that is kept as JSON."""
        return {
            "loader": state_of_loader(self.loader),
            "extra": dict(extra),
            "optimizer": _rates_of(self),
        }


@dataclass(frozen=True)
class Saving:
    """A save that may still be running."""

    path: Path
    saver: Saver = field(repr=False)

    def wait(self) -> Path:
        """Returns the checkpoint's folder once it is complete; RunError on every rank if it could not be written."""
        self.saver.wait()
        return self.path


def save(
    folder: str | Path,
    *,
    model: Model,
    step: int,
    optimizer: Optimizer | TrainStep | None = None,
    loader: Any = None,
    extra: Values | None = None,
    wait: bool = True,
    keep: int | None = None,
) -> Saving:
    """Saves the state after `step` in `FOLDER/checkpoints`; every rank calls it.

    Args:
        folder: a folder that all ranks see.
        step: the number of the last step done, which names the checkpoint.
        optimizer: the optimizer, or the TrainStep that has it.
        loader: has a `state_dict()` of plain values, the same on every rank: a threefold loader or sampler.
        extra: plain values by name, the same on every rank: a scheduler's state, a best loss.
        wait: return when the checkpoint is on disk; False: once its state is copied. The next save, `.wait()` of the
            returned object and `mesh.close()` wait for it.
        keep: afterwards remove all but this many newest checkpoints; None: keep all.

    Raises:
        ConfigError: something cannot be saved, or the folder is a run's or another loop's, or has checkpoints later
            than the one that was loaded; before anything is written, on every rank.
        RunError: it could not be written; for a background save, at the next of these calls.
    """
    held = Held(model, optimizer, loader)
    _check(held, folder)
    _check_values(step, keep, extra)
    mesh, folder = model.mesh, Path(folder)
    mesh.agree("threefold.save of step", step)
    place = folder.resolve()
    checkpoints = CheckpointFolder(folder)

    def job(manifest: Values) -> Save:
        def commit(seals: Mapping[str, Seal]) -> None:
            checkpoints.commit(step, manifest, seals)
            if keep is not None:
                checkpoints.prune(keep)

        begin, abandon = partial(checkpoints.begin, step), partial(checkpoints.abandon, step)
        return Save(step, checkpoints.partial(step) / "state", begin, commit, abandon)

    accept = partial(_refuse_folder, folder, step, model)
    saver = write(held, step, job, extra=extra or {}, accept=accept, wait=wait)
    model.saved[place] = step
    if (lock := model.locks.get(place)) is not None:
        mesh.before_close(lock.close)  # after the saver, which was the first to be waited for
    return Saving(checkpoints.at(step).path, saver)


def write(
    held: Held,
    step: int,
    job: Callable[[Values], Save],
    *,
    extra: Values,
    accept: Callable[[], object] = lambda: None,
    wait: bool = False,
    on_error: Literal["error", "continue"] = "error",
) -> Saver:
    """Writes the state of a loop after `step`; every rank calls it (`Mesh.agree`), and gets what may still write it.

    Args:
        job: the save, from the manifest of the checkpoint.
        accept: raises for a folder that is not the loop's; on rank 0, before anything is written.
        on_error: set by the first save: end the loop if a save fails, or print the error and continue.

    Raises:
        ConfigError, RunError: as `save`.
    """
    mesh, described = held.model.mesh, held.described(extra)

    def look() -> Values:
        _state(held)  # raises for values that no file can hold
        return digests_of(described, step)

    def conclude(parts: list[Values]) -> str:
        refuse_other_values(parts)
        accept()
        return ""

    _refuse_other_copies(held, step)
    saver = _saver_of(held, background=not wait, continue_on_error=on_error == "continue")
    saver.wait()
    mesh.decide_on("what is saved", look, conclude)
    # A background save writes it while the loop, whose values these are, goes on.
    saver.save(job(_manifest(held.model, copy.deepcopy(described))))
    return saver


def load(
    folder: str | Path,
    *,
    model: Model,
    optimizer: Optimizer | TrainStep | None = None,
    loader: Any = None,
) -> Loaded | None:
    """Loads the newest checkpoint of a folder, or a given checkpoint, on any mesh; every rank calls it.

    Weights, moments and the loader's place are loaded in place, and on the mesh that saved them the random states;
    these start afresh on another mesh. Nothing is changed before sizes and checksums of all files have been compared.

    Returns:
        None if there is no checkpoint yet.

    Raises:
        CheckpointError: it is torn, damaged, or of another model or optimizer. DataError: of other data.
    """
    held = Held(model, optimizer, loader)
    _check(held, folder)
    mesh = model.mesh
    path = mesh.share("newest checkpoint", lambda: _newest(Path(folder)))
    if path is None:
        return None
    checkpoint = checkpoint_at(Path(path))
    if (reason := run_state.damage_found(checkpoint, mesh)) is not None:
        raise damaged(checkpoint, reason)
    loaded = read(checkpoint, held)
    model.saved[checkpoint.path.resolve().parents[1]] = checkpoint.step
    return loaded


def read(checkpoint: Checkpoint, held: Held) -> Loaded:
    """Loads an undamaged checkpoint in place; every rank calls it. Errors as `load`."""
    model, loader, inner = held.model, held.loader, held.inner
    manifest = read_manifest(checkpoint)
    _refuse_other_model(manifest, model, checkpoint)
    saved = manifest.get("loop", {"loader": manifest["data"], "extra": {}, "optimizer": {}})
    if loader is not None and not saved["loader"]:
        raise DataError(
            f"{checkpoint.path} has no loader position",
            expected="one that was saved: threefold.save(..., loader=loader)",
            fix="leave loader out, and start again from the first rows",
        )
    index = Index.read(checkpoint.state)
    if inner is not None:
        if saved["optimizer"] is None:
            raise CheckpointError(
                f"{checkpoint.path} was saved without an optimizer",
                expected="its moments, without which this one would start over",
                fix="load without optimizer=   (and from now on threefold.save(..., optimizer=optimizer))",
            )
        if (kind := saved["optimizer"].get("kind")) not in (None, _kind_of(inner)):
            raise CheckpointError(
                f"{checkpoint.path} was saved with the optimizer {kind}, and this one is {_kind_of(inner)}",
                expected="the same optimizer, which continues with the state and the settings of its groups",
                fix="make the optimizer that was saved, or load without optimizer=, to begin with another one",
            )
        begin_state(model.module, inner, index)
    state = _state(held, {*index.entries, *model.trained})
    # A base weight that was never trained has the value of the base, from which it will be.
    if any(map(is_adapter, state)):
        for name in state.keys() - index.entries.keys() - model.trained:
            if name.startswith("model.") and not is_adapter(name):
                del state[name]
    run_state.fit(
        state,
        index,
        fix="load it with the model and the optimizer that were saved, or without optimizer=",
    )
    _set_rates(held, saved["optimizer"], checkpoint)
    if loader is not None:
        loader.load_state_dict(saved["loader"])
    run_state.read_into(state, checkpoint.state, index, model.mesh)
    model.trained.update(index.entries)
    run_state.restore_or_draw_random(checkpoint, manifest, index, model)
    return Loaded(checkpoint.step, saved["extra"])


def _check(held: Held, folder: str | Path) -> None:
    check_model(held.model)
    check_argument(
        "folder",
        folder,
        isinstance(folder, str | Path) and folder != "",
        expected="the path of a folder that all ranks see",
        fix="folder='my-loop'",
    )
    check_argument(
        "optimizer",
        held.inner,
        isinstance(held.inner, Optimizer | None),
        expected="a torch optimizer, or the TrainStep that has it; a scheduler's state goes into extra",
        fix="optimizer=step",
    )


def _check_values(step: int, keep: int | None, extra: Values | None) -> None:
    check_argument(
        "extra",
        extra,
        isinstance(extra, Mapping | None),
        expected="plain values by name",
        fix="extra={'best_loss': 2.5}",
    )
    check_argument(
        "step",
        step,
        type(step) is int and step >= 0,
        expected="the number of the last step done",
        fix="step=100",
    )
    check_argument(
        "keep",
        keep,
        keep is None or (type(keep) is int and keep >= 1),
        expected="how many checkpoints to keep, at least 1",
        fix="keep=3",
    )


def _refuse_folder(folder: Path, step: int, model: Model) -> None:
    """Locks the folder for this loop, which is one timeline: each checkpoint follows those before it; on rank 0.

    Raises:
        ConfigError: it is a run's, another process saves there, or its checkpoints are not those of this loop so far.
    """
    place = folder.resolve()
    asked = f"threefold.save({str(folder)!r})"
    other = f"threefold.save({str(folder) + '-2'!r}, ...)"
    if Identity.read(folder) is not None:
        raise ConfigError(
            f"{asked}: this is the folder of a run",
            expected="a folder for this loop alone: a resume of the run would take its checkpoints for the run's own",
            fix=f"run.save(), inside of `with threefold.Run({str(folder)!r})`, if it is this loop's run; or {other}",
        )
    if place not in model.locks:
        folder.mkdir(parents=True, exist_ok=True)
        (lock := RunLock()).take(folder, fresh=False, at=str(folder), other=other)
        model.locks[place] = lock
    steps = [each.step for each in CheckpointFolder(folder).all() if each.complete]
    last = model.saved.get(place)
    if steps and last is None:
        raise ConfigError(
            f"{asked}: another loop has saved step {steps[-1]} there, which this one has not loaded",
            expected="one loop in a folder: the next load would take one for the other",
            fix=f"threefold.load({str(folder)!r}, ...) before, to continue that loop; or {other}",
        )
    if last is not None and (later := [each for each in steps if each > last]):
        aside = folder / f"after-step-{last:08d}"
        moved = [str(folder / "checkpoints" / f"step-{each:08d}") for each in later]
        raise ConfigError(
            f"{asked}: step {later[-1]} is there, and this loop has gone back to step {last}",
            expected="no later checkpoints: the next load would take the newest, from the abandoned steps",
            fix=f"mkdir -p {shell_word(aside)} && mv {shlex.join([*moved, str(aside)])}   (or {other})",
        )
    if steps and step <= steps[-1]:
        raise ConfigError(
            f"{asked}: step = {step}, and step {steps[-1]} is saved there already",
            expected="a later step: a checkpoint is never overwritten",
            fix=f"save once a step, with the number of the last step done, or {other}",
        )


def _refuse_other_copies(held: Held, step: int) -> None:
    model, when = held.model, f"after step {step}, which is not saved"
    state = state_held(model.module, held.inner, buffers=model.context is not None)
    refuse_drift(state, model.mesh, when=when)
    if model.context is None:
        buffers = dict(model.module.named_buffers())
        averaged = (
            f"dist.all_reduce(module.{next(iter(buffers), '')}, dist.ReduceOp.AVG) in "
            "the loop, before it is saved"
        )
        refuse_drift(buffers, model.mesh, when=when, fix=averaged)


def _state(held: Held, names: Container[str] | None = None) -> dict[str, torch.Tensor]:
    """The live tensors of these `names`, or to be saved: with adapters, also other weights ever trained."""
    model, names = held.model, held.model.trained if names is None else names
    if held.inner is None:
        return run_state.model_state(model.module, names)
    return run_state.state_of(model.module, held.inner, names)


def _saver_of(held: Held, *, background: bool, continue_on_error: bool) -> Saver:
    """The saver of these tensors, made at the first save; waits for an earlier saver of other tensors."""
    model, key = held.model, (id(held.inner), background, continue_on_error)
    current = model.savers.get(key)
    for other in model.savers.values():
        if other is not current:
            other.wait()
    if current is None:

        def parts() -> list[TensorPart]:
            state = _state(held)
            return run_state.parts(state, run_state.holdings(state, model.mesh), model.mesh)

        current = model.savers[key] = Saver(
            model.mesh, parts, background=background, continue_on_error=continue_on_error
        )
        model.mesh.before_close(current.wait)
    saver: Saver = current
    return saver


def _manifest(model: Model, described: Values) -> Values:
    config = model.asked or Config()
    base, code = weights.base_of(config, model.mesh), weights.own_code(model.module)
    common = manifest_of(config, model.architecture, model.mesh, base, code)
    return {**common, "data": described["loader"], "loop": described}


def _newest(folder: Path) -> str | None:
    """The checkpoint that a path names; None if nothing was ever saved there."""
    if (folder / "manifest.json").exists() or folder.name.startswith("step-"):
        return str(folder)
    checkpoints = CheckpointFolder(folder)
    if (newest := checkpoints.newest()) is not None:
        return str(newest.path)
    if torn := checkpoints.all():
        raise CheckpointError(
            f"{torn[-1].path} is not complete, and there is no other checkpoint in {folder}",
            expected="a checkpoint with its marker, which is written last",
            fix=f"rm -r {shell_word(torn[-1].path)}   to start over, or copy it again from its source",
        )
    return None


def _refuse_other_model(manifest: Values, model: Model, checkpoint: Checkpoint) -> None:
    if model.asked is None or model.architecture is None:
        return  # the tensors of a custom module are compared by name, shape and type
    config = model.asked.changed(train={"seed": manifest["seed"]})
    with in_program(weights.as_argument):
        refuse_other(manifest, config, model.architecture, checkpoint)
    refuse_other_base(manifest, weights.base_of(config, model.mesh), config, checkpoint)
    refuse_other_code(manifest, weights.own_code(model.module), config, checkpoint)


def _rates_of(held: Held) -> Values | None:
    """The step's rate, and by parameter names each group's settings, which a scheduler may have changed."""
    if (inner := held.inner) is None:
        return None
    # Numbers may be tensors, for compiled and captured updates, or numpy's.
    plain = partial(tree_map, lambda each: each.tolist() if hasattr(each, "tolist") else each)
    groups = [
        {
            name: value
            for name, value in plain(group | {"params": names}).items()
            if not [*_not_plain(value, name)]
        }
        for group, names in zip(inner.param_groups, _names_of(held, inner), strict=True)
    ]
    own = held.optimizer if isinstance(held.optimizer, TrainStep) else None
    return {
        "kind": _kind_of(inner),
        "lr": own and own.lr,
        "weight_decay": own and own.given_decay,
        "groups": groups,
    }


def _kind_of(optimizer: Optimizer) -> str:
    """Its class, whichever of our implementations a mesh has, and whether it has momentum: its state alone cannot say.

    An optimizer without a state would take any for one that has not begun.
    """
    name = next(
        each.__name__
        for each in type(optimizer).__mro__
        if not each.__module__.startswith("threefold.")
    )
    momentum = any(group.get("momentum") for group in optimizer.param_groups)
    return name.removesuffix("8bit") + " with momentum" * momentum


def _names_of(held: Held, inner: Optimizer) -> list[list[str]]:
    names = {id(parameter): name for name, parameter in held.model.named_parameters()}
    return [sorted(names[id(each)] for each in group["params"]) for group in inner.param_groups]


def _set_rates(held: Held, saved: Any, checkpoint: Checkpoint) -> None:
    optimizer, inner = held.optimizer, held.inner
    if inner is None or not saved:
        return
    by_names = {tuple(group["params"]): group for group in saved["groups"]}
    matches = [
        by_names.get(tuple(names)) or _of_parameters(names, group, saved["groups"])
        for names, group in zip(_names_of(held, inner), inner.param_groups, strict=True)
    ]
    named = "lr_share" in inner.param_groups[0]
    not_kept = {"params", "fused", "foreach"}  # kernels are those of this mesh and device
    if isinstance(optimizer, TrainStep) and (rate := optimizer.lr) is not None:
        if saved.get("weight_decay") != optimizer.given_decay:
            not_kept.add("weight_decay")  # the program passes another value than before
        # Another optimizer, and another mesh, on which the groups that we make depend.
        if None in matches:
            optimizer.lr = rate if saved["lr"] is None else saved["lr"]
            return
    if None in matches or (len(matches) != len(by_names) and not named):
        number = matches.index(None) if None in matches else len(matches)
        raise CheckpointError(
            f"{checkpoint.path} was saved with other groups of parameters: it has no group like number {number} of "
            f"the optimizer, of {len(matches)}",
            expected=f"the groups that were saved, in any order, whose settings are restored: {_shown(by_names)}",
            fix="make the optimizer with those groups, or load without optimizer=",
        )
    for group, values in zip(inner.param_groups, matches, strict=True):
        assert values is not None
        for name in values.keys() - not_kept:
            value = values[name]
            if isinstance(held := group.get(name), torch.Tensor):
                held.copy_(torch.as_tensor(value))
            else:
                group[name] = tuple(value) if isinstance(value, list) else value


def _of_parameters(names: list[str], group: Values, saved: Iterable[Values]) -> Values | None:
    """The values saved for all parameters of a group of a named optimizer; on another mesh its groups differ."""
    parts = [each for each in saved if not set(names).isdisjoint(each["params"])]
    settings = [{**each, "params": None} for each in parts]
    fits = (
        settings
        and "lr_share" in group
        and all(each == settings[0] for each in settings)
        and not set(names) - {name for each in parts for name in each["params"]}
        and all(settings[0].get(key) == group.get(key) for key in ("label", "weight_decay"))
    )
    return settings[0] if fits else None


def _shown(groups: Iterable[tuple[str, ...]]) -> str:
    return "; ".join(
        f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else "".join(names)
        for names in groups
    )


def check_stateful(name: str, value: Any) -> None:
    """ConfigError unless the value has a state that can be saved; there may be no loader."""
    is_loader = name == "loader"
    check_argument(
        name,
        value,
        (value is None and is_loader)
        or (hasattr(value, "state_dict") and hasattr(value, "load_state_dict")),
        expected="a loader, sampler or schedule with state_dict() and load_state_dict()",
        fix=f"{name} = threefold.distribute({name})" if is_loader else f"leave {name} out",
    )
    if not is_loader:  # to ask a loader may begin a pass
        digests_of({name: value.state_dict()}, 0)


def state_of_loader(loader: Any) -> Values:
    check_stateful("loader", loader)
    return {} if loader is None else dict(loader.state_dict())


def _not_plain(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """The parts of a value that JSON cannot hold, each with its name."""
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        for key, each in value.items():
            yield from _not_plain(each, f"{name}.{key}")
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _not_plain(each, name)
    elif not isinstance(value, str | int | float | None):
        yield name, value


def digests_of(described: Values, step: int) -> Values:
    """Digests of the values saved as JSON, to compare; ConfigError for values that JSON cannot hold."""
    for name, value in _not_plain(described, ""):
        raise ConfigError(
            f"{name[1:]} is a {type(value).__name__}",
            expected="numbers, strings, lists of them and dicts keyed by strings: nothing is pickled",
            fix="leave constructor arguments out of a state (the milestones of MultiStepLR); save tensors with "
            "the model, as buffers, and plain values of other objects",
        )
    return {
        "step": step,
        **{
            name: hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
            for name, values in described.items()
        },
    }


def refuse_other_values(parts: list[Values]) -> str:
    for rank, part in enumerate(parts):
        if wrong := [name for name in part if part[name] != parts[0][name]]:
            raise ConfigError(
                f"ranks 0 and {rank} save different values as {wrong[0]}",
                expected="the same value on every rank: a checkpoint has one, for any mesh",
                fix="threefold.distribute(loader) has the same state on every rank"
                if wrong[0] == "loader"
                else f"take {wrong[0]} from values that all ranks share, such as a step's loss",
            )
    return ""
