"""Whether a run fits: what a rank is estimated to hold, against the memory that is free, before anything is loaded.

A model or a setting that cannot be estimated is trained as it is asked for. Estimates agree with traced steps within a
few per cent (docs/plan.md), but devices were not measured: a run is refused where it would not fit by a wide margin.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from threefold.errors import ConfigError
from threefold.mesh import environment
from threefold.mesh.mesh import Mesh
from threefold.plan.accelerators import Accelerator
from threefold.plan.adapters import adapted
from threefold.plan.decoder import Decoder, decoder_of
from threefold.plan.peak import Moment, peak
from threefold.plan.setup import Setup, refused, setup_of
from threefold.run.request import Asked
from threefold.run.room import room_here

# A run is refused where this part of the estimate is more than what is free.
_CERTAIN = {"cpu": 0.7, "cuda": 0.9}
# Of compiled layers the estimate is the most that they keep.
_CERTAIN_COMPILED = 0.75
_MODES = ("none", "selective", "full", "offload")


@dataclass(frozen=True)
class Fitted:
    """A request with a micro-batch that fits.

    Attributes:
        said: what was chosen or estimated, and why, to be printed.
    """

    asked: Asked
    said: tuple[tuple[str, str], ...] = ()


def fitted(asked: Asked, mesh: Mesh) -> Fitted:
    """The request, where train.micro_batch is auto with the largest that fits; every rank calls it.

    Raises:
        ConfigError: it does not fit, with what would.
    """
    decoder = _decoder(asked)
    if decoder is None or refused(asked.config, decoder, mesh.topology):
        return Fitted(asked)
    # The same on all ranks, whatever each of their devices has.
    free, whole = mesh.decide("free memory", memory_here(mesh), _least)
    if free is None:
        return Fitted(asked)
    device = Accelerator("this device", whole, 0, 0, 0, 0) if mesh.device.type == "cuda" else None
    return fitted_into(asked, decoder, setup_of(asked.config, decoder, mesh.topology, device), free)


def fitted_into(asked: Asked, decoder: Decoder, setup: Setup, free: int) -> Fitted:
    """As `fitted`, into so many bytes of each rank."""
    config, automatic = asked.config, asked.config.train.micro_batch == "auto"
    if automatic:
        setup = _largest(decoder, setup, free)
    moment = peak(decoder, setup)
    if config.train.memory_check and _certain(setup) * moment.total > free:
        raise _too_large(decoder, setup, moment, free)
    said = []
    if automatic and setup.num_batches > 1:
        train = config.train.model_copy(update={"micro_batch": setup.micro_batch})
        asked = replace(asked, config=config.model_copy(update={"train": train}))
        why = f"the most that fits into {_gib(free)} a rank, by the estimate: {_gib(moment.total)}"
        said.append((f"micro-batch: {setup.micro_batch} rows, {setup.num_batches} of them a step", why))
    elif setup.device is not None:
        said.append(
            (f"memory: about {_gib(moment.total)} a rank", f"estimated for the {moment.name}; {_gib(free)} are free")
        )
    return Fitted(replace(asked, estimated_bytes=round(moment.total)), tuple(said))


def _least(found: Sequence[tuple[int | None, int]]) -> tuple[int | None, int]:
    free, whole = zip(*found, strict=True)
    return None if None in free else min(free), min(whole)


def memory_here(mesh: Mesh) -> tuple[int | None, int]:
    """(free bytes, all) of this rank's device, or of its share of the host; None where that is not told."""
    if mesh.device.type == "cuda":
        return torch.cuda.mem_get_info(mesh.device)
    free = room_here().free_bytes
    return None if free is None else free // max(1, environment.current().local_world_size), 0


def _decoder(asked: Asked) -> Decoder | None:
    try:
        return adapted(decoder_of(asked.architecture.to_dict()), asked.config.model.lora)
    except ConfigError:  # not known
        return None


def _certain(setup: Setup) -> float:
    if setup.compiled:
        return _CERTAIN_COMPILED
    return _CERTAIN["cpu" if setup.device is None else "cuda"]


def _sizes(setup: Setup) -> list[int]:
    """Micro-batches that divide the rows of a dp rank, the largest first."""
    rows = setup.micro_batch * setup.num_batches
    return [size for size in range(rows, 0, -1) if rows % size == 0]


def _with_rows(setup: Setup, size: int) -> Setup:
    return replace(setup, micro_batch=size, num_batches=setup.micro_batch * setup.num_batches // size)


def _largest(decoder: Decoder, setup: Setup, free: int) -> Setup:
    """With all rows of a dp rank at once, or as many as fit; one, if none does."""
    sizes = (_with_rows(setup, size) for size in _sizes(setup))
    return next((each for each in sizes if peak(decoder, each).total <= free), _with_rows(setup, 1))


def _too_large(decoder: Decoder, setup: Setup, moment: Moment, free: int) -> ConfigError:
    line, size = max(moment.lines.items(), key=lambda item: item[1])
    found = next((each for each in _changes(setup) if peak(decoder, each[1]).total <= free), None)
    fix = found[0] if found is not None else "more ranks: threefold plan shows what fits on which devices"
    return ConfigError(
        f"a rank would hold about {_gib(moment.total)}, of which {_gib(free)} are free: {_gib(size)} of {line} in the "
        f"{moment.name}",
        expected="a step that fits, as estimated before anything is loaded (docs/plan.md)",
        fix=f"{fix}   (or, to start it all the same: --train.memory_check false)",
    )


def _changes(setup: Setup) -> Iterator[tuple[str, Setup]]:
    """Set-ups that need less, the fewest changes first, each with the keys to paste."""
    topology, modes = setup.topology, _MODES[_MODES.index(setup.recompute) :]
    modes = modes if setup.device is not None else tuple(mode for mode in modes if mode != "offload")
    whole = replace(topology, dp_replicate=1, dp_shard=topology.dp)
    meshes = [topology] if whole == topology else [topology, whole]
    offloads = (setup.cpu_offload,) if setup.cpu_offload or setup.device is None else (False, True)
    sizes = [size for size in _sizes(setup) if size <= setup.micro_batch]
    options = sorted(
        itertools.product(enumerate(meshes), enumerate(offloads), enumerate(modes), enumerate(sizes)),
        key=lambda option: (sum(bool(place) for place, _ in option), option[1][0], option[2][0], option[3][0]),
    )
    for (mesh, shape), (offload, offloaded), (mode, name), (place, size) in options[1:]:
        keys = [f"--mesh.dp_shard {shape.dp_shard}"] * bool(mesh) + ["--mesh.cpu_offload true"] * bool(offload)
        keys += [f"--train.activation_checkpointing {name}"] * bool(mode) + [f"--train.micro_batch {size}"] * bool(
            place
        )
        changed = replace(_with_rows(setup, size), topology=shape, recompute=name, cpu_offload=offloaded)
        yield " ".join(keys), changed


def _gib(size: float) -> str:
    return f"{size / 2**30:,.2f} GiB"
