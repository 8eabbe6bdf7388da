"""Text generation with a model on the mesh: transformers' own generate, on every rank with its part of the model.

The cp and tp ranks of a copy answer the same prompts together: each tp rank computes its heads and keeps their keys and
values, each cp rank computes whole rows. Sharded weights are gathered for each token, and ranks continue until the last
of them has finished. Logits are whole on each rank, and all sample from them with the same seed.
"""

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from threefold.errors import ConfigError, check_argument
from threefold.model import noise
from threefold.model.collectives import join
from threefold.model.data_parallel import reshard
from threefold.model.model import Model


def generate(model: Model, input_ids: Tensor, *, seed: int, **options: Any) -> Any:
    """The result of transformers' `generate` for this dp rank's prompts, [rows, length + new ids]; `Model.generate`."""
    mesh, module = model.mesh, model.module
    if model.context is None:
        raise ConfigError(
            f"generate: a {type(module).__name__} is a custom module",
            expected="a causal language model of transformers",
            fix="model.module, if it has a generate of its own and is not sharded",
        )
    arguments = dict(options)

    def read() -> tuple[list[dict[str, Tensor]], int]:
        check_argument(
            "input_ids",
            input_ids,
            isinstance(input_ids, Tensor) and input_ids.ndim == 2 and input_ids.numel() > 0,
            expected="this dp rank's prompts, int64 [rows, length], of one length",
            fix="model.generate(tokenizer(prompts, return_tensors='pt')['input_ids'])",
        )
        model.refuse_strange("input_ids", input_ids)
        arguments["input_ids"] = input_ids
        arguments.setdefault("attention_mask", torch.ones_like(input_ids))
        return [{name: each for name, each in arguments.items() if isinstance(each, Tensor)}], 0

    (rows,), _ = mesh.agree("generate", 0, read)
    arguments |= {name: each.to(mesh.device) for name, each in rows.items()}
    arguments.setdefault("use_cache", True)
    arguments["synced_gpus"] = mesh.world_size > 1 and isinstance(module, FSDPModule)
    start = _Start(model)
    model.trust_no_weight()
    # Rotary factors of a text longer than any trained on would stay.
    with _writing(model, start), noise.without_trace(module, mesh.device):
        torch.manual_seed(seed)
        try:
            written: Any = module.generate(**arguments)
        except Exception as error:  # of any class: the other ranks wait for this one
            start.refuse(error)
            raise
    reshard(model.forward)
    mesh.agree(
        "what generate wrote", 0, lambda: ([{"ids": getattr(written, "sequences", written)}], 0)
    )
    return written.to(input_ids.device) if isinstance(written, Tensor) else written


class _Start:
    """Lets the ranks compute together only if transformers accepts the arguments of each of them."""

    def __init__(self, model: Model) -> None:
        self._mesh, self._agreed = model.mesh, False

    def agree(self) -> None:
        """Every rank calls this before its first forward; raises if another one refused."""
        if not self._agreed:
            self._agreed = True
            self._mesh.agree("generate's first token")

    def refuse(self, error: Exception) -> None:
        """Raises transformers' refusal on every rank; does nothing if the ranks compute already."""
        if self._agreed:
            return

        def refused() -> Any:
            raise ConfigError(
                f"generate is refused by transformers: {' '.join(str(error).split()) or type(error).__name__}",
                expected="options of its generate",
                fix="model.generate(input_ids, max_new_tokens=64)",
            ) from error

        self._mesh.agree("generate's first token", 0, refused)


@contextmanager
def _writing(model: Model, start: _Start) -> Iterator[None]:
    """Inside, the module is called as transformers calls it, and gives whole logits of whole rows."""
    module, tensor = model.module, model.tensor
    own = functools.partial(type(module).forward, module)
    replaced = module.forward
    vocabulary = (
        module.get_output_embeddings().weight.shape[0]
        if tensor.vocabulary_start is not None
        else None
    )

    @functools.wraps(own)
    def forward(*arguments: Any, **named: Any) -> Any:
        outputs = own(*arguments, **named)
        if vocabulary is not None and (group := model.mesh.group("tp")) is not None:
            outputs.logits = join(outputs.logits, group, dim=-1, total=vocabulary)
        return outputs

    with ExitStack() as stack:
        if model.context is not None:
            stack.enter_context(model.context.whole_rows())
        if tensor.shared_input is not None:
            stack.enter_context(tensor.shared_input.whole())
        stack.enter_context(model.casting())
        stack.enter_context(model.weights_in_place())
        # Every length would be compiled.
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        # Before the hook in which FSDP2 gathers weights.
        stack.callback(
            module.register_forward_pre_hook(lambda *_: start.agree(), prepend=True).remove
        )
        stack.callback(setattr, module, "forward", replaced)
        module.forward = forward
        stack.enter_context(model.evaluating())
        yield
