"""Counts what a bfloat16 step of one GPU launches and moves, by FSDP2 on a mesh of one and by a working copy.

    python benchmarks/counts.py [--width 512] [--moments float32 bfloat16 "8 bits"] [--micro-batches 1 4]

A Llama takes real steps on this CPU, whose every operation is counted as it is dispatched. Kernels a layer are the
difference between 6 layers and 2. Bytes a parameter are those that operations other than products read and write: of
few tokens beside wide layers, so that nearly all of them are weights', gradients' and moments'. The fused update counts
as the one kernel that it is on CUDA. No time is measured.

The table's layers are not compiled. Below it are the kernels of a compiled one, which is the default on CUDA: those
that Inductor writes, here for this CPU, and its calls of libraries, for products and attention. The last table is of
the loss: from the logits of a chunk of tokens to their gradient, in bfloat16, without the head's products.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor import compile_fx, metrics
from torch._inductor import config as inductor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from threefold.config.loading import validate
from threefold.mesh.mesh import Mesh, init_mesh
from threefold.model import load
from threefold.model.build import build
from threefold.model.collectives import local_part
from threefold.optim import fused_adamw
from threefold.optim.fused_update import update_by_operations
from threefold.plan import choices
from threefold.run.assemble import optimizer_of
from threefold.training.loss import TokenLoss
from threefold.training.step import TrainStep

LAYERS, TOKENS = (2, 6), 8
GOALS = {"kernels": 100, "bytes": 34}
_PRODUCTS = ("aten.mm", "aten.bmm", "aten.addmm", "aten._scaled_dot_product", "aten.embedding")
# Whose first argument, or its every tensor, is only written.
_OVERWRITES = ("copy_", "zero_", "fill_", "all_gather", "reduce_scatter")
_ALLOCATES = ("empty", "detach", "record_stream", "_local_scalar", "resize", "set_")


class Counted(TorchDispatchMode):
    """Kernels, and bytes that those other than products read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels = self.moved_bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        found, name = func(*args, **(kwargs or {})), str(func)
        if func.is_view or any(part in name for part in _ALLOCATES):
            return found
        given = _tensors((args, kwargs))
        if name.startswith(("aten.gather", "aten.scatter")):  # one number of each row
            self.kernels += 1
            self.moved_bytes += 3 * args[2].nbytes
            return found
        known = {each.untyped_storage().data_ptr() for each in given}
        made = [
            each for each in _tensors(found) if each.untyped_storage().data_ptr() not in known
        ]
        if not made and not func._schema.is_mutable:
            return found  # another view
        self.kernels += 1
        if not name.startswith(_PRODUCTS):
            changed = _tensors(
                [each for place, each in enumerate(args) if _is_written(func, place)]
            )
            written = sum(each.nbytes for each in changed)
            read = sum(each.nbytes for each in given)
            overwrites = any(part in name for part in _OVERWRITES)
            self.moved_bytes += (
                read + (0 if overwrites else written) + sum(each.nbytes for each in made)
            )
        return found

    def fused(self, of_each: Any, factors: Any, group: dict[str, Any]) -> None:
        """In the place of the kernel."""
        self.kernels += 1
        for each in of_each:
            weight, gradient, *moments = each.stored[:4]
            scales = each.stored[5:7]
            changed = _nbytes([weight, *moments, *scales])
            self.moved_bytes += _nbytes([gradient, each.copy]) + 2 * changed
        with torch.utils._python_dispatch._disable_current_modes():
            update_by_operations(of_each, factors, group)

    def compiled(self, function: Any, **settings: Any) -> Any:
        """In the place of torch.compile: what Inductor writes of a function, and what that reads and writes."""

        def call(*args: Any) -> Any:
            shape = args[0].shape
            with torch.utils._python_dispatch._disable_current_modes():
                if shape not in _COMPILED:
                    torch._dynamo.reset()
                    metrics.reset()
                    # It counts bytes for a log alone.
                    log = mock.patch.object(
                        compile_fx,
                        "inductor_metrics_log",
                        logging.Logger("bytes", logging.INFO),
                    )
                    with log, inductor.patch(force_disable_caches=True):
                        found = _compile(function, **settings)(*args)
                    _COMPILED[shape] = (
                        metrics.generated_kernel_count,
                        metrics.num_bytes_accessed,
                    )
                else:
                    found = function(*args)
            kernels, moved_bytes = _COMPILED[shape]
            self.kernels += kernels
            self.moved_bytes += moved_bytes
            return found

        return call


