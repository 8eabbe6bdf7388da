"""What `make wheel` has built, as somebody who installs it has it.

    python tools/built.py dist [--sdist]

Installs the wheel into an empty venv of each Python that its classifiers name and this machine has, and trains with it
in an empty folder; prints which were not here. With --sdist, it unpacks the sdist instead, and runs the tests of its
pages, its order of samples, its imports and its own build.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
from pathlib import Path

import versions

ROOT = Path(__file__).resolve().parents[1]
CONSTRAINTS = ROOT / ".venv" / "constraints.txt"
TRAIN = (
    "train",
    "--data.source",
    "book.txt",
    "--train.steps",
    "2",
    "--mesh.dp",
    "2",
    "--log.dir",
    "run",
)
SDIST_TESTS = (
    "test_docs.py",
    "test_order.py",
    "test_imports.py",
    "test_every_module.py",
    "test_hatch_build.py",
)
INSTALL_LIMIT_S, RUN_LIMIT_S = 900, 300


class Failed(Exception):
    """What a command printed that should have succeeded."""


def pythons() -> list[tuple[int, int]]:
    """The minor versions of the classifiers."""
    classifiers = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    minors = re.findall(r"Python :: 3\.(\d+)$", "\n".join(classifiers), re.MULTILINE)
    return [(3, int(minor)) for minor in minors]


def run(command: list[str | Path], folder: Path, limit_s: float) -> str:
    # Nothing of this checkout: neither its sources nor what its venv would add to the path.
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "VIRTUAL_ENV")
    }
    ended = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=limit_s
    )
    if ended.returncode:
        raise Failed((ended.stdout + ended.stderr)[-3000:])
    return ended.stdout


def train(wheel: Path, interpreter: str, folder: Path) -> str:
    """Installs and trains; returns what is worth a line."""
    venv, began = folder / "venv", time.monotonic()
    limits = ["-c", CONSTRAINTS] if CONSTRAINTS.exists() else []
    installer: list[str | Path] = [
        sys.executable,
        ROOT / "tools" / "install.py",
        venv,
        "--interpreter",
        interpreter,
    ]
    run([*installer, *limits, wheel], folder, INSTALL_LIMIT_S)
    installed_s = time.monotonic() - began
    place = run(
        [venv / "bin" / "python", "-c", "import threefold; print(threefold.__file__)"],
        folder,
        RUN_LIMIT_S,
    )
    if not Path(place.strip()).is_relative_to(venv):
        raise Failed(f"threefold is imported from {place}")
    version = run([venv / "bin" / "threefold", "--version"], folder, RUN_LIMIT_S).strip()
    (folder / "book.txt").write_text(
        "".join(f"line {number} of a book\n" for number in range(2000))
    )
    began = time.monotonic()
    printed = run([venv / "bin" / "threefold", *TRAIN], folder, RUN_LIMIT_S)
    if "done: 2 steps" not in printed:
        raise Failed(printed)
    torch = versions.versions(venv / "bin" / "python")["torch"]
    return f"{version}, torch {torch}: installed in {installed_s:.0f} s, trained in {time.monotonic() - began:.0f} s"


def on_every_python(wheel: Path) -> bool:
    """Whether it trained on all that are here."""
    interpreters, passed = versions.interpreters(), True
    for python in pythons():
        name = f"Python {python[0]}.{python[1]}"
        if python not in interpreters:
            print(f"{name}: skipped, this machine has none", flush=True)
            continue
        with tempfile.TemporaryDirectory() as folder:
            try:
                outcome = train(wheel, interpreters[python], Path(folder))
            except (Failed, subprocess.TimeoutExpired) as error:
                outcome, passed = f"FAILED\n{error}", False
        print(f"{name}: {outcome}", flush=True)
    return passed


def test_sdist(sdist: Path) -> bool:
    """Whether the unpacked sdist passes tests, by this Python, which has what they need."""
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(sdist) as tar:
            # From 3.11.4 on.
            tar.extractall(
                folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {})
            )
        unpacked = Path(folder) / sdist.name.removesuffix(".tar.gz")
        tests = [f"tests/unit/{name}" for name in SDIST_TESTS]
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
        environment = {**os.environ, "PYTHONPATH": str(unpacked / "src")}
        return (
            subprocess.run(
                command, cwd=unpacked, env=environment, timeout=RUN_LIMIT_S
            ).returncode
            == 0
        )


def only(folder: Path, pattern: str) -> Path:
    built = sorted(folder.glob(pattern))
    if len(built) != 1:
        sys.exit(
            f"{folder} has {len(built)} files {pattern}, not one: make wheel; python tools/built.py dist"
        )
    return built[0].resolve()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sdist", action="store_true", help="the sdist, not the wheel")
    options = parser.parse_args()
    if options.sdist:
        return int(not test_sdist(only(options.folder, "*.tar.gz")))
    return int(not on_every_python(only(options.folder, "*.whl")))


if __name__ == "__main__":
    sys.exit(main())
