"""From sizes to live process groups: init_process_group, the parameters' DeviceMesh, further axes, teardown.

A `Mesh` is the live counterpart of a `Topology`. Parameters live on a DeviceMesh of (dp_replicate, fsdp, tp), where
`fsdp` = dp_shard x cp are the ranks that share the shards of one copy of the weights. Three more groups serve
everything else: `dp` (ranks that read distinct rows), `cp` (ranks that share a sequence) and `loss` = dp x cp (ranks
that hold distinct target tokens). Code that needs a group asks the mesh for it by name.
"""

from __future__ import annotations

import math
import os
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cached_property
from importlib.metadata import version
from threading import Event
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from threefold.arrays import Int64
from threefold.build_id import build_id
from threefold.config.loading import validate
from threefold.config.schema import MeshConfig
from threefold.errors import ConfigError, RunError, in_program
from threefold.mesh import environment
from threefold.mesh.exchange import (
    Conclude,
    Exchange,
    Make,
    described_rows,
    digest_of_rows,
    naming_lost_peers,
    refuse_unlike,
)
from threefold.mesh.rendezvous import join_group
from threefold.mesh.rendezvous_errors import no_device
from threefold.mesh.topology import AXES, Topology, default_topology, resolve

# Counts the ranks that failed; the first one reports why.
FAILURES = "threefold/failures"
_PARAMETER_AXES = ("dp_replicate", "fsdp", "tp")
# For a process about to exit: gloo's threads have the time to themselves.
_GLOO_ENDS_S = 0.02
# torch's backend without a network, for the group of a single process.
_ALONE = "fake"
_GROUPS = {
    "dp": ("dp_replicate", "dp_shard"),
    "cp": ("cp",),
    "loss": ("dp_replicate", "dp_shard", "cp"),
}

# A sampler built inside the user's own loop finds the mesh here, as torch's sampler finds the default process group.
_active: Mesh | None = None


