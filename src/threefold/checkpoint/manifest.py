"""Reads a checkpoint's record of its run, and refuses a checkpoint that belongs to another run."""

import functools
import json
import operator
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
import transformers
from transformers import AutoConfig, PretrainedConfig

from threefold.build_id import build_id
from threefold.checkpoint.checkpoint_folder import Checkpoint
from threefold.config.paths import with_absolute_paths
from threefold.config.schema import Config, every_key
from threefold.config.yaml_text import as_yaml, pasted, to_set
from threefold.errors import CheckpointError, Problem, shell_word
from threefold.jsonl import Values
from threefold.mesh.mesh import Mesh
from threefold.mesh.topology import Topology

# Fields and types that a manifest must have. A damaged one fails its checksum; this check is for a foreign one.
_FIELDS = {
    "step": int,
    "mesh": list,
    "data": dict,
    "seed": int,
    "architecture": dict,
    "config": dict,
}
# These are named for a model that is an entirely different one.
_TELLING = (
    "model_type",
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "vocab_size",
)
_NUM_NAMED = 3
_LAYERS = (
    "num_hidden_layers",
    "num_layers",
    "n_layers",
    "n_layer",
    "encoder_layers",
    "decoder_layers",
)


def read_manifest(checkpoint: Checkpoint) -> Values:
    """Returns the manifest of a checkpoint, with everything that a resume or an export needs.

    Raises:
        CheckpointError: it has changed since it was written, or something is missing.
    """
    manifest = checkpoint.manifest()
    wrong = [name for name, kind in _FIELDS.items() if not isinstance(manifest.get(name), kind)]
    wrong = wrong or [
        f"config.{name}" for name in _not_sections(manifest["config"], Config().model_dump())
    ]
    if wrong or manifest["step"] != checkpoint.step:
        raise CheckpointError(
            f"the manifest of {checkpoint.path} has no {wrong[0] if wrong else f'step {checkpoint.step}'}",
            expected="what `threefold train` writes",
            fix="use another checkpoint",
        )
    return manifest


def _not_sections(config: Values, defaults: Values) -> Iterator[str]:
    """The keys of a config that are sections in this release, and something else there; `model` must be in it."""
    for name, default in defaults.items():
        if isinstance(default, dict) and (name in config or name == "model"):
            if not isinstance(config.get(name), dict):
                yield name
            else:
                yield from (f"{name}.{key}" for key in _not_sections(config[name], default))


def manifest_of(
    config: Config,
    architecture: PretrainedConfig | None,
    mesh: Mesh,
    base: str | None,
    code: str | None,
) -> Values:
    """What a manifest says of the model and of what computes it.

    Args:
        base: of `load.base_of`.
        code: of `load.own_code`.
    """
    return {
        "mesh": list(mesh.topology.sizes),
        "device": mesh.device.type,
        "seed": config.train.seed,
        "architecture": architecture_of(architecture) if architecture is not None else {},
        "config": with_absolute_paths(config).model_dump(mode="json"),
        "base": base,
        "code": code,
        "versions": versions(),
    }


def refuse_layers_without_tensors(
    architecture: PretrainedConfig, num_tensors: int, checkpoint: Checkpoint
) -> None:
    """Raises CheckpointError if a config has more layers than its checkpoint has tensors: building them has no end."""
    layers = max(
        (value for key, value in _every_key(architecture.to_dict()) if key in _LAYERS),
        default=0,
    )
    if layers > num_tensors:
        raise CheckpointError(
            f"the config in {checkpoint.path} has {layers:,} layers, but its files hold {num_tensors:,} tensors",
            expected="at least one tensor in each layer",
            fix="use another checkpoint",
        )


