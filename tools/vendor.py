"""Brings what the page of a run carries from elsewhere into the package: uPlot, by `npm pack`, at one version.

    python tools/vendor.py            write the files again (make vendor)
    python tools/vendor.py --check    only compare the files of the package with the checksums below

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


def wrong() -> list[str]:
    """The files of the package that are not what was vendored."""
    found = {name: (ASSETS / name).read_bytes() if (ASSETS / name).exists() else b"" for name in FILES}
    return [name for name, (_, digest) in FILES.items() if hashlib.sha256(found[name]).hexdigest() != digest]


def fetch() -> None:
    """Writes the files from npm's archive; SystemExit if one is another file than expected."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["npm", "pack", "--silent", f"{PACKAGE}@{VERSION}"], cwd=folder, check=True, timeout=300)
        (archive,) = Path(folder).glob("*.tgz")
        with tarfile.open(archive) as tar:
            for name, (path, digest) in FILES.items():
                content = tar.extractfile(path)
                read = content.read() if content is not None else b""
                if hashlib.sha256(read).hexdigest() != digest:
                    sys.exit(f"{path} of {PACKAGE}@{VERSION} has the checksum {hashlib.sha256(read).hexdigest()}")
                (ASSETS / name).write_bytes(read)


if __name__ == "__main__":
    if sys.argv[1:] != ["--check"]:
        fetch()
    if different := wrong():
        sys.exit(f"{', '.join(different)}: not {PACKAGE} {VERSION} as it was vendored; run python tools/vendor.py")
    print(f"{PACKAGE} {VERSION}: {', '.join(FILES)}")
