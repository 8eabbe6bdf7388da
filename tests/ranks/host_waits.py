"""Watches a step for what waits for a device: what a host reads of a tensor, or sends to it and waits.

On a CPU nothing waits, so it is recognised by what is called: reading values (`item`, `nonzero`, a boolean index, ..)
and moving a tensor to a device, or making one there of values of Python, without `non_blocking`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_OPERATIONS = {
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "bincount",
    "unique_dim",
    "_unique",
    "_unique2",
}
_OPERATIONS |= {"unique_consecutive", "equal", "is_nonzero"}
_CALLS = {
    "tolist",
    "numpy",
    "cpu",
    "item",
    "__bool__",
    "__int__",
    "__float__",
    "__index__",
    "nonzero",
}
_TORCH = str(Path(torch.__file__).parent)


class _Operations(TorchDispatchMode):
    def __init__(self, found: set[tuple[str, str]]) -> None:
        super().__init__()
        self._found = found

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = function.overloadpacket.__name__
        indices = (
            args[1] if name in ("index", "index_put", "index_put_", "_index_put_impl_") else ()
        )
        by_mask = any(
            isinstance(each, Tensor) and each.dtype in (torch.bool, torch.uint8)
            for each in indices
        )
        repeats = name == "repeat_interleave" and (kwargs or {}).get("output_size") is None
        if name in _OPERATIONS or by_mask or repeats:
            self._found.add((f"{name} by a mask" if by_mask else name, _place()))
        return function(*args, **(kwargs or {}))


class HostWaits(TorchFunctionMode):
    """What waits inside: `found` has (what, where), where the innermost place that is not torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[tuple[str, str]] = set()
        self._operations = _Operations(self.found)

    def __enter__(self) -> HostWaits:
        self._operations.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._operations.__exit__(*raised)

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        if name in _CALLS:
            self.found.add((name, _place()))
        elif (
            name == "to"
            and _names_device(args[1:], kwargs)
            and not (kwargs.get("non_blocking") or True in args[1:])
        ):
            self.found.add(("to a device", _place()))
        elif name in ("tensor", "as_tensor") and kwargs.get("device") is not None:
            self.found.add((f"{name} on a device", _place()))
        return function(*args, **kwargs)


def _names_device(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return "device" in kwargs or any(isinstance(each, torch.device | str) for each in args[:1])


def _place() -> str:
    frame: Any = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((_TORCH, "<")) and not file.endswith("host_waits.py"):
            return f"{'/'.join(Path(file).parts[-2:])}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return "torch"
