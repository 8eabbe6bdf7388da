"""Whether a run fits: the estimated memory of a rank against the free memory, before anything is loaded.

A model or setting that cannot be estimated is trained as requested. Estimates agree with traced steps within a few
per cent (docs/plan.md), but were not measured on devices: a run is refused only if it exceeds memory by a wide margin.
If a device's memory is used up all the same, its snapshot is kept in the run's folder, and what would fit is named.
"""

import contextlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from threefold.config.schema import Config
from threefold.errors import ConfigError, RunError
from threefold.mesh import environment
from threefold.mesh.mesh import Mesh
from threefold.plan.accelerators import of_memory
from threefold.plan.decoder import Decoder
from threefold.plan.fit import MORE_RANKS, estimate_of, largest_micro_batch, what_fits
from threefold.plan.memory import Moment, host_bytes, peak
from threefold.plan.setup import Setup, setup_of
from threefold.run.local_rank_limit import room_here
from threefold.run.request import Asked

log = logging.getLogger("threefold")
# A run is refused if this part of the estimate exceeds the free memory.
# For compiled layers the estimate is an upper bound.
_CERTAIN = {"cpu": 0.7, "cuda": 0.9, "compiled": 0.75}
# Share of the estimate of what did not fit that other settings may need at most; first for those sure to help.
_SHARES = (0.8, 0.99)


def fitted(asked: Asked, mesh: Mesh) -> Asked:
    """The request, where train.micro_batch is auto with the largest that fits; every rank calls it.

    Raises:
        ConfigError: it does not fit, with what would.
    """
    # The same on all ranks, whatever each of their devices has.
    free, whole = mesh.decide("free memory", memory_here(mesh), _least)
    device = of_memory(whole) if mesh.on_cuda else None
    estimate = estimate_of(asked.config, asked.architecture.to_dict(), mesh.topology, device)
    if free is None or estimate is None:
        return asked
    if asked.config.train.memory_check:
        host_free = mesh.decide(
            "free host memory",
            host_memory_here(),
            lambda free: min((each for each in free if each is not None), default=None),
        )
        refuse_too_much_of_host(*estimate, host_free)
    return fitted_into(asked, *estimate, free)


def refuse_too_much_of_host(decoder: Decoder, setup: Setup, free: int | None) -> None:
    """ConfigError if a rank would keep more in its host's memory than its share of the free memory there."""
    needed = host_bytes(decoder, setup)
    if free is None or _CERTAIN["cuda"] * needed <= free:
        return
    key = "train.activation_checkpointing = offload"
    fix = "--train.activation_checkpointing full"
    if setup.cpu_offload:
        key, fix = "mesh.cpu_offload = true", "--mesh.cpu_offload false"
    raise ConfigError(
        f"a rank would keep about {_gib(needed)} in its host's memory, of which {_gib(free)} are free: {key}",
        expected="host memory for what devices do not hold, as estimated before anything is loaded (docs/plan.md)",
        fix=f"{fix}   (on more or larger devices; or, to start it all the same: --train.memory_check false)",
    )


def fitted_into(asked: Asked, decoder: Decoder, setup: Setup, free: int) -> Asked:
    """Like `fitted`, with `free` bytes for each rank."""
    config, automatic = asked.config, asked.config.train.micro_batch == "auto"
    if automatic:
        setup = largest_micro_batch(decoder, setup, free)
    moment = peak(decoder, setup)
    kind = "compiled" if setup.compiled else "cpu" if setup.device is None else "cuda"
    if config.train.memory_check and _CERTAIN[kind] * moment.total > free:
        raise _too_large(moment, _what_fits(config, decoder, setup, free), free)
    lines = []
    if automatic and setup.num_batches > 1:
        asked = replace(asked, config=config.changed(train={"micro_batch": setup.micro_batch}))
        why = f"the most that fits into {_gib(free)} a rank, by the estimate: {_gib(moment.total)}"
        lines.append(
            (f"micro-batch: {setup.micro_batch} rows, {setup.num_batches} of them a step", why)
        )
    elif setup.device is not None:
        lines.append(
            (
                f"memory: about {_gib(moment.total)} a rank",
                f"estimated for the {moment.name}; {_gib(free)} are free",
            )
        )
    return replace(asked, estimated_bytes=round(moment.total), said=tuple(lines))


def _least(of_ranks: Sequence[tuple[int | None, int]]) -> tuple[int | None, int]:
    free, whole = zip(*of_ranks, strict=True)
    return None if None in free else min(free), min(whole)


def host_memory_here() -> int | None:
    """Free bytes of this rank's share of its host."""
    free = room_here().free_bytes
    return None if free is None else free // max(1, environment.current().local_world_size)


