"""What a split layer computes on one tp rank, on local tensors.

transformers' styles run every product through DTensor and sum the gradient of a layer's input once for each projection
that reads it. Here a projection is a plain product with the local part of its weight, and projections that read the
same tensor (query, key and value; gate and up) share one sum of its gradient. A layer then costs two all-reduces
forward and two backward (Megatron-LM, arXiv:1909.08053). Parameters stay DTensors for everything else.

With sequence parallelism (arXiv:2205.05198) the hidden states between the split parts of a layer are [batch,
sequence / tp, hidden]: norms, residuals and everything else that is not split would otherwise be computed by every tp
rank. A split part (attention, MLP) gathers them at its entry, and the sum at its exit gives each rank its own part. The
traffic is the same; the work and the memory between the parts are divided by tp. A rank then knows only a part of the
gradient of a parameter between them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from threefold.model.collectives import gather_parts, local_part, scatter_sum, sum_gradient, sum_over

_SPLIT_STYLES = {"colwise", "rowwise", "embedding_rowwise", "replicate"}


class SharedInput:
    """One model's split projections; lets those that read the same tensor share the sum of its gradient."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._last: tuple[Tensor, Tensor] | None = None

    def take(self, x: Tensor) -> Tensor:
        """`x`, whose gradient will be summed over the group; once for consecutive takers of the same tensor."""
        if not (torch.is_grad_enabled() and x.requires_grad):
            return x
        if self._last is None or self._last[0] is not x:
            self._last = (x, sum_gradient(x, self._group))
        return self._last[1]

    def forget(self) -> None:
        """Lets go of the tensor taken last."""
        self._last = None


def column_forward(module: nn.Linear, shared: SharedInput | None) -> Callable[[Tensor], Tensor]:
    """x [.., in] on every rank -> this rank's part [.., out / tp]."""

    def forward(x: Tensor) -> Tensor:
        # A gathered x (without `shared`) has its gradient summed already.
        return F.linear(x if shared is None else shared.take(x), local_part(module.weight), local_part(module.bias))

    return forward


def row_forward(
    module: nn.Linear,
    shared: SharedInput | None,
    group: dist.ProcessGroup,
    adapter: Callable[[Tensor], Tensor] | None = None,
) -> Callable[[Tensor], Tensor]:
    """This rank's part [.., in / tp] -> the sum over the ranks [.., out], whole or (without `shared`) its own part.

    An `adapter` adds its own product of the same input before the sum.
    """

    def forward(x: Tensor) -> Tensor:
        product = F.linear(x, local_part(module.weight))
        product = product if adapter is None else product + adapter(x)
        if shared is None:
            y = scatter_sum(product, group)
        else:
            shared.forget()
            y = sum_over(product, group)
        return y if module.bias is None else y + local_part(module.bias)

    return forward


def vocabulary_forward(
    module: nn.Embedding, group: dist.ProcessGroup, *, start: int, scattered: bool
) -> Callable[[Tensor], Tensor]:
    """Token ids -> embeddings [.., hidden], or of this rank's part of the sequence if `scattered`.

    Each rank looks up the entries it holds, from `start` on.
    """

    def forward(ids: Tensor) -> Tensor:
        weight = local_part(module.weight)
        own = (ids >= start) & (ids < start + weight.shape[0])
        place = torch.where(own, ids - start, 0)
        padding = module.padding_idx - start if module.padding_idx is not None else -1
        padding_idx = padding if 0 <= padding < weight.shape[0] else None
        empty = not weight.shape[0]
        found = weight.new_zeros(*ids.shape, weight.shape[1]) if empty else F.embedding(place, weight, padding_idx)
        found = torch.where(own[..., None], found, 0.0)
        return scatter_sum(found, group) if scattered else sum_over(found, group)

    return forward


def allowed(modules: Mapping[str, nn.Module], plan: Mapping[str, str], layers: list[nn.Module]) -> tuple[bool, str]:
    """Whether the plan (module or parameter -> style) lets the sequence be split between the split parts, and why."""
    others = sorted(set(plan.values()) - _SPLIT_STYLES)
    if others:
        return False, f"its plan has {', '.join(others)}"
    for name in plan:
        owner = modules[name if name in modules else name.rpartition(".")[0]]
        if type(owner) not in (nn.Linear, nn.Embedding) and plan[name] != "replicate":
            return False, f"{name} is not a plain layer"
    if not layers or not all(split_parts(layer, modules, plan) for layer in layers):
        return False, "its layers have no split parts"
    whole = [child for layer in layers for child in layer.children() if child not in split_parts(layer, modules, plan)]
    # By transformers' custom, what mixes tokens knows its layer's number, for a cache.
    mixing = next(
        (type(each).__name__ for child in whole for each in child.modules() if hasattr(each, "layer_idx")), None
    )
    if mixing is not None:
        return False, f"{mixing}, which mixes tokens, is not split"
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
            named["hidden_states"] = gather_parts(named["hidden_states"], group)
        else:
            arguments = (gather_parts(arguments[0], group), *arguments[1:])
        return inner(*arguments, **named)

    part.forward = forward  # type: ignore[method-assign]
