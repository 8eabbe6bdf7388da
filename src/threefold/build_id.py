"""The build of threefold: its version and a digest of its sources, so that two checkouts are two builds."""

import hashlib
import sys
from functools import cache
from pathlib import Path

_SOURCE = Path(__file__).parent


@cache
def build_id() -> str:
    """The version, `+` and 12 hexadecimal digits of the digest of every module (PEP 440's local version)."""
    return f"{version()}+{source_digest(_SOURCE)[:12]}"


def version() -> str:
    """The release."""
    # An import would load all that the package exports.
    release: str = sys.modules["threefold"].__version__
    return release


def source_digest(folder: Path) -> str:
    """Digest of the names and contents of all Python files of a folder and the folders below it."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(folder.rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(folder).as_posix()} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()
