"""Sizes that the axes of a mesh must divide: the global batch, a row, a layer's heads. Arithmetic only, no torch.

The process that starts local ranks asks before it starts one; the ranks ask again, with all that they know.
"""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from threefold.config.schema import EMBEDDED_DEFAULT, Config, ModelConfig
from threefold.errors import ConfigError, Problem
from threefold.mesh.exact_limits import exact_problems
from threefold.mesh.topology import Topology


def refuse_impossible(config: Config, topology: Topology) -> None:
    """ConfigError if a mesh cannot share the batch, the rows or the heads, as far as that is known without the model.

    Raises:
        ConfigError: all that is wrong, at once.
    """
    problems = list(batch_problems(config, topology))
    sizes = _sizes_of(config.model)
    text = sizes.get("text_config", sizes)
    counts = [text.get(key) for key in ("num_attention_heads", "num_key_value_heads")]
    if isinstance(counts[0], int):
        problems += head_problems(
            topology.tp, counts[0], counts[1], name=str(sizes.get("model_type"))
        )
    ConfigError.raise_for(problems)


def batch_problems(config: Config, topology: Topology) -> Iterator[Problem]:
    """Why the dp ranks cannot share the global batch, or the cp and tp ranks a row; empty if they can."""
    cp, tp, size = topology.cp, topology.tp, config.train.micro_batch
    rows, left = divmod(config.train.global_batch, topology.dp)
    try:
        check_global_batch(config.train.global_batch, dp_size=topology.dp)
    except ConfigError as error:
        yield from error.problems
    if not left and size != "auto" and rows % size:
        divisor = max(each for each in range(1, rows + 1) if rows % each == 0 and each <= size)
        yield Problem(
            f"train.micro_batch = {size} does not divide the {rows} rows of a dp rank",
            "micro-batches of equal size",
            f"--train.micro_batch {divisor}   (or auto)",
        )
    seq_len = config.data.seq_len
    unit = 2 * cp if cp > 1 else 1
    split = config.mesh.sequence_parallel in (True, "async")
    if split and seq_len % (cp * tp):
        unit = math.lcm(cp * tp, unit)
        yield Problem(
            f"data.seq_len = {seq_len} cannot be shared by {cp} cp x {tp} tp ranks",
            f"a multiple of {unit}, so that each tp rank has an equal part between the layers",
            f"--data.seq_len {-(-seq_len // unit) * unit}   (or --mesh.sequence_parallel false)",
        )
    elif seq_len % unit:
        yield Problem(
            f"data.seq_len = {seq_len} cannot be split over {cp} cp ranks",
            f"a multiple of 2 x mesh.cp ({unit}): each rank takes a chunk of the head and one of the tail",
            f"--data.seq_len {-(-seq_len // unit) * unit}",
        )
    yield from exact_problems(config, topology)


def shared_length(tokens: int, topology: Topology) -> int:
    """The least length of a row from `tokens` on that cp ranks can share, and tp ranks between the layers."""
    unit = math.lcm(topology.cp * topology.tp, 2 * topology.cp if topology.cp > 1 else 1)
    return -(-tokens // unit) * unit


def check_global_batch(global_batch: int, *, dp_size: int) -> None:
    """Refuse a global batch that dp ranks cannot share equally (ConfigError)."""
    if global_batch > 0 and global_batch % dp_size == 0:
        return
    above = max(-(-global_batch // dp_size), 1) * dp_size
    below = global_batch // dp_size * dp_size
    raise ConfigError(
        f"train.global_batch = {global_batch} cannot be divided equally among {dp_size} dp ranks",
        expected=f"a multiple of mesh.dp ({dp_size}), so that every dp rank makes the same number of steps",
        fix=f"--train.global_batch {above}" + (f"   (or {below})" if below > 0 else ""),
    )


def head_problems(tp: int, heads: Any, kv_heads: Any, *, name: str) -> list[Problem]:
    """Why key-value heads or `tp` ranks cannot share the attention heads of an architecture; empty if they can."""
    kv_heads = kv_heads or heads
    if isinstance(kv_heads, int) and isinstance(heads, int) and heads % kv_heads:
        return [
            Problem(
                f"num_key_value_heads = {kv_heads} does not divide the {heads} attention heads of {name!r}",
                "a group of query heads, of equal size, for each key-value head",
                f"'num_key_value_heads': {math.gcd(heads, kv_heads)}   in the model's config",
            )
        ]
    shared = math.gcd(*(count for count in (heads, kv_heads) if isinstance(count, int)))
    fitting = [size for size in range(1, shared + 1) if shared % size == 0]
    return [
        Problem(
            f"mesh.tp = {tp} cannot divide the {count} {what} of {name!r}",
            expected=f"whole heads on every rank: one of {', '.join(map(str, fitting))}",
            fix=f"--mesh.tp {max(size for size in fitting if size <= tp)}",
        )
        for what, count in (("attention heads", heads), ("key-value heads", kv_heads))
        if isinstance(count, int) and count % tp
    ]


def _sizes_of(model: ModelConfig) -> Mapping[str, Any]:
    """The sizes that the user or the model's config.json gives; none if they lie elsewhere."""
    if model.name_or_path is None:
        return model.config or EMBEDDED_DEFAULT
    try:
        sizes = json.loads((Path(model.name_or_path) / "config.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return (
        sizes
        if isinstance(sizes, dict) and isinstance(sizes.get("text_config", sizes), dict)
        else {}
    )
