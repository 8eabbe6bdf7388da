"""From a config to a model that is ready for training steps, in the one correct order.

load (without storage) -> tensor parallel -> float8 -> activation checkpointing -> compile -> data parallel -> read the
weights. The optimizer is built afterwards, on the parameters as they are then.
"""

import dataclasses
import warnings
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers import PretrainedConfig, PreTrainedModel

from threefold.config.schema import Config
from threefold.mesh.mesh import Mesh
from threefold.model import (
    compiled,
    data_parallel,
    float8,
    head,
    load,
    lora,
    precision,
    weight_loading,
)
from threefold.model.activation_offload import HostActivations
from threefold.model.context_parallel import attention_choice
from threefold.model.context_parallel.attention import ContextParallel
from threefold.model.exact import limits
from threefold.model.gradient_sums import FloatSums
from threefold.model.head_gradient import is_product
from threefold.model.layer_kinds import heads_of
from threefold.model.model import Model
from threefold.model.tensor_parallel.plan import TensorParallelism, split_over_tp
from threefold.model.weight_check import (
    Stored,
    Weights,
    is_adapter,
    parameters_named,
    stored_in_files,
)
from threefold.plan.choices import GIVEN, Resolved, fused_loss, resolve

if TYPE_CHECKING:
    from threefold.model.working_copy import WorkingCopy

Choices = list[tuple[str, str]]


def build(
    config: Config,
    architecture: PretrainedConfig,
    mesh: Mesh,
    *,
    weights: Weights | None = None,
) -> Model:
    """The model on the mesh, filled with its weights; every rank calls it, after the architecture's check.

    Args:
        weights: in place of those that `config.model` names.
    """
    built, stored = arranged(config, architecture, mesh)
    model, seed = built.module, config.train.seed
    supplied = nullcontext(weights) if weights is not None else None
    with supplied or load.weights_of(
        config.model, architecture, stored, seed=seed, mesh=mesh
    ) as read:
        weight_loading.fill(
            model,
            read,
            mesh=mesh,
            tp_placements=built.tensor.placements,
            first_value=partial(lora.initial, seed=seed),
            offloaded=config.mesh.cpu_offload,
        )
    model.train()
    if built.working is not None:
        built.working.refresh()
    if resolved_on(mesh, config, architecture).data_parallel.value != "ddp":
        return built
    return dataclasses.replace(built, forward=data_parallel.replicate(model, mesh))


def resolved_on(mesh: Mesh, config: Config, architecture: PretrainedConfig) -> Resolved:
    """The automatic choices of a config for a model on a mesh."""
    return resolve(
        config,
        mesh.topology,
        data_parallel.device_of(mesh),
        heads=heads_of(architecture),
        drops_attention=attention_choice.drops_weights(architecture),
        unserved=attention_choice.unserved(architecture),
    )


def arranged(
    config: Config, architecture: PretrainedConfig, mesh: Mesh
) -> tuple[Model, Stored]:
    """The model on the mesh, still without storage, and what its files must hold."""
    resolved = resolved_on(mesh, config, architecture)
    dtype = precision.DTYPES[resolved.dtype.value]
    context, attention_choices = _context(architecture, mesh, resolved)
    model: Any = load.build_without_storage(architecture, config.model, attention=context.name)
    if (own_attention := context.adapt(model)) is not None:
        attention_choices = [("attention: the model's own", own_attention)]
    model.config.use_cache = False
    stored = stored_in_files(model)
    kept = frozenset[str]()  # names of what stays float32
    if dtype != torch.float32:
        kept = precision.kept_in_float32(model)
        like = load.outline(architecture, config.model, dtype=torch.bfloat16)
        precision.narrow_buffers(model, like, kept)
    tensor, split_choices = _split(model, config, mesh, resolved)
    context.note_split_heads(model, tensor.given_in_parts)
    if config.train.float8 != "none":
        split_choices.append(float8.convert(model, config.train.float8))
    if config.train.activation_checkpointing != "none":
        _checkpoint_layers(model, config.train.activation_checkpointing, mesh)
    if resolved.compiled.value:
        recomputed = config.train.activation_checkpointing
        around = recomputed == "offload" or (recomputed == "full" and mesh.tp_size > 1)
        left_out = compiled.waiting_layers(model, dtype=dtype, device=mesh.device.type)
        compiled.compile_layers(model, recomputed_around=around, left_out=left_out)
        split_choices.append(("compiled layers", resolved.compiled.why))
        if left_out:
            why = "compiled, experts in float32 would wait for the device; --model.dtype bfloat16 compiles them"
            split_choices.append((f"layers that are not compiled: {len(left_out)}", why))
    loss_choices = _install_head(model, config, tensor, mesh)
    offload = config.mesh.cpu_offload
    sharing = [data_parallel.gathering(model, mesh, config, dtype)]
    (kind, why), exact = resolved.data_parallel, None
    if kind == "fsdp":
        whole = parameters_named(model, kept)
        asked = config.train.exact
        exact = data_parallel.shard(
            model, mesh, dtype=dtype, cpu_offload=offload, kept=whole, exact=asked, ends=True
        )
        if config.train.float8 != "none" and mesh.size("fsdp") > 1:
            split_choices.append(
                float8.gather_in_8_bits(model, mesh, config.train.float8, offloaded=offload)
            )
    working = None
    if kind == "none" and dtype != torch.float32:
        working = _working_copy(model, dtype, kept)
        sharing.append(
            (
                "weights: a copy in bfloat16",
                "the optimizer writes it beside the float32 weights",
            )
        )
    sharing += [limits.described(config, mesh.topology)] if exact is not None else []
    layout = (f"data parallelism: {kind}", why), *(each for each in sharing if each is not None)
    choices = (*layout, *attention_choices, *split_choices, *loss_choices)
    rate, _ = config.model.automatic_rate
    built = Model(
        model,
        model,
        mesh,
        tensor,
        context,
        None,
        choices,
        rate,
        config,
        architecture,
        sums=exact or FloatSums(mesh),
        working=working,
    )
    return built, stored


