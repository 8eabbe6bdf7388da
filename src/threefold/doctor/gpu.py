"""torch, CUDA and the GPUs: builds against driver and device, memory, links.

`look` asks torch and nvidia-smi; `judge` is arithmetic on the answers. torch is imported where it is asked.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from threefold.doctor.findings import Finding, note, ok, stop, warning
from threefold.errors import size_text

Version = tuple[int, ...]
_LEAST_CUDA: Version = (11, 8)
_LEAST_CUDNN: Version = (8, 6)
_LEAST_NCCL: Version = (2, 14)
_LEAST_TORCH: Version = (2, 11)
_FREE_SHARE = 0.9
_ANSWER_WITHIN_S = 20
_LINKS = {"PIX": "one PCIe switch", "PXB": "PCIe switches", "PHB": "PCIe and the CPU", "NODE": "PCIe, one CPU"}


@dataclass(frozen=True)
class Gpu:
    """One GPU as this process may use it; memory in bytes."""

    name: str
    memory: int
    free: int
    capability: Version


@dataclass(frozen=True)
class Torch:
    """torch's build, and what it sees.

    Attributes:
        version: None where torch cannot be imported; `error` says why.
        cuda, cudnn, nccl: what it was built with; None in a build for CPUs.
        architectures: `sm_90` and the like, for which it holds code.
        driver, driver_cuda: the NVIDIA driver, and the newest CUDA that it takes.
        installed_gpus: what nvidia-smi counts; None where there is none.
        links: (GPU, GPU) -> kind, as nvidia-smi calls it.
    """

    version: str | None
    error: str = ""
    cuda: Version | None = None
    cudnn: Version | None = None
    nccl: Version | None = None
    architectures: Sequence[str] = ()
    gloo: bool = True
    gpus: Sequence[Gpu] = ()
    visible: str | None = None
    driver: str | None = None
    driver_cuda: Version | None = None
    installed_gpus: int | None = None
    links: Mapping[tuple[int, int], str] = field(default_factory=dict)


def look(environ: Mapping[str, str]) -> Torch:
    """Asks torch and nvidia-smi."""
    summary, listed, matrix = (_nvidia_smi(*arguments) for arguments in ((), ("-L",), ("topo", "-m")))
    driver, driver_cuda = read_summary(summary)
    hardware: dict[str, Any] = {
        "visible": environ.get("CUDA_VISIBLE_DEVICES"),
        "driver": driver,
        "driver_cuda": driver_cuda,
        "installed_gpus": listed.count("GPU ") if listed else None,
        "links": read_links(matrix),
    }
    try:
        import torch
    except (ImportError, OSError) as error:
        return Torch(None, str(error), **hardware)
    cudnn = torch.backends.cudnn.version()
    has_nccl = torch.version.cuda is not None and torch.distributed.is_nccl_available()
    return Torch(
        str(torch.__version__),
        cuda=_version(torch.version.cuda) if torch.version.cuda else None,
        cudnn=_cudnn_version(cudnn) if cudnn else None,
        nccl=tuple(torch.cuda.nccl.version()) if has_nccl else None,
        architectures=tuple(torch.cuda.get_arch_list()) if torch.cuda.is_available() else (),
        gloo=torch.distributed.is_available() and torch.distributed.is_gloo_available(),
        gpus=tuple(_gpus()),
        **hardware,
    )


def judge(seen: Torch) -> list[Finding]:
    """What is in the way of a run."""
    if seen.version is None:
        return [
            stop(
                "torch",
                f"cannot be imported: {seen.error.strip()}",
                expected="torch 2.11 or newer",
                fix="install it as pytorch.org/get-started says",
            )
        ]
    found = [_torch(seen.version)]
    if not seen.gloo:
        found.append(stop("gloo", "torch was built without it", expected="gloo", fix="install torch's own wheels"))
    found += _builds(seen)
    found += _driver(seen)
    for number, gpu in enumerate(seen.gpus):
        found += _gpu(number, gpu, seen.architectures)
    if seen.links and len(seen.gpus) > 1:
        found.append(_links(seen.links))
    return found


def read_summary(text: str) -> tuple[str | None, Version | None]:
    """Driver and the newest CUDA that it takes, from what nvidia-smi prints."""
    driver, cuda = re.search(r"Driver Version: ([\d.]+)", text), re.search(r"CUDA Version: ([\d.]+)", text)
    return (driver[1] if driver else None), (_version(cuda[1]) if cuda else None)


def read_links(text: str) -> dict[tuple[int, int], str]:
    """(GPU, GPU) -> kind of link, from `nvidia-smi topo -m`; each pair once."""
    rows = [line.split() for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()]
    header = next((row for row in rows if row[:1] == ["GPU0"] and "X" not in row), [])
    num_gpus = sum(re.fullmatch(r"GPU\d+", name) is not None for name in header)
    found = {}
    for row in rows:
        if row and re.fullmatch(r"GPU\d+", row[0]) and "X" in row:
            first = int(row[0][3:])
            found.update({(first, second): row[1 + second] for second in range(first + 1, num_gpus)})
    return found


def _torch(version: str) -> Finding:
    if _version(version) >= _LEAST_TORCH:
        return ok("torch", version)
    return stop("torch", version, expected="2.11 or newer", fix="pip install -U torch, see pytorch.org/get-started")


def _builds(seen: Torch) -> list[Finding]:
    if seen.cuda is None:
        if seen.installed_gpus:
            return [
                stop(
                    "CUDA",
                    f"{seen.installed_gpus} GPUs are here, and torch {seen.version} is a build for CPUs",
                    expected="a build of torch for CUDA",
                    fix="pip install torch from the index for your CUDA: pytorch.org/get-started; or --mesh.device cpu",
                )
            ]
        return [note("CUDA", "none: torch is a build for CPUs, ranks talk through gloo")]
    found = []
    for name, version, least in (
        ("CUDA", seen.cuda, _LEAST_CUDA),
        ("cuDNN", seen.cudnn, _LEAST_CUDNN),
        ("NCCL", seen.nccl, _LEAST_NCCL),
    ):
        if version is not None and version >= least:
            found.append(ok(name, _dotted(version)))
        else:
            found.append(
                stop(
                    name,
                    f"{_dotted(version)} in torch {seen.version}" if version else f"torch {seen.version} has none",
                    expected=f"{_dotted(least)} or newer",
                    fix="a newer build of torch, which brings it along: pytorch.org/get-started",
                )
            )
    return found


def _driver(seen: Torch) -> list[Finding]:
    if seen.cuda is None:
        return []
    if seen.driver is None:
        return [
            warning(
                "driver",
                "no NVIDIA driver is found (nvidia-smi)",
                expected=f"a driver for CUDA {_dotted(seen.cuda)}, which torch was built with",
                fix="install the driver; in a container: docker run --gpus all; without GPUs: --mesh.device cpu",
            )
        ]
    found = []
    newest = f", takes CUDA up to {_dotted(seen.driver_cuda)}" if seen.driver_cuda else ""
    # Within one major version a newer CUDA runs on an older driver.
    if seen.driver_cuda is not None and seen.driver_cuda[0] < seen.cuda[0]:
        found.append(
            stop(
                "driver",
                f"{seen.driver}{newest}; torch was built with {_dotted(seen.cuda)}",
                expected=f"a driver for CUDA {seen.cuda[0]}",
                fix=f"a newer driver, or torch for CUDA {seen.driver_cuda[0]}: pytorch.org/get-started",
            )
        )
    else:
        found.append(ok("driver", f"{seen.driver}{newest}"))
    if seen.installed_gpus and len(seen.gpus) < seen.installed_gpus:
        hides = f"CUDA_VISIBLE_DEVICES={seen.visible}" if seen.visible is not None else "torch"
        found.append(
            (note if seen.gpus else stop)(
                "GPUs",
                f"{len(seen.gpus)} of {seen.installed_gpus} are visible: {hides}",
                **({} if seen.gpus else {"expected": "at least one", "fix": "unset CUDA_VISIBLE_DEVICES"}),
            )
        )
    return found


def _gpu(number: int, gpu: Gpu, architectures: Sequence[str]) -> list[Finding]:
    text = f"{gpu.name}, {size_text(gpu.memory)}, {size_text(gpu.free)} free, capability {_dotted(gpu.capability)}"
    own = "".join(map(str, gpu.capability))
    # Code for a capability runs on later ones of the same major version.
    fits = any(
        re.fullmatch(r"sm_\d+[af]?", name) and name[3:].rstrip("af")[:-1] == own[:-1] and name[3:].rstrip("af") <= own
        for name in architectures
    ) or any(name.startswith("compute_") for name in architectures)
    if not fits:
        return [
            stop(
                f"GPU {number}",
                f"{text}; torch has code for {', '.join(architectures) or 'none'}",
                expected="a build of torch for this generation of GPUs",
                fix="pytorch.org/get-started: an older or newer build, as the GPU is",
            )
        ]
    if gpu.free < _FREE_SHARE * gpu.memory:
        return [
            warning(
                f"GPU {number}",
                text,
                expected="a GPU of its own: other processes hold memory here",
                fix="nvidia-smi shows them; CUDA_VISIBLE_DEVICES leaves this GPU out",
            )
        ]
    return [ok(f"GPU {number}", text)]


def _links(links: Mapping[tuple[int, int], str]) -> Finding:
    by_kind: dict[str, list[tuple[int, int]]] = {}
    for pair, kind in links.items():
        by_kind.setdefault(kind, []).append(pair)
    parts = []
    for kind, pairs in by_kind.items():
        name = f"NVLink ({kind})" if kind.startswith("NV") else _LINKS.get(kind, "PCIe between CPUs")
        some = ", ".join(f"{a}-{b}" for a, b in pairs[:4])
        parts.append(f"{name}: {some}" + (f" and {len(pairs) - 4} more pairs" if len(pairs) > 4 else ""))
    return note("links", "; ".join(parts))


def _gpus() -> list[Gpu]:
    import torch

    found = []
    for number in range(torch.cuda.device_count()) if torch.cuda.is_available() else ():
        properties = torch.cuda.get_device_properties(number)
        free, total = torch.cuda.mem_get_info(number)
        found.append(Gpu(properties.name, total, free, (properties.major, properties.minor)))
    return found


def _nvidia_smi(*arguments: str) -> str:
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    try:
        done = subprocess.run(
            [program, *arguments], capture_output=True, text=True, errors="replace", timeout=_ANSWER_WITHIN_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _version(text: str) -> Version:
    return tuple(int(part) for part in re.findall(r"\d+", text.partition("+")[0])[:3])


def _cudnn_version(number: int) -> Version:
    """8902 is 8.9.2; from version 9 on 90100 is 9.1.0."""
    if number >= 90000:
        return (number // 10000, number // 100 % 100, number % 100)
    return (number // 1000, number // 100 % 10, number % 100)


def _dotted(version: Version) -> str:
    return ".".join(map(str, version))
