"""What a run measures of itself: time, memory, and the share of the device's peak that it uses."""

from __future__ import annotations

import sys
import time

# Dense bfloat16 FLOP/s by the vendors' data sheets; MFU is given where the device is named here.
_PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "L4": 121e12, "B200": 2250e12}


class Stopwatch:
    """Time since it was last read, in seconds."""

    def __init__(self) -> None:
        self._since = time.perf_counter()

    def lap(self) -> float:
        now = time.perf_counter()
        elapsed, self._since = now - self._since, now
        return elapsed


def flops_per_token(num_parameters: int, *, num_layers: int, hidden_size: int, seq_len: int) -> float:
    """Forward and backward: 6 per parameter, and 12 x layers x hidden x length of attention (PaLM, appendix B)."""
    return 6.0 * num_parameters + 12.0 * num_layers * hidden_size * seq_len


def peak_flops(device_name: str) -> float | None:
    """The device's dense bfloat16 peak, FLOP/s, where it is known."""
    return next((peak for name, peak in _PEAK_FLOPS.items() if name in device_name), None)


def peak_memory_bytes(device_type: str) -> int:
    """Most memory that this rank has held: allocated on the device, or resident on a CPU."""
    if device_type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated()
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
