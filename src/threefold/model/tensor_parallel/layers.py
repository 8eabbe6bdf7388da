"""The computation of a split layer on one tp rank, on local tensors.

transformers' styles run every product through DTensor and sum the gradient of a layer's input once for each projection
that reads it. Here a projection is a plain product with the local part of its weight, and projections that read the
same tensor (query, key and value; gate and up) share one sum of its gradient. A layer then costs two all-reduces
forward and two backward (Megatron-LM, arXiv:1909.08053); those of backward run beside the product that gives the first
projection's weight its gradient. Parameters stay DTensors for everything else.

With sequence parallelism (arXiv:2205.05198) the hidden states between the split parts of a layer are [batch,
sequence / tp, hidden]: norms, residuals and everything else that is not split would otherwise be computed by every tp
rank. A split part (attention, MLP) gathers them at its entry, and the sum at its exit gives each rank its own part. The
traffic is the same; the work and the memory between the parts are divided by tp. A rank then knows only a part of the
gradient of a parameter between them.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from threefold.model.collectives import (
    gather_parts,
    local_part,
    scatter_sum,
    start_scattered_sum,
    start_sum,
    sum_gradient,
    sum_into,
    sum_over,
)
from threefold.model.tensor_parallel.symmetric import entry_product, exit_sum

_SPLIT_STYLES = {"colwise", "rowwise", "embedding_rowwise", "replicate"}


class _Beside:
    """Work overlapped with the sum of the gradient of a layer's input: the gradient of one weight that reads it.

    Of the first that does: a linear layer's backward needs its input's gradient at once, and may leave its weight's.
    """

    def __init__(
        self, start: Callable[[Tensor, dist.ProcessGroup], Callable[[], Tensor]]
    ) -> None:
        self.start = start
        self._left: tuple[Tensor, Tensor] | None = None

    def leave(self, gradient: Tensor, x: Tensor) -> None:
        """Leaves the gradient of the weight in `y = x weight^T` for later; `gradient` is that of y."""
        self._left = gradient, x

    def weight_gradient(self) -> Tensor | None:
        """The remaining work, computed now; None if nothing was left."""
        if self._left is None:
            return None
        (gradient, x), self._left = self._left, None
        return gradient.flatten(0, -2).t() @ x.flatten(0, -2)


class _Entry(torch.autograd.Function):
    """The input of split projections; its gradient is summed concurrently with the first one's weight gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, shared: "SharedInput", beside: _Beside
    ) -> Tensor:
        ctx.group, ctx.beside = shared.group, beside
        return gather_parts(x, shared.group) if shared.scattered else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        # A sum of products, held nowhere else.
        finish = ctx.beside.start(gradients[0], ctx.group)
        of_weight = ctx.beside.weight_gradient()
        return finish(), of_weight, None, None


class _Product(torch.autograd.Function):
    """x [.., in] -> [.., out], which leaves the gradient of its weight to `beside`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, beside: _Beside
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.beside = beside
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        ctx.beside.leave(gradients[0], x)
        of_bias = gradients[0].flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None
        return gradients[0] @ weight, None, of_bias, None


class SharedInput:
    """One model's split projections; lets those that read the same tensor share the sum of its gradient."""

    def __init__(
        self, group: dist.ProcessGroup, *, scattered: bool, overlapped: bool = False
    ) -> None:
        """Args: `overlapped`: scattered tensors are sent beside the products that read or give them."""
        self.group, self.scattered, self.overlapped = group, scattered, overlapped
        self._last: tuple[Tensor, Tensor] | None = None
        # A tensor, the weight that reads it first, and what makes their product, given the bias.
        self._opened: tuple[Tensor, Tensor, Callable[[Tensor | None], Tensor]] | None = None

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Inside, each rank holds the whole sequence, of any length, between the split parts; without gradients."""
        before = self.scattered, self.overlapped
        self.scattered = self.overlapped = False
        try:
            yield
        finally:
            self.scattered, self.overlapped = before

    def open(self, part: Tensor, first: nn.Linear | None) -> Tensor:
        """The gathered parts of a scattered tensor, which `first` reads before any other projection."""
        if not self.scattered:
            return part
        whole: Tensor
        if (
            self.overlapped
            and first is not None
            and not torch.is_autocast_enabled(part.device.type)
        ):
            whole, product = entry_product(part, local_part(first.weight), self.group)
            self._opened = (
                whole,
                first.weight,
                lambda bias: product if bias is None else product + bias,
            )
            return whole
        if first is None or not _leaves(part, weight := local_part(first.weight)):
            return gather_parts(part, self.group)
        beside = _Beside(start_scattered_sum)
        whole = _Entry.apply(part, weight, self, beside)  # type: ignore[assignment]
        self._opened = whole, first.weight, lambda bias: _product(whole, weight, bias, beside)
        return whole

    def take(self, x: Tensor) -> Tensor:
        """`x`, whose gradient will be summed over the group; once for consecutive takers of the same tensor."""
        if self.scattered or not (torch.is_grad_enabled() and x.requires_grad):
            return x
        if self._last is None or self._last[0] is not x:
            self._last = (x, sum_gradient(x, self.group))
        return self._last[1]

    def product(self, x: Tensor, module: nn.Linear) -> Tensor:
        """x [.., in] -> this rank's part [.., out / tp] of what `module` makes of it."""
        weight = local_part(module.weight)
        bias = local_part(module.bias)
        opened, self._opened = self._opened, None
        if opened is not None and opened[0] is x and opened[1] is module.weight:
            return opened[2](bias)
        same_input = self._last is not None and self._last[0] is x
        if self.scattered or same_input or not _leaves(x, weight):
            return F.linear(self.take(x), weight, bias)
        beside = _Beside(start_sum)
        taken: Tensor = _Entry.apply(x, weight, self, beside)  # type: ignore[assignment]
        self._last = (x, taken)
        return _product(taken, weight, bias, beside)

    def forget(self) -> None:
        """Lets go of the tensor taken last."""
        self._last = self._opened = None


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, beside: _Beside) -> Tensor:
    return _Product.apply(x, weight.detach(), bias, beside)  # type: ignore[return-value]


