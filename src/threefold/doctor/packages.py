"""What is installed: the packages' versions, and which of them do not fit one another. Nothing of it is imported."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import metadata

from threefold.doctor.findings import Finding, note, ok, stop, warning

# Whose versions a report shows, and whose requirements on torch are looked at beside ours.
SHOWN = ("torch", "transformers", "datasets", "tokenizers", "safetensors", "huggingface-hub", "numpy", "accelerate")
_BOUND_TO_TORCH = ("torchvision", "torchaudio", "torchdata", "xformers", "triton", "accelerate", "peft", "deepspeed")
_FLASH = ("flash-attn", "flash_attn_3", "flash-attn-3")


@dataclass(frozen=True)
class Package:
    """An installed distribution: its version, and its requirements as pip writes them."""

    name: str
    version: str
    requirements: Sequence[str] = ()


def look() -> dict[str, Package]:
    """The packages that matter, by name; those that are not installed are left out."""
    found = {}
    for name in ("threefold", *SHOWN, *_BOUND_TO_TORCH, *_FLASH, *_needed(metadata.requires)):
        try:
            found[name] = Package(name, metadata.version(name), tuple(metadata.requires(name) or ()))
        except metadata.PackageNotFoundError:
            continue
    return found


def judge(packages: dict[str, Package], *, gpus: bool) -> list[Finding]:
    """Which versions do not fit.

    Args:
        gpus: whether flash attention could be used.
    """
    shown = ", ".join(f"{name} {packages[name].version}" for name in SHOWN if name in packages)
    found = [note("packages", shown)]
    problems = list(_misfits("threefold", packages, only=None))
    for name in _BOUND_TO_TORCH:
        problems += _misfits(name, packages, only="torch")
    found += problems or [ok("versions", "fit one another")]
    flash = next((packages[name] for name in _FLASH if name in packages), None)
    if flash is not None:
        found.append(note("flash attention", f"{flash.name} {flash.version}; beside torch's own in SDPA"))
    elif gpus:
        found.append(note("flash attention", "torch's own in SDPA; the package flash-attn is not installed"))
    else:
        found.append(note("flash attention", "none: it needs a GPU; attention runs through SDPA"))
    return found


def _misfits(name: str, packages: dict[str, Package], *, only: str | None) -> Iterable[Finding]:
    from packaging.requirements import Requirement

    if name not in packages:
        return
    for text in packages[name].requirements:
        need = Requirement(text)
        if (need.marker is not None and not need.marker.evaluate({"extra": ""})) or only not in (None, need.name):
            continue
        installed = packages.get(need.name)
        if installed is None:
            yield stop(
                "versions",
                f"{need.name} is not installed",
                expected=f"{need.name} {need.specifier}, which {name} needs",
                fix=f"pip install '{need}'",
            )
        elif not need.specifier.contains(_without_build(installed.version), prereleases=True):
            yield _misfit(name, need.name, str(need.specifier), installed.version, ours=name == "threefold")


def _misfit(name: str, needed: str, specifier: str, version: str, *, ours: bool) -> Finding:
    say: Callable[..., Finding] = stop if ours else warning
    return say(
        "versions",
        f"{needed} {version} is installed, and {name} needs {needed} {specifier}",
        expected="versions that fit: otherwise imports fail, or calls do in the middle of a run",
        fix=f"pip install '{needed}{specifier}'"
        if ours
        else f"pip install -U {name}, or uninstall it if it is not used",
    )


def _needed(requires: Callable[[str], Sequence[str] | None]) -> list[str]:
    from packaging.requirements import Requirement

    try:
        return [Requirement(text).name for text in requires("threefold") or ()]
    except metadata.PackageNotFoundError:
        return []


def _without_build(version: str) -> str:
    """`2.13.0` of `2.13.0+cpu`: a specifier without a build number takes any."""
    return version.partition("+")[0]
