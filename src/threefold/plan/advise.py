"""Every legal mesh of some devices, with what each needs and how long it takes: ranked, and why others do not fit."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from threefold.config.schema import Config
from threefold.errors import ConfigError
from threefold.mesh.topology import Topology
from threefold.plan.accelerators import Accelerator
from threefold.plan.decoder import Decoder
from threefold.plan.duration import Duration, duration
from threefold.plan.efficiency import Margin, efficiency_of, margin_of
from threefold.plan.fabric import Fabric
from threefold.plan.fit import MODES, as_options, changed_keys, keys_of
from threefold.plan.memory import Moment, host_bytes, peak
from threefold.plan.operations import causal_keys
from threefold.plan.setup import Setup, refused, setup_of

# Usable share of a device's memory: data sheets round up, and the driver keeps some.
THERE = 0.97
# Times that differ by less are put in the order of memory. Which are distinguished is another matter: see `Margin`.
_ALIKE = 0.01
_MOST_ROWS = 64
# And of which the shorter is not worth another key.
_AS_FAST = 1.03


@dataclass(frozen=True)
class Plan:
    """One set-up: what a rank holds at its peak, on its device and on its host, how long a step takes, and how well
    that is known.
    """

    setup: Setup
    peak: Moment
    duration: Duration
    flops_per_token: float
    host_bytes: float
    margin: Margin

    @property
    def memory_bytes(self) -> float:
        return self.peak.total

    @property
    def fits(self) -> bool:
        assert self.setup.device is not None
        return self.memory_bytes <= THERE * self.setup.device.memory_bytes

    @cached_property
    def tokens_per_s_per_gpu(self) -> float:
        setup = self.setup
        rows = setup.micro_batch * setup.num_batches
        return (
            rows * setup.seq_len / (setup.topology.cp * setup.topology.tp) / self.duration.total
        )

    @property
    def mfu(self) -> float:
        assert self.setup.device is not None
        return self.tokens_per_s_per_gpu * self.flops_per_token / self.setup.device.bfloat16

    def between(self, figure: float) -> tuple[float, float]:
        """The least and the most that a figure of its speed or time may be."""
        return figure / self.margin.figure, figure * self.margin.figure

    def slower_than(self, other: "Plan") -> float:
        """By which part of the other's time; 0.0 where the estimate does not distinguish them."""
        slower = self.duration.total / other.duration.total - 1
        return slower if abs(slower) >= self.margin.difference else 0.0

    @property
    def why(self) -> str:
        """Of memory: the moment that needs the most, and the line that is the largest then."""
        assert self.setup.device is not None
        line, size = max(self.peak.lines.items(), key=lambda item: item[1])
        most = f"{size / 2**30:.1f} GiB of {line} in the {self.peak.name}"
        if self.host_bytes:
            most += f"; and {self.host_bytes / 2**30:.1f} GiB of its host's memory"
        if self.fits:
            return f"{self.memory_bytes / 2**30:.1f} GiB, {most}"
        capacity = THERE * self.setup.device.memory_bytes / 2**30
        return f"needs {self.memory_bytes / 2**30:.1f} GiB of {capacity:.1f}: {most}"

    def to_json(self) -> dict[str, Any]:
        """As `--json` has it."""
        setup, topology = self.setup, self.setup.topology
        mesh = {
            "dp": topology.dp,
            "dp_shard": topology.dp_shard,
            "cp": topology.cp,
            "tp": topology.tp,
        }
        speeds: dict[str, float] = {}
        for name, figure in (
            ("step_time_s", self.duration.total),
            ("tokens_per_s_per_gpu", self.tokens_per_s_per_gpu),
            ("mfu", self.mfu),
        ):
            speeds[name] = figure
            speeds[f"{name}_low"], speeds[f"{name}_high"] = self.between(figure)
        return {
            "mesh": mesh,
            "micro_batch": setup.micro_batch,
            "activation_checkpointing": setup.recompute,
            "cpu_offload": setup.cpu_offload,
            "compile": setup.compiled,
            "memory_bytes": round(self.memory_bytes),
            **speeds,
            "flops_per_token": self.flops_per_token,
            "host_bytes": round(self.host_bytes),
            "fits": self.fits,
            "why": self.why,
        }

    def sections(self) -> dict[str, dict[str, Any]]:
        """The keys of a config that ask for it."""
        sections: dict[str, dict[str, Any]] = {
            "mesh": {},
            "train": {"compile": self.setup.compiled},
        }
        for key, value in keys_of(self.setup).items():
            section, _, name = key.partition(".")
            if value is not False:  # the default
                sections[section][name] = value
        return sections


