"""The copy that the training thread makes, so that a save can continue while the next steps change the state.

One host buffer, as large as what this rank writes, is kept from save to save: copying into memory that was touched
before is about eight times as fast. On a CUDA device, the buffer is pinned and the copies are queued behind the step,
so the training thread waits for none of them.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from threefold.checkpoint.tensors import Part


class Stage:
    """A buffer for the parts that one rank writes.

    Args:
        parts: as passed to every `copy`, in file order; they determine the buffer's size.
    """

    def __init__(self, parts: Sequence[Part], device: torch.device) -> None:
        self._size_bytes = sum(part.values.nbytes for part in parts)
        self._device = device
        self._buffer: Tensor | None = None
        self._copied: torch.cuda.Event | None = None
        self._made = threading.Thread(target=self._make, name="threefold-stage", daemon=True)
        self._made.start()

    def _make(self) -> None:
        # The first touch of fresh memory is expensive, so it happens here, while the first steps run.
        buffer = torch.empty(self._size_bytes, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        self._buffer = buffer.zero_()

    def copy(self, parts: Sequence[Part]) -> list[Part]:
        """Returns the parts with their values in the buffer; read them after `wait`. Overwrites the last copy.

        Raises:
            RuntimeError: there was no memory for the buffer.
        """
        self._made.join()
        if self._buffer is None:
            raise RuntimeError(f"no memory for a copy of {self._size_bytes:,} bytes")
        staged, start = [], 0
        for part in parts:
            end = start + part.values.nbytes
            values = self._buffer[start:end].view(part.values.dtype).view(part.values.shape)
            values.copy_(part.values, non_blocking=True)
            staged.append(dataclasses.replace(part, values=values))
            start = end
        if self._device.type == "cuda":
            self._copied = torch.cuda.Event()
            self._copied.record()
        return staged

    def wait(self) -> None:
        """Waits until the last copy is complete; the thread that reads it calls this."""
        if self._copied is not None:
            self._copied.synchronize()
