"""Copies stay copies: state that several ranks hold whole has the same bits on all of them.

Ranks that hold the same part of a tensor (over tp, dp_replicate, and cp where nothing is sharded) compute the same
update for it. A wrong gradient, other noise, or one flipped bit makes their models drift apart, and the saved model
is then that of one of them. Each rank sends one digest for each way of splitting, not for each tensor; only where two
differ do the ranks compare every tensor, and name it.
"""

import functools
import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from threefold.checkpoint.optimizer_state import plain_state
from threefold.checkpoint.state import Axes, place_on, sharded_axes
from threefold.errors import RunError, ranks_text
from threefold.mesh.mesh import Mesh

# Words of 8 bytes that are digested at once: their products fit into a CPU's cache, and keep a GPU busy.
_BLOCK = {"cpu": 1 << 14, "cuda": 1 << 20}
_PIECE_BYTES = 1 << 25
_FIX = (
    "resume from the last checkpoint; if copies differ again, --mesh.tp 1, or look for code or hardware that changes a "
    "tensor on one rank"
)


def state_held(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, *, buffers: bool = True
) -> dict[str, Tensor]:
    """All parameters, buffers and tensors of the optimizer, live, by name; tied ones once.

    Args:
        buffers: False for a module whose forward changes them by the rows of one rank (batch norm).
    """
    named = dict(model.named_parameters())
    state = {f"model.{name}": parameter.detach() for name, parameter in named.items()}
    if buffers:
        state |= {f"model.{name}": tensor for name, tensor in model.named_buffers()}
    for name, parameter in named.items():
        kept = optimizer.state.get(parameter, {}) if optimizer is not None else {}
        for key, value in plain_state(kept).items():
            # A plain tensor of a split parameter belongs to this rank's part, as only the optimizer knows.
            if isinstance(value, DTensor) or (
                isinstance(value, Tensor) and not sharded_axes(parameter)
            ):
                state[f"optimizer.{key}.{name}"] = value
    return state


def refuse_drift(
    state: Mapping[str, Tensor], mesh: Mesh, *, when: str, fix: str = _FIX
) -> None:
    """Compares the copies of every tensor bit by bit; every rank calls it, after the same step.

    Args:
        state: live tensors, the same names on every rank. A plain tensor is complete on every rank.
        when: what it was compared after or before, for the error: `after step 10`.

    Raises:
        RunError: a tensor differs between ranks that hold the same part of it; the same text on every rank.
    """
    groups = _copied(state, mesh)
    if not groups:
        return
    own = [digest([state[name] for name in names]) for names in groups.values()]
    of_ranks = mesh.gather(np.array(own, np.int64))
    if not any(
        _differing(of_ranks[:, number].tolist(), axes) for number, axes in enumerate(groups)
    ):
        return
    each = {name: digest([state[name]]) for names in groups.values() for name in names}
    raise RunError(
        mesh.decide("copies", each, lambda parts: _difference(parts, groups, when)),
        expected="the same bits on all ranks that hold the same part of a tensor: their updates are the same",
        fix=fix,
    )


def _copied(state: Mapping[str, Tensor], mesh: Mesh) -> dict[Axes, list[str]]:
    """The names of tensors of which other ranks hold the same part, by the axes that they are split over."""
    groups: dict[Axes, list[str]] = {}
    for name, tensor in state.items():
        axes = sharded_axes(tensor)
        if math.prod(size for _, size in axes) < mesh.world_size:
            groups.setdefault(axes, []).append(name)
    return groups


def _differing(digests: Sequence[int], axes: Axes) -> list[tuple[int, int]]:
    """The ranks whose digest is not that of the first rank which holds the same part, each with that rank."""
    first: dict[tuple[int, ...], int] = {}
    pairs = [
        (rank, first.setdefault(place_on(axes, rank), rank)) for rank in range(len(digests))
    ]
    return [(rank, other) for rank, other in pairs if digests[rank] != digests[other]]


def _difference(
    parts: Sequence[Mapping[str, int]], groups: Mapping[Axes, Sequence[str]], when: str
) -> str:
    """Names the first tensor of which ranks hold other bits, those ranks, and how many tensors differ besides."""
    for rank, part in enumerate(parts):
        if alone := sorted(part.keys() ^ parts[0].keys()):
            return f"ranks 0 and {rank} do not hold the same tensors {when}: {alone[0]} is on only one of them"
    differing = {
        name: pairs
        for axes, names in groups.items()
        for name in names
        if (pairs := _differing([part[name] for part in parts], axes))
    }
    name, pairs = next(iter(differing.items()))
    others = len(differing) - 1
    more = (
        f", and so {'do' if others > 1 else 'does'} {others} more tensor{'s' * (others > 1)}"
        if others
        else ""
    )
    ranks = ranks_text([rank for rank, _ in pairs])
    return f"the copies of {name.removeprefix('model.')} differ {when}: {ranks} from rank {pairs[0][1]}{more}"


def digest(tensors: Sequence[Tensor]) -> int:
    """64 bits, signed, of the bits of tensors, one after another.

    A word of 8 bytes counts times an odd number of its place, modulo 2**64: no single change goes unseen, nor two
    words in each other's place.
    """
    by_device: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        by_device.setdefault(tensor.device, []).append(tensor)
    sums = [
        torch.stack([_weighted(words) for words in _pieces(each)])
        for each in by_device.values()
    ]
    return int(_weighted(torch.cat([each.cpu() for each in sums])))


def _pieces(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """The words of all tensors, small ones together."""
    waiting: list[Tensor] = []
    for tensor in tensors:
        words = _words(tensor)
        if waiting and (sum(map(len, waiting)) + len(words)) * 8 > _PIECE_BYTES:
            yield torch.cat(waiting)
            waiting = []
        waiting.append(words)
    if waiting:
        yield torch.cat(waiting) if len(waiting) > 1 else waiting[0]


def _words(tensor: Tensor) -> Tensor:
    """The bits of this rank's part, int64 [words], the last one filled up with zeros."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    size_bytes = local.numel() * local.element_size()
    if (
        size_bytes % 8 == 0
        and local.is_contiguous()
        and local.storage_offset() * local.element_size() % 8 == 0
    ):
        return local.detach().view(-1).view(torch.int64)
    filled = torch.zeros(-(-size_bytes // 8) * 8, dtype=torch.uint8, device=local.device)
    filled[:size_bytes] = local.detach().contiguous().view(-1).view(torch.uint8)
    return filled.view(torch.int64)


def _weighted(words: Tensor) -> Tensor:
    """The sum of words, each times the odd number of its place."""
    block = _BLOCK.get(words.device.type, _BLOCK["cuda"])
    weights = _weights(block, words.device)
    if len(words) <= block:
        return (words * weights[: len(words)]).sum()
    whole = len(words) // block * block
    sums = [(part * weights).sum() for part in words[:whole].view(-1, block).unbind()]
    return _weighted(
        torch.stack([*sums, (words[whole:] * weights[: len(words) - whole]).sum()])
    )


@functools.lru_cache(maxsize=2)
def _weights(count: int, device: torch.device) -> Tensor:
    # 2**64 divided by the golden ratio spreads consecutive numbers over all 64 bits.
    places = torch.arange(1, count + 1, dtype=torch.int64, device=device)
    return places.mul_(-7046029254386353131).bitwise_or_(1)
