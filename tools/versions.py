"""The oldest and the newest versions that pyproject admits, each in a venv of its own, and the tests that need them.

    python tools/versions.py [oldest | newest] [--all] [--write docs/install.md]

The newest are those of the package registry; those between, which constraints.txt pins, are what `make test` runs on.
With --all, everything that a promise rests on; without it, each thing that versions can change, once. Versions that
cannot be installed here are reported as not run; failed tests end it with 1.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VENVS = ROOT / ".venv-versions"
# Parity on four meshes, resumes on other meshes, saves, exports, every import, a run of the command and of the Trainer.
TESTS = (
    "tests/unit/test_every_module.py",
    "tests/ranks/test_train_step.py",
    "tests/ranks/test_parity.py::test_mesh_follows_one_process[(1, 1, 1, 1)]",
    "tests/ranks/test_parity.py::test_mesh_follows_one_process[(2, 2, 1, 1)]",
    "tests/ranks/test_parity.py::test_mesh_follows_one_process[(2, 1, 2, 1)]",
    "tests/ranks/test_parity.py::test_mesh_follows_one_process[(2, 1, 1, 2)]",
    "tests/ranks/test_resume_meshes.py",
    "tests/ranks/test_saver.py",
    "tests/ranks/test_export.py",
    "tests/ranks/test_runs.py::test_loss_falls_and_every_step_is_logged",
    "tests/ranks/test_runs.py::test_torchrun_trains_the_same",
    "tests/ranks/test_huggingface_training.py::test_training_follows_a_loop_by_hand",
)
# Besides: the order of samples, conversations, kernels (a build of torch for CUDA brings Triton), the command's errors.
ALL_TESTS = (
    "tests/unit/test_every_module.py",
    "tests/ranks/test_parity.py",
    "tests/ranks/test_bfloat16.py",
    "tests/ranks/test_train_step.py",
    "tests/ranks/test_resume_meshes.py",
    "tests/ranks/test_saver.py",
    "tests/ranks/test_runs.py",
    "tests/ranks/test_export.py",
    "tests/ranks/test_conversations_ranks.py",
    "tests/ranks/test_huggingface_training.py",
    "tests/unit/test_order.py",
    "tests/unit/test_permutation.py",
    "tests/unit/test_sampler.py",
    "tests/unit/test_conversations.py",
    "tests/unit/test_fused_adamw.py",
    "tests/unit/test_loss_kernel.py",
    "tests/errors",
)
PACKAGES = ("torch", "transformers", "datasets", "tokenizers", "numpy", "pydantic")
COLUMNS = ("Python", *PACKAGES)


@dataclass(frozen=True)
class Row:
    """A set of versions: a minor version of Python, and what pip is asked for besides the package itself."""

    name: str
    python: tuple[int, int]
    requirements: tuple[str, ...]


def rows() -> dict[str, Row]:
    """Every set, by name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    least = dict(
        re.findall(r"^([\w-]+)>=([\d.]+)", "\n".join(project["dependencies"]), re.MULTILINE)
    )
    first = tuple(map(int, re.findall(r"\d+", project["requires-python"])))
    ends = (
        Row(
            "oldest",
            (first[0], first[1]),
            tuple(f"{name}=={least[name]}.*" for name in ("torch", "transformers")),
        ),
        Row("newest", max(interpreters()), ("torch", "transformers")),
    )
    return {row.name: row for row in ends}


def interpreters() -> dict[tuple[int, int], str]:
    """The Pythons of this machine that pyproject admits, by minor version."""
    found = {sys.version_info[:2]: sys.executable}
    for minor in range(11, 20):
        places = [
            shutil.which(f"python3.{minor}"),
            *Path.home().glob(f".pyenv/versions/3.{minor}.*/bin/python"),
        ]
        for place in filter(None, places):
            if (
                subprocess.run(
                    [place, "-c", "import ensurepip, ssl, sqlite3"], capture_output=True
                ).returncode
                == 0
            ):
                found.setdefault((3, minor), str(place))
    return found