@dataclass(frozen=True)
class Mesh:
    """This rank's place on the live mesh.

    Attributes:
        topology: sizes of the axes.
        rank: global rank.
        device: the device this rank computes on.
        parameter_mesh: torch's DeviceMesh of (dp_replicate, fsdp, tp), or None in a single process.
        local_world_size: ranks on this machine.
        host_leader: the lowest rank on this machine.
        num_hosts: number of machines, if known.
        host: name of this machine, as its launcher or the system has it.
        groups: process groups of `dp`, `cp` and `loss` that have more than one member.
        store: the rendezvous store, or None in a single process.
        timeout_s: longest wait in a collective.
        losses: the batches of the custom losses being computed now, for models that a loss calls.
        routers: the routers' losses of its steps, which count every token that is not `padding`.
        kept: in runs of a program, the optimizer of each model whose state is in their checkpoints.
        exchange: passes plain values between ranks; set from the start, as a watch reads it from its thread.
    """

    topology: Topology
    rank: int
    device: torch.device
    parameter_mesh: DeviceMesh | None = None
    groups: Mapping[str, dist.ProcessGroup] = field(default_factory=dict)
    local_world_size: int = 1
    host_leader: int = 0
    num_hosts: int = 1
    store: dist.Store | None = None
    timeout_s: float = 600.0
    host: str = ""
    losses: list[Any] = field(default_factory=list, repr=False, compare=False)
    routers: list[Any] = field(default_factory=list, repr=False, compare=False)
    kept: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)
    exchange: Exchange = field(init=False, repr=False, compare=False)
    _before_close: list[Callable[[], object]] = field(
        default_factory=list, repr=False, compare=False
    )
    _closed: Event = field(default_factory=Event, repr=False, compare=False)

    def __post_init__(self) -> None:
        vars(self)["exchange"] = Exchange(self.rank, self.world_size, self.store)

    @cached_property
    def world_size(self) -> int:
        return self.topology.world_size

    @property
    def on_cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def dp_size(self) -> int:
        return self.topology.dp

    @property
    def cp_size(self) -> int:
        return self.topology.cp

    @property
    def tp_size(self) -> int:
        return self.topology.tp

    @property
    def dp_rank(self) -> int:
        return self.topology.dp_rank(self.rank)

    @property
    def cp_rank(self) -> int:
        return self.topology.coordinates(self.rank)[2]

    @property
    def tp_rank(self) -> int:
        return self.topology.coordinates(self.rank)[3]

    def size(self, name: str) -> int:
        """Number of ranks along an axis, along `dp`, `fsdp` or `loss`, or in the `world`."""
        axes = {**_GROUPS, "fsdp": ("dp_shard", "cp"), "world": AXES}.get(name, (name,))
        return math.prod(getattr(self.topology, axis) for axis in axes)

    def group(self, name: str) -> dist.ProcessGroup | None:
        """Process group of `size(name)` ranks; None if it has a single member (nothing to send)."""
        if self.parameter_mesh is None or self.size(name) == 1:
            return None
        if name == "world":
            return dist.group.WORLD
        return (
            self.parameter_mesh.get_group(name)
            if name in _PARAMETER_AXES
            else self.groups[name]
        )

    def all_reduce(
        self, name: str, values: torch.Tensor, op: dist.RedOpType = dist.ReduceOp.SUM
    ) -> None:
        """Reduces values over an axis, in place: over `group(name)`, if it has several ranks."""
        if (group := self.group(name)) is not None:
            dist.all_reduce(values, op, group=group)

    @property
    def meets_others(self) -> bool:
        """Whether there are other ranks to communicate with; not while a step is traced with a fake group.

        Raises:
            RunError: the mesh is closed.
        """
        if self._closed.is_set():
            raise RunError(
                "the mesh is closed: no step, call or save can be made on it",
                expected="mesh.close() as the last line: it has disconnected the ranks",
                fix="mesh = threefold.init_mesh(...), and the model and its step made on that mesh",
            )
        return self.store is not None and dist.get_backend() != _ALONE

    def device_mesh(self, name: str) -> DeviceMesh | None:
        """torch's DeviceMesh of this rank and the others along `dp`, `cp`, `tp` or `loss` (dp x cp), for collectives.

        It has one dimension of that name; ranks may ask for different ones. None for a single rank (nothing to send).

        Raises:
            ConfigError: no axis has that name.
        """
        if name not in (*_GROUPS, *_PARAMETER_AXES):
            raise ConfigError(
                f"mesh.device_mesh({name!r}): no such axis",
                expected="an axis of the mesh: dp, cp, tp, or loss for dp x cp",
                fix="mesh.device_mesh('dp')",
            )
        if (group := self.group(name)) is None:
            return None
        return DeviceMesh.from_group(group, self.device.type, mesh_dim_names=(name,))

    @naming_lost_peers()
    def gather(self, values: Int64) -> Int64:
        """The values of every rank, [n] int64 -> [world, n] int64, on the CPU: no rank waits for its device.

        If a launcher's process group cannot send from the CPU, the device is used.
        """
        if self.store is None:
            return values[None]
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        gathered = torch.empty((self.world_size, len(values)), dtype=torch.int64, device=device)
        dist.all_gather(list(gathered), torch.from_numpy(values).to(device))
        return gathered.numpy(force=True)

    def agree(
        self,
        call: str,
        number: int = 0,
        make: Callable[[], tuple[Sequence[dict[str, Any]], int]] = lambda: ((), 0),
    ) -> tuple[Sequence[dict[str, Any]], int]:
        """The micro-batches that `make` returns, and its count summed over the dp ranks; every rank calls it.

        All ranks must make the same call with the same number of micro-batches, and the cp and tp ranks of a dp rank
        with the same rows. The check is one small gather on the CPU; details are exchanged and named on a mismatch.

        Args:
            call: name of the call, for the error, such as `step`.
            number: the number of the call; 0: there is only one.

        Raises:
            RunError, DataError: the ranks differ (`refuse_unlike`), or what `make` raised on a rank; on every rank.
        """
        batches: Sequence[dict[str, Any]] = ()
        count = 0
        failed = None
        shared = self.cp_size * self.tp_size
        if not self.meets_others:
            return make()
        try:
            batches, count = make()
            digest = digest_of_rows(batches) if shared > 1 else 0
        except Exception as error:
            failed, digest = error, 0
        own = [
            zlib.crc32(call.encode()),
            number,
            len(batches),
            digest,
            count,
            failed is not None,
        ]
        ranks = self.gather(np.array(own, np.int64))
        copies = ranks.reshape(-1, shared, len(own))  # (dp ranks, cp x tp, numbers)
        alike = (ranks[:, :3] == ranks[0, :3]).all() and (
            copies[..., 3] == copies[:, :1, 3]
        ).all()
        if ranks[:, 5].any() or not alike:

            def described() -> dict[str, Any]:
                if failed is not None:
                    raise failed
                rows = described_rows(batches) if shared > 1 else {}
                return {
                    "call": f"{call} {number}" if number else call,
                    "pieces": len(batches),
                    "rows": rows,
                }

            self.decide_on("agreement", described, lambda parts: refuse_unlike(parts, shared))
        return batches, int(copies[:, 0, 4].sum())

    def share(self, name: str, make: Make) -> Any:
        """The plain value that `make` returns on rank 0, on every rank; no collective, so it may take any time or fail.

        Raises:
            ThreefoldError: the error of rank 0, with the same class and text on every rank.
        """
        return self.exchange.value_of(0, name, make)

    def once_per_host(self, name: str, work: Make) -> Any:
        """Like `share`, but `make` runs on the first rank of each machine."""
        return self.exchange.value_of(self.host_leader, f"{name}/{self.host_leader}", work)

    def decide(self, name: str, part: Any, conclude: Conclude) -> Any:
        """The conclusion of rank 0 from the `part` of every rank, in rank order, on every rank; raises as `share`."""
        return self.exchange.conclusion_of(name, part, conclude)

    def decide_on(self, name: str, make: Make, conclude: Conclude) -> Any:
        """Like `decide`, on what `make` returns on every rank; an error of one rank, on any host, is raised on all."""
        return self.exchange.conclusion_of_work(name, make, conclude)

    @cached_property
    def sharding_mesh(self) -> DeviceMesh:
        """The DeviceMesh of the parameters; FSDP2 needs one even for a mesh of one, whose group sends nothing."""
        if self.parameter_mesh is not None:
            return self.parameter_mesh
        if not dist.is_initialized():
            dist.init_process_group(_ALONE, store=dist.HashStore(), rank=0, world_size=1)
        # One of several ranks may compute alone, to find out why all of them fail: it waits for no other rank.
        rank = dist.get_rank()
        group = dist.new_group([rank], backend=_ALONE, use_local_synchronization=True)
        alone = torch.full((1, 1, 1), rank)
        return DeviceMesh.from_group(
            [group] * 3, self.device.type, mesh=alone, mesh_dim_names=_PARAMETER_AXES
        )

    @naming_lost_peers()
    def barrier(self) -> None:
        """Returns when every rank has called it."""
        if self.parameter_mesh is not None:
            dist.barrier(device_ids=[self.device.index] if self.on_cuda else None)

    def before_close(self, end: Callable[[], object]) -> None:
        """Makes `close` call `end` first, which waits for work still running in the background."""
        self._before_close.append(end)

    def abandon(self) -> None:
        """Waits for background saves after a failure, and leaves the process groups as they are.

        Destroying NCCL's groups waits for all ranks of the node, which may never arrive: they learn of a failure when
        this process ends.
        """
        global _active
        if _active is self:
            _active = None
        for end in self._before_close:
            end()

    def close(self) -> None:
        """Waits for background saves and destroys the process groups; the mesh is unusable afterwards."""
        self.abandon()
        if self.store is not None:
            self._closed.set()
        if dist.is_initialized() and (
            self.parameter_mesh is not None or dist.get_backend() == _ALONE
        ):
            # gloo's thread drops its last work with Python's lock; DDP frees the group with it, waiting for the thread.
            time.sleep(_GLOO_ENDS_S)
            dist.destroy_process_group()


