"""Whether a store has the semantics that runs rely on: probes of a few kilobytes, and one object of two parts.

Many servers and gateways accept a conditional write and ignore its condition, without an error. So only observed
behaviour counts. The probes have their own folder below the prefix, which is removed again.
"""

import os
import statistics
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from threefold.errors import ThreefoldError, size_text
from threefold.places.object_store import ObjectStore, open_store, server_of
from threefold.places.place import ObjectPlace

LIMIT_S = 2.0
# The probe's own objects: not part of any data.
PROBE = ".threefold-probe-"
_NUM_RACES, _NUM_WRITERS = 20, 8
_NUM_LATENCIES = 8
_PARTS_BYTES = 9 * 2**20  # above the size of one part
_CLOCK_S = 60.0
_ELSEWHERE = "another store for this; SeaweedFS, Amazon S3 and Google Cloud Storage document it"


@dataclass(frozen=True)
class StoreProbe:
    """A probe of a store, and its observation; `expected` and `fix` are for one that does not hold."""

    name: str
    holds: bool
    what: str
    expected: str
    fix: str


@dataclass
class StoreAdmission:
    """The probes of a store, in their order, and what was measured meanwhile."""

    address: str
    probes: list[StoreProbe] = field(default_factory=list)
    measured: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0


def admit(address: str, environ: Mapping[str, str]) -> StoreAdmission:
    """Asks the store of an address; ThreefoldError if it cannot be reached, listed or written at all."""
    begun = time.monotonic()
    place = open_store(address, environ, retry_s=2 * LIMIT_S)
    probing = _Probing(place, f"{PROBE}{uuid.uuid4().hex[:12]}", begun + LIMIT_S)
    next(place.list(), None)
    try:
        place.write(f"{probing.folder}/first", b"1")
        for name, probe in probing.all():
            probing.take(name, probe)
        probing.measured()
    finally:
        place.delete([each.key for each in place.list(probing.folder)])
    probing.report.seconds = time.monotonic() - begun
    return probing.report


def require_admitted(
    address: str, environ: Mapping[str, str], kept: Path, say: Callable[[str], None]
) -> None:
    """Asks the store of an address once; ThreefoldError for the first probe that does not hold.

    Args:
        kept: a folder that remembers the buckets of which all held.
        say: receives a line if it was asked.
    """
    server = server_of(address, environ)
    mark = kept / f"store-{xxhash.xxh3_64_hexdigest(server.encode())}"
    if mark.exists():
        return
    admission = admit(address, environ)
    for probe in admission.probes:
        if not probe.holds:
            raise ThreefoldError(
                f"{admission.address}: {probe.name}: {probe.what}",
                expected=probe.expected,
                fix=probe.fix,
            )
    with suppress(OSError):  # then the next start asks, too
        kept.mkdir(parents=True, exist_ok=True)
        mark.write_text(server)
    say(f"{server}: {len(admission.probes)} probes hold; {admission.seconds:.1f} s")


def require_create(place: ObjectPlace) -> None:
    """ThreefoldError if the store lets two writers hold one key, with which nothing would keep them apart."""
    key = f"{PROBE}{uuid.uuid4().hex[:12]}"
    place.create(key, b"first")
    try:
        second = place.create(key, b"second")
    finally:
        place.delete([key])
    if second is not None:
        raise ThreefoldError(
            "the store overwrites existing objects although it was asked not to (it ignores If-None-Match)",
            expected="put if absent, which keeps two writers apart",
            fix=f"--to a local folder, and copy that; or {_ELSEWHERE}",
        )


def require_conditions(place: ObjectPlace) -> None:
    """ThreefoldError if the store writes although a condition does not hold: nothing would keep two writers apart."""
    key = f"{PROBE}{uuid.uuid4().hex[:12]}"
    try:
        if (first := place.create(key, b"first")) is None:
            raise ThreefoldError(
                "the store refuses a new key", expected="put if absent", fix=_ELSEWHERE
            )
        ignored = "If-None-Match" if place.create(key, b"second") is not None else ""
        if not ignored:
            place.swap(key, b"third", etag=first)
            ignored = "If-Match" if place.swap(key, b"fourth", etag=first) is not None else ""
    finally:
        place.delete([key])
    if ignored:
        raise ThreefoldError(
            f"the store overwrites existing objects although it was asked not to (it ignores {ignored})",
            expected="conditional writes: a run's lease and a checkpoint's seal depend on them",
            fix=f"leave checkpoint.store out; or {_ELSEWHERE}",
        )


