"""Where a rank is on the mesh: arithmetic only, no torch.

A mesh has four axes in one fixed order, last fastest: dp_replicate, dp_shard, cp, tp. Tensor parallelism communicates
most, so its ranks are neighbours. The dp = dp_replicate x dp_shard data ranks read distinct rows; the cp and tp ranks
of one data rank read the same ones. `resolve` turns what the user asked for into sizes, with the reason.
"""

import math
from dataclasses import dataclass

from threefold.config.schema import MeshConfig
from threefold.errors import ConfigError

AXES = ("dp_replicate", "dp_shard", "cp", "tp")

DEFAULT_ON_CPU = "the default on a CPU"


@dataclass(frozen=True)
class Topology:
    """Sizes of the four axes."""

    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        return (self.dp_replicate, self.dp_shard, self.cp, self.tp)

    @property
    def dp(self) -> int:
        return self.dp_replicate * self.dp_shard

    @property
    def world_size(self) -> int:
        return self.dp * self.cp * self.tp

    def coordinates(self, rank: int) -> tuple[int, int, int, int]:
        """Position of a global rank on (dp_replicate, dp_shard, cp, tp)."""
        rest, tp = divmod(rank, self.tp)
        rest, cp = divmod(rest, self.cp)
        replicate, shard = divmod(rest, self.dp_shard)
        return replicate, shard, cp, tp

    def dp_rank(self, rank: int) -> int:
        """Which of the `dp` data ranks a global rank belongs to."""
        return rank // (self.cp * self.tp)

    def groups(self, *axes: str) -> list[list[int]]:
        """The sets of ranks that differ only on `axes`, each in ascending order; together they hold every rank once."""
        groups: dict[tuple[int | None, ...], list[int]] = {}
        for rank in range(self.world_size):
            places = zip(AXES, self.coordinates(rank), strict=True)
            groups.setdefault(
                tuple(None if axis in axes else place for axis, place in places), []
            ).append(rank)
        return list(groups.values())

    def __str__(self) -> str:
        sharded = (
            f" ({self.dp_replicate} replicas x {self.dp_shard} shards)"
            if self.dp_replicate > 1
            else " (sharded)"
        )
        return (
            f"dp={self.dp}{sharded if self.dp_shard > 1 else ''} x cp={self.cp} x tp={self.tp}"
        )


def default_topology(world_size: int) -> Topology:
    """The largest mesh of `world_size` ranks that uses as many of the three axes as it can, each at least 2.

    8 ranks are 2 x 2 x 2, 12 are 3 x 2 x 2; 4 or 6 have room for two axes (dp, tp 2), 2 or an odd number for dp.
    """
    cp = 2 if world_size % 4 == 0 and world_size >= 8 else 1
    tp = 2 if world_size % 2 == 0 and world_size >= 4 else 1
    return Topology(dp_replicate=world_size // (cp * tp), cp=cp, tp=tp)


def resolve(
    mesh: MeshConfig, *, launched_world_size: int | None = None, num_devices: int | None = None
) -> tuple[Topology, str]:
    """Sizes of the mesh, and the reason for them.

    Args:
        mesh: what the user asked for (environment defaults already folded in).
        launched_world_size: number of ranks if a launcher started them, else None.
        num_devices: accelerators of this machine, or None on a CPU.

    Raises:
        ConfigError: sizes that do not match one another or the number of ranks, with the settings to change.
    """
    if mesh.dp is mesh.dp_shard is mesh.cp is mesh.tp is None:
        if launched_world_size is not None:
            return Topology(
                dp_replicate=launched_world_size
            ), "dp is the launcher's world size: no mesh key was given"
        if num_devices is None:
            return default_topology(8), DEFAULT_ON_CPU
        # Communication of tp and cp in each layer costs more than FSDP's gathers, as long as a row fits into a device.
        return Topology(
            dp_shard=num_devices
        ), f"FSDP over {num_devices} devices: no mesh key was given"
    ranks = launched_world_size if launched_world_size is not None else num_devices
    sizes, why = _filled(mesh, 8 if ranks is None else ranks)
    dp, cp, tp = (sizes[axis] for axis in ("dp", "cp", "tp"))
    shard = dp if mesh.dp_shard == "auto" else mesh.dp_shard or 1
    if dp % shard:
        raise ConfigError(
            f"mesh.dp_shard = {shard} does not divide mesh.dp = {dp}",
            expected="dp = dp_replicate x dp_shard: 1 (DDP), dp (FSDP), or a divisor of dp between (HSDP)",
            fix=f"--mesh.dp_shard {dp}" + "   (or 1)" * (dp > 1),
        )
    topology = Topology(dp_replicate=dp // shard, dp_shard=shard, cp=cp, tp=tp)
    if launched_world_size is not None and topology.world_size != launched_world_size:
        raise ConfigError(
            f"mesh.dp x mesh.cp x mesh.tp = {dp} x {cp} x {tp} = {topology.world_size}, "
            f"but {launched_world_size} ranks were started",
            expected="world size = dp x cp x tp, so that every rank has a place on the mesh",
            fix=f"start {topology.world_size} ranks, or set {_fitting(launched_world_size)}",
        )
    return topology, why


def _filled(mesh: MeshConfig, available: int) -> tuple[dict[str, int], str]:
    """Sizes of dp, cp and tp, the one on auto filled from the `available` ranks; and the reason."""
    dp = mesh.dp if mesh.dp is not None else mesh.dp_shard
    asked = {"dp": dp, "cp": mesh.cp, "tp": mesh.tp}
    sizes = {axis: size or 1 for axis, size in asked.items() if size != "auto"}
    automatic = [axis for axis in asked if axis not in sizes]
    if len(automatic) > 1:
        raise ConfigError(
            " and ".join(f"mesh.{axis} = auto" for axis in automatic)
            + " leave more than one axis open",
            expected="at most one axis on auto, filled from the number of ranks and the others",
            fix=f"--mesh.{automatic[1]} 1",
        )
    if not automatic:
        return sizes, "as given"
    axis, others = automatic[0], math.prod(sizes.values())
    if available % others:
        raise ConfigError(
            f"mesh.{axis} = auto cannot be filled: {available} ranks are not a multiple of {others}",
            expected="world size = dp x cp x tp",
            fix=_fitting(available),
        )
    return {**sizes, axis: available // others}, f"{axis} filled from {available} ranks"


def _fitting(world_size: int) -> str:
    mesh = default_topology(world_size)
    return f"--mesh.dp {mesh.dp} --mesh.cp {mesh.cp} --mesh.tp {mesh.tp}"
