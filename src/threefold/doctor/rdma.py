"""Cards that put data into another host's memory (InfiniBand, RoCE, EFA), and what NCCL needs to use them. No torch."""

import re
import resource
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from threefold.doctor.findings import Finding, note, warning
from threefold.doctor.machine import text_of
from threefold.errors import size_text

_DEVICES = Path("/sys/class/infiniband")
_LEAST_LOCKED = 1 << 30
_PLUGIN = "libnccl-net*.so*"
_PLUGIN_FOLDERS = (
    "/opt/amazon/ofi-nccl/lib",
    "/opt/amazon/ofi-nccl/lib/*",
    "/opt/aws-ofi-nccl/lib",
    "/usr/lib/*-linux-gnu",
)


@dataclass(frozen=True)
class Rdma:
    """The RDMA hardware of this machine.

    Attributes:
        devices: (name, driver).
        locked_memory: that a process may lock, in bytes; None: any, or unknown.
        direct: whether cards reach the GPUs' memory: nvidia-peermem, or the driver's open kernel module.
        plugin: NCCL's plugin for libfabric, which it needs for EFA; its file.
    """

    devices: Sequence[tuple[str, str]] = ()
    locked_memory: int | None = None
    direct: bool = True
    plugin: str | None = None


def look(environ: Mapping[str, str], *, root: Path = Path("/")) -> Rdma:
    """Reads this machine, whose files are below `root`."""
    devices = root / _DEVICES.relative_to("/")
    cards = [
        (each.name, (each / "device" / "driver").resolve().name)
        for each in sorted(devices.glob("*"))
    ]
    modules = text_of(root / "proc/modules") or ""
    version = text_of(root / "proc/driver/nvidia/version") or ""
    places = [*filter(None, environ.get("LD_LIBRARY_PATH", "").split(":")), *_PLUGIN_FOLDERS]
    files = (file for place in places for file in root.glob(f"{place.strip('/')}/{_PLUGIN}"))
    return Rdma(
        cards,
        _locked_memory(),
        re.search(r"^nvidia_peermem ", modules, re.MULTILINE) is not None
        or "Open Kernel Module" in version,
        next((str(file) for file in files), None),
    )


def judge(cards: Rdma, *, gpus: bool) -> list[Finding]:
    """What would keep NCCL from these cards; `gpus`: whether this machine has any."""
    return list(_judged(cards)) if cards.devices and gpus else []


def _judged(cards: Rdma) -> Iterator[Finding]:
    names = ", ".join(name for name, _ in cards.devices)
    if cards.locked_memory is not None and cards.locked_memory < _LEAST_LOCKED:
        yield warning(
            "locked memory",
            f"{size_text(cards.locked_memory)} per process, with {names} here",
            "unlimited: NCCL registers its buffers with the card, which locks them",
            "ulimit -l unlimited; Slurm: PropagateResourceLimitsExcept=MEMLOCK; docker run --ulimit memlock=-1",
        )
    if any(driver == "efa" for _, driver in cards.devices):
        if cards.plugin is None:
            yield warning(
                "EFA",
                f"{names} is here, but NCCL's plugin for libfabric ({_PLUGIN}) was not found",
                "the plugin: without it NCCL goes over TCP, many times slower",
                "install aws-ofi-nccl, or an image that has it; its folder belongs in LD_LIBRARY_PATH",
            )
        else:
            yield note("EFA", f"{names}, by {cards.plugin}")
    elif not cards.direct:
        yield warning(
            "GPUDirect",
            f"{names} cannot reach the GPUs' memory: nvidia_peermem is not loaded",
            "GPUDirect RDMA: otherwise all traffic goes through the host's memory",
            "sudo modprobe nvidia-peermem",
        )


def _locked_memory() -> int | None:
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return limit if limit != resource.RLIM_INFINITY else None