class _Probing:
    """The probes of one store while they run."""

    def __init__(self, place: ObjectStore, folder: str, until: float) -> None:
        self.place, self.folder, self.until = place, folder, until
        self.report = StoreAdmission(str(place.url))

    def all(self) -> Iterator[tuple[str, Callable[[], tuple[bool, str, str]]]]:
        """Every probe by name: a function that returns whether it holds, the observation, and the expectation."""
        yield "put if absent", self._create
        yield "races of writers", self._races
        yield "swap by etag", self._swap
        yield "parts and ranges", self._parts
        yield "listing after writing", self._listing
        yield "delete", self._delete
        yield "clock", self._clock

    def take(self, name: str, probe: Callable[[], tuple[bool, str, str]]) -> None:
        """Runs a probe and keeps its result; an error of the store counts as its result."""
        try:
            holds, what, expected = probe()
        except ThreefoldError as error:
            problem = error.problems[0]
            self.report.probes.append(
                StoreProbe(name, False, problem.what, problem.expected, problem.fix)
            )
            return
        self.report.probes.append(StoreProbe(name, holds, what, expected, self._fix(name)))

    def measured(self) -> None:
        """Adds what was measured, if the bytes could be written and read."""
        if not self.report.measured:
            return
        latency_s, write, read = self.report.measured.values()
        speed = f"{size_text(write)}/s written, {size_text(read)}/s read"
        what = (
            f"{latency_s * 1000:.3g} ms a small read; {size_text(_PARTS_BYTES)} in one: {speed}"
        )
        self.report.probes.append(StoreProbe("latency, bandwidth", True, what, "", ""))

    def _fix(self, name: str) -> str:
        if name == "clock":
            return "start an NTP client here: chronyd, or timedatectl set-ntp true"
        works = [probe.name for probe in self.report.probes if probe.holds]
        return f"{_ELSEWHERE}; of this one, what works so far: {', '.join(works) or 'nothing'}"

    def _key(self, name: str) -> str:
        return f"{self.folder}/{name}"

    def _create(self) -> tuple[bool, str, str]:
        key = self._key("created")
        first, second = self.place.create(key, b"first"), self.place.create(key, b"other")
        expected = (
            "the second writer is refused: a run's lock and a checkpoint's seal depend on this"
        )
        if first is None:
            return False, "a new key is refused", expected
        if second is not None or self.place.read(key, start=0, length=5) != b"first":
            return (
                False,
                "the second writer of a key is not refused (If-None-Match is ignored)",
                expected,
            )
        return True, "the second writer of a key is refused", expected

    def _races(self) -> tuple[bool, str, str]:
        expected = "exactly one writer wins each race, even at the same moment"
        won: list[int] = []
        with ThreadPoolExecutor(_NUM_WRITERS) as pool:
            while len(won) < _NUM_RACES and (not won or time.monotonic() < self.until - 0.5):
                key = self._key(f"race-{len(won)}")
                etags = pool.map(
                    lambda writer, key=key: self.place.create(key, b"w" * writer),
                    range(1, _NUM_WRITERS + 1),
                )
                won.append(sum(etag is not None for etag in etags))
        cut = f"; the {LIMIT_S:g} s for probes ran out" if len(won) < _NUM_RACES else ""
        right = won.count(1)
        return (
            right == len(won),
            f"{right} of {len(won)} races of {_NUM_WRITERS} had one winner{cut}",
            expected,
        )

    def _swap(self) -> tuple[bool, str, str]:
        key, expected = (
            self._key("swapped"),
            "a write with a stale etag is refused (If-Match)",
        )
        first = self.place.create(key, b"1")
        second = None if first is None else self.place.swap(key, b"22", etag=first)
        if first is None or second is None:
            return False, "a write with the current etag is refused", expected
        if (
            self.place.swap(key, b"333", etag=first) is not None
            or self.place.read(key, start=0, length=2) != b"22"
        ):
            return (
                False,
                "a write with a stale etag is not refused (If-Match is ignored)",
                expected,
            )
        return True, "a stale etag is refused", expected

    def _parts(self) -> tuple[bool, str, str]:
        key, data = self._key("parts"), os.urandom(_PARTS_BYTES)
        begun = time.monotonic()
        self.place.write(key, data)
        written = time.monotonic()
        whole = self.place.read(key, start=0, length=len(data))
        read = time.monotonic()
        latencies, right = [], whole == data
        for start in range(_PARTS_BYTES // 2, _PARTS_BYTES // 2 + _NUM_LATENCIES):
            sent = time.monotonic()
            right &= self.place.read(key, start=start, length=16) == data[start : start + 16]
            latencies.append(time.monotonic() - sent)
        measured = {
            "write_bytes_per_s": len(data) / (written - begun),
            "read_bytes_per_s": len(data) / (read - written),
        }
        self.report.measured = {"latency_s": statistics.median(latencies), **measured}
        return (
            right,
            "equal bytes" if right else "other bytes than were written",
            "the bytes that were written",
        )

    def _listing(self) -> tuple[bool, str, str]:
        names = [f"list/{number}" for number in range(8)]
        for name in names:
            self.place.write(self._key(name), b"1")
        listed = {each.key for each in self.place.list(self._key("list"))}
        missing = len({self._key(name) for name in names} - listed)
        return (
            not missing,
            f"{len(names) - missing} of {len(names)} are listed at once",
            "every object written is listed",
        )

    def _delete(self) -> tuple[bool, str, str]:
        key, expected = self._key("list/0"), "a deleted object is neither readable nor listed"
        self.place.delete([key])
        gone = self.place.stat(key) is None and key not in {
            each.key for each in self.place.list(self._key("list"))
        }
        return (
            gone,
            "the deleted object is gone" if gone else "the deleted object is still there",
            expected,
        )

    def _clock(self) -> tuple[bool, str, str]:
        key = self._key("clock")
        before = time.time()
        self.place.write(key, b"1")
        stored = self.place.stat(key)
        written = stored.written_s if stored else 0.0
        # Stores give whole seconds.
        apart = max(before - 1 - written, written - time.time(), 0.0)
        gap = f"{apart:.0f} s apart" if apart >= 1 else "less than a second apart"
        return (
            apart <= _CLOCK_S,
            f"this machine's and the store's: {gap}",
            "less than a minute apart",
        )


def facts(admission: StoreAdmission) -> dict[str, Any]:
    """The measurements, as plain values with their units."""
    admitted = all(probe.holds for probe in admission.probes)
    return {
        "address": admission.address,
        "seconds": admission.seconds,
        **admission.measured,
        "admitted": admitted,
    }
