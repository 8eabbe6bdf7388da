"""Whether all ranks read the same bytes, and a resumed run the bytes that it began with.

The digests of the stores' blocks are compared before a model is built. If they differ, the lists of hashes say in
which block: those of the other rank, or those that the run keeps in its folder (`blocks/DIGEST.blocks`).
"""

import base64
import functools
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from threefold.audit.stores import list_at
from threefold.checkpoint.manifest import read_manifest
from threefold.data.rows.concat import Rows
from threefold.data.rows.known_rows import SourceRows, block_text, digests_of, parts_of
from threefold.data.store.blocks import Blocks
from threefold.errors import DataError, ranks_text
from threefold.jsonl import Values
from threefold.mesh.mesh import Mesh
from threefold.run.folder import RunFolder

# Hashes of 4 TB; longer lists are not sent, and the block is not named.
_MOST_SENT_BYTES = 64 << 20


def of_one_copy(open_rows: Callable[[], Rows], keys: Sequence[str], mesh: Mesh) -> Rows:
    """The rows that `open_rows` opens here, which every rank calls.

    Args:
        keys: of the sources, as in the config.

    Raises:
        ThreefoldError: what opening them raised on a rank, or a DataError if a rank has other bytes or rows than rank
            0; on every rank.
    """
    opened: list[Rows] = []

    def describe() -> Values:
        opened.append(rows := open_rows())
        return {
            "host": mesh.host,
            "rows": rows.fingerprint,
            "digests": list(digests_of(rows).values()),
        }

    mismatch = mesh.decide_on("bytes", describe, _others)
    (rows,) = opened
    if not mismatch:
        return rows
    number, sent = mismatch["source"], None
    if mesh.rank == mismatch["ranks"][0]:
        content = parts_of(rows)[number].blocks.to_bytes()
        sent = base64.b64encode(content).decode() if len(content) <= _MOST_SENT_BYTES else None
    mesh.decide("blocks", sent, functools.partial(_refuse, mismatch, rows, keys[number]))
    return rows


def _others(parts: list[Values]) -> Values | None:
    """The ranks whose rows or bytes are not those of rank 0, and the first source in which they differ."""
    compared = [(part["rows"], part["digests"]) for part in parts]
    ranks = [rank for rank, values in enumerate(compared) if values != compared[0]]
    if not ranks:
        return None
    pairs = zip(parts[0]["digests"], parts[ranks[0]]["digests"], strict=True)
    source = next((number for number, (first, other) in enumerate(pairs) if first != other), 0)
    return {"ranks": ranks, "source": source, "hosts": [part["host"] for part in parts]}


def _refuse(mismatch: Values, rows: Rows, key: str, sent: list[str | None]) -> None:
    ranks = mismatch["ranks"]
    hosts = mismatch["hosts"]
    part = parts_of(rows)[mismatch["source"]]
    path, where = part.rows.store.named, "their fingerprints differ"
    if (text := sent[ranks[0]]) is not None:
        where = _difference(part, Blocks.parse(base64.b64decode(text), Path(path))) or where
    others = ", ".join(dict.fromkeys(f"host {hosts[rank]}" for rank in ranks))
    raise DataError(
        f"{key}: {ranks_text(ranks)} ({others}) and rank 0 (host {hosts[0]}) have different copies of {path}: {where}",
        expected="the same bytes on every host: otherwise a sample's number means different samples",
        fix="copy the store's folder from a host that has the right one to the others; or once: threefold data prepare "
        "--data.source ... --to DIR, copy DIR to every host, and --data.source DIR",
    )


def refuse_other_bytes(rows: Rows, folder: RunFolder, mesh: Mesh) -> None:
    """Raises DataError on every rank if the stores are not those that the checkpoint's run has read; all call it."""
    mesh.share("bytes of the run", lambda: _compare_with_run(rows, folder))


def _compare_with_run(rows: Rows, folder: RunFolder) -> None:
    if folder.resume is None:
        return
    manifest = read_manifest(folder.resume)
    recorded = manifest.get("blocks")
    order = manifest["data"].get("fingerprint")
    # Rows of another source or packing are refused by their fingerprint, when the order is resumed.
    if not (
        isinstance(recorded, dict)
        and isinstance(order, dict)
        and order.get("data") == rows.fingerprint
    ):
        return
    for part in parts_of(rows):
        digest = recorded.get(part.name)
        if digest is None or digest == part.blocks.digest:
            continue
        began = Blocks.read(list_at(folder.resume.path.parents[1], digest))
        where = _difference(part, began) if began is not None else None
        path = part.rows.store.named
        raise DataError(
            f"{path} has changed since the checkpoint {folder.resume.path}: {where or 'its hashes differ'}",
            expected="the bytes that the run began with: it would continue with others unnoticed",
            fix=f"copy the store to {os.path.dirname(path)} again from its origin, or "
            "start a new run (another log.dir)",
        )


def _difference(part: SourceRows, other: Blocks) -> str | None:
    """The first block in which a source's store and another list differ, as text."""
    own = part.blocks
    change = part.blocks.difference(other)
    if change is None:
        return None
    where = block_text(own, change, part.rows, first_row=part.first_row)
    return f"{part.rows.store.prefix.name}{change.suffix}, {where}"


def record_of(rows: Rows) -> tuple[tuple[str, str, str], ...]:
    """(name, digest, prefix on this host) of each source's store, for the run's record."""
    stores = [(part.name, part.blocks.digest, part.rows.store) for part in parts_of(rows)]
    return tuple(
        (name, digest, store.named if store.stored else os.path.abspath(store.prefix))
        for name, digest, store in stores
    )


def keep_lists(rows: Rows, run: Path) -> None:
    """Keeps the lists of hashes in the run's folder, so that a later change can be named with its block."""
    for part in parts_of(rows):
        if not (place := list_at(run, part.blocks.digest)).exists():
            part.blocks.write(place)