def active_mesh() -> Mesh | None:
    """The mesh that `init_mesh` made last, if it is not closed; else None."""
    return _active


def init_mesh(
    dp: int | str | None = None,
    *,
    dp_shard: int | str | None = None,
    cp: int | str | None = None,
    tp: int | str | None = None,
    device: str | torch.device = "auto",
    timeout_s: float = 600.0,
) -> Mesh:
    """Makes this process a rank of a dp x cp x tp mesh and returns its place on it.

    Under a launcher every rank calls it with the same sizes; in a plain process it is a mesh of one. An existing
    process group is used unchanged. Omitted sizes come from the variables DP_SIZE, CP_SIZE and TP_SIZE, or follow
    the same rules as the config's mesh keys.

    Raises:
        ConfigError: sizes that do not match the number of ranks, or a device that this machine does not have.
    """
    sizes = {"dp": dp, "dp_shard": dp_shard, "cp": cp, "tp": tp}
    for axis in ("dp", "cp", "tp"):
        if sizes[axis] is None:
            sizes[axis] = _size_from(f"{axis.upper()}_SIZE")
    with in_program(lambda key, value: f"threefold.init_mesh({key[5:]}={value!r})"):
        asked = validate(
            {"mesh": {**sizes, "device": str(device), "timeout_s": timeout_s}}
        ).mesh
    info = environment.current()
    if dist.is_initialized() and dist.get_world_size() != info.world_size:
        info = environment.LaunchInfo(
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            launcher="process group",
            host=info.host,
        )
    try:
        topology, _ = resolve(asked, launched_world_size=info.world_size)
    except ConfigError as error:
        raise ConfigError.of(
            [replace(each, fix=_sizes_to_paste(asked, info)) for each in error.problems]
        ) from None
    return join_mesh(topology, info, device=asked.device, timeout_s=timeout_s)


