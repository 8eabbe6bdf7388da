"""A forward that is no part of a run leaves nothing behind in the module, nor in what is drawn after it."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from threefold.model import noise

CPU = torch.device("cpu")


class Counting(nn.Module):
    """Whatever a forward can leave: a counter, running means in a buffer and beside it, lists, what is made lazily."""

    mean: Tensor
    replaced: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.calls, self.longest = 0, 16
        self.seen: list[int] = []
        self.lengths = self.seen  # one list under two names
        self.sizes = {"rows": 1}
        self.beside = torch.zeros(3)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("replaced", torch.zeros(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.longest = max(self.longest, len(x))
        self.seen.append(len(x))
        self.sizes["tokens"] = x.numel()
        self.beside += 1
        self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        self.register_buffer("replaced", torch.ones(5), persistent=False)
        if not hasattr(self, "made"):
            self.made: Any = torch.ones(1)
            self.linear.register_forward_hook(lambda *_: self.seen.append(-1))
        return self.linear(x) * random.random() * np.random.rand() * torch.rand(())


def test_a_module_is_left_as_it_was() -> None:
    module = Counting()
    beside, mean, replaced = module.beside, module.mean, module.replaced
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    expected = (torch.rand(()).item(), random.random(), np.random.rand())
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    with noise.without_trace(module, CPU):
        module(torch.ones(32, 4))
        assert (module.calls, module.longest, module.seen) == (1, 32, [32, -1])
    assert (torch.rand(()).item(), random.random(), np.random.rand()) == expected
    assert (module.calls, module.longest, module.seen, module.sizes) == (0, 16, [], {"rows": 1})
    assert module.lengths is module.seen
    assert (module.beside is beside, module.mean is mean, module.replaced is replaced) == (
        True,
        True,
        True,
    )
    assert not (beside.any() or mean.any() or replaced.any())
    assert not hasattr(module, "made") and not module.linear._forward_hooks


def test_a_rotary_embedding_that_grows_with_its_rows_grows_again() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "vocab_size": 32,
    }
    config = AutoConfig.for_model(
        "llama", **sizes, max_position_embeddings=16, rope_parameters=rope
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    ids = torch.arange(32)[None]
    with noise.without_trace(model, CPU), torch.no_grad():
        expected = model(ids).logits
    with torch.no_grad():
        assert torch.equal(model(ids).logits, expected)