def _leaves(x: Tensor, weight: Tensor) -> bool:
    """Whether a product leaves its weight's gradient for later; a compiler and autocast see plain products."""
    plain = torch.compiler.is_compiling() or torch.is_autocast_enabled(x.device.type)
    return torch.is_grad_enabled() and x.requires_grad and weight.requires_grad and not plain


def column_forward(module: nn.Linear, shared: SharedInput) -> Callable[[Tensor], Tensor]:
    """x [.., in] on every rank -> this rank's part [.., out / tp]."""
    return lambda x: shared.product(x, module)


def row_forward(
    module: nn.Linear, shared: SharedInput, adapter: Callable[[Tensor], Tensor] | None = None
) -> Callable[[Tensor], Tensor]:
    """This rank's part [.., in / tp] -> the sum over the ranks [.., out], whole or (if scattered) its own part.

    An `adapter` adds its own product of the same input before the sum.
    """

    def forward(x: Tensor) -> Tensor:
        weight = local_part(module.weight)
        if (
            shared.overlapped
            and adapter is None
            and not torch.is_autocast_enabled(x.device.type)
        ):
            shared.forget()
            y = exit_sum(x, weight, shared.group)
            return y if module.bias is None else y + local_part(module.bias)
        product = F.linear(x, weight)
        product = product if adapter is None else product + adapter(x)
        shared.forget()
        y = (
            scatter_sum(product, shared.group)
            if shared.scattered
            else _total(product, shared.group)
        )
        return y if module.bias is None else y + local_part(module.bias)

    return forward


def _total(own: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of the ranks' tensors, in `own` itself unless something else may hold it or look at it."""
    # Selective recomputation, a dispatch mode, keeps the product that is summed; a compiler sees for itself.
    watched = torch.compiler.is_compiling() or _get_current_dispatch_mode() is not None
    return (sum_over if watched or not own.is_contiguous() else sum_into)(own, group)


def vocabulary_forward(
    module: nn.Embedding, shared: SharedInput, *, start: int
) -> Callable[[Tensor], Tensor]:
    """Token ids -> embeddings [.., hidden], or of this rank's part of the sequence where tensors are scattered.

    Each rank looks up the entries it holds, from `start` on. An id that the vocabulary lacks, at which torch's lookup
    fails, becomes NaN: nothing is silently computed from it.
    """
    size = module.num_embeddings

    def forward(ids: Tensor) -> Tensor:
        weight = local_part(module.weight)
        own = (ids >= start) & (ids < start + weight.shape[0])
        place = torch.where(own, ids - start, 0)
        padding = module.padding_idx - start if module.padding_idx is not None else -1
        padding_idx = padding if 0 <= padding < weight.shape[0] else None
        empty = not weight.shape[0]
        embedded = (
            weight.new_zeros(*ids.shape, weight.shape[1])
            if empty
            else F.embedding(place, weight, padding_idx)
        )
        rest = torch.where((ids >= 0) & (ids < size), 0.0, math.nan).to(embedded.dtype)
        embedded = torch.where(own[..., None], embedded, rest[..., None])
        return (
            scatter_sum(embedded, shared.group)
            if shared.scattered
            else _total(embedded, shared.group)
        )

    return forward


def allowed(
    modules: Mapping[str, nn.Module], plan: Mapping[str, str], layers: list[nn.Module]
) -> tuple[bool, str]:
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
    whole = [
        child
        for layer in layers
        for child in layer.children()
        if child not in split_parts(layer, modules, plan)
    ]
    # By transformers' custom, what mixes tokens knows its layer's number, for a cache.
    mixing = next(
        (
            type(each).__name__
            for child in whole
            for each in child.modules()
            if hasattr(each, "layer_idx")
        ),
        None,
    )
    if mixing is not None:
        return False, f"{mixing}, which mixes tokens, is not split"
    return True, "every split part begins by columns and ends by rows"


def split_parts(
    layer: nn.Module, modules: Mapping[str, nn.Module], plan: Mapping[str, str]
) -> list[nn.Module]:
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


def enter(part: nn.Module, shared: SharedInput, first: nn.Linear | None) -> None:
    """Makes a split part gather its input hidden states, passed as first argument or by name.

    Args:
        first: the part's projection by columns that comes first, if it has any.
    """
    inner = part.forward

    def forward(*arguments: Any, **named: Any) -> Any:
        if "hidden_states" in named:
            named["hidden_states"] = shared.open(named["hidden_states"], first)
        else:
            arguments = (shared.open(arguments[0], first), *arguments[1:])
        return inner(*arguments, **named)

    part.forward = forward  # type: ignore[method-assign]
