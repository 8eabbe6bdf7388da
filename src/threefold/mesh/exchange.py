"""Exchange of plain values between ranks outside collectives, over the rendezvous store.

A value is made on one rank and read on all, so making it may take any time, or fail: then every rank raises the same
error. Values are those of JSON; the rank that makes one gets it in the same form as the others.

Also here: naming of ranks that pass the wrong rows to a call (`Mesh.agree`).
"""

import json
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from threefold.errors import (
    DataError,
    RunError,
    ThreefoldError,
    described_error,
    error_of,
    first_line,
)
from threefold.jsonl import Values
from threefold.mesh import environment

Make = Callable[[], Any]
Conclude = Callable[[list[Any]], Any]
_LONGEST_PREPARATION = timedelta(days=2)
# How long rank 0 waits for the others to read why all of them end.
_FAREWELL_S = 5.0
# How gloo, NCCL and the store report that a process is gone.
_PEER_GONE = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "remote process exited",
    "failed to recv",
    "Failed to recv",
)


class LostPeerError(RunError):
    """A connection to another rank is lost; what has ended that rank is not known here."""

    how = "lost"


class Exchange:
    """The values that the ranks of one mesh send one another. All ranks ask for the same ones in the same order.

    Attributes:
        passed: how many this rank has got, which a watch may read at any time.
    """

    def __init__(self, rank: int, world_size: int, store: dist.Store | None) -> None:
        # None in a single process.
        self._rank, self._world_size, self._store = (rank, world_size, store)
        self._numbers: Counter[str] = Counter()
        self.passed = 0

    def value_of(self, maker: int, name: str, make: Make) -> Any:
        """The result of `make` on the rank `maker`.

        Raises:
            ThreefoldError: what `make` raised, on every rank; OtherRankError if it was not an error for users.
        """
        if self._store is None:
            return json.loads(json.dumps(make()))
        key = f"threefold/shared/{name}/{self._number(name)}"
        leave = partial(
            leave_together,
            self._store,
            f"{key}/read",
            self._world_size,
            waits=self._rank == 0,
        )
        if self._rank == maker:
            try:
                answer = json.dumps({"value": make()})
            except BaseException as error:
                self._store.set(key, json.dumps(described_error(error)))
                if isinstance(error, Exception):
                    leave()
                raise
            self._store.set(key, answer)
        (reply,) = _wait_for_all(self._store, [key])
        if "value" not in reply:
            leave()
            raise error_of(reply, name)
        self.passed += 1
        return reply["value"]

    def conclusion_of(self, name: str, part: Any, conclude: Conclude) -> Any:
        """The conclusion of rank 0 from the `part` of every rank, in rank order; raises as `value_of`."""
        store = self._store
        if store is None:
            return self.value_of(0, name, lambda: conclude([part]))
        number = self._number(f"parts/{name}")
        keys = [f"threefold/parts/{name}/{number}/{rank}" for rank in range(self._world_size)]
        store.set(keys[self._rank], json.dumps(part))
        return self.value_of(0, f"decide/{name}", lambda: conclude(_wait_for_all(store, keys)))

    def conclusion_of_work(self, name: str, make: Make, conclude: Conclude) -> Any:
        """Like `conclusion_of`, on what `make` returns on every rank; if it fails on one, every rank raises."""
        error: BaseException | None = None
        try:
            part = {"value": make()}
        except BaseException as raised:
            part, error = described_error(raised), raised

        def concluded(parts: list[dict[str, Any]]) -> Any:
            for each in parts:
                if "value" not in each:
                    raise error_of(each, name)
            return conclude([each["value"] for each in parts])

        try:
            return self.conclusion_of(name, part, concluded)
        except ThreefoldError:
            if error is None:
                raise
            raise error from None

    def _number(self, name: str) -> int:
        self._numbers[name] += 1
        return self._numbers[name]


def collectives_begun() -> dict[str, int]:
    """The number of collectives that this rank has begun, by the ranks and the name of the process group."""
    counts: dict[str, int] = {}
    for group in list(dist.distributed_c10d._world.pg_map):
        # It is being made, or ends, or counts nothing.
        with suppress(RuntimeError, ValueError, KeyError):
            ranks = ",".join(map(str, dist.get_process_group_ranks(group)))
            counts[f"{ranks}/{group.group_name}"] = group._get_sequence_number_for_group()
    return counts


def leave_together(store: dist.Store, key: str, ranks: int, *, waits: bool) -> None:
    """Before all raise what they have read: one that may keep the store, which ends with it, `waits` for the others."""
    with suppress(RuntimeError):  # it has ended
        store.add(key, 1)
    until = time.monotonic() + _FAREWELL_S
    while waits and time.monotonic() < until and store.add(key, 0) < ranks:
        time.sleep(0.02)


