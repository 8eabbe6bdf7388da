"""torch's allocator: the memory of a GPU by its out-of-memory message. No torch."""

import re
from typing import NamedTuple

_SIZE = r"([\d.]+) (bytes|[KMGT]iB)"
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")  # each 1,024 times the one before
_FORMS = (
    rf"Tried to allocate {_SIZE}",
    rf"{_SIZE}(?: is)? free",
    rf"{_SIZE} is reserved by PyTorch but unallocated",
    rf"total capac\w+ of {_SIZE}",
    rf"this process has {_SIZE} memory in use",
)


class GpuMemory(NamedTuple):
    """Bytes of a GPU, as far as a line shows them; `pieces` are reserved, but not in use."""

    asked: int | None
    free: int | None
    pieces: int | None
    total: int | None
    own: int | None


def gpu_memory(text: str) -> GpuMemory:
    """What a line reports about the memory of a GPU."""
    sizes = (re.search(form, text) for form in _FORMS)
    return GpuMemory._make(
        size and int(float(size[1]) * 1024 ** _UNITS.index(size[2])) for size in sizes
    )
