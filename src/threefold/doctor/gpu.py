"""torch, CUDA and the GPUs: the build compared with driver and device, memory, links.

`look` queries torch, and nvidia-smi through `nvidia`; `judge` only computes with the answers and needs no torch.
"""

import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from threefold.doctor import nvidia
from threefold.doctor.findings import Finding, judged, note, ok, stop, warning
from threefold.errors import size_text

Version = tuple[int, ...]
_LEAST_TORCH: Version = (2, 11)
_START = "pytorch.org/get-started"
_FREE_SHARE = 0.9
_LINKS = {
    "PIX": "one PCIe switch",
    "PXB": "PCIe switches",
    "PHB": "PCIe and the CPU",
    "NODE": "PCIe, one CPU",
}


@dataclass(frozen=True)
class Gpu:
    """One GPU as this process may use it; memory in bytes."""

    name: str
    memory: int
    free: int
    capability: Version


@dataclass(frozen=True)
class Torch:
    """torch's build, and the hardware.

    Attributes:
        version: None if torch cannot be imported; `error` has the reason.
        cuda, cudnn, nccl: the versions that it was built with; None in a build for CPUs.
        architectures: `sm_90` and others that it has code for.
        driver, driver_cuda: the NVIDIA driver, and the newest CUDA that it supports.
        installed_gpus: as nvidia-smi counts them; None without nvidia-smi.
        links: (GPU, GPU) -> kind, as nvidia-smi calls it.
        silent: nvidia-smi is installed, but failed to answer (`nvidia` has the reason).
        trouble: CUDA's message if it could not be used.
        rocm: the version of ROCm that it was built with.
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
    silent: bool = False
    trouble: str = ""
    rocm: str | None = None


def look(environ: Mapping[str, str], tools: nvidia.Nvidia) -> Torch:
    """Queries torch; `tools`: the answers of NVIDIA's."""
    driver, driver_cuda = read_summary(tools.smi.text)
    hardware: dict[str, Any] = {
        "visible": environ.get("CUDA_VISIBLE_DEVICES"),
        "driver": driver,
        "driver_cuda": driver_cuda,
        "installed_gpus": tools.installed,
        "links": tools.links,
        "silent": tools.smi.late or bool(tools.smi.code),
    }
    try:
        import torch
    except (ImportError, OSError) as error:
        return Torch(None, str(error), **hardware)
    cudnn = torch.backends.cudnn.version()
    cuda = torch.version.cuda
    has_nccl = cuda is not None and torch.distributed.is_nccl_available()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        gpus = tuple(_gpus())
    return Torch(
        str(torch.__version__),
        cuda=_version(cuda) if cuda else None,
        cudnn=_cudnn_version(cudnn) if cudnn else None,
        nccl=tuple(torch.cuda.nccl.version()) if has_nccl else None,
        architectures=tuple(torch.cuda.get_arch_list()) if torch.cuda.is_available() else (),
        gloo=torch.distributed.is_available() and torch.distributed.is_gloo_available(),
        gpus=gpus,
        trouble=" ".join(str(each.message) for each in caught if "CUDA" in str(each.message)),
        rocm=torch.version.hip,
        **hardware,
    )


def judge(probe: Torch) -> list[Finding]:
    """What would keep a run from using torch or the GPUs."""
    if probe.version is None:
        why = f"cannot be imported: {probe.error.strip()}"
        return [
            stop("torch", why, "torch 2.11 or newer", f"install it as described on {_START}")
        ]
    fits = _version(probe.version) >= _LEAST_TORCH
    findings = [
        judged(
            "torch", probe.version, fits, "2.11 or newer", f"pip install -U torch, see {_START}"
        )
    ]
    if not probe.gloo:
        findings.append(
            stop("gloo", "torch was built without it", "gloo", "install torch's own wheels")
        )
    findings += [*_builds(probe), *_driver(probe)]
    findings += [
        _gpu(number, gpu, probe.architectures) for number, gpu in enumerate(probe.gpus)
    ]
    if probe.links and len(probe.gpus) > 1:
        findings.append(_links(probe.links))
    return findings


