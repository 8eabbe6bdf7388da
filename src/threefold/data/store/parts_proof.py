"""PREFIX.parts: the seals of the parts that a store was joined of, and the proof that they are its source, each once.

It is written before the parts are joined, a line of JSON each, and one with their number. The pieces of a source follow
one another without gap or overlap, each part has the ones that follow those of the part before, and a document belongs
to one piece: so each document is in exactly one part. The counts must add up to the store's, and the digests be those
of its bytes.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import xxhash

from threefold.data.store.blocks import with_suffix
from threefold.data.store.parts import PartDone, PartMaker
from threefold.data.store.prepare import PARTS
from threefold.data.store.store import StoreInfo, TokenStore
from threefold.errors import DataError
from threefold.jsonl import from_json, write_whole

SUFFIX = ".parts"


def write(prefix: Path, maker: PartMaker, done: Sequence[PartDone]) -> None:
    """Writes the record of all parts, in order, which are about to be joined."""
    seals = (maker.path(each.part, "json").read_bytes() for each in done)
    write_whole(with_suffix(prefix, SUFFIX), chain(seals, [_last(done)]))


def prove(prefix: Path, *, read: bool) -> str:
    """The proof of a store, in one line, or that it keeps none.

    Args:
        read: compare every token, length and label with the digests again; they were when the parts were joined.

    Raises:
        DataError: it is not proved; names the part.
    """
    path, store = with_suffix(prefix, SUFFIX), TokenStore(prefix)
    if not path.exists() or store.info is None:
        return f"no proof: {path} is not there, as of a store that a run has made"
    *lines, last = path.read_bytes().splitlines(keepends=True) or [b""]
    try:
        seals = [from_json(line) for line in lines]
        offence = "it was cut"
        if last == _last(lines):
            offence = next(_offences(seals, store, store.info, read=read), "")
    except (ValueError, TypeError, KeyError) as error:
        offence = f"it cannot be read: {error!r}"
    if offence:
        raise DataError(
            f"{path}: {offence}",
            expected="each document of the source in exactly one part, counts and digests of the parts as in the store",
            fix="threefold data prepare ... --to ANOTHER   (prepares the source again)",
        )
    num_pieces = sum(len(seal["pieces"]) for seal in seals)
    digests = (
        "read again, every digest is equal"
        if read
        else "every digest was equal when they were joined"
    )
    return (
        f"proof: the {num_pieces:,} pieces of the source are in {len(seals):,} parts, each in one; their "
        f"{store.num_documents:,} documents and {store.num_tokens:,} tokens are the store's; {digests}"
    )


def _last(parts: Sequence[Any]) -> bytes:
    """The last line of the record of these parts."""
    return json.dumps({"parts": len(parts)}).encode() + b"\n"


def _offences(
    seals: Iterable[Any], store: TokenStore, info: StoreInfo, *, read: bool
) -> Iterator[str]:
    """The problems, in words."""
    documents = tokens = skipped = 0
    file, end = -1, 0
    for number, seal in enumerate(seals):
        if (seal["part"], seal["of"]) != (number, PARTS + info.request):
            yield f"part {seal['part']} of {seal['of']} is where part {number} of {PARTS}{info.request} belongs"
        for its_file, start, stop in seal["pieces"]:
            if its_file < file or start != (end if its_file == file else 0) or stop < start:
                yield f"part {number}: its piece from {start} on does not follow the one before"
            file, end = its_file, stop
        until = documents + seal["num_documents"], tokens + seal["num_tokens"]
        if read:
            files = {
                "bin": store.read(tokens, until[1]),
                "len": store.lengths()[documents : until[0]],
            }
            if store.has_loss_mask:
                files["loss_mask"] = store.trained_on(tokens, until[1])
            for kind, data in files.items():
                if xxhash.xxh3_128_hexdigest(data.tobytes()) != seal["xxh3"][kind]:
                    yield f"part {number} (documents {documents:,} to {until[0] - 1:,}) has another {kind} in the store"
        documents, tokens = until
        skipped += seal["log"]["num_skipped"]
    whole = info.num_documents, info.num_tokens, info.num_skipped
    if (documents, tokens, skipped) != whole:
        yield f"its parts have {documents:,} documents, {tokens:,} tokens, {skipped:,} skipped; the store has {whole}"
