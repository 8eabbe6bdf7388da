"""From a config to a model that is ready to step, in the one correct order.

load (without storage) -> tensor parallel -> context parallel -> activation checkpointing -> compile -> data parallel ->
read the weights. The optimizer is built afterwards, on the parameters as they are then.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers import PretrainedConfig, PreTrainedModel

from threefold.config.peak_rate import RANDOM, automatic_rate
from threefold.config.schema import Config
from threefold.mesh.mesh import Mesh
from threefold.model import data_parallel, fused_loss, head, load, lora, storage
from threefold.model.collectives import gather_parts
from threefold.model.context_parallel import flex
from threefold.model.context_parallel.split import ContextParallel, choose_method
from threefold.model.tensor_parallel.plan import TensorParallelism, split_over_tp
from threefold.model.weight_check import Weights, stored_in_files

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
Choices = Sequence[tuple[str, str]]


@dataclass(frozen=True)
class ParallelModel:
    """A model on the mesh.

    Attributes:
        forward: what to call (the model, or the wrapper of data parallelism around it).
        module: the model itself, whose names a checkpoint uses.
        context: the cp axis: splits batches, owns masks.
        tensor: what was split over tp.
        autocast: type that operations are cast to in forward, or None (float32, or FSDP2 casts the weights).
        choices: (what was chosen, why), to be printed.
        automatic_rate: the peak learning rate that suits its weights, random or pretrained ones.
    """

    forward: nn.Module
    module: PreTrainedModel
    context: ContextParallel
    tensor: TensorParallelism
    autocast: torch.dtype | None
    choices: tuple[tuple[str, str], ...] = ()
    automatic_rate: float = RANDOM


def build(
    config: Config, architecture: PretrainedConfig, mesh: Mesh, *, weights: Weights | None = None
) -> ParallelModel:
    """The model on the mesh, filled with its weights; every rank calls it, after the architecture's check.

    Args:
        weights: in place of those that `config.model` names.
    """
    dtype = DTYPES[config.model.dtype]
    context, attention_choices = _context(config, architecture, mesh)
    model: Any = load.build_without_storage(
        architecture, attention=context.name, trust_remote_code=config.model.trust_remote_code
    )
    if (own_attention := context.adapt(model)) is not None:
        attention_choices = [("attention: the model's own", own_attention)]
    model.config.use_cache = False
    stored = stored_in_files(model)
    tensor, split_choices = _split(model, config, mesh)
    if config.train.activation_checkpointing != "none":
        _checkpoint_layers(model, config.train.activation_checkpointing)
    if config.train.compile:
        for layer in load.layers_of(model):
            layer.compile()
    loss_choices = _install_head(model, config, tensor, mesh)
    kind, why = data_parallel.choose(mesh.topology)
    if kind == "fsdp":
        data_parallel.shard(
            model, mesh, dtype=dtype, cpu_offload=config.mesh.cpu_offload, prefetch=config.mesh.prefetch
        )
    seed = config.train.seed
    given = nullcontext(weights) if weights is not None else None
    with given or load.weights_of(config.model, architecture, stored, seed=seed, mesh=mesh) as found:
        storage.fill(
            model,
            found,
            mesh=mesh,
            tp_placements=tensor.placements,
            fsdp_sharded=kind == "fsdp",
            first_value=partial(lora.initial, seed=seed),
            offloaded=config.mesh.cpu_offload,
        )
    model.train()
    forward = data_parallel.replicate(model, mesh) if kind == "ddp" else model
    choices = ((f"data parallelism: {kind}", why), *attention_choices, *split_choices, *loss_choices)
    autocast = None if kind == "fsdp" or dtype == torch.float32 else dtype
    rate, _ = automatic_rate(config.model)
    return ParallelModel(forward, model, context, tensor, autocast, choices, rate)


# What `selective` keeps: results that are expensive to compute and small to keep, of matrix products and of attention.
_KEPT = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.higher_order.flex_attention,
}


def _checkpoint_layers(model: PreTrainedModel, kind: str) -> None:
    """Lets backward compute each layer again: all of it (`full`), or the cheap part (`selective`)."""
    settings: dict[str, Any] = {"use_reentrant": False}
    if kind == "selective":
        settings["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=settings)


def _policy(context: Any, operation: Any, *arguments: Any, **keywords: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE


def _context(config: Config, architecture: PretrainedConfig, mesh: Mesh) -> tuple[ContextParallel, Choices]:
    method, method_why = choose_method(config.mesh.cp_method, architecture, mesh.topology, seq_len=config.data.seq_len)
    kernel, kernel_why = str(config.model.attention), "as given"
    if kernel == "auto":
        kernel, kernel_why = flex.choose(architecture, device=mesh.device.type)
    choices = [(f"context parallelism: {method}", method_why)] if mesh.size("cp") > 1 else []
    if kernel == "flex" or config.model.attention != "auto":
        choices.append((f"attention: {kernel}", kernel_why))
    return ContextParallel(mesh, method=method, kernel=kernel), choices


def _split(model: PreTrainedModel, config: Config, mesh: Mesh) -> tuple[TensorParallelism, Choices]:
    """Splits the model over tp; adapters come after, as their projections are split then."""
    shared_evenly = config.data.seq_len % (mesh.size("cp") * mesh.size("tp")) == 0
    scatter = config.mesh.sequence_parallel if shared_evenly else False
    tensor, sequence = split_over_tp(model, mesh, scatter=scatter, whole_experts=config.mesh.ep > 1)
    choices = [sequence] if sequence is not None else []
    if config.mesh.ep > 1:
        choices.append((f"experts: whole ones on each of {config.mesh.ep} tp ranks", "as given"))
    if config.model.lora.r:
        tensor = lora.inject(model, config.model.lora, tensor, mesh)
        choices.append(lora.described(model))
    return tensor, choices


def _install_head(model: PreTrainedModel, config: Config, tensor: TensorParallelism, mesh: Mesh) -> Choices:
    sharers = tensor.sequence_group
    whole = {"whole": lambda hidden: gather_parts(hidden, sharers)} if sharers is not None else {}
    kind, why = head.kind_of(model)
    fused, fused_why = False, ""
    if config.train.fused_loss == "liger" or (config.train.fused_loss == "auto" and mesh.device.type == "cuda"):
        asked, smoothing = config.train.fused_loss, config.train.label_smoothing
        fused, fused_why = fused_loss.choose(
            asked, kind, device=mesh.device.type, tp=mesh.size("tp"), label_smoothing=smoothing
        )
    head.install(model, chunk=config.train.loss_chunk_tokens, fused=fused, **whole)
    choices = [("loss: Liger's kernel", fused_why)] if fused else []
    if kind is None:
        choices.append(("loss: all logits of a micro-batch at once", why))
    return choices