def _every_key(values: Values) -> Iterator[tuple[str, int]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _every_key(value)
        elif isinstance(value, int):
            yield key, value


def refuse_other(
    manifest: Values, config: Config, architecture: PretrainedConfig, checkpoint: Checkpoint
) -> None:
    """Raises CheckpointError if the checkpoint belongs to another model or seed."""
    problems, at, seed = [], f"the checkpoint {checkpoint.path}", manifest["seed"]
    problems += _other_model(manifest, architecture_of(architecture), config, checkpoint)
    lora, trained = (
        config.model.model_dump(mode="json")["lora"],
        manifest["config"]["model"].get("lora", {}),
    )
    for key in (
        sorted((lora.keys() & trained.keys()) - {"dropout"})
        if lora["r"] or trained.get("r")
        else ()
    ):
        if lora[key] != trained[key]:
            problems.append(
                to_set(
                    f"{at} was made with model.lora.{key} = {trained[key]}, not {lora[key]}",
                    "the adapters of the run: others would not fit, or would mean something else",
                    f"model.lora.{key}",
                    trained[key],
                )
            )
    if seed != config.train.seed:
        problems.append(
            to_set(
                f"{at} was made with train.seed = {seed}, not {config.train.seed}",
                "the seed of the run, so that it continues as if it had not stopped",
                "train.seed",
                seed,
            )
        )
    CheckpointError.raise_for(problems)


# Keys that affect training without any other trace in a run.
_CONFIRMED = (
    "model.dtype",
    "train.label_smoothing",
    "train.z_loss",
    "optimizer.name",
    "optimizer.options",
    "optimizer.moments",
    "optimizer.betas",
    "optimizer.eps",
    "train.reduce",
    "train.objective",
    "dpo.beta",
    "dpo.loss",
    "dpo.label_smoothing",
)
# With train.reduce exact: what the gradient of a micro-batch is made of.
_OF_BITS = (
    "train.micro_batch",
    "train.loss_chunk_tokens",
    "train.activation_checkpointing",
    "model.attention",
    "mesh.cp",
    "mesh.tp",
    "mesh.cp_method",
    "mesh.sequence_parallel",
)
# What changes no weight, of sections that do.
_WITHOUT_EFFECT = ("data.num_workers", "train.memory_check", "train.deterministic")
_SECTIONS_OF_BITS = (
    "model.",
    "data.",
    "train.",
    "optimizer.",
    "mesh.cp",
    "mesh.tp",
    "mesh.sequence_parallel",
)
# The head of a run shows its folder and where it resumes.
_NOT_COMPARED = ("checkpoint.resume", "log.dir")


class ChangedKey(NamedTuple):
    """A key whose value is another one than when the checkpoint was saved."""

    key: str
    before: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.key} {as_yaml(self.before)} -> {as_yaml(self.now)}"


def changes(manifest: Values, config: Config) -> list[ChangedKey]:
    """The keys of the config that differ from the checkpoint's; keys that its release did not have are left out."""
    changed = []
    now = with_absolute_paths(config).model_dump(mode="json")
    for key in every_key():
        if key in _NOT_COMPARED:
            continue
        try:
            before = functools.reduce(operator.getitem, key.split("."), manifest["config"])
        except (KeyError, TypeError):
            continue
        if before in (None, "auto") and not manifest["mesh"]:
            continue  # an import leaves it to the first start
        value = functools.reduce(operator.getitem, key.split("."), now)
        moved = (
            isinstance(before, str)
            and isinstance(value, str)
            and value.endswith(f"/{before.removeprefix('./')}")
        )
        changed += [ChangedKey(key, before, value)] if before != value and not moved else []
    return changed


def with_axes(
    found: Sequence[ChangedKey], manifest: Values, topology: Topology
) -> list[ChangedKey]:
    """`changes` with the sizes that cp and tp had and have, in place of the requested ones."""
    then = Topology(*manifest["mesh"])
    axes = [
        ChangedKey(f"mesh.{axis}", getattr(then, axis), getattr(topology, axis))
        for axis in ("cp", "tp")
    ]
    others = [change for change in found if change.key not in ("mesh.cp", "mesh.tp")]
    return [*others, *(change for change in axes if change.before != change.now)]