def install(row: Row) -> tuple[Path, str]:
    """Makes the venv of a row; returns its Python, and why it is not complete (empty if it is)."""
    folder = VENVS / row.name
    python = folder / "bin" / "python"
    marker = folder / ".installed"
    if marker.exists():
        return python, ""
    shutil.rmtree(folder, ignore_errors=True)
    interpreter = interpreters().get(row.python)
    if interpreter is None:
        return python, f"this machine has no Python {row.python[0]}.{row.python[1]}"
    command = [
        sys.executable,
        ROOT / "tools" / "install.py",
        folder,
        "--interpreter",
        interpreter,
    ]
    done = subprocess.run(
        [*command, *row.requirements, "-e", f"{ROOT}[dev]"], capture_output=True, text=True
    )
    if done.returncode:
        shutil.rmtree(folder, ignore_errors=True)
        return python, (done.stderr.strip().splitlines() or ["the installation failed"])[-1]
    marker.touch()
    return python, ""


def versions(python: Path) -> dict[str, str]:
    """What is installed beside that Python."""
    code = f"import importlib.metadata as m, platform as p; print(p.python_version(), *map(m.version, {PACKAGES!r}))"
    printed = subprocess.run(
        [python, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    return dict(zip(COLUMNS, printed, strict=True))


def tested(python: Path, tests: tuple[str, ...]) -> tuple[int, str]:
    """Runs the tests; returns pytest's exit code and its last line."""
    command = [
        python,
        "-m",
        "pytest",
        "-q",
        "-n",
        "2",
        "--dist",
        "loadfile",
        "-p",
        "no:cacheprovider",
    ]
    command += [
        "--durations=10",
        "-m",
        "not slow and not launchers and not examples and not long",
        *tests,
    ]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        last = ""
        for line in running.stdout:
            print(line, end="", flush=True)
            last = line.strip() or last
    return running.returncode, re.sub(r" in [\d.]+s.*", "", last.strip("= "))


def lines(results: Mapping[str, tuple[dict[str, str], str]]) -> dict[str, str]:
    """The row of each set as Markdown, by name."""
    return {
        name: f"| {name} | {' | '.join(versions_of.get(column, '-') for column in COLUMNS)} | {outcome} |"
        for name, (versions_of, outcome) in results.items()
    }


def with_rows(page: str, rows: Mapping[str, str]) -> str:
    """The page with these rows of its table written anew, or added at its end."""
    written = page.splitlines()
    for name, line in rows.items():
        places = [number for number, row in enumerate(written) if row.startswith(f"| {name} |")]
        if places:
            written[places[0]] = line
        else:
            last = max(number for number, row in enumerate(written) if row.startswith("| "))
            written.insert(last + 1, line)
    return "\n".join(written) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names", nargs="*", default=list(rows()), help=f"default: {' '.join(rows())}"
    )
    parser.add_argument(
        "--all",
        action="store_true",
        help="all tests that a promise rests on, not only a sample",
    )
    parser.add_argument("--install", action="store_true", help="only install")
    parser.add_argument("--write", type=Path, help="the page whose table is written anew")
    asked = parser.parse_args()
    if unknown := set(asked.names) - set(rows()):
        parser.error(f"{', '.join(sorted(unknown))}: not one of {', '.join(rows())}")
    results: dict[str, tuple[dict[str, str], str]] = {}
    failed = False
    for name in asked.names:
        started = time.monotonic()
        python, problem = install(rows()[name])
        if problem:
            results[name] = ({}, f"not run: {problem}")
            if notes := os.environ.get("THREEFOLD_CI_NOTES"):
                with open(notes, "a") as file:
                    file.write(f"{name} versions: not run: {problem}\n")
            continue
        found = versions(python)
        print(f"{name}: {found}, installed in {time.monotonic() - started:.0f} s", flush=True)
        if asked.install:
            continue
        code, outcome = tested(python, ALL_TESTS if asked.all else TESTS)
        failed = failed or code != 0
        results[name] = (found, outcome)
    written = lines(results)
    print("\n".join([f"| | {' | '.join(COLUMNS)} | tests |", *written.values()]))
    if asked.write is not None:
        asked.write.write_text(with_rows(asked.write.read_text(), written))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
