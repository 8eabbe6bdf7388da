"""Imports another program's checkpoint (DCP, or DeepSpeed's universal) as a run, or as a model.

Tensors are read, converted and written one at a time. The run has one checkpoint, with the step that the optimizer has
counted; it resumes there with the same weights and moments, and reads its own data from the first row on, because
the rows read by the other program are unknown.
"""

import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PretrainedConfig

from threefold.checkpoint import state as run_state
from threefold.checkpoint.background_saver import indexed
from threefold.checkpoint.checkpoint_folder import CheckpointFolder
from threefold.checkpoint.lineage import Identity, Journal
from threefold.checkpoint.manifest import architecture_of, versions
from threefold.checkpoint.tensor_index import Box
from threefold.checkpoint.tensors import TYPE_NAMES, write_boxes
from threefold.config.paths import with_absolute_paths
from threefold.config.schema import Config
from threefold.config.yaml_text import as_yaml
from threefold.convert.dcp_reader import Foreign, open_dcp
from threefold.convert.names import Convert, Found, Wanted, find_names
from threefold.convert.universal import open_universal
from threefold.errors import CheckpointError, ConfigError
from threefold.export.model_folder import Exported, export, refuse_filled, unfinished
from threefold.model import load
from threefold.run.folder import keep_config
from threefold.run.request import model_of

_FILE = "rank-00000.safetensors"
# Values of these types are values of float32.
_EXACT = ("F32", "BF16", "F16")
_ADAM = ("adamw", "torch.optim.AdamW", "torch.optim.Adam")


@dataclass(frozen=True)
class Imported:
    """The result of an import: whose names the tensors had, the last step done, and omitted tensors."""

    program: str
    step: int
    num_weights: int
    left_out: tuple[str, ...]


def import_run(source: Path, to: Path, config: Config) -> Imported:
    """Makes a run whose newest checkpoint is the one in `source`; `threefold resume` continues it.

    Raises:
        CheckpointError: it is not a checkpoint of this model with AdamW's moments. ConfigError: `to` is not empty.
    """
    refuse_filled(to)
    asked = config.optimizer
    if asked.name not in _ADAM or asked.moments != "float32" or asked.options.get("amsgrad"):
        raise ConfigError(
            f"optimizer.name = {asked.name}, optimizer.moments = {asked.moments} and optimizer.options = "
            f"{as_yaml(asked.options)} do not continue with AdamW's moments, which are imported",
            expected=f"{', '.join(_ADAM)}: with moments in float32 and without amsgrad",
            fix="--optimizer.name adamw --optimizer.moments float32 --optimizer.options '{}'   (or --weights, for a "
            "Hugging Face folder from which a new run begins)",
        )
    return _import(source, to, config.changed(log={"dir": str(to)}), weights_alone=False)


def import_model(source: Path, to: Path, config: Config) -> tuple[Imported, Exported]:
    """Makes a Hugging Face folder of the weights in `source`, and reloads it; errors as `import_run` and `export`."""
    refuse_filled(to)
    between = to.absolute().with_name(f".{to.name}.imported")
    shutil.rmtree(between, ignore_errors=True)
    try:
        return _import(source, between, config, weights_alone=True), export(between, to)
    finally:
        shutil.rmtree(between, ignore_errors=True)


def _import(source: Path, to: Path, config: Config, *, weights_alone: bool) -> Imported:
    if config.model.lora.r:
        raise ConfigError(
            f"model.lora.r = {config.model.lora.r}",
            expected="the whole model: adapters are not imported",
            fix="--model.lora.r 0",
        )
    # A Trainer's checkpoint by DeepSpeed has the model's own files beside what only DeepSpeed can open.
    has_weights = weights_alone and any(source.glob("*.safetensors"))
    foreign = (not has_weights and open_universal(source)) or open_dcp(source)
    _, architecture = model_of(config)
    model = load.outline(architecture, config.model)
    shapes = run_state.model_state(model)
    names = find_names(
        foreign,
        _wanted(model, shapes, architecture),
        where=str(source),
        weights_alone=weights_alone,
    )
    _refuse_other_twins(foreign, names)
    step = 0 if weights_alone else _step_of(foreign, names, source)
    with unfinished(to):
        _write(foreign, names, shapes, to, config, architecture, step=step)
    return Imported(names.program, step, len(names.weights), tuple(names.left_out))


