"""How fast a collective of some ranks is: links inside a host, and the network between hosts."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from threefold.errors import ConfigError
from threefold.plan.accelerators import Accelerator

# Bytes/s of one device one way, by data sheets. Inside of a host:
LINKS = {"nvlink4": 450e9, "nvlink5": 900e9, "pcie4": 32e9, "pcie5": 64e9}
# Between hosts: a network card for each device (NDR, HDR, EFA, RoCE), or one for each host (Ethernet).
NETWORKS = {"ib-ndr": 50e9, "ib-hdr": 25e9, "efa": 50e9, "efa-p4d": 6.25e9, "roce": 50e9}
OF_A_HOST = {"100gbe": 12.5e9, "25gbe": 3.125e9}
# The share of a rate that large collectives reach: NCCL's own tests give 360 of 450 GB/s on NVLink 4.
_REACHED = 0.8
# Of a collective in a host, for each doubling of its ranks, and of one between hosts, for each host of its ring, s.
_LATENCY_LINK, _LATENCY_NETWORK = 5e-6, 20e-6
_MEASURED = re.compile(r"(?P<number>\d+(\.\d+)?) ?(?P<unit>[KMGT]i?B)/s")
_UNITS = {f"{letter}{'i' * binary}B": (1024 if binary else 1000) ** power
          for power, letter in enumerate("KMGT", 1) for binary in (False, True)}  # fmt: skip


@dataclass(frozen=True)
class Fabric:
    """Attributes:
    in_host: devices of a host.
    link, network: bytes/s of a device, one way, to its neighbours in the host and to other hosts.
    """

    in_host: int
    link: float
    network: float

    def seconds(self, collective: str, size: float, *, ranks: int, stride: int) -> float:
        """The duration of one call.

        Args:
            size: as `traffic` counts it.
            ranks: that take part.
            stride: distance between the numbers of two neighbours: of tp ranks 1, of cp ranks tp.
        """
        if ranks == 1 or not size:
            return 0.0
        here = max(1, min(ranks, self.in_host // stride))
        inside = ranks <= here
        # Each rank of a host that takes part brings its own network card.
        rate = self.link if inside else min(self.link, self.network * here)
        times = 2 if collective == "all-reduce" else 1
        share = (ranks - 1) / ranks * times
        latency = (
            math.log2(ranks) * _LATENCY_LINK if inside else ranks / here * _LATENCY_NETWORK
        )
        return share * size / (_REACHED * rate) + times * latency


def fabric_of(
    device: Accelerator, *, in_host: int, link: str | None = None, network: str | None = None
) -> Fabric:
    """From presets, or from the bandwidths that `threefold doctor` has measured; None: the device's own link, and NDR
    InfiniBand.

    Raises:
        ConfigError: neither a preset nor a bandwidth.
    """
    between = {**NETWORKS, **{name: rate / in_host for name, rate in OF_A_HOST.items()}}
    own = device.link if link is None else _rate("--link", link, LINKS)
    return Fabric(in_host, own, _rate("--network", network or "ib-ndr", between))


def _rate(option: str, text: str, presets: Mapping[str, float]) -> float:
    """Bytes/s of a preset, or that a measured bandwidth is part of."""
    if text in presets:
        return presets[text]
    if (match := _MEASURED.fullmatch(text)) is not None and (
        rate := float(match["number"]) * _UNITS[match["unit"]]
    ):
        return rate / _REACHED
    raise ConfigError(
        f"{option} {text} is not known",
        expected=f"one of {', '.join(presets)}, or a bus bandwidth as `threefold doctor` measures it: 41.5GiB/s",
        fix=f"{option} {next(iter(presets))}",
    )