def read_summary(text: str) -> tuple[str | None, Version | None]:
    """Driver and the newest CUDA that it supports, from the output of nvidia-smi."""
    driver = re.search(r"Driver Version: ([\d.]+)", text)
    cuda = re.search(r"CUDA Version: ([\d.]+)", text)
    return (driver[1] if driver else None), (_version(cuda[1]) if cuda else None)


def _builds(probe: Torch) -> Iterator[Finding]:
    if probe.rocm is not None:
        yield warning(
            "ROCm",
            f"torch {probe.version} is a build for ROCm {probe.rocm}",
            "NVIDIA GPUs or CPUs: ROCm is untested",
            "--mesh.device cpu, or a machine with NVIDIA GPUs",
        )
    elif probe.cuda is None and probe.installed_gpus:
        yield stop(
            "CUDA",
            f"this machine has {probe.installed_gpus} GPUs, but torch {probe.version} is a build for CPUs",
            "a build of torch for CUDA",
            f"pip install torch from the index for your CUDA: {_START}; or --mesh.device cpu",
        )
    elif probe.cuda is None:
        yield note("CUDA", "none: torch is a build for CPUs, ranks communicate through gloo")
    else:
        for name, least in (("CUDA", (11, 8)), ("cuDNN", (8, 6)), ("NCCL", (2, 14))):
            version: Version | None = getattr(probe, name.lower())
            fits = version is not None and version >= least
            what = f"torch {probe.version} has none"
            if version is not None:
                what = (
                    _dotted(version) if fits else f"{_dotted(version)} in torch {probe.version}"
                )
            yield judged(
                name,
                what,
                fits,
                f"{_dotted(least)} or newer",
                f"a newer build of torch, which includes it: {_START}",
            )


def _driver(probe: Torch) -> Iterator[Finding]:
    if probe.cuda is None:
        return
    if probe.silent:
        return
    if probe.driver is None:
        yield warning(
            "driver",
            "no NVIDIA driver was found (nvidia-smi)",
            f"a driver for CUDA {_dotted(probe.cuda)}, which torch was built with",
            "install the driver; in a container: docker run --gpus all; without GPUs: --mesh.device cpu",
        )
        return
    newest = f", supports CUDA up to {_dotted(probe.driver_cuda)}" if probe.driver_cuda else ""
    # Within one major version a newer CUDA runs on an older driver.
    if probe.driver_cuda is not None and probe.driver_cuda[0] < probe.cuda[0]:
        yield stop(
            "driver",
            f"{probe.driver}{newest}; torch was built with {_dotted(probe.cuda)}",
            f"a driver for CUDA {probe.cuda[0]}",
            f"a newer driver, or torch for CUDA {probe.driver_cuda[0]}: {_START}",
        )
    else:
        yield ok("driver", f"{probe.driver}{newest}")
    yield from _visible(probe)


