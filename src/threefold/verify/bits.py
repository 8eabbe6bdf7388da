"""`threefold verify --bits`: the same steps on several numbers of data ranks, and whether their weights are equal.

What `train.reduce: exact` promises, shown on the user's own model, data and settings. After each step every tensor is
gathered and hashed, so that the first step and the first tensor that differ can be named.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from threefold.check.compare import Difference, compare_exactly
from threefold.checkpoint.tensors import bytes_of
from threefold.config.schema import Config
from threefold.errors import ConfigError
from threefold.jsonl import Values
from threefold.mesh.mesh import Mesh
from threefold.mesh.topology import Topology
from threefold.model.build import build
from threefold.model.collectives import whole_of
from threefold.model.data_parallel import device_of
from threefold.model.model import Model
from threefold.optim.schedule import learning_rate
from threefold.plan import choices
from threefold.run import assemble
from threefold.run.process import as_rank, compute_alike
from threefold.training.batches import micro_batches, with_noise
from threefold.training.forward import token_loss_of
from threefold.training.numbers import mean_loss
from threefold.training.step import TrainStep
from threefold.verify.rank import opened
from threefold.verify.verdict import VerifyOptions

# Of one step: `loss`, `gradient norm`, and in `weights` the SHA-256 of each tensor after it, in the model's order, or
# None of one that is not finite.
Step: TypeAlias = dict[str, Any]
_DATA_RANKS = ((1, 1), (1, 2), (2, 2))


def refuse_fast(config: Config) -> None:
    """ConfigError unless the config asks for train.reduce exact."""
    if config.train.reduce != "exact":
        asked = config.train.micro_batch
        # As `mesh.exact_limits` asks for it: any number would do.
        size = asked if isinstance(asked, int) else 1
        raise ConfigError(
            f"verify --bits with train.reduce = {config.train.reduce}",
            expected="a run that promises the same bits on any number of data ranks",
            fix=f"--train.reduce exact --train.micro_batch {size}",
        )


def meshes_of(config: Config, topology: Topology) -> list[Topology]:
    """1, 2 and 4 data ranks that the global batch can be dealt to, with the cp and tp of `topology`; and that mesh."""
    size = config.train.micro_batch
    assert isinstance(size, int), "mesh.exact_limits refuses `auto`, which depends on the mesh"
    meshes = [Topology(*sizes, topology.cp, topology.tp) for sizes in _DATA_RANKS]
    meshes = [each for each in meshes if config.train.global_batch % (each.dp * size) == 0]
    return [*(each for each in meshes if each != topology), topology]


def bits_rank(config: Config, options: VerifyOptions, topology: Topology, answer: str) -> int:
    """Trains as one rank and returns its exit code; rank 0 writes the steps to `answer`."""

    def work(mesh: Mesh) -> int:
        steps = steps_on(mesh, config, options)
        if mesh.rank == 0:
            Path(answer).write_text(json.dumps(steps))
        return 0

    return as_rank(config, topology, work)


def steps_on(mesh: Mesh, config: Config, options: VerifyOptions) -> list[Step]:
    """The first steps of a run on an existing mesh; every rank calls it."""
    compute_alike(config)
    config = choices.with_dtype(config.with_rate(config.peak_rate[0]), device_of(mesh))
    config, architecture, rows = opened(config, mesh, options)
    model = build(config, architecture, mesh)
    train = config.train
    optimizer = assemble.optimizer_of(config, model)
    ema = assemble.average_of(config, model)
    loss = token_loss_of(model, label_smoothing=train.label_smoothing, z_loss=train.z_loss)
    step = TrainStep(
        model,
        optimizer,
        token_loss=loss,
        grad_clip=train.grad_clip,
        ema=ema,
        compare_copies=False,
    )
    loader = iter(assemble.loader_of(config, rows, mesh))
    steps = list[Step]()
    exact = train.exact
    size = choices.micro_batch(config, mesh.topology).value
    for number in range(1, options.steps + 1):
        pieces = micro_batches(next(loader), size, spread=exact)
        lr = learning_rate(number, num_steps=options.steps, config=config.optimizer)
        result = step.run(
            with_noise(pieces, model, seed=train.seed, step=number, spread=exact), lr=lr
        )
        numbers = {"loss": mean_loss(result, mesh), "gradient norm": result.grad_norm.item()}
        steps.append({**numbers, "weights": _hashes(model)})
    return steps


def _hashes(model: Model) -> dict[str, str | None]:
    """The hash of each whole tensor; None for a non-finite one. Every rank calls it."""
    hashes = {}
    for name, parameter in model.module.named_parameters():
        whole = whole_of(parameter)
        content = bytes_of(whole.detach().cpu().contiguous())
        hashes[name] = hashlib.sha256(content).hexdigest() if whole.isfinite().all() else None
    return hashes


def compared(meshes: Mapping[str, Sequence[Step]]) -> tuple[list[str], bool]:
    """The steps of each mesh as lines, and whether all are those of the first."""
    first_name, first = next(iter(meshes.items()))
    lines = [
        f"{'mesh':<44}  {'last loss':<20}  {'last gradient norm':<20}  SHA-256 of all tensors"
    ]
    for name, steps in meshes.items():
        last: Step = steps[-1] if steps else {"loss": "", "gradient norm": "", "weights": {}}
        whole = hashlib.sha256("".join(map(str, last["weights"].values())).encode()).hexdigest()
        lines.append(
            f"{name:<44}  {last['loss']!r:<20}  {last['gradient norm']!r:<20}  {whole[:16]}"
        )
    # The first mesh is compared with itself too: non-finite values are unequal there too.
    differing = [
        (name, text) for name, steps in meshes.items() if (text := _difference(first, steps))
    ]
    if not differing:
        lines.append(
            f"equal: {len(first[0]['weights'])} tensors, losses and norms, in each of {len(first)} steps"
        )
    for name, text in differing:
        pair = name if name == first_name else f"{name} and {first_name}"
        lines.append(f"not equal: {pair}: {text}")
    return lines, not differing


def _difference(first: Sequence[Step], other: Sequence[Step]) -> str | None:
    """The first step and tensor that differ."""
    if len(first) != len(other) or not first:
        return f"{len(other)} steps, {len(first)} expected"
    for number, (expected, actual) in enumerate(zip(first, other, strict=True), start=1):
        numbers = _failing(
            *(
                {key: step[key] for key in ("loss", "gradient norm")}
                for step in (actual, expected)
            )
        )
        tensors = _failing(actual["weights"], expected["weights"])
        if tensors:
            more = (
                f" and {len(tensors) - 1} more of {len(expected['weights'])} tensors"
                if len(tensors) > 1
                else ""
            )
            so = (
                f"; so does its {' and its '.join(difference.place for difference in numbers)}"
                if numbers
                else ""
            )
            in_both = all(
                step["weights"].get(tensors[0].place) is not None for step in (actual, expected)
            )
            reason = "" if in_both else f" ({tensors[0].detail})"
            return f"step {number} differs first, in {tensors[0].place}{more}{reason}{so}"
        if numbers:
            return f"step {number} differs first, in its {' and its '.join(each.place for each in numbers)}"
    return None


def _failing(actual: Values, expected: Values) -> list[Difference]:
    return [
        difference
        for difference in compare_exactly("bits", actual, expected)
        if not difference.holds
    ]
