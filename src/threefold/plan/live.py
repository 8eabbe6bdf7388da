"""Tracks the memory of live tensors, also of fake ones, which have no storage."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary


class LiveTensors(TorchDispatchMode):
    """Counts the bytes of all storages that are alive while it is active.

    Attributes:
        now, peak: bytes.
    """

    def __init__(self, already: Iterable[Tensor] = ()) -> None:
        """Args:
        already: tensors that are alive before, as parameters are.
        """
        super().__init__()
        self.now = self.peak = 0
        self._bytes: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._add(already)

    def __enter__(self) -> Any:
        # FSDP2 frees what it has gathered by giving its storage no size.
        self._resize = torch.UntypedStorage.resize_
        resize = self._resize

        def watched(storage: torch.UntypedStorage, size: int) -> Any:
            found = resize(storage, size)
            if storage in self._bytes:
                self._change(storage, size)
            return found

        torch.UntypedStorage.resize_ = watched  # type: ignore[method-assign,assignment]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        self._add(each for each in tree_leaves(found) if isinstance(each, Tensor))
        return found

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
        self.now += size - counted[0]
        counted[0] = size
        self.peak = max(self.peak, self.now)

    def _forget(self, counted: list[int]) -> None:
        self.now -= counted[0]
        counted[0] = 0
