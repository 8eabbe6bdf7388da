"""The complete gradients of a model on a mesh, by the names that one process has them under."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from threefold.model.model import Model


def complete_gradients(model: Model) -> Iterator[tuple[str, Tensor]]:
    """(name, gradient) of each parameter that is trained, whole; zeros where it has none. Every rank calls it.

    A parameter that is tied to another one has that one's name, as in `check.reference.gradients_of`.
    """
    tied = dict(getattr(model.module, "all_tied_weights_keys", {}))
    for name, parameter in model.module.named_parameters():
        if not parameter.requires_grad:
            continue
        gradient = parameter.grad
        if gradient is None:
            whole = torch.zeros(parameter.shape, device=parameter.device)
        else:
            whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        yield tied.get(name, name), whole.detach()
