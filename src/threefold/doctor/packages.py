"""The installed packages' versions, and which of them are incompatible. Imports none of them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata

from threefold.doctor.findings import Finding, note, ok, stop, warning

# Packages whose versions a report shows, and packages whose requirements on torch are checked as well as ours.
SHOWN = (
    "torch",
    "transformers",
    "datasets",
    "tokenizers",
    "safetensors",
    "huggingface-hub",
    "numpy",
    "accelerate",
)
_BOUND_TO_TORCH = (
    "torchvision",
    "torchaudio",
    "torchdata",
    "xformers",
    "triton",
    "accelerate",
    "peft",
    "deepspeed",
)
_FLASH = ("flash-attn", "flash_attn_3", "flash-attn-3")


@dataclass(frozen=True)
class Package:
    """An installed distribution: its version, and its requirements as pip writes them."""

    name: str
    version: str
    requirements: Sequence[str] = ()


def look() -> dict[str, Package]:
    """The packages that matter, by name; those that are not installed are left out."""
    packages = {}
    for name in ("threefold", *SHOWN, *_BOUND_TO_TORCH, *_FLASH, *_needed()):
        try:
            packages[name] = Package(
                name, metadata.version(name), tuple(metadata.requires(name) or ())
            )
        except metadata.PackageNotFoundError:
            continue
    return packages


def judge(packages: dict[str, Package], *, gpus: bool) -> list[Finding]:
    """Which versions do not fit one another; `gpus`: whether flash attention could be used."""
    shown = ", ".join(f"{name} {packages[name].version}" for name in SHOWN if name in packages)
    problems = [
        finding
        for name in ("threefold", *_BOUND_TO_TORCH)
        for finding in _misfits(name, packages)
    ]
    flash = next((packages[name] for name in _FLASH if name in packages), None)
    if flash is not None:
        text = f"{flash.name} {flash.version}, in addition to torch's own in SDPA"
    elif gpus:
        text = "torch's own in SDPA; the package flash-attn is not installed"
    else:
        text = "none: it needs a GPU; attention runs through SDPA"
    fit = [ok("versions", "compatible")]
    return [note("packages", shown), *(problems or fit), note("flash attention", text)]


def _misfits(name: str, packages: dict[str, Package]) -> Iterator[Finding]:
    """Threefold's requirements that are not met; of another package, only its requirement on torch."""
    from packaging.requirements import Requirement

    ours = name == "threefold"
    for need in map(Requirement, packages[name].requirements if name in packages else ()):
        if (need.marker is not None and not need.marker.evaluate({"extra": ""})) or not (
            ours or need.name == "torch"
        ):
            continue
        installed = packages.get(need.name)
        if installed is None:
            needed = f"{need.name} {need.specifier}, which {name} needs"
            yield stop(
                "versions", f"{need.name} is not installed", needed, f"pip install '{need}'"
            )
        # Without the build number, as in 2.13.0+cpu: a specifier without one accepts any.
        elif not need.specifier.contains(installed.version.partition("+")[0], prereleases=True):
            upgrade = f"pip install -U {name}, or uninstall it if it is not used"
            yield (stop if ours else warning)(
                "versions",
                f"{need.name} {installed.version} is installed, but {name} needs {need.name} {need.specifier}",
                "compatible versions: otherwise imports fail, or calls in the middle of a run",
                f"pip install '{need.name}{need.specifier}'" if ours else upgrade,
            )


def _needed() -> list[str]:
    from packaging.requirements import Requirement

    try:
        return [Requirement(text).name for text in metadata.requires("threefold") or ()]
    except metadata.PackageNotFoundError:
        return []
