"""A device and the cores of a host under load, with answers that are known: what computes or keeps wrong is named.

Products are of whole numbers so small that every partial sum is exact in the type, whatever the order of the sum: a
single wrong bit makes the answer another. Memory is written with a pattern that differs at every place and in every
pass, and read back. A chain of ordinary layers gives bits that devices of one kind must agree on.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import platform
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from threefold.doctor.findings import Finding, ok, stop
from threefold.errors import size_text
from threefold.mesh.mesh import Mesh

# (type, size of the matrices, largest number in them): size x largest^2 is exact in the type, as is each partial sum.
_PRODUCTS = {
    "cuda": ((torch.float32, 2048, 16), (torch.bfloat16, 4096, 1), (torch.float16, 4096, 1)),
    "cpu": ((torch.float32, 256, 16), (torch.float64, 256, 1024), (torch.bfloat16, 256, 1)),
}
_NON_ZERO = 1 / 32  # of the numbers where the largest is 1: 4096 / 32 / 32 = 4 summands, and never above 128
_MEMORY_SHARE = {"cuda": 0.8, "cpu": 0.1}
_PIECE = 1 << 22  # numbers of memory that are written and compared at a time
_ODD = -7046029254386353131
_CHAIN = 20
_LINK_NUMBERS = {"cuda": 1 << 24, "cpu": 1 << 19}
Multiply = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Burned:
    """What one device or core did, and how much of it was wrong.

    Attributes:
        kind: what must be equal for its `digest` to be.
        wrong: by what was done: products, words of memory.
        failed: what ended it before its time.
    """

    place: str
    kind: str
    products: int
    words: int
    digest: str
    wrong: dict[str, int] = field(default_factory=dict)
    failed: str = ""


def burn(device: torch.device, seconds: float, *, part: int, parts: int, multiply: Multiply = torch.mm) -> list[Burned]:
    """Loads this process' device, and its part of the host's cores, for about that many seconds.

    Args:
        part, parts: which of the host's processes this is, which share its cores and memory.
    """
    found = []
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        free = torch.cuda.mem_get_info(device)[0]
        found.append(
            _tried(device, f"{device} {name}", name, 0.7 * seconds, int(_MEMORY_SHARE["cuda"] * free), multiply)
        )
        seconds *= 0.3
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    own = cores[part::parts] or [cores[part % len(cores)]]
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 1 << 30
    each = int(_MEMORY_SHARE["cpu"] * free / max(len(cores), parts))
    with _one_thread():
        threads = [_Core(core, seconds, each, multiply) for core in own]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for thread in threads:
        if thread.burned is None:
            raise thread.error or RuntimeError(f"core {thread.core} gave no answer")
        found.append(thread.burned)
    return found


class _Core(threading.Thread):
    """Loads one core, to which it is bound."""

    def __init__(self, core: int, seconds: float, memory: int, multiply: Multiply) -> None:
        super().__init__(daemon=True)
        self.core = core
        self.burned: Burned | None = None
        self.error: Exception | None = None
        self._work = seconds, memory, multiply

    def run(self) -> None:
        try:
            if hasattr(os, "sched_setaffinity"):
                os.sched_setaffinity(0, {self.core})  # of this thread
            self.burned = _tried(torch.device("cpu"), f"core {self.core}", _processor(), *self._work)
        except Exception as error:  # told by the thread that waits
            self.error = error


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _tried(device: torch.device, place: str, kind: str, *work: Any) -> Burned:
    """As `_loaded`; a device that raises an error has failed."""
    try:
        return _loaded(device, place, kind, *work)
    except RuntimeError as error:  # also of CUDA
        return Burned(place, kind, 0, 0, "", failed=(str(error).splitlines() or [type(error).__name__])[0])


def _loaded(device: torch.device, place: str, kind: str, seconds: float, memory: int, multiply: Multiply) -> Burned:
    """Products and memory by turns."""
    ends = time.monotonic() + seconds
    cases = [_case(device, *each) for each in _PRODUCTS[device.type]]
    wrong: Counter[str] = Counter()
    products = words = passes = 0
    while not products or time.monotonic() < ends:
        turn = time.monotonic() + seconds / 10
        for left, right, expected in itertools.cycle(cases):
            wrong["products"] += int(not torch.equal(multiply(left, right), expected))
            products += 1
            if products % len(cases) == 0 and time.monotonic() > turn:
                break
        bad, checked = _remembered(device, memory, passes, time.monotonic() + seconds / 20)
        wrong["words of memory"] += bad
        words, passes = words + checked, passes + 1
    return Burned(
        place, kind, products, words, _digest(device, multiply), {name: bad for name, bad in wrong.items() if bad}
    )


def _case(device: torch.device, dtype: torch.dtype, size: int, largest: int) -> tuple[Tensor, Tensor, Tensor]:
    """Two matrices of whole numbers, and their product, made of whole numbers on the host."""
    draws = torch.Generator().manual_seed(size + largest)
    left, right = (torch.randint(-largest, largest + 1, (size, size), generator=draws) for _ in range(2))
    if largest == 1:
        left, right = (each * (torch.rand(size, size, generator=draws) < _NON_ZERO) for each in (left, right))
    expected = (left.double() @ right.double()).to(dtype)
    return left.to(device, dtype), right.to(device, dtype), expected.to(device)


def _remembered(device: torch.device, memory: int, number: int, ends: float) -> tuple[int, int]:
    """(wrong words, words checked) of memory that is filled in pieces, each of which is then read."""
    pieces: list[Tensor] = []
    while not pieces or (len(pieces) < memory // (8 * _PIECE) and time.monotonic() < ends):
        pieces.append(_pattern(device, len(pieces), number))
    wrong = sum(int((held != _pattern(device, piece, number)).sum()) for piece, held in enumerate(pieces))
    return wrong, len(pieces) * _PIECE


def _pattern(device: torch.device, piece: int, number: int) -> Tensor:
    """Words that differ at every place; in each pass the bits of every other are turned."""
    words = torch.arange(piece * _PIECE, (piece + 1) * _PIECE, device=device).add_(number).mul_(_ODD)
    return words if number % 2 else words.bitwise_not_()


def _digest(device: torch.device, multiply: Multiply) -> str:
    draws = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(256, 256, generator=draws).to(device) for _ in range(2))
    for _ in range(_CHAIN):
        x = torch.tanh(multiply(x, weight) / 16)
    return hashlib.sha256(x.cpu().numpy().tobytes()).hexdigest()[:16]


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.partition(":")[2].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def load_links(mesh: Mesh, seconds: float, run: Callable[[Callable[[], Any]], float]) -> tuple[int, int]:
    """(all-reduces over all ranks, those whose sum was wrong), while each rank also multiplies. All ranks call it.

    Args:
        run: waits for what it begins, within a limit.
    """
    ends, world = time.monotonic() + seconds, mesh.world_size
    numbers = torch.arange(_LINK_NUMBERS[mesh.device.type], device=mesh.device) % 1024
    left, right, _ = _case(mesh.device, *_PRODUCTS[mesh.device.type][0])
    expected = (numbers * (world * (world + 1) // 2)).float()
    rounds = wrong = 0
    while True:
        sent = (numbers * (mesh.rank + 1)).float()
        sent[0] = float(time.monotonic() < ends)  # all go on while all want to

        def begin(sent: Tensor = sent) -> Any:
            work = torch.distributed.all_reduce(sent, async_op=True)
            torch.mm(left, right)
            return work

        run(begin)
        rounds += 1
        wrong += int(not torch.equal(sent[1:], expected[1:]))
        if sent[0] < world:
            return rounds, wrong


def judge(found: Sequence[tuple[str, Burned]], links: Sequence[tuple[int, int, int]] = ()) -> list[Finding]:
    """What was wrong, by host and device.

    Args:
        found: (host, what it did).
        links: (rank, all-reduces, wrong ones).
    """
    faults = [each for host, burned in found for each in _faults(host, burned)]
    for kind in sorted({burned.kind for _, burned in found}):
        ended = [(host, burned) for host, burned in found if burned.kind == kind and not burned.failed]
        digests = Counter(burned.digest for _, burned in ended)
        if len(digests) < 2:
            continue
        (usual, times), *others = digests.most_common()
        odd = [f"{burned.place} of {host}" for host, burned in ended if burned.digest != usual]
        what = f"{', '.join(odd[:8])} computed other bits than the other {times} of {kind}"
        if times == others[0][1]:
            what = f"devices of {kind} do not agree on bits, and no side is larger: {', '.join(odd[:8])} differ"
        faults.append(_fault(what, "the same bits from devices of one kind, by the same libraries"))
    bad = [(rank, wrong, rounds) for rank, rounds, wrong in links if wrong]
    for rank, wrong, rounds in bad:
        faults.append(_fault(f"rank {rank} received {wrong} of {rounds} sums wrong", "the sum of what all ranks sent"))
    if faults:
        return faults
    places, products = len(found), sum(burned.products for _, burned in found)
    words = sum(burned.words for _, burned in found)
    text = f"{places} devices and cores: {products:,} products, {size_text(8 * words)} of memory, all right"
    if links:
        text += f"; {max(rounds for _, rounds, _ in links):,} all-reduces under load, all right"
    return [ok("burn", text)]


def _faults(host: str, burned: Burned) -> Iterator[Finding]:
    if burned.failed:
        yield _fault(f"{burned.place} of {host} failed: {burned.failed}", "a device that works under load")
    totals = {"products": burned.products, "words of memory": burned.words}
    for name, count in burned.wrong.items():
        what = f"{burned.place} of {host}: {count:,} of {totals[name]:,} {name} were wrong"
        yield _fault(what, "the answers of whole numbers, which are exact")


def _fault(what: str, expected: str) -> Finding:
    fix = "take the host out of the job, and let the device be tested: it changes what is trained without a word"
    return stop("burn", what, expected=expected, fix=fix)