def memory_here(mesh: Mesh) -> tuple[int | None, int]:
    """(free bytes, all) of this rank's device, or of its share of the host; None where that is not known."""
    if mesh.on_cuda:
        return torch.cuda.mem_get_info(mesh.device)
    return host_memory_here(), 0


def _what_fits(config: Config, decoder: Decoder, setup: Setup, free: int) -> str:
    """Options to paste, of any mesh of these ranks on CUDA; or that more are needed."""
    gpus, device = setup.topology.world_size, setup.device
    if device is None:
        return what_fits(decoder, setup, free)
    from threefold.plan import advise, fabric

    config = config.changed(mesh=dict.fromkeys(("dp", "dp_shard", "cp", "tp")))
    hosts = fabric.fabric_of(device, in_host=min(8, gpus))
    question = advise.Question(decoder, config, frozenset(), gpus, hosts, device)
    plans = [plan for plan in question.plans() if plan.memory_bytes <= free]
    return advise.what_fits(question.plan(setup), plans) or MORE_RANKS


def _too_large(moment: Moment, smaller: str, free: int) -> ConfigError:
    line, size = max(moment.lines.items(), key=lambda item: item[1])
    return ConfigError(
        f"a rank would hold about {_gib(moment.total)}, of which {_gib(free)} are free: {_gib(size)} of {line} in the "
        f"{moment.name}",
        expected="a step that fits, as estimated before anything is loaded (docs/plan.md)",
        fix=f"{smaller}   (or, to start it all the same: --train.memory_check false)",
    )


def _gib(size: float) -> str:
    return f"{size / 2**30:,.2f} GiB"


class DeviceMemoryError(RunError):
    """A device has no memory left."""

    how = "device"


@contextlib.contextmanager
def explained(asked: Asked, mesh: Mesh, folder: Path) -> Iterator[None]:
    """Turns torch's error, if memory runs out inside, into one that suggests what would fit.

    Raises:
        DeviceMemoryError: in place of torch's OutOfMemoryError; on the rank that ran out.
    """
    if mesh.on_cuda:
        _remember_owners()
    try:
        yield
    except torch.OutOfMemoryError as error:
        reason = str(error).strip().split("\n")[0].split(". GPU")[0].rstrip(".")
        snapshot = _snapshot(folder.resolve() / "memory" / f"rank-{mesh.rank:04d}.pickle")
        expected, fix = _advice(asked, mesh)
        raise DeviceMemoryError(
            f"rank {mesh.rank} has no memory left: {reason}",
            expected=expected + snapshot,
            fix=fix,
        ) from error


def _advice(asked: Asked, mesh: Mesh) -> tuple[str, str]:
    """(what was expected, what would fit), by the estimate if there is one."""
    device = None
    if mesh.on_cuda:
        device = of_memory(torch.cuda.get_device_properties(mesh.device).total_memory)
    estimate = estimate_of(asked.config, asked.architecture.to_dict(), mesh.topology, device)
    if estimate is None:
        setup = setup_of(asked.config, None, mesh.topology, device)
        return "a step that fits in its device", what_fits(None, setup, 0)
    moment = peak(*estimate)
    state = sum(
        moment.lines.get(line, 0.0) for line in ("weights", "gradients", "moments", "averages")
    )
    expected = (
        f"about {moment.total / 2**30:,.1f} GiB to fit in its device, as estimated for the {moment.name}: "
        f"{state / 2**30:,.1f} GiB of weights, gradients and moments, together with activations and gathered weights"
    )
    fixes = (what_fits(*estimate, share * moment.total) for share in _SHARES)
    return expected, next((fix for fix in fixes if fix != MORE_RANKS), MORE_RANKS)


def _remember_owners() -> None:
    """Lets the allocator keep where in Python each block was asked for that is in use, and nothing of freed ones."""
    try:
        torch.cuda.memory._record_memory_history("state", context="state", stacks="python")
    except Exception as error:  # a snapshot shows blocks without owners then
        log.warning("the snapshot of a full device will not say who holds what: %s", error)


def _snapshot(path: Path) -> str:
    """Writes the allocator's snapshot, for pytorch.org/memory_viz, and reports its path; threefold never reads it."""
    try:
        path.parent.mkdir(exist_ok=True)
        torch.cuda.memory._dump_snapshot(str(path))
    except Exception as error:  # the run's own error is the one to see
        log.warning("no snapshot of the memory in %s: %s", path, error)
        return ""
    return f"; what it holds is in {path}, for pytorch.org/memory_viz"
