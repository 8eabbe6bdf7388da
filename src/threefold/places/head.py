"""The head of a run in a store: one small object, changed by swaps alone, with the writer and the complete checkpoints.

It holds the lease of the run that writes below the prefix, the run's identity, and its complete checkpoints. Whoever
takes the lease swaps the head, so that the next swap of the former holder is refused: of two runs one can add a
checkpoint, whatever their clocks say. A checkpoint that the head does not name was not saved; the newest one is read
here, never guessed from a listing.
"""

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import xxhash

from threefold.errors import CheckpointError, ConfigError, RunError, ThreefoldError
from threefold.places.admission import require_conditions
from threefold.places.object_store import ObjectStore

log = logging.getLogger("threefold")

KEY = "run-head.json"
CHECKPOINTS = "checkpoints"
_FORMAT = 1
# How often a holder swaps the head, and how long a contender waits for a swap before it takes the lease.
RENEW_S, LEASE_S = 5.0, 30.0
_LOOK_S = 0.5


class LeaseLost(RunError):
    """Another run writes below the prefix now."""


@dataclass(frozen=True)
class Lease:
    """Who writes: `owner` is random, `who` is for people, `beat` counts the swaps; not held: the owner has ended."""

    owner: str
    who: str
    beat: int = 0
    held: bool = True


@dataclass(frozen=True)
class StoredCheckpoint:
    """A complete checkpoint: its name below `checkpoints/`, its step, its seal's checksum; the best so far or not."""

    name: str
    step: int
    seal: str
    best: bool = False


@dataclass(frozen=True)
class RunHead:
    """The contents of the head: the lease, the run's identity (None: no run yet), and its checkpoints, oldest first.

    Attributes:
        aside: names of checkpoints later than one the run has gone back to; they are kept, and never resumed.
    """

    lease: Lease
    identity: Mapping[str, Any] | None = None
    checkpoints: tuple[StoredCheckpoint, ...] = ()
    aside: tuple[str, ...] = ()


def checked_text(values: Any) -> bytes:
    """Plain values as JSON that shows whether it was changed or cut."""
    text = json.dumps(values, sort_keys=True)
    return json.dumps(
        {"checksum": xxhash.xxh3_128_hexdigest(text.encode()), "values": values}
    ).encode()


def checked_values(content: bytes) -> Any:
    """The inverse of `checked_text`; ValueError, KeyError or TypeError for anything else."""
    read = json.loads(content)
    if checked_text(read["values"]) != content:
        raise ValueError("its checksum differs")
    return read["values"]


def read_head(place: ObjectStore) -> tuple[RunHead, str] | None:
    """The head and its etag; None if no run was ever here.

    Raises:
        CheckpointError: it was changed or cut.
    """
    if (stored := place.get(KEY)) is None:
        return None
    try:
        values = checked_values(stored[0])
        if values.pop("format") != _FORMAT:
            raise ValueError("another release wrote it")
        lease = Lease(**values.pop("lease"))
        checkpoints = tuple(StoredCheckpoint(**each) for each in values.pop("checkpoints"))
        return RunHead(
            lease=lease, checkpoints=checkpoints, aside=tuple(values.pop("aside")), **values
        ), stored[1]
    except (ValueError, KeyError, TypeError, RecursionError, AttributeError) as error:
        raise CheckpointError(
            f"{place.url}/{KEY} cannot be read: {error}",
            expected="the record of the run's checkpoints as it was written",
            fix=f"--checkpoint.resume {place.url}/{CHECKPOINTS}/NAME --log.dir ANOTHER_FOLDER   (a checkpoint by its "
            "own seal)",
        ) from error