_compile = torch.compile
# Of torchao's update of a parameter, by its shape.
_COMPILED: dict[torch.Size, tuple[int, int]] = {}


def _nbytes(tensors: list[Tensor | None]) -> int:
    return sum(each.nbytes for each in tensors if each is not None)


def _tensors(values: Any) -> list[Tensor]:
    return [local_part(each) for each in tree_leaves(values) if isinstance(each, Tensor)]


def _is_written(func: Any, place: int) -> bool:
    arguments = func._schema.arguments
    return (
        place < len(arguments)
        and arguments[place].alias_info is not None
        and arguments[place].alias_info.is_write
    )


class LossKernels:
    """In the place of `training.loss_kernel`: as many kernels and bytes, by operations that are not counted."""

    def __init__(self, counted: Counted) -> None:
        self._counted = counted

    def row_sums(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        self._counted.kernels += 1
        # A row that is read again may still be in a cache.
        self._counted.moved_bytes += 2 * logits.nbytes
        with torch.utils._python_dispatch._disable_current_modes():
            largest = logits.amax(1).float()
            return torch.stack(
                [largest, (logits - largest[:, None]).logsumexp(1)]
            ), logits.float().sum(1)

    def gradients(
        self,
        logits: Tensor,
        largest: Tensor,
        logs: Tensor,
        *_: Any,
        dtype: torch.dtype,
        **__: Any,
    ) -> Tensor:
        self._counted.kernels += 1
        with torch.utils._python_dispatch._disable_current_modes():
            found = (logits - (largest + logs)[:, None]).exp().to(dtype)
        self._counted.moved_bytes += logits.nbytes + found.nbytes
        return found


def of_loss(
    *, fused: bool, tokens: int = 64, vocabulary: int = 32000, **settings: Any
) -> tuple[int, float]:
    """(kernels of a chunk, bytes of a logit in bfloat16), from logits to their gradient."""
    logits, labels = (
        torch.randn(tokens, vocabulary).bfloat16(),
        torch.randint(vocabulary, (tokens,)),
    )
    counted = Counted()
    with (
        mock.patch.dict(sys.modules, {"threefold.training.loss_kernel": LossKernels(counted)}),
        counted,
    ):
        *_, gradient_of = TokenLoss(fused=fused, **settings).measure(logits, labels)
        gradient_of(torch.bfloat16)
    return counted.kernels, counted.moved_bytes / logits.numel()


@contextmanager
def _as_large(by_fsdp: bool) -> Iterator[None]:
    """Units of one layer that do not stay from forward to backward, as those of a model of billions."""
    none = mock.patch.object(choices, "working_copy", lambda *arguments, **settings: False)
    with (
        mock.patch.multiple(choices, UNIT_BYTES=1, KEPT_WHOLE_BYTES=-1),
        none if by_fsdp else mock.patch.object(choices, "working_copy", choices.working_copy),
    ):
        yield


def _step(
    mesh: Mesh,
    *,
    layers: int,
    width: int,
    moments: str,
    by_fsdp: bool,
    micro_batches: int,
    compile: bool = False,
) -> tuple[int, float, int]:
    """(kernels, bytes, parameters) of one step."""
    sizes = {
        "hidden_size": width,
        "intermediate_size": 3 * width,
        "num_hidden_layers": layers,
        "vocab_size": 64,
    }
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 64}
    kind = {"name": "adamw_8bit"} if moments == "8 bits" else {"moments": moments}
    optimizer = {"lr": 1e-3, "betas": [0.9, 0.95], **kind}
    model = {"config": {"model_type": "llama", **sizes, **heads}, "dtype": "bfloat16"}
    train = {"compile": compile, "global_batch": micro_batches, "micro_batch": 1}
    config = validate(
        {"model": model, "data": {"seq_len": TOKENS}, "train": train, "optimizer": optimizer}
    )
    with _as_large(by_fsdp):
        built = build(config, load.read_config(config.model), mesh)
        step = TrainStep(built, optimizer_of(config, built), compare_copies=False)
        ids = torch.randint(64, (1, TOKENS + 1), generator=torch.Generator().manual_seed(0))
        batch = {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}
        batches = [batch] * micro_batches
        counted = Counted()
        # The layers are compiled by the time of the first step, and torchao's update in each.
        theirs = (
            mock.patch.object(torch, "compile", counted.compiled)
            if moments == "8 bits"
            else nullcontext()
        )
        with theirs:
            step.run(batches)
            counted.kernels = counted.moved_bytes = 0
            with (
                counted,
                mock.patch.object(fused_adamw, "_kernel", lambda device: counted.fused),
            ):
                step.run(batches)
    return (
        counted.kernels,
        counted.moved_bytes,
        sum(each.numel() for each in built.parameters()),
    )


