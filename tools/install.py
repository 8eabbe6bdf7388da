"""Makes a venv where there is none, and installs into it: by uv where that can be had, otherwise by pip.

    python3 tools/install.py .venv -c constraints.txt -e '.[dev]'

uv unpacks a wheel once and links its files into every venv, which is many times faster than pip. It does not read
pip's settings, so they are handed to it: a machine whose pip takes torch from a folder or an index of its own gets the
same torch. Where a setting has no counterpart in uv, or uv fails, pip installs.
"""

from __future__ import annotations

import argparse
import ast
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# pip's settings by the variables of uv that mean the same.
VARIABLES = {
    "cert": "SSL_CERT_FILE",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "index-url": "UV_DEFAULT_INDEX",
    "no-index": "UV_NO_INDEX",
    "proxy": "ALL_PROXY",
    "trusted-host": "UV_INSECURE_HOST",
}
# What says how pip works or what it prints, not what it installs.
WITHOUT_EFFECT = {
    *(
        "break-system-packages",
        "cache-dir",
        "compile",
        "default-timeout",
        "disable-pip-version-check",
        "format",
    ),
    *(
        "no-cache-dir",
        "no-color",
        "no-compile",
        "no-input",
        "no-python-version-warning",
        "no-warn-script-location",
    ),
    *(
        "prefer-binary",
        "progress-bar",
        "quiet",
        "require-virtualenv",
        "retries",
        "root-user-action",
        "timeout",
    ),
    *("upgrade-strategy", "use-feature", "verbose"),
}
LISTS_BY_COMMA = {"find-links"}


def settings(python: Path) -> dict[str, str]:
    """pip's settings for `pip install`, from its files and from the environment, which comes last and counts."""
    printed = subprocess.run(
        [python, "-m", "pip", "config", "list"], capture_output=True, text=True
    ).stdout
    values: dict[str, dict[str, str]] = {"global": {}, "install": {}, ":env:": {}}
    for line in printed.splitlines():
        key, _, value = line.partition("=")
        section, _, name = key.rpartition(".")
        if section in values:
            values[section][name] = str(ast.literal_eval(value))
    return {**values["global"], **values["install"], **values[":env:"]}


def for_uv(options: Mapping[str, str]) -> dict[str, str] | None:
    """uv's variables for pip's settings; None where one of them has no counterpart."""
    if set(options) - set(VARIABLES) - WITHOUT_EFFECT:
        return None
    variables = {
        VARIABLES[name]: (
            ",".join(value.split()) if name in LISTS_BY_COMMA else " ".join(value.split())
        )
        for name, value in options.items()
        if name in VARIABLES
    }
    # As pip does: the best version of all indexes, not of the first that has the package.
    return {**variables, "UV_INDEX_STRATEGY": "unsafe-best-match"}


def find_uv(python: Path) -> Path | None:
    """uv beside that Python or in the project's venv, or None."""
    places = (python.parent / "uv", ROOT / ".venv" / "bin" / "uv")
    return next((place for place in places if place.exists()), None)


def make(folder: Path, interpreter: str, uv: Path | None) -> None:
    """The venv, with uv in it where the project's has none; Python's own way, which needs no network."""
    subprocess.run([interpreter, "-m", "venv", folder], check=True)
    if uv is not None:
        return
    command = [folder / "bin" / "python", "-m", "pip", "install", "-q", "uv>=0.9,<1"]
    if subprocess.run(command, capture_output=True).returncode:
        print(f"{folder}: uv cannot be had, pip installs", flush=True)


def install(folder: Path, arguments: list[str]) -> int:
    """The exit code of what has installed."""
    python = folder / "bin" / "python"
    uv = find_uv(python)
    variables = for_uv(settings(python)) if uv is not None else None
    if uv is not None and variables is not None:
        command = [uv, "pip", "install", "-q", "--python", python, *arguments]
        if sys.dont_write_bytecode:
            # Nobody would write it later, and every process would compile what it imports.
            command.append("--compile-bytecode")
        if subprocess.run(command, env={**os.environ, **variables}).returncode == 0:
            return 0
        print(f"{folder}: uv has failed, pip tries", file=sys.stderr, flush=True)
    return subprocess.run([python, "-m", "pip", "install", "-q", *arguments]).returncode


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="the venv")
    parser.add_argument(
        "--interpreter", default=sys.executable, help="the Python of a new venv"
    )
    options, arguments = parser.parse_known_args()
    python = options.folder / "bin" / "python"
    if not python.exists():
        make(options.folder, options.interpreter, find_uv(python))
    return install(options.folder, arguments) if arguments else 0


if __name__ == "__main__":
    sys.exit(main())