def _visible(probe: Torch) -> Iterator[Finding]:
    """Whether torch sees all GPUs that it should."""
    installed, count = probe.installed_gpus, len(probe.gpus)
    chosen = (
        None
        if probe.visible is None
        else [name for name in probe.visible.split(",") if name.strip() not in ("", "-1")]
    )
    if "802" in probe.trouble and not count:
        yield stop(
            "fabric",
            "CUDA waits for the fabric of the NVSwitches (error 802)",
            "a working fabric",
            "sudo systemctl restart nvidia-fabricmanager, of exactly the driver's version",
        )
    elif probe.trouble and not count and chosen != []:
        yield stop(
            "GPUs",
            probe.trouble[:300],
            "usable CUDA",
            "nvidia-smi, and sudo dmesg | grep -i nvrm; CUDA's libraries must be no newer than the driver",
        )
    elif installed and count < (installed if chosen is None else len(chosen)):
        hides = (
            "though CUDA_VISIBLE_DEVICES is not set"
            if chosen is None
            else f"of CUDA_VISIBLE_DEVICES={probe.visible}"
        )
        fix = (
            "nvidia-smi -L and sudo dmesg | grep -i nvrm show which is missing; "
            "reboot, or take the host out of the job"
        )
        if chosen is not None:
            fix = "numbers from 0, or names, of GPUs that nvidia-smi -L lists"
        yield stop(
            "GPUs",
            f"torch has {count} GPUs, {hides}",
            f"{installed if chosen is None else len(chosen)}",
            fix,
        )
    elif installed and not count:
        yield stop(
            "GPUs",
            f"0 of {installed} are visible: CUDA_VISIBLE_DEVICES={probe.visible}",
            "at least one",
            "unset CUDA_VISIBLE_DEVICES, or --mesh.device cpu",
        )
    elif installed and count < installed:
        yield note(
            "GPUs", f"{count} of {installed} are visible: CUDA_VISIBLE_DEVICES={probe.visible}"
        )


def _gpu(number: int, gpu: Gpu, architectures: Sequence[str]) -> Finding:
    text = f"{gpu.name}, {size_text(gpu.memory)}, {size_text(gpu.free)} free, capability {_dotted(gpu.capability)}"
    own = "".join(map(str, gpu.capability))
    # Code for a capability runs on later ones of the same major version; torch compiles `compute_` code for any.
    codes = [
        name[3:].rstrip("af") for name in architectures if re.fullmatch(r"sm_\d+[af]?", name)
    ]
    runs = any(code[:-1] == own[:-1] and code <= own for code in codes)
    if not runs and not any(name.startswith("compute_") for name in architectures):
        return stop(
            f"GPU {number}",
            f"{text}; torch has code for {', '.join(architectures) or 'none'}",
            "a build of torch for this generation of GPUs",
            f"an older or newer build that matches the GPU: {_START}",
        )
    free = gpu.free >= _FREE_SHARE * gpu.memory
    alone = "a GPU for this run alone: other processes use its memory"
    return judged(
        f"GPU {number}",
        text,
        free,
        alone,
        "nvidia-smi lists them; CUDA_VISIBLE_DEVICES can leave this GPU out",
        otherwise="warning",
    )


def _links(links: Mapping[tuple[int, int], str]) -> Finding:
    by_kind: dict[str, list[tuple[int, int]]] = {}
    for pair, kind in links.items():
        by_kind.setdefault(kind, []).append(pair)
    parts = []
    for kind, pairs in by_kind.items():
        name = (
            f"NVLink ({kind})"
            if kind.startswith("NV")
            else _LINKS.get(kind, "PCIe between CPUs")
        )
        some = ", ".join(f"{a}-{b}" for a, b in pairs[:4])
        parts.append(
            f"{name}: {some}" + (f" and {len(pairs) - 4} more pairs" if len(pairs) > 4 else "")
        )
    return note("links", "; ".join(parts))


def _gpus() -> list[Gpu]:
    import torch

    gpus = []
    for number in range(torch.cuda.device_count()) if torch.cuda.is_available() else ():
        properties = torch.cuda.get_device_properties(number)
        free, total = torch.cuda.mem_get_info(number)
        gpus.append(Gpu(properties.name, total, free, (properties.major, properties.minor)))
    return gpus


def _version(text: str) -> Version:
    return tuple(int(part) for part in re.findall(r"\d+", text.partition("+")[0])[:3])


def _cudnn_version(number: int) -> Version:
    """8902 is 8.9.2; since version 9, 90100 is 9.1.0."""
    base = 100 if number >= 90000 else 10
    return (number // (100 * base), number // 100 % base, number % 100)


def _dotted(version: Version) -> str:
    return ".".join(map(str, version))
