"""A mesh as a picture: a block for each data rank, in it a row for each cp rank and a column for each tp rank."""

from collections.abc import Mapping

from threefold.mesh.topology import Topology
from threefold.report.markup import Html, tag

_MOST_DRAWN, _WIDTH = 1024, 640
_KINDS = dict.fromkeys(("forward", "backward", "optimizer"), "computes")
_KINDS |= dict.fromkeys(("data", "reduce"), "waits")


def drawn(topology: Topology, now: Mapping[int, str]) -> Html:
    """The mesh as SVG, each rank in the colour of its phase `now`, if that is known; in words if it has too many."""
    words = f"{topology}: {topology.world_size:,} rank{'s' if topology.world_size > 1 else ''}"
    if topology.world_size > _MOST_DRAWN:
        return tag("p", words)
    # A rank's number needs room; many ranks are drawn without it.
    side, high = (44, 26) if topology.world_size <= 128 else (12, 12)
    block_w = topology.tp * side + 14
    block_h = topology.cp * high + 30
    across = max(1, min(topology.dp, _WIDTH // block_w))
    blocks = []
    for dp_rank in range(topology.dp):
        left = dp_rank % across * block_w
        top = dp_rank // across * block_h
        cells = [tag("text", _name(topology, dp_rank), x=left + 2, y=top + 14, class_="axis")]
        for inside in range(topology.cp * topology.tp):
            cp, tp = divmod(inside, topology.tp)
            rank = dp_rank * topology.cp * topology.tp + inside
            cells.append(
                _cell(
                    rank,
                    left + 2 + tp * side,
                    top + 20 + cp * high,
                    (side, high),
                    now.get(rank),
                )
            )
        blocks.append(tag("g", *cells))
    width = across * block_w
    height = -(-topology.dp // across) * block_h
    picture = tag(
        "svg", tag("title", words), *blocks, class_="mesh", role="img", viewBox=f"0 0 {width} {height}",
        width=width, height=height, aria_label=words,
    )  # fmt: skip
    axes = "rows: cp ranks, which share a row's tokens; columns: tp ranks, which share each layer; blocks: data ranks"
    return tag("figure", picture, tag("figcaption", f"{words}. In a block, {axes}."))


def _name(topology: Topology, dp_rank: int) -> str:
    if topology.dp_replicate > 1 and topology.dp_shard > 1:
        replica, shard = divmod(dp_rank, topology.dp_shard)
        return f"dp {dp_rank} ({replica}.{shard})" if topology.tp > 1 else f"dp {dp_rank}"
    return f"dp {dp_rank}"


def _cell(rank: int, x: int, y: int, size: tuple[int, int], phase: str | None) -> Html:
    side, high = size
    title = tag("title", f"rank {rank}: {phase}" if phase else f"rank {rank}")
    box = tag("rect", title, x=x, y=y, width=side - 2, height=high - 2, rx=3)
    named = [tag("text", rank, x=x + side // 2 - 1, y=y + high // 2 + 4)] if side > 20 else []
    kind = _KINDS.get(phase, "other") if phase else ""
    return tag("g", box, *named, class_=f"rank {kind}")
