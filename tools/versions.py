"""The oldest and the newest versions that pyproject admits, each in a venv of its own, and the tests that every promise
rests on.

    python tools/versions.py [oldest | newest] [--write docs/versions.md]

Versions that cannot be installed here are reported as not run; failed tests end it with 1.
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
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VENVS = ROOT / ".venv-versions"
# Parity, the order of samples, checkpoints (of 0.1.0 too), conversations, the command and its errors.
TESTS = (
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
    "tests/errors",
    "tests/compat",
)
PACKAGES = ("torch", "transformers", "datasets", "tokenizers", "numpy", "pydantic")


@dataclass(frozen=True)
class Row:
    """A set of versions: a minor version of Python, and what pip is asked for besides the package itself."""

    name: str
    python: tuple[int, int]
    requirements: tuple[str, ...]


def rows() -> dict[str, Row]:
    """Every set, by name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    least = dict(re.findall(r"^([\w-]+)>=([\d.]+)", "\n".join(project["dependencies"]), re.MULTILINE))
    first = tuple(map(int, re.findall(r"\d+", project["requires-python"])))
    found = (
        Row("oldest", (first[0], first[1]), tuple(f"{name}=={least[name]}.*" for name in ("torch", "transformers"))),
        Row("newest", max(interpreters()), ("torch", "transformers")),
    )
    return {row.name: row for row in found}


def interpreters() -> dict[tuple[int, int], str]:
    """The Pythons of this machine that pyproject admits, by minor version."""
    found = {sys.version_info[:2]: sys.executable}
    for minor in range(11, 20):
        places = [shutil.which(f"python3.{minor}"), *Path.home().glob(f".pyenv/versions/3.{minor}.*/bin/python")]
        for place in filter(None, places):
            if subprocess.run([place, "-c", "import ensurepip, ssl, sqlite3"], capture_output=True).returncode == 0:
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
    for command in (
        [interpreter, "-m", "venv", str(folder)],
        [str(python), "-m", "pip", "install", "-q", *row.requirements],
        [str(python), "-m", "pip", "install", "-q", *row.requirements, "-e", f"{ROOT}[dev]"],
    ):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            shutil.rmtree(folder, ignore_errors=True)
            return python, (done.stderr.strip().splitlines() or ["the installation failed"])[-1]
    marker.touch()
    return python, ""


def versions(python: Path) -> dict[str, str]:
    """What is installed beside that Python."""
    code = f"import importlib.metadata as m, platform as p; print(p.python_version(), *map(m.version, {PACKAGES!r}))"
    printed = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    return dict(zip(("Python", *PACKAGES), printed, strict=True))


def tested(python: Path) -> tuple[int, str]:
    """Runs the tests; returns pytest's exit code and its last line."""
    command = [python, "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile", "-p", "no:cacheprovider"]
    command += ["-m", "not slow and not launchers and not examples and not long", *TESTS]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        last = ""
        for line in running.stdout:
            print(line, end="", flush=True)
            last = line.strip() or last
    return running.returncode, re.sub(r" in [\d.]+s.*", "", last.strip("= "))


def table(results: dict[str, tuple[dict[str, str], str]]) -> str:
    """The rows as Markdown."""
    names = ("Python", *PACKAGES)
    lines = [f"| | {' | '.join(names)} | tests |", f"|{'---|' * (len(names) + 2)}"]
    for name, (found, outcome) in results.items():
        lines.append(f"| {name} | {' | '.join(found.get(each, '-') for each in names)} | {outcome} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(rows()), help=f"default: {' '.join(rows())}")
    parser.add_argument("--write", type=Path, help="the page whose table is written anew")
    asked = parser.parse_args()
    if unknown := set(asked.names) - set(rows()):
        parser.error(f"{', '.join(sorted(unknown))}: not one of {', '.join(rows())}")
    results, failed = {}, False
    for name in asked.names:
        started = time.monotonic()
        python, problem = install(rows()[name])
        if problem:
            results[name] = ({}, f"not run: {problem}")
            continue
        found = versions(python)
        print(f"{name}: {found}, installed in {time.monotonic() - started:.0f} s", flush=True)
        code, outcome = tested(python)
        failed = failed or code != 0
        results[name] = (found, outcome)
    print(table(results))
    if asked.write is not None:
        text = asked.write.read_text()
        begin, end = text.index("| |"), text.rindex("|\n") + 2
        asked.write.write_text(text[:begin] + table(results) + "\n" + text[end:])
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