def counts(mesh: Mesh, **settings: Any) -> tuple[float, float]:
    """(kernels a layer, bytes a parameter of the layers)."""
    (few, few_bytes, small), (many, many_bytes, large) = (
        _step(mesh, layers=each, **settings) for each in LAYERS
    )
    return (many - few) / (LAYERS[1] - LAYERS[0]), (many_bytes - few_bytes) / (large - small)


def compiled_kernels(mesh: Mesh, width: int) -> tuple[int, int]:
    """Of one compiled layer, forward and backward: (kernels that Inductor writes, its calls of libraries)."""
    torch._dynamo.reset()
    metrics.reset()
    counters.clear()
    # Equal layers are compiled once. From a cache of other processes, nothing would be written.
    with inductor.patch(force_disable_caches=True):
        _step(
            mesh,
            layers=1,
            width=width,
            moments="float32",
            by_fsdp=False,
            micro_batches=1,
            compile=True,
        )
    return metrics.generated_kernel_count, counters["inductor"]["extern_calls"]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--moments", nargs="+", default=["float32", "bfloat16", "8 bits"])
    parser.add_argument("--micro-batches", nargs="+", type=int, default=[1, 4])
    asked = parser.parse_args()
    mesh = init_mesh(1, device="cpu")
    print(
        "| moments | micro-batches | kernels a layer: FSDP2 | working copy | bytes a parameter: FSDP2 | working copy |"
    )
    print("|---|---|---|---|---|---|")
    reached = True
    for moments in asked.moments:
        for number in asked.micro_batches:
            settings = {"width": asked.width, "moments": moments, "micro_batches": number}
            before, after = (
                counts(mesh, **settings, by_fsdp=by_fsdp) for by_fsdp in (True, False)
            )
            print(
                f"| {moments} | {number} | {before[0]:.0f} | {after[0]:.0f} | {before[1]:.1f} | {after[1]:.1f} |",
                flush=True,
            )
            if number == 1:
                reached &= after[0] <= GOALS["kernels"] and after[1] <= GOALS["bytes"]
    print(
        f"goals for one micro-batch: {GOALS['kernels']} kernels a layer, {GOALS['bytes']} bytes a parameter:",
        end=" ",
    )
    print("reached" if reached else "missed")
    written, called = compiled_kernels(mesh, asked.width)
    print(
        f"of a compiled layer: {written + called} kernels: {written} written by Inductor, {called} of libraries"
    )
    print(
        "| loss | kernels a chunk: operations | kernels | bytes a logit: operations | kernels |"
    )
    print("|---|---|---|---|---|")
    for name, settings in (
        ("cross entropy", {}),
        ("with z-loss and smoothed labels", {"z_loss": 1e-4, "label_smoothing": 0.1}),
    ):
        (before, before_bytes), (after, after_bytes) = (
            of_loss(fused=fused, **settings) for fused in (False, True)
        )
        print(f"| {name} | {before} | {after} | {before_bytes:.1f} | {after_bytes:.1f} |")
    mesh.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
