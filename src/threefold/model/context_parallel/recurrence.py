"""Layers that carry a state along the sequence: each document runs through them alone.

A mask keeps attention inside a document; it does nothing to a convolution or a recurrence, which would take the end of
one document into the next. So rows with documents are rearranged before such a layer, one document per row, and back
after it. Documents of similar length run together: at most half of the computation is padding.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from threefold.model.context_parallel.attention_choice import (
    arguments_of,
    asks_for_attention,
    text_modules,
)

# Marks of such layers: an argument of their forward, or one of their tensors.
_ARGUMENTS = {"cache_params", "state", "conv_mask"}
_TENSORS = ("A_log", "time_decay", "slope_rate")


def carriers(model: nn.Module) -> Iterator[nn.Module]:
    """The innermost modules that carry a state along the sequence."""
    marked = [module for module in text_modules(model) if _carries(module)]
    outer = {
        id(module)
        for module in marked
        if any(each is not module and _carries(each) for each in module.modules())
    }
    return (module for module in marked if id(module) not in outer)


def _carries(module: nn.Module) -> bool:
    arguments = arguments_of(type(module))  # type: ignore[arg-type]
    if arguments & {"input_ids", "input"}:
        return False  # a model, or a layer of torch
    if any(isinstance(child, nn.Conv1d) for child in module.children()):
        return True
    if len(arguments) > 1 and any(
        isinstance(getattr(module, name, None), Tensor) for name in _TENSORS
    ):
        return True
    return bool(_ARGUMENTS & arguments) and not asks_for_attention(module)


@dataclass(frozen=True)
class DocumentRows:
    """Where the tokens of a batch are when each document is a row.

    Attributes:
        shape: (batch, sequence) of the batch.
        places: for each group of documents [documents, longest] the place of each token among all of the batch;
            behind a document's end its last token again.
        back: [batch x sequence] the place of each token among those of all groups, one after the other.
    """

    shape: tuple[int, int]
    places: tuple[Tensor, ...]
    back: Tensor

    @classmethod
    def of(cls, documents: Tensor) -> "DocumentRows":
        """Built from the number of each token's document [batch, sequence]; waits for the device once."""
        batch, sequence = documents.shape
        begins = torch.ones_like(documents, dtype=torch.bool)
        begins[:, 1:] = documents.diff(dim=1) != 0
        starts = begins.flatten().nonzero()[:, 0].tolist()
        groups: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        for start, end in zip(starts, [*starts[1:], batch * sequence], strict=True):
            groups[(end - start).bit_length()].append((start, end - start))
        places = []
        back = torch.empty(batch * sequence, dtype=torch.int64)
        before = 0
        for group in groups.values():
            start, length = torch.tensor(group).T.unsqueeze(-1)
            steps = torch.arange(int(length.max()))
            place = start + steps.minimum(length - 1)
            real = steps < length
            back[place[real]] = torch.arange(before, before + place.numel()).view(place.shape)[
                real
            ]
            places.append(place.to(documents.device))
            before += place.numel()
        return cls((batch, sequence), tuple(places), back.to(documents.device))

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def run(self, forward: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        """The result of `forward` for a batch, computed for each document alone."""
        outputs = [
            forward(
                *(self._laid_out(each, place) for each in arguments),
                **{name: self._laid_out(each, place) for name, each in keywords.items()},
            )
            for place in self.places
        ]
        if not isinstance(outputs[0], tuple):
            return self._put_back(outputs)
        # After the hidden states there may be a final state that was not requested.
        return tuple(
            self._put_back([*each], needed=not number)
            for number, each in enumerate(zip(*outputs, strict=True))
        )

    def _laid_out(self, value: Any, place: Tensor) -> Any:
        if isinstance(value, tuple):
            return tuple(self._laid_out(each, place) for each in value)
        if not isinstance(value, Tensor) or value.shape[:2] != self.shape:
            return value
        return value.flatten(0, 1)[place]

    def _put_back(self, outputs: list[Any], *, needed: bool = True) -> Any:
        tensors = [each for each in outputs if isinstance(each, Tensor)]
        if [each.shape[:2] for each in tensors] == [place.shape for place in self.places]:
            return torch.cat([each.flatten(0, 1) for each in tensors])[self.back].unflatten(
                0, self.shape
            )
        if needed:
            raise RuntimeError(
                f"a layer that carries a state did not return a tensor of rows for rows {self.shape}"
            )
        return None


def keep_documents_apart(model: nn.Module, rows: Callable[[], DocumentRows | None]) -> bool:
    """Lets each document of a batch run alone through the layers that carry a state; returns whether there are any.

    Args:
        rows: those of the batch at hand; None if it has no documents.
    """
    layers = list(carriers(model))
    for module in layers:
        module.forward = _apart(module.forward, rows)
    return bool(layers)


def _apart(
    own: Callable[..., Any], rows: Callable[[], DocumentRows | None]
) -> Callable[..., Any]:
    def forward(*arguments: Any, **keywords: Any) -> Any:
        documents = rows()
        return (
            own(*arguments, **keywords)
            if documents is None
            else documents.run(own, *arguments, **keywords)
        )

    return forward
