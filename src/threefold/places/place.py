"""The interface of a place that holds bytes under names: all that the code above knows about a store.

An object is written whole or not at all, and never changed in part. Of two writers that create one key, one
succeeds; a swap of a key by the etag that was read succeeds only if nothing was written since.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True)
class StoredObject:
    """An object as its store describes it: key below the place, bytes, etag, and when it was written (Unix time, s)."""

    key: str
    size: int
    etag: str
    written_s: float


class ObjectPlace(Protocol):
    """A prefix of a store. Errors are ThreefoldErrors in three parts, after retries within a bounded time."""

    def read(self, key: str, *, start: int, length: int) -> bytes:
        """Exactly these bytes of an object; MissingObject if it is absent or shorter."""

    def get(self, key: str) -> tuple[bytes, str] | None:
        """A small object and the etag of these very bytes, None if there is none."""

    def stat(self, key: str) -> StoredObject | None:
        """The object of a key, None if there is none."""

    def write(self, key: str, data: bytes | Path, *, in_parts: bool = True) -> None:
        """Writes an object whole, over an old one; a large one in parts that appear together, or by one request."""

    def create(self, key: str, data: bytes) -> str | None:
        """The etag of a new object; None if another one has this key. No other writer may write the same `data`."""

    def swap(self, key: str, data: bytes, *, etag: str) -> str | None:
        """The etag of what replaces the object with `etag`; None if that is no longer there. `data` as in `create`."""

    def list(self, folder: str = "") -> Iterator[StoredObject]:
        """All objects below a folder, in no order."""

    def delete(self, keys: Sequence[str]) -> None:
        """Removes objects; those that are absent already are no error."""