class HeldHead:
    """The head while this process holds its lease; a thread renews it until `release`."""

    def __init__(self, place: ObjectStore, head: RunHead, etag: str) -> None:
        self.place, self.head = place, head
        self.lost: ThreefoldError | None = None
        self._etag, self._lock, self._ended = etag, threading.Lock(), threading.Event()
        self._renewing = threading.Thread(
            target=self._renew, name="threefold-lease", daemon=True
        )
        self._renewing.start()

    def update(self, change: Callable[[RunHead], RunHead]) -> RunHead:
        """Replaces the head by what `change` makes of it, and returns it.

        Raises:
            LeaseLost: another run has taken the lease, or the head is gone. PlaceError: the store failed.
        """
        with self._lock:
            if self.lost is not None:
                raise self.lost
            if self._ended.is_set():
                raise self._lost_to("this run has released its lease")
            changed = change(self.head)
            lease = replace(
                changed.lease, owner=self.head.lease.owner, beat=self.head.lease.beat + 1
            )
            self._swap(replace(changed, lease=lease))
            return self.head

    def release(self) -> None:
        """Ends the renewals, and lets the next run have the prefix at once."""
        self._ended.set()
        self._renewing.join()
        with self._lock:
            if self.lost is None:
                lease = replace(self.head.lease, beat=self.head.lease.beat + 1, held=False)
                self._swap(replace(self.head, lease=lease))

    def _swap(self, head: RunHead) -> None:
        etag = self.place.swap(KEY, _written(head), etag=self._etag)
        if (
            etag is None
            and (current := read_head(self.place))
            and current[0].lease.owner == head.lease.owner
        ):
            # An earlier swap of this process was carried out after it was given up.
            etag = self.place.swap(KEY, _written(head), etag=current[1])
        if etag is None:
            self.lost = self._lost_to(_holder(self.place))
            raise self.lost
        self.head, self._etag = head, etag

    def _lost_to(self, what: str) -> LeaseLost:
        return LeaseLost(
            f"{self.place.url}: {what}",
            expected="one run at a time below a prefix: two would mix and remove one another's checkpoints",
            fix="stop one of them; this one's own checkpoints are in its folder: continue it with --checkpoint.store "
            "ANOTHER_PREFIX",
        )

    def _renew(self) -> None:
        while not self._ended.wait(RENEW_S):
            try:
                self.update(lambda head: head)
            except LeaseLost:
                return
            except ThreefoldError as error:
                # A contender finds the store as it is; a swap after that shows whether somebody took it.
                log.warning("the lease could not be renewed: %s", error.problems[0].what)
            except BaseException:
                log.exception("the lease could not be renewed")


def take(
    place: ObjectStore,
    owner: str,
    who: str,
    *,
    dead: Callable[[str], bool],
    say: Callable[[str], None],
) -> HeldHead:
    """Takes the lease of a prefix; a new head is that of no run.

    Args:
        owner: this start, new and random; `who`: the same for people.
        dead: whether an owner is known to have ended. Any other is watched for a swap.
        say: receives a line if that takes long.

    Raises:
        ConfigError: another run has the lease. ThreefoldError: the store does not keep conditional writes.
    """
    require_conditions(place)
    if (current := read_head(place)) is None:
        head = RunHead(Lease(owner, who))
        taken = place.create(KEY, _written(head))
    else:
        before, etag = current
        if before.lease.held and not dead(before.lease.owner):
            say(
                f"{place.url} was held by {before.lease.who}: checking for up to {LEASE_S:.0f} s whether it still runs"
            )
            _require_silence(place, etag)
        head = replace(before, lease=Lease(owner, who, before.lease.beat + 1))
        taken = place.swap(KEY, _written(head), etag=etag)
    if taken is None:
        raise in_use(place)
    return HeldHead(place, head, taken)


def in_use(place: ObjectStore) -> ConfigError:
    """The error for a prefix that another run writes to."""
    return ConfigError(
        f"checkpoint.store = {place.url} is in use: {_holder(place)}",
        expected="one run at a time below a prefix: two would mix and remove one another's checkpoints",
        fix="wait for that run or stop it; or --checkpoint.store ANOTHER_PREFIX",
    )


def _require_silence(place: ObjectStore, etag: str) -> None:
    until = time.monotonic() + LEASE_S
    while time.monotonic() < until:
        time.sleep(_LOOK_S)
        stored = place.stat(KEY)
        if stored is None or stored.etag != etag:
            raise in_use(place)


def _holder(place: ObjectStore) -> str:
    current = read_head(place)
    if current is None:
        return f"{KEY} was removed"
    return f"{current[0].lease.who} {'writes there' if current[0].lease.held else 'has written there since'}"


def _written(head: RunHead) -> bytes:
    return checked_text({"format": _FORMAT, **json.loads(json.dumps(asdict(head)))})
