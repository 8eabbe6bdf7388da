"""Context parallelism under transformers' own loop: each cp rank computes a part of each row, hidden from the Trainer.

`threefold.init_mesh(cp=N)` before the Trainer is made asks for it. The model's forward is replaced by one that takes
complete rows, splits them as `model.context_parallel` does (head and tail, true positions, every mask kept), and
returns the mean loss over all targets of the rows, the same on every cp rank. So to the loop cp ranks share their rows,
as tensor ranks do, and the average over all ranks is the gradient of complete rows.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from transformers import PretrainedConfig
from transformers.modeling_outputs import CausalLMOutput

from threefold.check.admit import admit
from threefold.check.full_size import admit_first
from threefold.config.loading import validate
from threefold.config.schema import Config
from threefold.data.rows.concat import IGNORED
from threefold.errors import ConfigError, Problem
from threefold.mesh.mesh import Mesh, active_mesh
from threefold.model import head
from threefold.model.context_parallel import limits
from threefold.model.context_parallel.attention import ContextParallel
from threefold.model.context_parallel.limits import split_problems
from threefold.model.context_parallel.positions import gathered_positions
from threefold.model.head import first_position, longest_row
from threefold.model.layer_kinds import heads_of
from threefold.model.model import Model
from threefold.plan import choices

# Arguments that the Trainer passes to every model, and that change nothing here.
_IGNORED_ARGUMENTS = {
    "num_items_in_batch",
    "return_dict",
    "use_cache",
    "output_attentions",
    "output_hidden_states",
}
_NOT_THERE = -1  # the document of padding


def mesh_of_rows() -> Mesh | None:
    """The mesh that this process has joined, if it splits rows (cp > 1)."""
    mesh = active_mesh()
    return mesh if mesh is not None and mesh.cp_size > 1 else None


def problems(trainer: Any) -> Iterator[Problem]:
    """Why the rows of this Trainer cannot be split; nothing if they can, or if it was not asked for."""
    mesh, args = mesh_of_rows(), trainer.args
    if mesh is None:
        return
    yield from split_problems("auto", mesh.topology, trainer.model)
    cp = mesh.cp_size
    kind = type(trainer.model).__name__
    if not kind.endswith("ForCausalLM"):
        yield Problem(
            f"threefold.init_mesh(cp={cp}), and the model is a {kind}",
            "a causal language model, whose loss is a sum over positions",
            "threefold.init_mesh(cp=1)",
        )
    else:
        yield from limits.direction_problems(trainer.model, pretrained=True)
    if mesh.tp_size > 1 or mesh.topology.dp_shard > 1:
        yield Problem(
            f"the mesh is {mesh.topology}",
            "data and context ranks: transformers' loop has tensor ranks and shards by its DistributedConfig",
            f"threefold.init_mesh(cp={cp})",
        )
    if trainer.compute_loss_func is not None or args.label_smoothing_factor > 0:
        yield Problem(
            "a custom loss (compute_loss_func or label_smoothing_factor) together with split rows",
            "the model's own loss: any other loss would see only a part of each row",
            "leave it out, or threefold train --train.label_smoothing",
        )
    if getattr(trainer.model.config, "output_router_logits", False):
        yield Problem(
            "output_router_logits = True together with split rows",
            "a router's loss over entire rows, which transformers' loop then lacks",
            f"threefold train --mesh.cp {cp}   (it is exact there)",
        )


def _config_of(model: Any, dtype: str = "float32") -> Config:
    """What `threefold train` would be asked for, with rows that hold documents and padding."""
    asked = {
        "name_or_path": model.name_or_path or None,
        "trust_remote_code": not type(model).__module__.startswith("transformers."),
        "dtype": dtype,
    }
    return validate({"model": asked, "data": {"packing": "none", "document_mask": True}})


def _probe_of(
    model: Any, mesh: Mesh, context: ContextParallel
) -> Callable[[Mapping[str, Tensor]], None]:
    """A probe of the model's own forward, at the size of a first micro-batch; every rank calls it."""
    # Without peft's wrapper.
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    own_forward = inner.forward
    head.install(inner, chunk="auto")
    probed_forward, inner.forward = inner.forward, own_forward

    def probe(rows: Mapping[str, Tensor]) -> None:
        narrow = torch.is_autocast_enabled(mesh.device.type) or inner.dtype != torch.float32
        asked = _config_of(model, "bfloat16" if narrow else "float32")
        usual, inner.forward = inner.forward, probed_forward
        try:
            admit_first(
                Model(
                    inner, inner, mesh, context=context, asked=asked, architecture=inner.config
                ),
                rows,
            )
        finally:
            inner.forward = usual

    return probe


