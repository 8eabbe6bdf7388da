"""Between the split parts of a layer: each tp rank holds a part of the sequence instead of all of it.

Norms, residuals and everything else that tensor parallelism does not split would be computed by every tp rank alike.
Here the hidden states are [batch, sequence / tp, hidden] there (arXiv:2205.05198): a split part (attention, MLP)
gathers them at its entry, and the sum at its exit gives each rank its own part. The traffic is the same; the work and
the memory between the parts are divided by tp. A parameter between them then knows its gradient only in part.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

# torch 2.13 renamed them and warns at the old names.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
_SPLIT_STYLES = {"colwise", "rowwise", "embedding_rowwise", "replicate"}


def allowed(model: PreTrainedModel, plan: Mapping[str, str], layers: list[nn.Module]) -> tuple[bool, str]:
    """Whether the plan of this model lets the sequence be split between its split parts, and what decides.

    Args:
        plan: one style for each module or parameter that is split.
    """
    others = sorted(set(plan.values()) - _SPLIT_STYLES)
    if others:
        return False, f"its plan has {', '.join(others)}"
    modules = dict(model.named_modules())
    for name in plan:
        owner = modules[name if name in modules else name.rpartition(".")[0]]
        if type(owner) not in (nn.Linear, nn.Embedding) and plan[name] != "replicate":
            return False, f"{name} is no plain layer"
    if not layers or not all(split_parts(layer, modules, plan) for layer in layers):
        return False, "its layers have no split parts"
    return True, "every split part begins by columns and ends by rows"


def split_parts(layer: nn.Module, modules: Mapping[str, nn.Module], plan: Mapping[str, str]) -> list[nn.Module]:
    """The children of a layer that hold split projections, one ended by rows each; empty where one is not."""
    split = {id(modules[name]): style for name, style in plan.items() if name in modules}
    parts = []
    for child in layer.children():
        styles = [split[id(module)] for module in child.modules() if id(module) in split]
        if "colwise" in styles or "rowwise" in styles:
            if styles.count("rowwise") != 1:
                return []
            parts.append(child)
    return parts


def enter(part: nn.Module, group: dist.ProcessGroup) -> None:
    """Lets a split part gather the hidden states that it is given, as its first argument or by name."""
    inner = part.forward

    def forward(*arguments: Any, **named: Any) -> Any:
        if "hidden_states" in named:
            named["hidden_states"] = gather(named["hidden_states"], group)
        else:
            arguments = (gather(arguments[0], group), *arguments[1:])
        return inner(*arguments, **named)

    part.forward = forward  # type: ignore[method-assign]


def gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[batch, sequence / tp, hidden] -> [batch, sequence, hidden]; the gradient is summed and split again."""
    return _Gather.apply(x, group)  # type: ignore[return-value]


def scatter_sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Each rank's [batch, sequence, hidden] -> its part of their sum, [batch, sequence / tp, hidden]."""
    return _ScatterSum.apply(x, group)  # type: ignore[return-value]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _gathered(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _scattered(gradients[0], ctx.group), None


class _ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _scattered(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _gathered(gradients[0], ctx.group), None


def _gathered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    mine = x.contiguous()
    if exchanges_directly(mine, group):
        theirs = exchange(mine, group)
        return torch.cat([mine, theirs] if dist.get_rank(group) == 0 else [theirs, mine], dim=1)
    # (tp x batch, sequence / tp, hidden) -> (batch, sequence, hidden)
    parts = mine.new_empty((group.size() * mine.shape[0], *mine.shape[1:]))
    _all_gather(parts, mine, group=group)
    return torch.cat(parts.chunk(group.size()), dim=1)


def _scattered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    parts = [part.contiguous() for part in x.chunk(group.size(), dim=1)]
    rank = dist.get_rank(group)
    if exchanges_directly(parts[0], group):
        return exchange(parts[1 - rank], group).add_(parts[rank])
    own = torch.empty_like(parts[0])
    _reduce_scatter(own, torch.cat(parts), group=group)
    return own


def exchanges_directly(x: Tensor, group: dist.ProcessGroup) -> bool:
    """Whether two ranks on a CPU meet: gloo's collectives take milliseconds at any size, one exchange does not."""
    return group.size() == 2 and not x.is_cuda


def exchange(mine: Tensor, group: dist.ProcessGroup) -> Tensor:
    """What the other of two ranks gives for `mine`, of the same shape."""
    theirs = torch.empty_like(mine)
    peer = 1 - dist.get_rank(group)
    both = [
        dist.P2POp(dist.isend, mine, group=group, group_peer=peer),
        dist.P2POp(dist.irecv, theirs, group=group, group_peer=peer),
    ]
    for work in dist.batch_isend_irecv(both):
        work.wait()
    return theirs
