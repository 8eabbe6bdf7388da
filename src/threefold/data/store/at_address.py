"""Data at an address, `s3://BUCKET/PREFIX`: the local part of a token store, how its tokens are read; and text.

The index, the .json, the loss mask and the hashes are small: they are fetched once, compared with the hashes, and kept
in a folder of the cache, as for any store. Instead of the .bin there is a .stored with its address. The folder is
named after the hashes, so a store that is rewritten is another one.
"""

from pathlib import Path

from threefold.data.store.blocks import SUFFIX, Blocks, with_suffix
from threefold.data.text.listing import KINDS, kind_of
from threefold.mesh.environment import cache_folder, variables
from threefold.places import fetched, text_files
from threefold.places.known_file import KnownFile


def prefix_of(address: str) -> Path | None:
    """The prefix of a store's files on this machine, made now; None if there is text, errors as for `fetched`."""
    if text_files.parted(address, kind_of)[1]:
        return None
    return fetched.fetched(address, variables(), cache_folder() / "stored", Blocks.parse)


def tokens_at(prefix: Path) -> tuple[Blocks, KnownFile]:
    """(hashes, tokens) of the store at an address that `prefix_of` has made."""
    blocks = Blocks.read(with_suffix(prefix, SUFFIX))
    assert blocks is not None, f"{prefix} has lost its hashes"
    return blocks, fetched.tokens_at(prefix, blocks, variables())


def text_at(address: str) -> Path:
    """The local folder, file or file pattern for text at an address; errors as for `text_files`."""
    return text_files.text_files(
        address, variables(), cache_folder() / "stored-text", kind_of, kinds=KINDS
    )
