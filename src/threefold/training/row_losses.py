"""Keeps the loss of each row of each step: this rank's part of its rows, as the loss's forward reported it.

Nothing is sent, and nothing is waited for: on an accelerator a step's numbers are copied to the host while the next one
runs, and read after it. The targets of a row are counted in its labels, which are still on the host.
"""

import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from threefold.arrays import Int64
from threefold.audit.row_losses import FOLDER, RankPart, packed
from threefold.data.rows.concat import IGNORED
from threefold.mesh.mesh import Mesh
from threefold.training.forward import Batch
from threefold.training.nonfinite import copy_to_host
from threefold.training.numbers import StepResult

log = logging.getLogger("threefold")

# Kept in memory until a step is logged, or the state saved.
_MOST_BYTES = 1 << 20


class KeptRows:
    """Appends to this rank's file; the one tp rank that does so for its group makes one."""

    def __init__(
        self,
        run: Path,
        mesh: Mesh,
        *,
        segment: int,
        count: Callable[[Batch], Int64] | None = None,
        spread: bool = False,
    ) -> None:
        """Args:
        segment: the number of this start in audit.jsonl.
        spread: whether micro-batches take turns in the rows (`batches.micro_batches`).
        count: what each row of a batch counts, [rows]; None: its targets.
        """
        self._path = run / FOLDER / f"rank-{mesh.rank:04}.bin"
        self._part = RankPart(mesh.dp_rank, mesh.dp_size, mesh.cp_rank, mesh.cp_size)
        self._segment = segment
        self._count = count or count_targets
        self._join = torch.column_stack if spread else torch.cat  # to the order of the rows
        self._on_cpu = mesh.device.type == "cpu"
        self._unread: list[tuple[int, torch.Tensor, Any, Int64]] = []
        self._lines = bytearray()
        self._lost = False

    def after(
        self, step: int, result: StepResult, batches: Sequence[Batch], *, now: bool
    ) -> None:
        """Takes a step and keeps those before it; `now` this one too, and writes all that were kept."""
        if not result.of_rows:
            return
        counts = (
            self._join([torch.from_numpy(self._count(batch)) for batch in batches])
            .flatten()
            .numpy()
        )
        sums = self._join([each.float() for each in result.of_rows]).flatten()
        host, copied = (sums, None) if self._on_cpu else copy_to_host(sums)
        self._unread.append((step, host, copied, counts))
        while len(self._unread) > (0 if now or self._on_cpu else 1):
            self._keep(*self._unread.pop(0))
        if now or len(self._lines) > _MOST_BYTES:
            self._write()

    def close(self) -> None:
        """The run is over, complete or not: numbers already on the host are written, without a wait for the device."""
        for step, sums, copied, counts in self._unread:
            if copied is None or copied.query():
                self._keep(step, sums, None, counts)
        self._unread = []
        self._write()

    def _keep(self, step: int, sums: torch.Tensor, copied: Any, counts: Int64) -> None:
        if copied is not None:
            copied.synchronize()
        self._lines += packed(self._segment, step, self._part, sums.numpy(), counts)

    def _write(self) -> None:
        """In one call, so that a killed process leaves whole records; losses of rows are worth no run's end."""
        if not self._lines or self._lost:
            return
        try:
            self._path.parent.mkdir(exist_ok=True)
            file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                os.write(file, self._lines)
            finally:
                os.close(file)
        except OSError as error:
            self._lost = True
            log.warning(
                "%s cannot be written (%s): the losses of rows are no longer kept",
                self._path,
                error.strerror,
            )
        self._lines = bytearray()


def count_targets(batch: Batch) -> Int64:
    """The targets of each row, [rows]."""
    counts: Int64 = (batch["labels"] != IGNORED).sum(1).numpy(force=True)
    return counts


def count_pairs(batch: Batch) -> Int64:
    """The pairs of each row of which something is trained on, [rows]: documents 2k and 2k + 1."""
    trained = (batch["labels"] != IGNORED).numpy(force=True)
    rows = zip(trained, batch["document_ids"].numpy(force=True), strict=True)
    return np.array([len(np.unique(ids[own & (ids % 2 == 0)])) for own, ids in rows], np.int64)
