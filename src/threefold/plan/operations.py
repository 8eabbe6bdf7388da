"""Operations per token, by what they depend on: parameters, and the keys that it sees (see `flops`)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple


class Attention(NamedTuple):
    """Sizes of a layer's attention: heads, the widths of a head's queries and values, and at most `window` keys."""

    heads: int
    query_width: int
    value_width: int
    window: int | None


@dataclass(frozen=True)
class Flops:
    """The operations per token.

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
            6.0
            * layers
            * each.heads
            * (each.query_width + each.value_width)
            * keys(each.window)
            for each, layers in self.attention.items()
        )


def causal_keys(length: int) -> Callable[[int | None], float]:
    """Keys of a token, by window, on average over a row of one document."""

    def keys(window: int | None) -> float:
        width = length if window is None else min(window, length)
        # Of the first `width` tokens each sees one more than the one before, from 1 on; the others see `width`.
        return (width * (width + 1) + 2 * width * (length - width)) / length - 1

    return keys


def formula(flops: Flops, seq_len: int) -> list[str]:
    """The cost of a token of a row, as a line, and the products that make it up."""
    keys = causal_keys(seq_len)
    lines = [f"a token costs {flops.per_token(keys) / 1e9:,.2f} GFLOP, forward and backward"]
    of_matrices = (
        (
            6,
            flops.trained,
            "trained parameters of matrices that a token meets: head yes, embedding no",
        ),
        (4, flops.frozen, "frozen ones"),
    )
    for factor, count, name in of_matrices:
        if count:
            lines.append(
                f"  {factor * count / 1e9:10,.2f} GFLOP = {factor} x {count:,.0f} {name}"
            )
    for attention, layers in sorted(flops.attention.items(), key=str):
        heads = attention.heads
        width = attention.query_width + attention.value_width
        num_keys = keys(attention.window)
        window = "" if attention.window is None else f" (window {attention.window})"
        lines.append(
            f"  {6 * layers * heads * width * num_keys / 1e9:10,.2f} GFLOP = 6 x {layers} layers x {heads} heads x "
            f"({attention.query_width} + {attention.value_width}) x {num_keys:,.0f} keys{window}"
        )
    return lines


def longest_row(values: Mapping[str, Any]) -> int | None:
    """Tokens of the longest row that a model takes, by its text config's values; None: they name none.

    `max_position_embeddings`, or what linear and YaRN scaling make of it: many configs name the length before that.
    """
    longest = values.get("max_position_embeddings") or values.get("max_target_positions")
    if not isinstance(longest, int):
        return None
    scaling = values.get("rope_parameters") or values.get("rope_scaling") or {}
    kind, factor = scaling.get("rope_type", scaling.get("type")), scaling.get("factor") or 1
    if kind == "yarn":
        before = scaling.get("original_max_position_embeddings") or longest
        return max(longest, int(before * factor))
    return int(longest * factor) if kind == "linear" else longest