def _working_copy(
    model: PreTrainedModel, dtype: torch.dtype, kept: frozenset[str]
) -> "WorkingCopy":
    """The copy with which a model on the meta device will compute; weights frozen under adapters need no other copy."""
    from threefold.model.working_copy import WorkingCopy

    whole = parameters_named(model, kept)
    for name, parameter in model.named_parameters() if lora.target_names(model) else ():
        if not parameter.requires_grad and not is_adapter(name) and parameter not in whole:
            parameter.data = parameter.data.to(dtype)
    return WorkingCopy(model, dtype, kept)


# Kept by `selective`: results that are expensive to compute and small to keep, of matrix products and of attention.
_SAVED_OPS = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten._scaled_mm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.higher_order.flex_attention,
    torch.ops.torch_attn._varlen_attn.default,
}


def _checkpoint_layers(model: PreTrainedModel, kind: str, mesh: Mesh) -> None:
    """Lets backward compute each layer again: all of it (`full`, `offload`), or the cheap part (`selective`)."""
    settings: dict[str, Any] = {"use_reentrant": False}
    if kind == "selective":
        settings["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    # From transformers 5.24 on an alias, for a name that earlier versions do not have.
    with warnings.catch_warnings(action="ignore", category=FutureWarning):
        model.gradient_checkpointing_enable(settings)
    if kind == "offload":
        own = HostActivations(mesh.device).checkpoint
        for module in model.modules():
            if hasattr(module, "_gradient_checkpointing_func"):
                module._gradient_checkpointing_func = own


def _policy(context: Any, operation: Any, *arguments: Any, **keywords: Any) -> CheckpointPolicy:
    return (
        CheckpointPolicy.MUST_SAVE
        if operation in _SAVED_OPS
        else CheckpointPolicy.PREFER_RECOMPUTE
    )


def _context(
    architecture: PretrainedConfig, mesh: Mesh, resolved: Resolved
) -> tuple[ContextParallel, Choices]:
    (method, method_why), (kernel, kernel_why) = resolved.cp_method, resolved.attention
    choices = [(f"context parallelism: {method}", method_why)] if mesh.cp_size > 1 else []
    if kernel != "sdpa" or kernel_why == GIVEN:
        choices.append((f"attention: {kernel}", kernel_why))
    causal = ""
    if mesh.on_cuda and (head_dim := attention_choice.head_size(architecture)) is not None:
        halved = mesh.cp_size > 1 and method == "gather"
        capability = torch.cuda.get_device_capability(mesh.device)
        causal, why = attention_choice.choose(
            capability,
            dtype=resolved.dtype.value,
            head_dim=head_dim,
            halved=halved,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        choices.append((f"attention without a mask: {causal}", why))
    return ContextParallel(mesh, method=method, kernel=kernel, causal=causal), choices


def _split(
    model: PreTrainedModel, config: Config, mesh: Mesh, resolved: Resolved
) -> tuple[TensorParallelism, Choices]:
    """Splits the model over tp; adapters come after, as their projections are split then."""
    scatter = resolved.sequence_parallel
    tensor, sequence = split_over_tp(
        model,
        mesh,
        scatter=scatter,
        whole_experts=config.mesh.ep > 1,
        exact=config.train.exact,
    )
    choices = [sequence] if sequence is not None else []
    if config.mesh.ep > 1:
        choices.append(
            (f"experts: whole ones on each of {config.mesh.ep} tp ranks", "as given")
        )
    if config.model.lora.r:
        tensor = lora.inject(model, config.model.lora, tensor, mesh)
        choices.append(lora.described(model))
    return tensor, choices


def _install_head(
    model: PreTrainedModel, config: Config, tensor: TensorParallelism, mesh: Mesh
) -> Choices:
    kind, why = head.kind_of(model)
    splitters = mesh.group("tp") if tensor.vocabulary_start is not None else None
    chunk, sharers = config.train.loss_chunk_tokens, tensor.sequence_group
    head.install(model, chunk=chunk, sharers=sharers, splitters=splitters)
    if kind is None:
        return [("loss: all logits of a micro-batch at once", why)]
    fused, why = fused_loss(config.train.fused_loss, data_parallel.device_of(mesh))
    return (
        [("loss: by kernels", why)]
        if fused and is_product(model.get_output_embeddings())
        else []
    )
