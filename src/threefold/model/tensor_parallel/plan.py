"""One layer over several ranks: the model's own plan, made exact.

transformers gives each architecture a plan (which projection is split by columns, which by rows). Three things are
changed: the head stays split over the vocabulary, so that no rank ever holds full logits; a tied embedding is split the
same way as the head it shares its weight with; norms that see only this rank's heads get their gradient summed once, at
the end of a step, because the plan's own hook would sum an accumulated gradient again at every micro-batch.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement
from transformers import PretrainedConfig, PreTrainedModel
from transformers.distributed.tensor_parallel import (
    ALL_PARALLEL_STYLES,
    apply_tensor_parallelism,
)

from threefold.errors import ConfigError, Problem
from threefold.mesh.divisibility import head_problems
from threefold.mesh.mesh import Mesh
from threefold.model.head import kind_of
from threefold.model.layer_kinds import common_number
from threefold.model.load import layers_of
from threefold.model.tensor_parallel import layers, symmetric
from threefold.model.tensor_parallel.layers import SharedInput
from threefold.plan.choices import Decision

_OUR_STYLES = {
    (nn.Linear, "colwise"),
    (nn.Linear, "rowwise"),
    (nn.Embedding, "embedding_rowwise"),
}
_NUMBER = re.compile(r"\.\d+(?=\.|$)")
_SUMMED_EVERY_BACKWARD = "replicated_with_grad_allreduce"
# Styles of projections between which a model computes with all of their columns.
_WHOLE_AROUND = ("colwise_gather_output", "rowwise_split_input", "colwise_rep", "rowwise_rep")


@dataclass(frozen=True)
class TensorParallelism:
    """The split parameters, and how they are split.

    Attributes:
        placements: parameter name -> its placement on the tp axis, for the parameters that are split.
        partial_gradients: names of the replicated parameters whose gradient each tp rank knows only in part.
        vocabulary_start: first vocabulary entry of this rank's logits; None if its logits are complete.
        sequence_group: the tp ranks that share the sequence between the split parts; None if each holds all of it.
        projections: name of each plain layer with a rule -> which; those of `colwise` and `rowwise` have our forward.
        shared_input: what the split projections read; None if there are none.
    """

    placements: Mapping[str, Placement] = field(default_factory=dict)
    partial_gradients: tuple[str, ...] = ()
    vocabulary_start: int | None = None
    sequence_group: dist.ProcessGroup | None = None
    projections: Mapping[str, str] = field(default_factory=dict)
    shared_input: SharedInput | None = None

    @property
    def given_in_parts(self) -> list[str]:
        """The split parameters of layers that give each tp rank a part; others gather it, or take whole inputs."""
        whole = tuple(
            f"{name}." for name, style in self.projections.items() if style in _WHOLE_AROUND
        )
        return [name for name in self.placements if not name.startswith(whole)]


def plan_problems(
    config: PretrainedConfig, tp_size: int, *, plan: Mapping[str, str] | None
) -> list[Problem]:
    """Why this architecture cannot be split over `tp_size` ranks; empty if it can.

    Args:
        plan: the model's own tensor-parallel plan; one without a rule for its layers does not count.
    """
    text = config.get_text_config()
    name = config.model_type
    if tp_size > 1 and not any(".*." in name for name in plan or ()):
        return [
            Problem(
                f"mesh.tp = {tp_size}, but transformers has no tensor-parallel plan for {name!r}",
                "a model whose layers can be split, or one tp rank",
                "--mesh.tp 1   (use mesh.dp, mesh.dp_shard or mesh.cp instead)",
            )
        ]
    heads, kv_heads = (
        common_number(text, key) for key in ("num_attention_heads", "num_key_value_heads")
    )
    return head_problems(tp_size, heads, kv_heads, name=name)


def expert_problems(config: PretrainedConfig, ep_size: int, tp_size: int) -> Iterator[Problem]:
    """Why each of `ep_size` ranks cannot be given whole experts; empty if it can."""
    if ep_size == 1:
        return
    text = config.get_text_config()
    name = config.model_type
    experts = getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None)
    if not getattr(text, "base_model_ep_plan", None) or not isinstance(experts, int):
        what = f"mesh.ep = {ep_size}, but transformers has no expert-parallel plan for {name!r}"
        yield Problem(what, "a model with experts that can be distributed", "--mesh.ep 1")
        return
    if ep_size != tp_size:
        yield Problem(
            f"mesh.ep = {ep_size} is not mesh.tp ({tp_size})",
            "1, or the number of tp ranks, which hold the same tokens: experts shared by more ranks would be sharded "
            "over another mesh than the rest of the model, which is not supported",
            f"--mesh.ep {tp_size}",
        )
    if experts % ep_size:
        sizes = [
            size for size in range(1, experts + 1) if experts % size == 0 and size <= ep_size
        ]
        yield Problem(
            f"mesh.ep = {ep_size} cannot divide the {experts} experts of {name!r}",
            "whole experts on every rank",
            f"--mesh.ep {sizes[-1]} --mesh.tp {sizes[-1]}",
        )


def _expanded(model: PreTrainedModel, plan: Mapping[str, str]) -> dict[str, str]:
    """A plan's rules by the names that they match: a module's parameters, then the module; `*` is any number."""
    rules = {}
    for name, module in model.named_modules():
        rule = plan.get(_NUMBER.sub(".*", name))
        for own, _ in module.named_parameters(recurse=False):
            parameter = f"{name}.{own}" if name else own
            if (style := plan.get(_NUMBER.sub(".*", parameter), rule)) is not None:
                rules[parameter] = style
        if rule is not None:
            rules[name] = rule
    return rules


def split_over_tp(
    model: PreTrainedModel,
    mesh: Mesh,
    *,
    scatter: Decision[bool | str],
    whole_experts: bool,
    exact: bool,
) -> tuple[TensorParallelism, tuple[str, str] | None]:
    """Splits `model` (on the meta device) over the tp axis; returns what was split, and (the choice, why).

    Args:
        scatter: sequence parallelism between the split parts (`plan.choices.sequence_parallel`).
        whole_experts: give each tp rank some experts instead of a part of all.
        exact: sums do not depend on the mesh, and are not sent beside products by default.

    Raises:
        ConfigError: sequence parallelism was asked for and the plan or the devices do not allow it.
    """
    if mesh.tp_size == 1:
        return TensorParallelism(), None
    group = mesh.group("tp")
    assert group is not None and mesh.parameter_mesh is not None
    head_name, head = _name_and_module(model, model.get_output_embeddings())
    embedding_name, embedding = _name_and_module(model, model.get_input_embeddings())
    tied = head is not None and embedding is not None and head.weight is embedding.weight
    plan, partial = _exact_plan(model, head_name, tied_embedding=embedding_name if tied else "")
    experts = _expanded(model, model.ep_plan) if whole_experts else {}
    plan = {name: style for name, style in plan.items() if name not in experts}
    modules = dict(model.named_modules())
    scattered, why = _sequence(model, modules, {**plan, **experts}, asked=scatter, mesh=mesh)
    if scattered:
        plan |= _rules(model, embedding_name, "embedding_rowwise")
    overlapped = scatter.value == "async"
    if overlapped:
        symmetric.share_memory(group)
    elif scattered and scatter.value == "possible" and not exact:
        unfit = symmetric.unfit(mesh)
        overlapped = unfit is None
        why = f"not sent beside the products: {unfit}"
    if overlapped:
        why = "sent beside the products, in memory that the tp ranks share"
    shared = SharedInput(group, scattered=scattered, overlapped=overlapped)
    projections = _split(model, plan, mesh, shared)
    if experts:
        from transformers.distributed.expert_parallel import apply_expert_parallelism

        apply_expert_parallelism(
            model, mesh.parameter_mesh["tp"], mesh.parameter_mesh["tp"], experts
        )
    parts = [
        part
        for layer in layers_of(model)
        if scattered
        for part in layers.split_parts(layer, modules, plan)
    ]
    for part in parts:
        columns = [each for name, each in modules.items() if projections.get(name) == "colwise"]
        layers.enter(
            part, shared, next((each for each in part.modules() if each in columns), None)
        )
    if tied:
        # Splitting gave each of the two modules its own parameter; they are one again.
        head._parameters["weight"] = embedding._parameters["weight"]
    partial += _without_rule(modules, plan)
    parameters = dict(model.named_parameters())
    placements = {
        name: each.placements[0]
        for name, each in parameters.items()
        if isinstance(each, DTensor)
    }
    if scattered:
        partial += _known_in_part(model, plan, parts, placements)
    split = TensorParallelism(
        placements=placements,
        partial_gradients=tuple(dict.fromkeys(name for name in partial if name in parameters)),
        vocabulary_start=_vocabulary_start(head, mesh) if head_name else None,
        sequence_group=group if scattered else None,
        projections=projections,
        shared_input=shared,
    )
    return split, (f"sequence parallelism: {'on' if scattered else 'off'}", why)


def _exact_plan(
    model: PreTrainedModel, head_name: str, *, tied_embedding: str
) -> tuple[dict[str, str], list[str]]:
    """The model's plan with a head that stays split, and the replicated parameters whose gradient it would sum."""
    plan = _expanded(model, model.tp_plan or {})
    partial = [name for name, style in plan.items() if style == _SUMMED_EVERY_BACKWARD]
    plan |= dict.fromkeys(partial, "replicate")
    return plan | _rules(model, head_name, "colwise") | _rules(
        model, tied_embedding, "embedding_rowwise"
    ), partial