def _sizes_to_paste(asked: MeshConfig, info: environment.LaunchInfo) -> str:
    """A call with sizes that use all ranks: the sizes asked for and dp from the rest, if that is possible."""
    dp, cp, tp = (
        size if isinstance(size, int) else 1 for size in (asked.dp, asked.cp, asked.tp)
    )
    more = f"   (or start {dp * cp * tp} ranks)"
    if info.world_size % (cp * tp):
        whole = default_topology(info.world_size)
        return f"threefold.init_mesh(dp={whole.dp}, cp={whole.cp}, tp={whole.tp}){more}"
    return f"threefold.init_mesh(dp={info.world_size // (cp * tp)}, cp={cp}, tp={tp}){more}"


def _size_from(variable: str) -> int | str | None:
    text = os.environ.get(variable)
    if text is None or text == "auto":
        return text
    if text.isascii() and text.isdigit() and int(text):
        return int(text)
    raise ConfigError(
        f"{variable} is {text!r}",
        expected="a number of ranks, at least 1, or auto",
        fix=f"export {variable}=2",
    )


@naming_lost_peers()
def join_mesh(
    topology: Topology,
    info: environment.LaunchInfo,
    *,
    device: str,
    timeout_s: float,
    facts: Mapping[str, str] | None = None,
    met: Callable[[dist.Store, Sequence[str]], None] | None = None,
) -> Mesh:
    """Joins the ranks that the launcher describes and lays the mesh over them.

    Args:
        timeout_s: longest wait for the other ranks, and in any collective later.
        met: called when all ranks have met and before they connect, with their store and the host of each.
        facts: must be the same on every rank, like mesh and versions; compared before anything is sent.

    Raises:
        RendezvousError: the ranks did not meet within `timeout_s`.
    """
    global _active
    environment.allow_open_files()
    own_device = pick_device(device, 0 if info.own_device else info.local_rank)
    if topology.world_size == 1 and (not dist.is_initialized() or dist.get_backend() == _ALONE):
        _active = Mesh(topology, 0, own_device, host=info.host)
        return _active
    if own_device.type == "cuda":
        torch.cuda.set_device(own_device)
    hosts: tuple[str, ...] = ()
    if not dist.is_initialized():
        versions = {
            "threefold": build_id(),
            "torch": torch.__version__,
            "transformers": version("transformers"),
        }
        own = {
            **versions,
            "the mesh": str(topology),
            "the device": own_device.type,
            **(facts or {}),
        }
        hosts = join_group(info, own_device, timeout_s, own, environment.token(), met)
    sizes = (topology.dp_replicate, topology.dp_shard * topology.cp, topology.tp)
    device_mesh = init_device_mesh(own_device.type, sizes, mesh_dim_names=_PARAMETER_AXES)
    groups = {name: _group_of(topology, axes) for name, axes in _GROUPS.items()}
    present = {name: group for name, group in groups.items() if group is not None}
    for group in (*device_mesh.get_all_groups(), *present.values()):
        # Groups made from groups get torch's default timeout, not that of the first one.
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), group)
    store = dist.distributed_c10d._get_default_store()
    # All ranks join in the same order, so counting gives each of several meshes in one process group its own keys.
    number = store.add(f"threefold/meshes/{dist.get_rank()}", 1)
    store = dist.PrefixStore(f"mesh-{number}", store)
    rank = dist.get_rank()
    _active = Mesh(
        topology,
        rank,
        own_device,
        device_mesh,
        present,
        info.local_world_size,
        hosts.index(hosts[rank]) if hosts else rank - rank % info.local_world_size,
        len(set(hosts)) or 1,
        store,
        timeout_s,
        info.host,
    )
    return _active


def _group_of(topology: Topology, axes: tuple[str, ...]) -> dist.ProcessGroup | None:
    ranks = topology.groups(*axes)
    if len(ranks[0]) == 1:
        return None
    if len(ranks) == 1:
        return dist.group.WORLD
    return dist.new_subgroups_by_enumeration(ranks)[0]


def pick_device(device: str, local_rank: int) -> torch.device:
    """The device of one rank: `cpu`, or the accelerator of the local rank.

    Raises:
        ConfigError: a device that this machine does not have.
    """
    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    visible = torch.cuda.device_count()
    named = environment.variables().get("CUDA_VISIBLE_DEVICES")
    if visible == 1 and named == str(local_rank):
        return torch.device("cuda", 0)  # chosen by a wrapper script around the rank
    if local_rank >= visible:
        raise no_device(local_rank, visible=visible, named=named)
    return torch.device("cuda", local_rank)