def _wanted(
    model: torch.nn.Module, shapes: dict[str, Tensor], architecture: PretrainedConfig
) -> Wanted:
    text = architecture.get_text_config()
    heads = getattr(text, "num_attention_heads", 1)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    return Wanted(
        {name.removeprefix("model."): tuple(tensor.shape) for name, tensor in shapes.items()},
        frozenset(trained),
        architecture.model_type,
        (heads, getattr(text, "num_key_value_heads", None) or heads),
        bool(getattr(text, "tie_word_embeddings", False)),
    )


def _refuse_other_twins(foreign: Foreign, names: Found) -> None:
    for name, other in names.twins:
        if not torch.equal(foreign.read(name), foreign.read(other)):
            raise CheckpointError(
                f"{name} and {other} differ, but the model has one tensor for both",
                expected="equal tensors, as in a model with tied embeddings",
                fix="--model.config '{..., tie_word_embeddings: false}', or a config.json with it",
            )


def _step_of(foreign: Foreign, names: Found, source: Path) -> int:
    """The number of steps that the optimizer has counted, the same for all weights."""
    if not names.moments:
        beside = sorted(
            each.name for each in source.glob("optimizer*") if each.suffix in (".bin", ".pt")
        )
        raise CheckpointError(
            f"{source} has no state of AdamW"
            + (
                f" that is read: {beside[0]} is pickled, by accelerate or a Trainer"
                if beside
                else ""
            ),
            expected="exp_avg, exp_avg_sq and step of every weight: a run continues with them",
            fix="--weights   (makes a Hugging Face folder, from which --model.name_or_path begins a new run)",
        )
    steps = {float(foreign.read(entry)) for entry, _ in names.moments["step"].values()}
    if len(steps) > 1 or not all(step.is_integer() and step > 0 for step in steps):
        raise CheckpointError(
            f"the optimizer in {source} has counted {' and '.join(f'{step:g}' for step in sorted(steps)[:3])} steps",
            expected="one number of steps for all weights, 1 or more",
            fix="--weights   (makes a Hugging Face folder of the weights alone)",
        )
    return int(steps.pop())


def _write(
    foreign: Foreign,
    names: Found,
    shapes: dict[str, Tensor],
    to: Path,
    config: Config,
    architecture: PretrainedConfig,
    *,
    step: int,
) -> None:
    sources: dict[str, tuple[str, Convert, tuple[int, ...]]] = {
        f"model.{name}": (*pair, tuple(shapes[f"model.{name}"].shape))
        for name, pair in names.weights.items()
    }
    for moment, pairs in names.moments.items():
        for name, pair in pairs.items():
            shape = () if moment == "step" else tuple(shapes[f"model.{name}"].shape)
            sources[f"optimizer.{moment}.{name}"] = (*pair, shape)
    types = {name: shapes[name].dtype if name in shapes else torch.float32 for name in sources}
    for name, (entry, _, _) in sources.items():
        theirs, ours = foreign.tensors[entry].dtype, types[name]
        if theirs != TYPE_NAMES[ours] and not (ours == torch.float32 and theirs in _EXACT):
            raise CheckpointError(
                f"{entry} is {theirs}, and {TYPE_NAMES[ours]} does not hold all of its values",
                expected="F32, BF16 or F16",
                fix="save the checkpoint again in one of them",
            )
    ordered = sorted(sources, key=lambda name: -types[name].itemsize)
    boxes = [
        (
            name,
            TYPE_NAMES[types[name]],
            shape := sources[name][2],
            Box((0,) * len(shape), shape),
        )
        for name in ordered
    ]
    (to / "logs").mkdir(parents=True)
    checkpoints, identity = CheckpointFolder(to), Identity.new()
    state = checkpoints.begin(step) / "state"

    def values() -> Iterator[Tensor]:
        for name in ordered:
            entry, convert, shape = sources[name]
            values = foreign.read(entry)
            if not values.isfinite().all():
                raise CheckpointError(
                    f"{entry} has numbers that are not finite",
                    expected="weights and moments that training can continue from",
                    fix="import an earlier checkpoint",
                )
            yield convert(values).reshape(shape).to(types[name])

    seals = indexed(state, {_FILE: write_boxes(state / _FILE, boxes, values())})
    identity.write(to)
    keep_config(to, config)
    Journal(to).append(
        "import", program=names.program, step=step, left_out=sorted(names.left_out)[:100]
    )
    manifest = {
        **asdict(identity.author),
        "mesh": [],
        "device": "cpu",
        "data": {},
        "seed": config.train.seed,
        "architecture": architecture_of(architecture),
        "config": with_absolute_paths(config).model_dump(mode="json"),
        "base": None,
        "admission": config.model.admission,
        "versions": versions(),
    }
    checkpoints.commit(step, manifest, seals)
