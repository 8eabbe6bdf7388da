"""The rows that a model is probed with: few, short, and with everything that the run's rows will have.

Four rows. With documents they hold one, two, three and two of them; with padding the last row ends in it. Every dp rank
has all four, in a different order, and with several dp ranks the rows of one have no targets: so gradients differ
between ranks, and a missing reduction shows.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from threefold.config.schema import DataConfig
from threefold.data.rows.concat import IGNORED, PADDING
from threefold.mesh.topology import Topology

Batch = dict[str, Tensor]

NUM_ROWS = 4
_SHORTEST, _SHORTEST_CUDA = 32, 256
# One document is shorter than the windows of reduced architectures, within which some compute otherwise.
# Where the documents of each row end, and where the padding of the last one begins, as shares of the row.
_ENDS = ((), (0.4,), (0.15, 0.7), (0.5,))
_PADDED_FROM = 0.8
_SHORT = 0.15


@dataclass(frozen=True)
class Mode:
    """What the rows of a run have: documents that are kept apart, padding."""

    documents: bool
    padding: bool

    @classmethod
    def of(cls, data: DataConfig) -> "Mode":
        return cls(bool(data.document_mask), data.packing != "concat")


def row_length(topology: Topology, *, device: str = "cpu") -> int:
    """Tokens in a probe's row: the shortest from 32 that the mesh can split, a multiple of 4.

    On CUDA each cp rank has 256: with fewer than 128 queries flex attention takes a kernel that no training takes, and
    a mask is one block of 128.
    """
    unit = _unit(topology)
    shortest = _SHORTEST_CUDA * topology.cp if device == "cuda" else _SHORTEST
    return -(-shortest // unit) * unit


def longer_row(topology: Topology, *, device: str = "cpu") -> int:
    """Tokens in the other rows whose gradients are compared: nearly twice as many, of which chunks leave a rest."""
    unit = _unit(topology)
    length = row_length(topology, device=device)
    return 2 * length - unit % length


def _unit(topology: Topology) -> int:
    return math.lcm(4, 2 * topology.cp, topology.cp * topology.tp)


def probe_rows(mode: Mode, *, seq_len: int, vocabulary: int, seed: int) -> Batch:
    """`input_ids`, `labels`, `position_ids` and with documents `document_ids`, [4, seq_len] int64; `padding`, bool.

    Token 0 pads; `document_ids` are -1 there, as in the rows of a run.
    """
    generator = torch.Generator().manual_seed(seed)
    lowest = min(3, vocabulary - 1)
    # Few tokens from all over the vocabulary, so that they repeat as in text: what picks keys by value then meets ties.
    pool = lowest + torch.randperm(vocabulary - lowest, generator=generator)[: seq_len // 2]
    tokens = pool[torch.randint(len(pool), (NUM_ROWS, seq_len + 1), generator=generator)]
    rows = {"input_ids": tokens[:, :-1].clone(), "labels": tokens[:, 1:].clone()}
    positions = torch.arange(seq_len).repeat(NUM_ROWS, 1)
    documents = torch.zeros_like(positions)
    if mode.documents:
        for row, ends in enumerate(_ENDS):
            for end in (round(share * seq_len) for share in ends):
                rows["labels"][row, end - 1] = IGNORED
                documents[row, end:] += 1
                positions[row, end:] = torch.arange(seq_len - end)
    if mode.padding:
        # Without documents also a row that is nearly all padding.
        for row, share in ((-1, _PADDED_FROM), *(() if mode.documents else ((1, _SHORT),))):
            used = round(share * seq_len)
            rows["input_ids"][row, used:] = 0
            rows["labels"][row, used - 1 :] = IGNORED
            documents[row, used:] = PADDING
    rows |= {"position_ids": positions, "padding": documents == PADDING}
    return {**rows, "document_ids": documents} if mode.documents else rows


def share_of(rows: Batch, *, dp_rank: int, dp_size: int) -> Batch:
    """The rows of one dp rank, in its order; one of them without targets if there are several ranks."""
    order = [(dp_rank + place) % NUM_ROWS for place in range(NUM_ROWS)]
    own = {name: values[order] for name, values in rows.items()}
    if dp_size > 1:
        own["labels"][0] = IGNORED
    return own


def times_counted(dp_size: int) -> list[int]:
    """How many dp ranks have each row with its targets."""
    if dp_size == 1:
        return [1] * NUM_ROWS
    return [sum(rank % NUM_ROWS != row for rank in range(dp_size)) for row in range(NUM_ROWS)]