def _rules(model: PreTrainedModel, module: str, style: str) -> dict[str, str]:
    if not module:
        return {}
    own = [
        f"{module}.{name}"
        for name, _ in model.get_submodule(module).named_parameters(recurse=False)
    ]
    return dict.fromkeys([*own, module], style)


def _without_rule(modules: Mapping[str, nn.Module], plan: Mapping[str, str]) -> list[str]:
    """The parameters that see only a rank's columns, and that the plan does not mention.

    They are those of activations between columns and rows (Apertus' xIELU), and of norms of heads (q_norm behind a
    q_proj, as GLM-4.5 has it).
    """
    names = []
    for name, module in modules.items():
        owner = name.rpartition(".")[0]
        siblings = {
            plan.get(f"{owner}.{child}") for child, _ in modules[owner].named_children()
        }
        if (
            type(module).__module__ == "transformers.activations"
            and {"colwise", "rowwise"} <= siblings
        ) or (name.endswith("_norm") and plan.get(f"{name[:-4]}proj") == "colwise"):
            names += [f"{name}.{own}" for own, _ in module.named_parameters()]
    return names


def _known_in_part(
    model: PreTrainedModel,
    plan: Mapping[str, str],
    parts: list[nn.Module],
    placements: Mapping[str, Placement],
) -> list[str]:
    """The whole parameters that see a part of the sequence: between the split parts, and biases after a sum."""
    inside = {id(parameter) for part in parts for parameter in part.parameters()}
    biases = {f"{name}.bias" for name, style in plan.items() if style == "rowwise"}
    between = [
        name
        for name, each in model.named_parameters()
        if id(each) not in inside or name in biases
    ]
    return [
        name for name in between if name not in placements or placements[name].is_replicate()
    ]


