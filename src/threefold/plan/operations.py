"""Operations that a token meets, by what they depend on: parameters, and the keys that it sees (see `flops`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple


class Attention(NamedTuple):
    """What a layer's attention reads: heads, the widths of a head's queries and values, and at most `window` keys."""

    heads: int
    query_width: int
    value_width: int
    window: int | None


@dataclass(frozen=True)
class Flops:
    """What a token meets.

    Attributes:
        trained, frozen: parameters of matrices with and without a gradient; of experts, those of the chosen ones.
        attention: how many layers have which attention.
    """

    trained: float
    frozen: float
    attention: Mapping[Attention, int]

    def per_token(self, keys: Callable[[int | None], float]) -> float:
        """Forward and backward, given the keys of a token by window (None: without one): `causal_keys`, `KeysSeen`."""
        return 6.0 * self.trained + 4.0 * self.frozen + self.of_attention(keys)

    def of_attention(self, keys: Callable[[int | None], float]) -> float:
        """The part that depends on the length."""
        return sum(
            6.0 * layers * each.heads * (each.query_width + each.value_width) * keys(each.window)
            for each, layers in self.attention.items()
        )


def causal_keys(length: int) -> Callable[[int | None], float]:
    """Keys of a token, by window, on average over a row of one document."""

    def keys(window: int | None) -> float:
        width = length if window is None else min(window, length)
        # Of the first `width` tokens each sees one more than the one before, from 1 on; the others see `width`.
        return (width * (width + 1) + 2 * width * (length - width)) / length - 1

    return keys