@contextmanager
def naming_lost_peers() -> Iterator[None]:
    """RunError in place of what gloo, NCCL and the store say."""
    try:
        yield
    except RuntimeError as error:
        if (lost := lost_peer(error)) is None:
            raise
        raise lost from error


@naming_lost_peers()
def _wait_for_all(store: dist.Store, keys: list[str]) -> list[Any]:
    store.wait(keys, _LONGEST_PREPARATION)
    return [json.loads(store.get(key)) for key in keys]


def lost_peer(error: BaseException) -> LostPeerError | None:
    """The text that reports a lost rank, if an error of gloo, NCCL or the store means that."""
    if isinstance(error, LostPeerError):
        return error
    if not isinstance(error, RuntimeError) or not any(
        sign in str(error) for sign in _PEER_GONE
    ):
        return None
    return LostPeerError(
        f"rank {environment.current().rank} lost its connection to another rank: {first_line(error)}",
        expected="all ranks to run until the end; rank 0 keeps the store in which they meet",
        fix="see what the other ranks have printed, rank 0 first; if none has reported an error, one was killed: look "
        "for `Out of memory` in the kernel's log (dmesg) of its host; the same command resumes from the newest "
        "checkpoint, and `threefold train --max-restarts N` does so automatically",
    )


def digest_of_rows(batches: Sequence[Values]) -> int:
    """Digest of the names, shapes and bytes of all tensors; for those on a device it waits for the device."""
    digest = 0
    for batch in batches:
        for name in sorted(batch):
            if isinstance(values := batch[name], Tensor):
                digest = zlib.crc32(
                    _bytes(values), zlib.crc32(f"{name} {[*values.shape]}".encode(), digest)
                )
    return digest


def described_rows(batches: Sequence[Values]) -> Values:
    """Facts to name a difference: for each tensor by name its shape, and a digest of each row."""
    return {
        name: [
            [[*batch[name].shape] for batch in batches],
            [zlib.crc32(_bytes(row)) for b in batches for row in b[name]],
        ]
        for batch in batches[:1]
        for name in sorted(batch)
        if isinstance(batch[name], Tensor) and batch[name].ndim
    }


def _bytes(values: Tensor) -> Any:
    # A copy: of one element, any stride counts as contiguous, and cannot be viewed as bytes.
    return (
        values.detach()
        .cpu()
        .clone(memory_format=torch.contiguous_format)
        .flatten()
        .view(torch.uint8)
        .numpy()
    )


def refuse_unlike(parts: list[Values], ranks_of_copy: int) -> None:
    """Names what makes ranks differ in a call that all of them make together.

    Args:
        parts: of each rank, its `call`, the number of its micro-batches (`pieces`), and `described_rows`.
        ranks_of_copy: cp x tp.

    Raises:
        RunError: they make different calls. DataError: they bring rows that do not belong to one step.
    """
    calls = [part["call"] for part in parts]
    if (
        other := next((rank for rank, call in enumerate(calls) if call != calls[0]), None)
    ) is not None:
        raise RunError(
            f"ranks are not in the same call: rank 0 is in {calls[0]}, rank {other} in {calls[other]}",
            expected="the same calls in the same order on every rank: a step sums over all of them",
            fix="skip a step or a batch on all ranks or on none; let an error on one rank end the program",
        )
    pieces = [part["pieces"] for part in parts]
    if len(set(pieces)) > 1:
        raise DataError(
            f"the batch of {calls[0]} is split into {min(pieces)} micro-batches on rank {pieces.index(min(pieces))}, "
            f"into {max(pieces)} on rank {pieces.index(max(pieces))}",
            expected="the same number on every rank: they step together",
            fix="threefold.distribute(loader) gives every dp rank the same number of rows",
        )
    for rank, part in enumerate(parts):
        dp = rank // ranks_of_copy
        first = dp * ranks_of_copy
        if difference := _first_difference(parts[first]["rows"], part["rows"]):
            raise DataError(
                f"ranks {first} and {rank} belong to dp rank {dp} and give different rows to {calls[0]}: {difference}",
                expected="the same rows on all cp and tp ranks of a dp rank",
                fix="loader = threefold.distribute(loader), which reads by mesh.dp_rank; a collate_fn's random "
                "draws (masks) must depend on the sample alone",
            )


def _first_difference(first: Values, other: Values) -> str:
    for name in sorted(first.keys() | other.keys()):
        if name not in first or name not in other:
            return f"{name} is on only one of them"
        (shapes, rows), (other_shapes, other_rows) = first[name], other[name]
        if shapes != other_shapes:
            return f"{name} is {shapes[0]} on one, {other_shapes[0]} on the other"
        if (
            row := next(
                (n for n, (a, b) in enumerate(zip(rows, other_rows, strict=True)) if a != b),
                None,
            )
        ) is not None:
            return f"row {row} of {name}"
    return ""