def _sequence(
    model: PreTrainedModel,
    modules: Mapping[str, nn.Module],
    plan: Mapping[str, str],
    *,
    asked: Decision[bool | str],
    mesh: Mesh,
) -> tuple[bool, str]:
    wanted, why = asked
    if wanted is False:
        return False, why
    possible, why = layers.allowed(modules, plan, layers_of(model))
    head_kind, head_why = kind_of(model)
    if possible and head_kind is None:
        possible, why = False, head_why
    if wanted != "possible" and not possible:
        raise ConfigError(
            f"mesh.sequence_parallel = {str(wanted).lower()}, but {model.config.model_type!r} does not allow it: {why}",
            expected="layers whose split parts each begin by columns and end by rows",
            fix="--mesh.sequence_parallel auto   (or false)",
        )
    if wanted == "async" and (lacks := symmetric.lacking(mesh)) is not None:
        raise ConfigError(
            f"mesh.sequence_parallel = async, which needs memory that the tp ranks share, but {lacks}",
            expected="CUDA devices of one host that read and write one another's memory (NVLink), seen by each rank",
            fix="--mesh.sequence_parallel auto",
        )
    return possible, why


def _split(
    model: PreTrainedModel, plan: dict[str, str], mesh: Mesh, shared: SharedInput
) -> dict[str, str]:
    """Splits parameters as transformers' styles do; gives plain layers the forward of `layers`, and returns how."""
    group = mesh.group("tp")
    assert mesh.parameter_mesh is not None and group is not None
    modules = dict(model.named_modules())
    parameters = dict(model.named_parameters())
    projections: dict[str, str] = {}
    theirs: dict[str, str] = {}
    for name, style in plan.items():
        owner = modules[name if name in modules else name.rpartition(".")[0]]
        if (type(owner), style) not in _OUR_STYLES:
            theirs[name] = style
            if type(owner) is nn.Linear and name in modules:
                projections[name] = style
        elif name in parameters:
            ALL_PARALLEL_STYLES[style].shard_param(
                owner, name.rpartition(".")[2], mesh.parameter_mesh["tp"]
            )
        elif style == "embedding_rowwise":
            start = _vocabulary_start(owner, mesh)
            owner.forward = layers.vocabulary_forward(owner, shared, start=start)
        else:
            projections[name] = style
            forward = layers.column_forward if style == "colwise" else layers.row_forward
            owner.forward = forward(owner, shared)
    apply_tensor_parallelism(model, mesh.parameter_mesh["tp"], theirs)
    return projections


def _vocabulary_start(head: nn.Module, mesh: Mesh) -> int:
    # The chunking of torch.chunk and of DTensor's Shard: all but the last parts have the rounded-up size.
    entries: int = head.weight.shape[0]  # type: ignore[union-attr]
    return min(entries, mesh.tp_rank * -(-entries // mesh.tp_size))


def _name_and_module(model: nn.Module, module: nn.Module | None) -> tuple[str, Any]:
    return next(
        ((name, each) for name, each in model.named_modules() if each is module), ("", None)
    )
