"""Tracks the memory of live tensors, also of fake ones, which have no storage, and what glibc makes of it on a CPU."""

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

# glibc maps larger blocks one by one and gives them back when they are freed; others come from a heap that does not
# shrink (DEFAULT_MMAP_THRESHOLD_MAX of its malloc.c, which the first large blocks that are freed raise it to).
_MAPPED_FROM = 32 * 2**20
# Of blocks of the heap that come and go, measured (docs/plan.md): torch asks for aligned ones, and glibc (2.36) seldom
# gives a freed one to as large a request (its bug 14581).
_HEAP_SHARE = 1.77
# gloo receives into a copy of the whole tensor, and reduces one.
_COPIED = ("_allgather_base_", "_reduce_scatter_base_")


class LiveTensors(TorchDispatchMode):
    """Counts the bytes of all storages that are alive while it is active.

    Attributes:
        peak: bytes.
    """

    def __init__(self, already: Iterable[Tensor] = (), buckets: Iterable[Tensor] = ()) -> None:
        """Args:
        already: tensors that are alive before, as parameters are.
        buckets: like tensors that come while it is active, but in a run stay from step to step, as DDP's gradients do.
        """
        super().__init__()
        self.peak = 0
        # Of the heap, and of mapped blocks, with gloo's copies.
        self._pools, self._most = [0, 0], [0, 0]
        self._bytes: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._add(already)
        self._staying = self._pools[0] + sum(
            each.nbytes for each in buckets if each.nbytes <= _MAPPED_FROM
        )

    @property
    def resident_bytes(self) -> float:
        """The most that tensors and gloo's copies take of a process' resident size, with what glibc keeps of them."""
        heap, mapped = self._most
        return mapped + self._staying + _HEAP_SHARE * (heap - self._staying)

    def __enter__(self) -> Any:
        # FSDP2 frees what it has gathered by giving its storage no size.
        self._resize = torch.UntypedStorage.resize_
        resize = self._resize

        def watched(storage: torch.UntypedStorage, size: int) -> Any:
            resized = resize(storage, size)
            if storage in self._bytes:
                self._change(storage, size)
            return resized

        torch.UntypedStorage.resize_ = watched  # type: ignore[method-assign,assignment]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*error)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func._opname in _COPIED:
            copy = max(each.nbytes for each in args[:2])  # sent and received
            self._count(copy)
            self._count(-copy)
        outputs = func(*args, **(kwargs or {}))
        self._add(each for each in tree_leaves(outputs) if isinstance(each, Tensor))
        return outputs

    def _add(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            storage = local.untyped_storage()
            if storage not in self._bytes:
                self._bytes[storage] = [0]
                weakref.finalize(storage, self._forget, self._bytes[storage])
                self._change(storage, storage.nbytes())

    def _change(self, storage: torch.UntypedStorage, size: int) -> None:
        counted = self._bytes[storage]
        self._count(size - counted[0])  # one of them is 0
        counted[0] = size
        self.peak = max(self.peak, sum(self._pools))

    def _forget(self, counted: list[int]) -> None:
        self._count(-counted[0])
        counted[0] = 0

    def _count(self, size: int) -> None:
        """Adds a block, or takes it away (less than zero)."""
        pool = abs(size) > _MAPPED_FROM
        self._pools[pool] += size
        self._most[pool] = max(self._most[pool], self._pools[pool])
