"""The share of a data sheet's rates reached in whole runs: by device and kind of kernel, from published speeds.

Rates are fitted to half of the rows of `tests/published_speeds.json` and judged by the other half
(`python benchmarks/speeds.py`). No figure is better than its margin: what 8 in 10 published speeds keep to.
"""

from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

from threefold.plan.accelerators import Accelerator


class Efficiency(NamedTuple):
    """The rates that a device's kernels reach.

    Attributes:
        products: of the dense bfloat16 peak, by large products in bfloat16.
        attention: of that peak, by causal attention forward and backward.
        experts: of `products`, by the products of chosen experts.
        float8: how many times faster a product in 8 bits is by itself, by recipe; casts are counted apart.
        passes: of the memory's rate, by passes over large tensors.
        shown: the part of overlapped communication that lengthens a step: both need the same processors.
        rows: published speeds of dense models that these were fitted to.
    """

    products: float
    attention: float
    experts: float
    float8: Mapping[str, float]
    rows: int = 0
    passes: float = 0.85
    shown: float = 0.29


class Margin(NamedTuple):
    """How well an estimate is known.

    Attributes:
        figure: most speeds lie between the estimate over this and the estimate times this.
        difference: two set-ups of one model whose times differ by a smaller part are not distinguished.
        source: what both come from, in words.
    """

    figure: float
    difference: float
    source: str


_FLOAT8 = {"none": 1.0, "tensorwise": 1.77, "rowwise": 1.27}
EFFICIENCIES = {
    "A100": Efficiency(0.77, 0.54, 0.63, _FLOAT8, 22),
    "H100": Efficiency(0.61, 0.48, 0.63, _FLOAT8, 46),
    "B200": Efficiency(0.59, 0.39, 0.63, _FLOAT8, 1),
    "MI300X": Efficiency(0.31, 0.24, 0.63, _FLOAT8, 2),
}

_UNKNOWN = Efficiency(0.54, 0.40, 0.63, _FLOAT8)  # the geometric means
# Of the rows that rates were fitted to, 8 in 10 are off by less: dense models; mixtures; 3 in 4 families, had each of
# them only the rates of the others.
_DENSE, _MIXTURE, _OTHER_DEVICE = 1.11, 1.44, 1.57
# A family with fewer rows than this is known half as well as one with many, on the way to one with none.
_FEW = 8
# And of the difference of two rows of one program, model, device and length. Of mixtures and of other devices there are
# too few: twice that.
_DIFFERENCE = 0.08

# The family of a device, by a part of its sign: the same chip with other memory, links or clocks.
_FAMILIES = {
    "A100": "A100", "A800": "A100", "H100": "H100", "H200": "H100", "H800": "H100", "B200": "B200", "B300": "B200",
    "MI300X": "MI300X", "MI325X": "MI300X",
}  # fmt: skip


@cache
def family_of(device: Accelerator) -> str | None:
    """The row of a device; None: no speed was published for one like it."""
    return next((family for sign, family in _FAMILIES.items() if sign in device.sign), None)


def efficiency_of(device: Accelerator, slowness: float = 1.0) -> Efficiency:
    """What its kernels reach.

    Args:
        slowness: how many times as long they took when they were measured; 1: not measured.
    """
    family = family_of(device)
    base = _UNKNOWN if family is None else EFFICIENCIES[family]
    return base._replace(
        **{name: getattr(base, name) / slowness for name in ("products", "attention", "passes")}
    )


def margin_of(device: Accelerator, *, mixture: bool, measured: bool = False) -> Margin:
    """How well times on this device are known, for a mixture of experts or a dense model.

    Args:
        measured: its layers were measured on such a device; the rest is known as for dense models.
    """
    if measured:
        source = (
            "8 in 10 published speeds of dense models keep to, and layers were measured here"
        )
        return Margin(_DENSE, _DIFFERENCE, source)
    rows = efficiency_of(device).rows
    figure = _MIXTURE if mixture else _DENSE
    source = f"8 in 10 published speeds of {'mixtures' if mixture else 'dense models'} keep to"
    if not rows:
        figure *= _OTHER_DEVICE
        source += ", and more, as none was published for such a device"
    elif rows < _FEW and not mixture:
        figure = (_DENSE * _OTHER_DEVICE) ** 0.5
        source += f", and more, as only {rows} for such a device went into it"
    return Margin(figure, _DIFFERENCE if figure == _DENSE else 2 * _DIFFERENCE, source)
