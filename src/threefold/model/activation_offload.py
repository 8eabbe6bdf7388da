"""Inputs of checkpointed layers, kept in the host's memory between forward and backward.

Full checkpointing keeps one tensor per layer, its input hidden states: [rows, sequence, hidden]. Here each is copied
to pinned memory while its layer computes, on a separate stream, and copied back while the following layer is
recomputed: one layer ahead. So a device holds those of two layers, whatever the number of layers.
"""

import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint


class Lane(Protocol):
    """How tensors travel between a device and its host."""

    def to_host(self, tensor: Tensor) -> Tensor:
        """A copy in the host's memory, which may still be on its way."""

    def to_device(self, host: Tensor) -> tuple[Tensor, Any]:
        """A copy on the device, on its way after what was sent before, and what `arrived` waits for."""

    def arrived(self, tensor: Tensor, mark: Any) -> Tensor:
        """The copy, ready for computation enqueued from now on."""


class SideStream:
    """Copies beside the computing of a CUDA device, in their order."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)

    def to_host(self, tensor: Tensor) -> Tensor:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            host.copy_(tensor, non_blocking=True)
        tensor.record_stream(self._stream)  # its memory is not given away before it is copied
        return host

    def to_device(self, host: Tensor) -> tuple[Tensor, Any]:
        with torch.cuda.stream(self._stream):
            return host.to(self._device, non_blocking=True), self._stream.record_event()

    def arrived(self, tensor: Tensor, mark: Any) -> Tensor:
        current = torch.cuda.current_stream(self._device)
        current.wait_event(mark)
        tensor.record_stream(current)
        return tensor


class Copies:
    """Copies at once, for a device without streams."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def to_host(self, tensor: Tensor) -> Tensor:
        return tensor.detach().to("cpu", copy=True)

    def to_device(self, host: Tensor) -> tuple[Tensor, Any]:
        return host.to(self._device, copy=True), None

    def arrived(self, tensor: Tensor, mark: Any) -> Tensor:
        return tensor


class _Held:
    """A tensor on the host, and the one that was sent there before it, if that is still held."""

    def __init__(self, host: Tensor, before: "_Held | None") -> None:
        self.host = host
        self.before = weakref.ref(before) if before is not None else lambda: None
        self.coming: tuple[Tensor, Any] | None = None


class HostActivations:
    """Sends the inputs of checkpointed layers to the host, and fetches them in the opposite order."""

    def __init__(self, device: torch.device, lane: Lane | None = None) -> None:
        self._type = device.type
        self._lane = lane or (SideStream(device) if device.type == "cuda" else Copies(device))
        self._last: Callable[[], _Held | None] = lambda: None

    def checkpoint(self, layer: Callable[..., Any], *inputs: Any, **settings: Any) -> Any:
        """A replacement for torch's `checkpoint`."""
        with saved_tensors_hooks(self._send, self._fetch):
            return checkpoint(layer, *inputs, use_reentrant=False, **settings)

    def _send(self, tensor: Tensor) -> Tensor | _Held:
        # Masks and positions are those of every layer, and stay.
        if not tensor.requires_grad or tensor.device.type != self._type:
            return tensor
        held = _Held(self._lane.to_host(tensor), self._last())
        self._last = weakref.ref(held)
        return held

    def _fetch(self, packed: Tensor | _Held) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        coming, packed.coming = packed.coming or self._lane.to_device(packed.host), None
        if (ahead := packed.before()) is not None and ahead.coming is None:
            ahead.coming = self._lane.to_device(ahead.host)
        return self._lane.arrived(*coming)
