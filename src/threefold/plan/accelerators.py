"""Accelerators as their data sheets describe them: dense peaks without sparsity, memory and links of one device.

A link's rate is what one device sends to its neighbours in one host, one way, which is half of what the sheets add up.
"""

from typing import NamedTuple

from threefold.errors import ConfigError


class Accelerator(NamedTuple):
    """One device.

    Attributes:
        sign: part of the name that torch gives it; of several that fit, the first of the table counts.
        memory_bytes, bandwidth: its memory, bytes and bytes/s.
        bfloat16, float8: FLOP/s of dense products; 0.0: it has no such products.
        link: bytes/s to the other devices of its host, one way.
    """

    sign: str
    memory_bytes: int
    bandwidth: float
    bfloat16: float
    float8: float
    link: float


def _of(
    sign: str,
    memory_gb: float,
    bandwidth_gb: float,
    bfloat16: float,
    float8: float,
    link_gb: float,
) -> Accelerator:
    """From GB, GB/s, TFLOP/s and GB/s; devices' memories are named in GB and made in GiB."""
    return Accelerator(
        sign,
        int(memory_gb * 2**30),
        bandwidth_gb * 1e9,
        bfloat16 * 1e12,
        float8 * 1e12,
        link_gb * 1e9,
    )


_PCIE_4, _PCIE_5 = 32.0, 64.0
ACCELERATORS = {
    # NVIDIA, Blackwell. Of 192 or 288 GB a part is the device's own.
    "b300": _of("B300", 268, 8000, 2250, 4500, 900),
    "gb200": _of("GB200", 185, 8000, 2500, 5000, 900),
    "b200": _of("B200", 180, 7700, 2250, 4500, 900),
    "rtx-5090": _of("RTX 5090", 32, 1792, 209.5, 419, _PCIE_5),
    # Hopper.
    "h200-nvl": _of("H200 NVL", 140, 4800, 835, 1671, 450),
    "h200": _of("H200", 140, 4800, 989, 1979, 450),
    "h800": _of("H800", 80, 3350, 989, 1979, 200),
    "h20": _of("H20", 96, 4000, 148, 296, 450),
    "h100-pcie": _of("H100 PCIe", 80, 2000, 756, 1513, _PCIE_5),
    "h100-nvl": _of("H100 NVL", 94, 3900, 835, 1671, 300),
    "h100-80gb": _of("H100", 80, 3350, 989, 1979, 450),
    # Ada.
    "l40s": _of("L40S", 48, 864, 362, 733, _PCIE_4),
    "l40": _of("L40", 48, 864, 181, 362, _PCIE_4),
    "l4": _of("L4", 24, 300, 121, 242, _PCIE_4),
    "rtx-4090": _of("RTX 4090", 24, 1008, 165.2, 330.3, _PCIE_4),
    # Ampere.
    "a100-40gb": _of("A100-SXM4-40GB", 40, 1555, 312, 0, 300),
    "a100-pcie-40gb": _of("A100-PCIE-40GB", 40, 1555, 312, 0, _PCIE_4),
    "a100-pcie-80gb": _of("A100 80GB PCIe", 80, 1935, 312, 0, _PCIE_4),
    "a100-80gb": _of("A100", 80, 2039, 312, 0, 300),
    "a800": _of("A800", 80, 2039, 312, 0, 200),
    "a40": _of("A40", 48, 696, 149.7, 0, _PCIE_4),
    "a30": _of("A30", 24, 933, 165, 0, _PCIE_4),
    "a10g": _of("A10G", 24, 600, 70, 0, _PCIE_4),
    "a10": _of("A10", 24, 600, 125, 0, _PCIE_4),
    "rtx-a6000": _of("RTX A6000", 48, 768, 154.8, 0, _PCIE_4),
    "rtx-3090": _of("RTX 3090", 24, 936, 71, 0, _PCIE_4),
    # AMD, whose devices torch calls cuda too.
    "mi325x": _of("MI325X", 256, 6000, 1307, 2615, 448),
    "mi300x": _of("MI300X", 192, 5300, 1307, 2615, 448),
}


def of_memory(memory_bytes: int) -> Accelerator:
    """A device of which nothing else is asked."""
    return Accelerator("this device", memory_bytes, 0, 0, 0, 0)


def by_name(name: str) -> Accelerator:
    """The accelerator that a user named.

    Raises:
        ConfigError: there is none of that name.
    """
    if (accelerator := ACCELERATORS.get(name.lower())) is not None:
        return accelerator
    raise ConfigError(
        f"--gpu {name} is not known",
        expected=f"one of {', '.join(ACCELERATORS)}",
        fix="--gpu h100-80gb",
    )


def peak_flops(device_name: str) -> float | None:
    """The dense bfloat16 peak, FLOP/s, of a device as torch names it, if it is known."""
    return next(
        (each.bfloat16 for each in ACCELERATORS.values() if each.sign in device_name), None
    )