def versions() -> dict[str, str]:
    """The versions that results depend on."""
    return {
        "threefold": build_id(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "cpu": f"{_processor()}, {torch.backends.cpu.get_cpu_capability()}",
    }


def _processor() -> str:
    """The processor's name, whose libraries choose their kernels by it."""
    with suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        return next(
            (line.partition(":")[2].strip() for line in file if line.startswith("model name")),
            "",
        )
    return platform.processor()


def lost_bits(
    manifest: Values, found: Sequence[ChangedKey], versions: Mapping[str, str]
) -> list[str]:
    """Why a run with train.reduce exact does not continue bit for bit as if it had not been stopped; empty if it does.

    Args:
        found: `with_axes`.
        versions: what results depend on, now; those of the checkpoint are in its manifest.
    """
    lost = [
        each
        for each in found
        if each.key.startswith(_SECTIONS_OF_BITS) and each.key not in _WITHOUT_EFFECT
    ]
    then = {
        name: manifest.get("versions", {}).get(name, "unknown")
        for name in ("torch", "transformers", "cpu")
    }
    other = [
        f"{name} {before} -> {versions[name]}"
        for name, before in then.items()
        if before != versions[name]
    ]
    return [*map(str, lost), *other]


def refuse_unconfirmed(
    found: Sequence[ChangedKey], checkpoint: Checkpoint, *, exact: bool = False
) -> None:
    """Raises CheckpointError for the changes that must be confirmed; `exact`: of a run whose bits depend on more."""
    confirmed = (*_CONFIRMED, *(_OF_BITS if exact else ()))
    CheckpointError.raise_for(
        Problem(
            f"{change.key} = {as_yaml(change.now)}, but {checkpoint.path} was saved with {as_yaml(change.before)}",
            "the run's own value: another one changes what is trained from here on",
            f"--{change.key} {pasted(change.before)}   (or --accept-changes, to continue with the new one)",
        )
        for change in found
        if change.key in confirmed
    )


def _other_model(
    manifest: Values, now: Values, config: Config, checkpoint: Checkpoint
) -> list[Problem]:
    """One problem for all keys of the architecture that differ, the sizes that tell most first."""
    then = manifest["architecture"]
    differing = sorted(key for key in now.keys() | then.keys() if now.get(key) != then.get(key))
    if not differing:
        return []
    differing.sort(key=lambda key: _TELLING.index(key) if key in _TELLING else len(_TELLING))
    named = [
        f"{key} = {then.get(key)}, this run {now.get(key)}" for key in differing[:_NUM_NAMED]
    ]
    more = (
        f"; {len(differing) - _NUM_NAMED} more keys differ"
        if len(differing) > _NUM_NAMED
        else ""
    )
    name = manifest["config"].get("model", {}).get("name_or_path")
    model = f"the model {name}" if name else "a model"
    fix, run = "use the model of the run", checkpoint.path.parents[1]
    if name and name == with_absolute_paths(config).model.name_or_path:
        fix = "restore its config.json, or name the revision: --model.revision COMMIT"
    elif (run / "config.yaml").is_file():
        fix = f"threefold resume {shell_word(run)}   to resume the run"
    return [
        Problem(
            f"the checkpoint {checkpoint.path} has {model} with {'; '.join(named)}{more}",
            "the same model: its tensors would not fit, or would mean something else",
            f"{fix}, or another folder for a new one",
        )
    ]


def refuse_other_base(
    manifest: Values, base: str | None, config: Config, checkpoint: Checkpoint
) -> None:
    """Raises CheckpointError if a run began with another base than `base`, the one in use now; None: it needs none."""
    if base is not None and manifest.get("base") != base:
        what = "the adapters" if config.model.lora.r else "the preferences"
        raise CheckpointError(
            f"{what} of {checkpoint.path} were trained on weights other than those of {config.model.name_or_path}",
            expected="the weights that the run began with, which its checkpoints do not hold",
            fix="restore them, or name the revision: --model.revision COMMIT",
        )


def refuse_other_code(
    manifest: Values, code: str | None, config: Config, checkpoint: Checkpoint
) -> None:
    """Raises CheckpointError if the code that came with the model is another one than `code`, the one in use now."""
    if manifest.get("code", code) != code:
        raise CheckpointError(
            f"the code of the model {config.model.name_or_path} has changed since {checkpoint.path} was saved",
            expected="the code of the run: with other code the same weights compute something else",
            fix="restore it, or --model.revision COMMIT   (to continue anyway: threefold resume RUN --accept-changes)",
        )


def refuse_other_user_objects(
    manifest: Values, user_objects: Values, checkpoint: Checkpoint
) -> None:
    """Raises CheckpointError if a program gave the run another loss or optimizer than it has now."""
    before, now = manifest.get("given") or {}, dict(user_objects)
    for key, usual in (
        ("loss", "the cross entropy"),
        ("optimizer", "the optimizer of the config"),
    ):
        then, other = before.get(key), now.get(key)
        if then != other:
            what = [f"the {key} {each}" if each else usual for each in (then, other)]
            fix = (
                f"threefold.train(config, {key}={then.rpartition('.')[2]})"
                if then
                else f"leave {key}= out"
            )
            raise CheckpointError(
                f"{checkpoint.path} was trained with {what[0]}, and would continue with {what[1]}",
                expected=f"one {key} for the whole run",
                fix=f"{fix}   (or accept_changes=True, --accept-changes, to continue with another)",
            )
    if before.get("loss_on") != now.get("loss_on"):
        raise CheckpointError(
            f"{checkpoint.path} was trained with loss_on = {before.get('loss_on')}, not {now.get('loss_on')}",
            expected="one loss for the whole run",
            fix=f"loss_on={before.get('loss_on')!r}",
        )


def architecture_of(config: PretrainedConfig) -> Values:
    """The model's config as plain values, without those that do not belong to the weights."""
    values = json.loads(config.to_json_string(use_diff=False))
    volatile = (
        "_name_or_path",
        "transformers_version",
        "dtype",
        "use_cache",
        "_attn_implementation",
    )
    return {name: value for name, value in values.items() if name not in volatile}


def read_architecture(values: Values) -> PretrainedConfig:
    """The config that `architecture_of` wrote; of a class that transformers has, whose exceptions it lets pass."""
    plain = with_infinities(values)
    return AutoConfig.for_model(plain.pop("model_type"), **plain)


def architecture_problems(config: PretrainedConfig) -> list[Problem]:
    """Why a checkpoint could not say which model it holds; empty if the config reads back as it was written."""
    written = architecture_of(config)
    try:
        # The class itself: a model's own code has one that transformers does not know.
        read = architecture_of(type(config).from_dict(with_infinities(written)))
    except Exception as error:  # a config validates with exceptions of several families
        lost = f"it is refused: {' '.join(str(error).split())}"
    else:
        changed = sorted(
            key for key in written.keys() | read.keys() if written.get(key) != read.get(key)
        )
        if not changed:
            return []
        key = changed[0]
        lost = f"{key} = {written.get(key)} becomes {read.get(key)}"
    return [
        Problem(
            f"the config of {config.model_type!r} is not the same when read back: {lost}",
            "a config that a checkpoint can keep: the model of the run could not be resumed or exported",
            "set the key to the value that it becomes, in model.config or in config.json",
        )
    ]


def with_infinities(values: Any) -> Any:
    """Plain values with the floats that JSON does not have, which transformers writes as `{"__float__": ..}`."""
    if isinstance(values, Mapping):
        if values.keys() == {"__float__"}:
            return float(values["__float__"])
        return {key: with_infinities(value) for key, value in values.items()}
    return [with_infinities(value) for value in values] if isinstance(values, list) else values
