"""Context parallelism under transformers' own loop: the model looks whole to the Trainer, and holds a part of each row.

`threefold.init_mesh(cp=N)` before the Trainer is made asks for it. The model's forward is replaced by one that takes
whole rows, cuts them as `model.context_parallel` does (head and tail, true positions, every mask kept), and returns the
mean loss over all targets of the rows, the same on every cp rank. So to the loop cp ranks are ranks that share their
rows, as tensor ranks are; the average over all ranks then is the gradient of whole rows.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from transformers import PretrainedConfig
from transformers.modeling_outputs import CausalLMOutput

from threefold.data.rows.concat import IGNORED
from threefold.errors import ConfigError, Problem
from threefold.mesh.mesh import Mesh, active_mesh
from threefold.model.context_parallel.split import ContextParallel, choose_method, gathered_positions, split_problems

# What the Trainer passes to every model, and what a cut one does alike without.
_PASSED_OVER = {"num_items_in_batch", "return_dict", "use_cache", "output_attentions", "output_hidden_states"}
_NOT_THERE = -1  # the document of places that only fill a row up


def mesh_of_rows() -> Mesh | None:
    """The mesh that this process has joined, where its rows are to be cut; None where there is none."""
    mesh = active_mesh()
    return mesh if mesh is not None and mesh.size("cp") > 1 else None


def problems(trainer: Any) -> list[Problem]:
    """What stands against cutting the rows of this Trainer; empty where nothing does, or it was not asked for."""
    mesh, args = mesh_of_rows(), trainer.args
    if mesh is None:
        return []
    found = split_problems("auto", trainer.model.config, mesh.topology)
    kind = type(trainer.model).__name__
    for wrong, what, expected, fix in (
        (
            not kind.endswith("ForCausalLM"),
            f"threefold.init_mesh(cp={mesh.size('cp')}), and the model is a {kind}",
            "a causal language model, whose loss is a sum over places",
            "threefold.init_mesh(cp=1)",
        ),
        (
            mesh.size("tp") > 1 or mesh.topology.dp_shard > 1,
            f"the mesh is {mesh.topology}",
            "data and context ranks: transformers' loop has tensor ranks and shards by its DistributedConfig",
            f"threefold.init_mesh(cp={mesh.size('cp')})",
        ),
        (
            trainer.compute_loss_func is not None or args.label_smoothing_factor > 0,
            "a loss of its own (compute_loss_func or label_smoothing_factor) beside cut rows",
            "the model's own loss: others would see a part of each row",
            "leave it out, or threefold train --train.label_smoothing",
        ),
        (
            bool(getattr(trainer.model.config, "output_router_logits", False)),
            "output_router_logits = True beside cut rows",
            "a router's loss over whole rows, which transformers' loop does not have then",
            f"threefold train --mesh.cp {mesh.size('cp')}   (it is exact there)",
        ),
    ):
        if wrong:
            found.append(Problem(what, expected, fix))
    return found


def cut_rows(model: Any, mesh: Mesh) -> None:
    """Replaces the model's forward; before anything is wrapped around it."""
    config: PretrainedConfig = model.config
    longest = getattr(config.get_text_config(), "max_position_embeddings", 0) or 0
    method, _ = choose_method("auto", config, mesh.topology, seq_len=longest)
    context = ContextParallel(mesh, method=method)
    model.set_attn_implementation(context.name)
    own_forward = model.forward
    group = mesh.group("cp")
    assert group is not None

    @functools.wraps(own_forward)
    def forward(
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> CausalLMOutput:
        if others := sorted(name for name in kwargs.keys() - _PASSED_OVER if kwargs[name] is not None):
            raise ConfigError(
                f"the model has its rows cut among {context.size} context ranks, and was given {', '.join(others)}",
                expected="input_ids, attention_mask, position_ids and labels: anything else would be left out",
                fix="leave it out; to generate, save_model(DIR) and from_pretrained(DIR) in one process",
            )
        length = input_ids.shape[1]
        whole = _filled_up(input_ids, attention_mask, position_ids, labels, unit=2 * context.size)
        # The layers are given their masks, so what is recomputed in backward needs no batch.
        with context.batch(whole) as part:
            logits = own_forward(
                input_ids=part["input_ids"],
                position_ids=part["position_ids"],
                attention_mask=torch.ones_like(part["input_ids"]),
                use_cache=False,
            ).logits
        loss = None
        if labels is not None:
            total = F.cross_entropy(
                logits.float().flatten(0, 1), part["labels"].flatten(), ignore_index=IGNORED, reduction="sum"
            )
            loss = _SumOfParts.apply(total, group) / whole["labels"].ne(IGNORED).sum()
        if not torch.is_grad_enabled():
            logits = _in_row_order(logits, group)[:, :length]
        return CausalLMOutput(loss=loss, logits=logits)

    model.forward = forward


def _filled_up(
    input_ids: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None, labels: Tensor | None, *, unit: int
) -> dict[str, Tensor]:
    """Whole rows with shifted labels, in a length that the ranks can share; padding sees and is seen by nobody else."""
    rows, length = input_ids.shape
    room = -length % unit
    if position_ids is None:
        position_ids = torch.arange(length, device=input_ids.device).expand(rows, -1)
    # A document is where positions count on; a packed row begins anew at 0.
    documents = (position_ids.diff(dim=1, prepend=position_ids[:, :1] - 1) != 1).cumsum(1)
    if attention_mask is not None:
        documents = documents.where(attention_mask.bool(), _NOT_THERE)
    targets = torch.full_like(input_ids, IGNORED)
    if labels is not None:
        targets[:, :-1] = labels[:, 1:]
    return {
        "input_ids": F.pad(input_ids, (0, room)),
        "labels": F.pad(targets, (0, room), value=IGNORED),
        "position_ids": F.pad(position_ids, (0, room)),
        "document_ids": F.pad(documents, (0, room), value=_NOT_THERE),
    }


def _in_row_order(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[rows, sequence / cp, ...] of each rank -> [rows, sequence, ...], each place where it stands in its row."""
    parts = [torch.empty_like(part) for _ in range(group.size())]
    dist.all_gather(parts, part.contiguous(), group=group)
    gathered = torch.cat(parts, dim=1)
    whole = torch.empty_like(gathered)
    whole[:, gathered_positions(gathered.shape[1], cp_size=group.size())] = gathered
    return whole


class _SumOfParts(torch.autograd.Function):
    """The sum over the cp ranks; its gradient is theirs times their number, as the loop averages over all ranks."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.size = group.size()
        total = part.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * ctx.size, None