@dataclass(frozen=True)
class Question:
    """The question to plan for.

    Attributes:
        config: its keys in `pinned` are kept; other keys of mesh and memory are open.
        slowness: how many times as long as by published speeds layers took on such a device; None: not measured.
    """

    decoder: Decoder
    config: Config
    pinned: frozenset[str]
    gpus: int
    fabric: Fabric
    device: Accelerator
    slowness: float | None = None

    def plans(self) -> list[Plan]:
        """All legal plans: those that fit by time, and by memory if times are equal, then the others by memory.

        Raises:
            ConfigError: no mesh is legal, or the model or a key cannot be estimated.
        """
        problems: list[Any] = []
        legal: list[Plan] = []
        for topology in self.topologies():
            refusals = list(refused(self._of(topology), self.decoder, topology))
            problems += refusals
            if not refusals:
                legal += self._on(topology)
        if not legal and problems:
            raise ConfigError.of(
                list({problem.what: problem for problem in problems}.values())[:5]
            )
        if not legal:
            raise ConfigError(
                f"no mesh of {self.gpus} devices is legal",
                expected="dp x cp x tp devices, whose dp divides the global batch",
                fix=f"--train.global_batch {self.gpus}   (and leave keys of the mesh out)",
            )
        fitting = [plan for plan in legal if plan.fits]
        least = min((plan.duration.total for plan in fitting), default=1.0)
        # Of two equal plans, the one that needs no transfers, whose speed was not measured.
        fitting.sort(
            key=lambda plan: (
                int((plan.duration.total / least - 1) / _ALIKE),
                plan.setup.recompute == "offload",
                plan.memory_bytes,
            )
        )
        return fitting + sorted(
            (plan for plan in legal if not plan.fits), key=lambda plan: plan.memory_bytes
        )

    def topologies(self) -> Iterator[Topology]:
        """Meshes of all devices; tp stays inside a host, and rows divide over dp and cp."""
        mesh = self.config.mesh
        heads = math.gcd(*self.decoder.heads)
        plan = self.decoder.family.plan
        for tp in self._sizes("tp", mesh.tp, self.gpus):
            if "mesh.tp" not in self.pinned and (
                heads % tp or tp > self.fabric.in_host or (tp > 1 and not plan)
            ):
                continue
            for cp in self._sizes("cp", mesh.cp, self.gpus // tp):
                if (
                    "mesh.cp" not in self.pinned
                    and cp > 1
                    and (self.config.data.seq_len % (2 * cp) or cp > heads * 8)
                ):
                    continue
                dp = self.gpus // (tp * cp)
                if mesh.dp not in (None, "auto", dp) or self.config.train.global_batch % dp:
                    continue
                for shard in self._sizes("dp_shard", mesh.dp_shard, dp):
                    yield Topology(dp // shard, shard, cp, tp)

    def _sizes(self, axis: str, asked: int | str | None, of: int) -> list[int]:
        if asked == "auto" and axis == "dp_shard":
            return [of]
        if isinstance(asked, int):
            return [asked] if of % asked == 0 else []
        return _divisors(of)

    def _of(self, topology: Topology) -> Config:
        sizes = {name: getattr(topology, name) for name in ("dp", "dp_shard", "cp", "tp")}
        return self.config.changed(mesh=sizes)

    def _on(self, topology: Topology) -> list[Plan]:
        config, train = self._of(topology), self.config.train
        base = setup_of(config, self.decoder, topology, self.device)
        rows = train.global_batch // topology.dp
        sizes = [size for size in range(1, min(rows, _MOST_ROWS) + 1) if rows % size == 0]
        if "train.micro_batch" in self.pinned and train.micro_batch != "auto":
            sizes = [train.micro_batch]
        modes = (
            MODES if "train.activation_checkpointing" not in self.pinned else (base.recompute,)
        )
        offloads = (
            (False, True) if "mesh.cpu_offload" not in self.pinned else (base.cpu_offload,)
        )
        plans: list[Plan] = []
        for offload in offloads:
            if offload and len(offloads) > 1 and any(plan.fits for plan in plans):
                break  # it is slower, and nothing needs it
            for size, mode in itertools.product(sizes, modes):
                fields: dict[str, Any] = {
                    "micro_batch": size,
                    "num_batches": rows // size,
                    "recompute": mode,
                    "cpu_offload": offload,
                }
                plans.append(self.plan(replace(base, **fields)))
        return plans

    def plan(self, setup: Setup) -> Plan:
        """The plan for one set-up."""
        decoder = self.decoder
        flops = decoder.flops.per_token(causal_keys(setup.seq_len))
        seconds = duration(
            decoder, setup, self.fabric, efficiency_of(self.device, self.slowness or 1.0)
        )
        mixture = any(layer.chosen for layer in decoder.layers)
        margin = margin_of(self.device, mixture=mixture, measured=self.slowness is not None)
        return Plan(
            setup, peak(decoder, setup), seconds, flops, host_bytes(decoder, setup), margin
        )


def _divisors(of: int) -> list[int]:
    small = [size for size in range(1, math.isqrt(of) + 1) if of % size == 0]
    return sorted({*small, *(of // size for size in small)})


def pareto(plans: Sequence[Plan]) -> list[Plan]:
    """Of the plans that fit, those that no other beats in both time and memory, the fastest first."""
    front: list[Plan] = []
    for plan in sorted(
        (plan for plan in plans if plan.fits), key=lambda plan: plan.duration.total
    ):
        if not front or plan.memory_bytes < front[-1].memory_bytes:
            front.append(plan)
    return front


def what_fits(plan: Plan, plans: Sequence[Plan]) -> str | None:
    """The keys that make a set-up fit which does not, to paste; None: none do.

    They are the fewest of those that take about as long as the fastest, the first of the plans that fit.
    """
    least = next((other.duration.total for other in plans if other.fits), 0.0)
    fast = (other for other in plans if other.fits and other.duration.total <= _AS_FAST * least)
    changes = [changed_keys(plan.setup, other.setup) for other in fast]
    return as_options(min(changes, key=len)) if changes else None


def what_pays(question: Question, plans: Sequence[Plan]) -> list[str]:
    """What each axis and float8 would change in the fastest plan, in words."""
    fitting = [plan for plan in plans if plan.fits]
    if not fitting:
        return []
    best, lines = fitting[0], []
    for axis in ("tp", "cp"):
        if f"mesh.{axis}" in question.pinned:
            continue
        used = getattr(best.setup.topology, axis) > 1
        others = [plan for plan in fitting if (getattr(plan.setup.topology, axis) > 1) != used]
        if not others:
            lines.append(
                f"{axis}: "
                + ("nothing fits without it" if used else "no mesh with it fits or is legal")
            )
            continue
        slower = others[0].slower_than(best)
        verdict = (
            f"without it {slower:.1%} slower" if used else f"would not pay, {slower:.1%} slower"
        )
        lines.append(
            f"{axis}: "
            + (verdict if slower else _untold(best, "without it" if used else "with it"))
        )
    if best.setup.topology.tp > 1:
        other = question.plan(
            replace(best.setup, sequence_parallel=not best.setup.sequence_parallel)
        )
        held = (other.memory_bytes - best.memory_bytes) / 2**30
        which = "without it" if best.setup.sequence_parallel else "with it"
        lines.append(f"sequence parallelism: {which} {held:+.1f} GiB a device")
    if best.setup.float8 == "none" and best.setup.device.float8:  # type: ignore[union-attr]
        faster = best.slower_than(question.plan(replace(best.setup, float8="tensorwise")))
        pays = (
            f"{faster:.1%} faster"
            if faster > 0
            else "would not pay: its products are too small, or too small a share of the time"
        )
        lines.append(
            "train.float8 tensorwise: " + (pays if faster else _untold(best, "with it"))
        )
    return lines


def _untold(plan: Plan, which: str) -> str:
    return f"no difference {which} that the estimate resolves: it resolves {plan.margin.difference:.0%}"
