"""Brings what pages carry from elsewhere, by `npm pack`, at one version: uPlot into the package, Mermaid for the site.

    python tools/vendor.py                write uPlot's files again (make vendor)
    python tools/vendor.py --check        only compare the files of the package with the checksums below
    python tools/vendor.py --docs FOLDER  write Mermaid into a folder (make docs)

The registry is npm's own setting. A file whose checksum is another one is refused.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ASSETS = Path(__file__).parents[1] / "src" / "threefold" / "report" / "assets"
PACKAGE, VERSION = "uplot", "1.6.32"
# File of the package -> (its path in npm's archive, SHA-256).
FILES = {
    "uplot.min.js": (
        "package/dist/uPlot.iife.min.js",
        "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    ),
    "uplot.min.css": (
        "package/dist/uPlot.min.css",
        "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
    ),
    "uplot.LICENSE": (
        "package/LICENSE",
        "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd",
    ),
}
# For the diagrams of the site: not in the package, and not in the repository.
MERMAID = "mermaid", "11.4.1"
MERMAID_FILES = {
    "mermaid.min.js": (
        "package/dist/mermaid.min.js",
        "a43bc1afd446f9c4cc66ac5dd45d02e8d65e26fc5344ec0ef787f88d6ddb6f9e",
    )
}


def wrong() -> list[str]:
    """The files of the package that are not what was vendored."""
    found = {
        name: (ASSETS / name).read_bytes() if (ASSETS / name).exists() else b""
        for name in FILES
    }
    return [
        name
        for name, (_, digest) in FILES.items()
        if hashlib.sha256(found[name]).hexdigest() != digest
    ]


def fetch(package: str, version: str, files: dict[str, tuple[str, str]], into: Path) -> None:
    """Writes the files of npm's archive into a folder; SystemExit if one is another file than expected."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            ["npm", "pack", "--silent", f"{package}@{version}"],
            cwd=folder,
            check=True,
            timeout=300,
        )
        (archive,) = Path(folder).glob("*.tgz")
        with tarfile.open(archive) as tar:
            for name, (path, digest) in files.items():
                content = tar.extractfile(path)
                read = content.read() if content is not None else b""
                if hashlib.sha256(read).hexdigest() != digest:
                    sys.exit(
                        f"{path} of {package}@{version} has the checksum {hashlib.sha256(read).hexdigest()}"
                    )
                (into / name).write_bytes(read)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--docs"]:
        fetch(*MERMAID, MERMAID_FILES, Path(sys.argv[2]))
        sys.exit()
    if sys.argv[1:] != ["--check"]:
        fetch(PACKAGE, VERSION, FILES, ASSETS)
    if different := wrong():
        sys.exit(
            f"{', '.join(different)}: not {PACKAGE} {VERSION} as it was vendored; run python tools/vendor.py"
        )
    print(f"{PACKAGE} {VERSION}: {', '.join(FILES)}")