def cut_rows(model: Any, mesh: Mesh) -> None:
    """Replaces the model's forward, before anything wraps the model.

    Raises:
        ConfigError: the architecture fails a probe on this mesh; in the first step, its own forward fails one.
    """
    admit(_config_of(model), model.config, mesh)
    config: PretrainedConfig = model.config
    method = choices.cp_method(
        "auto", mesh.topology, heads=heads_of(config), seq_len=longest_row(config, model)
    ).value
    context = ContextParallel(mesh, method=method)
    model.set_attn_implementation(context.name)
    context.adapt(model)
    first = first_position(model)
    probes = [_probe_of(model, mesh, context)]
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
        if others := sorted(
            name for name in kwargs.keys() - _IGNORED_ARGUMENTS if kwargs[name] is not None
        ):
            raise ConfigError(
                f"the model splits its rows among {context.size} context ranks, and was given {', '.join(others)}",
                expected="input_ids, attention_mask, position_ids and labels: anything else would be ignored",
                fix="leave it out; to generate, save_model(DIR) and from_pretrained(DIR) in one process",
            )
        length = input_ids.shape[1]
        numbered = position_ids is None
        whole = _filled_up(
            input_ids, attention_mask, position_ids, labels, unit=2 * context.size
        )
        if probes and model.training and torch.is_grad_enabled():
            probes.pop()(whole)
        # The layers are passed their masks, so recomputation in backward needs no batch.
        with context.batch(whole) as part:
            logits = own_forward(
                input_ids=part["input_ids"],
                position_ids=part["position_ids"] + first if numbered else part["position_ids"],
                attention_mask=torch.ones_like(part["input_ids"]),
                use_cache=False,
            ).logits
        loss = None
        if labels is not None:
            total = F.cross_entropy(
                logits.float().flatten(0, 1),
                part["labels"].flatten(),
                ignore_index=IGNORED,
                reduction="sum",
            )
            loss = _SumOfParts.apply(total, group) / whole["labels"].ne(IGNORED).sum()
        if not torch.is_grad_enabled():
            logits = _in_row_order(logits, group)[:, :length]
        return CausalLMOutput(loss=loss, logits=logits)

    model.forward = forward


def _filled_up(
    input_ids: Tensor,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    labels: Tensor | None,
    *,
    unit: int,
) -> dict[str, Tensor]:
    """Complete rows with shifted labels, padded to a multiple of `unit`; padding attends only to padding."""
    rows, length = input_ids.shape
    room = -length % unit
    if position_ids is None:
        position_ids = torch.arange(length, device=input_ids.device).expand(rows, -1)
    # Positions count up inside a document; a packed row restarts at 0.
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
    """[rows, sequence / cp, ...] of each rank -> [rows, sequence, ...], in the order of the row."""
    parts = [torch.empty_like(part) for _ in range(group.size())]
    dist.all_gather(parts, part.contiguous(), group=group)
    gathered = torch.cat(parts, dim=1)
    whole = torch.empty_like(gathered)
    whole[:, gathered_positions(gathered.shape[1], cp_size=group.size())] = gathered
    return whole


class _SumOfParts(torch.autograd.Function):
    """The sum over the cp ranks; its gradient is multiplied by their number, as the loop averages over all ranks."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.size = group.size()
        total = part.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * ctx.size, None
