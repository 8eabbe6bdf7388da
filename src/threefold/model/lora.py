"""Low-rank adapters (LoRA, arXiv:2106.09685) in peft's modules, split in the same way as their projections.

An adapter adds scale * B(A(x)) to a projection. If tp splits the projection by columns, B is split by columns and A is
whole; if by rows, A is split by rows and B is whole, and the adapter's part joins the sum that the projection makes
anyway. So an adapter needs no additional collective. The exceptions are A's gradient (columns) and B's (rows), which
each rank knows only in part: they are summed once a step. The model's own weights are frozen.
"""

import copy
import dataclasses
import functools
import hashlib
import importlib.util
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import PreTrainedModel
from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES

from threefold.config.schema import LoraConfig
from threefold.errors import Problem, first_line
from threefold.mesh.mesh import Mesh
from threefold.model.collectives import local_part
from threefold.model.tensor_parallel.layers import SharedInput, row_forward
from threefold.model.tensor_parallel.plan import TensorParallelism
from threefold.model.weight_check import is_adapter, original

ADAPTER = "default"
_LATENT = "mla_kv_a_proj"


def problems(
    asked: LoraConfig, build: Callable[[], PreTrainedModel], *, name: str
) -> list[Problem]:
    """Why adapters of this model, which `build` makes without storage, cannot be trained; empty if they can."""
    if importlib.util.find_spec("peft") is None:
        what = f"model.lora.r = {asked.r}, but peft is not installed"
        expected = "the package that defines the adapters"
        return [Problem(what, expected, "pip install 'threefold[lora]'")]
    model = build()
    if not (linear := _linear_layers(model)):
        what = f"model.lora.r = {asked.r}, but {name!r} has no linear layers that adapters could be added to"
        expected = "an architecture whose projections are torch.nn.Linear"
        return [Problem(what, expected, "leave model.lora.r out: all weights are trained")]
    targets = asked.target_modules
    listed = f"[{', '.join(targets)}]" if isinstance(targets, tuple) else targets or "null"
    fix = "--model.lora.target_modules all-linear"
    try:
        insert(model, asked)
    except ValueError as error:
        what = f"model.lora.target_modules = {listed} is refused by peft for {name!r}: {first_line(error)}"
        expected = f"names of its linear layers: {', '.join(sorted({each.rpartition('.')[2] for each in linear}))}"
        return [Problem(what, expected, fix)]
    ends = {id(model.get_output_embeddings()), id(model.get_input_embeddings())}
    odd = [
        each
        for each, module in _adapted(model)
        if type(module.base_layer) is not nn.Linear or id(module) in ends
    ]
    expected = (
        "projections of the layers; not the embedding, the head or a layer of another kind"
    )
    return [
        Problem(
            f"model.lora.target_modules has {own}, which is not a linear layer inside {name!r}",
            expected,
            fix,
        )
        for own in [each.rpartition(".")[2] for each in odd[:1]]
    ]


def inject(
    model: PreTrainedModel, asked: LoraConfig, tensor: TensorParallelism, mesh: Mesh
) -> TensorParallelism:
    """Adds adapters to the projections of a model on the meta device, which may be split over tp already.

    Returns the splits, under the present names of the parameters.
    """
    with _as_whole(model):
        insert(model, asked)
    renamed = {original(name): name for name, _ in model.named_parameters()}
    placements = {renamed[name]: placement for name, placement in tensor.placements.items()}
    partial = [renamed[name] for name in tensor.partial_gradients]
    shared = tensor.shared_input
    for name, module in _adapted(model):
        style = tensor.projections.get(name)
        if style == _LATENT:
            assert mesh.parameter_mesh is not None
            module.forward = _latent_forward(module, mesh.parameter_mesh["tp"])
        if style not in ("colwise", "rowwise"):
            continue  # a whole layer, whose adapter is whole
        assert mesh.parameter_mesh is not None and shared is not None
        columns = style == "colwise"
        (split, placement), whole = (
            (("lora_B", Shard(0)), "lora_A") if columns else (("lora_A", Shard(1)), "lora_B")
        )
        layer = getattr(module, split)[ADAPTER]
        weight = distribute_tensor(
            layer.weight.detach(), mesh.parameter_mesh["tp"], [placement], src_data_rank=None
        )
        layer.weight = nn.Parameter(weight)
        placements[f"{name}.{split}.{ADAPTER}.weight"] = placement
        partial.append(f"{name}.{whole}.{ADAPTER}.weight")
        if columns:
            module.forward = _column_forward(module, shared)
        else:
            product = functools.partial(_product, module)
            module.forward = row_forward(module.base_layer, shared, adapter=product)
    return dataclasses.replace(tensor, placements=placements, partial_gradients=tuple(partial))


@contextmanager
def _as_whole(model: nn.Module) -> Iterator[None]:
    """Lets split layers look whole: peft takes the sizes of an adapter from them, and here it is split afterwards."""
    split = [(layer, layer.weight) for layer in model.modules() if type(layer) is nn.Linear]
    for layer, weight in split:
        layer.out_features, layer.in_features = weight.shape
        layer.weight = nn.Parameter(torch.empty(weight.shape, device="meta"))
    yield
    for layer, weight in split:
        layer.weight = weight.requires_grad_(False)


def _column_forward(module: Any, shared: SharedInput) -> Callable[[Tensor], Tensor]:
    """x [.., in] on every rank -> this rank's part [.., out / tp], its adapter's part added."""

    def forward(x: Tensor) -> Tensor:
        y: Tensor = module.base_layer(x)
        return y + _product(module, shared.take(x))

    return forward


def _latent_forward(module: Any, axis: DeviceMesh) -> Callable[[Tensor], Tensor]:
    """Keys and values before their heads: the positions' part goes to every head, and each tp rank has some of them.

    The plan sums the gradient of that part behind the layer; behind the adapter's product it is summed too.
    """

    def forward(x: Tensor) -> Tensor:
        y: Tensor = module.base_layer(x)
        if module.disable_adapters:
            return y
        return y + ALL_PARALLEL_STYLES[_LATENT].transform_output_post_forward(
            module.base_layer, _product(module, x), axis
        )

    return forward


def _product(module: Any, x: Tensor) -> Tensor:
    if module.disable_adapters:
        return x.new_zeros(())
    narrow = F.linear(
        module.lora_dropout[ADAPTER](x), local_part(module.lora_A[ADAPTER].weight)
    )
    product: Tensor = (
        F.linear(narrow, local_part(module.lora_B[ADAPTER].weight)) * module.scaling[ADAPTER]
    )
    return product


@contextmanager
def switched_off(model: nn.Module) -> Iterator[None]:
    """Inside, the model computes without its adapters, as it began."""
    adapted = [module for _, module in _adapted(model)]
    try:
        for module in adapted:
            # Not with peft's `enable_adapters`, which also changes `requires_grad`.
            module._disable_adapters = True
        yield
    finally:
        for module in adapted:
            module._disable_adapters = False


def insert(model: PreTrainedModel, asked: LoraConfig) -> None:
    """Adds adapters to the projections of a whole model; the others are frozen. On the meta device: no values."""
    from peft import inject_adapter_in_model

    on_meta = any(parameter.is_meta for parameter in model.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        inject_adapter_in_model(
            peft_config(asked, model), model, adapter_name=ADAPTER, low_cpu_mem_usage=on_meta
        )


def insert_whole(model: PreTrainedModel, asked: LoraConfig, *, seed: int) -> None:
    """Adds adapters with their first values to the projections of a whole model that has its weights."""
    insert(model, asked)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if is_adapter(name):
                parameter.copy_(initial(name, parameter.shape, seed=seed))


def merge(model: PreTrainedModel) -> None:
    """Adds the adapters of a whole model to its weights, and removes them."""
    for name, module in _adapted(model):
        module.merge()
        owner, _, own = name.rpartition(".")
        setattr(model.get_submodule(owner), own, module.base_layer)
    if hasattr(model, "peft_config"):
        del model.peft_config


def target_names(model: nn.Module) -> set[str]:
    """Full names of the layers that have adapters."""
    return {name for name, _ in _adapted(model)}


def described(model: PreTrainedModel) -> tuple[str, str]:
    """A description of the adapters, and of the number of trained parameters."""
    kinds = sorted({name.rpartition(".")[2] for name in target_names(model)})
    trained = sum(
        parameter.numel() for parameter in model.parameters() if parameter.requires_grad
    )
    return (
        f"adapters: {', '.join(kinds)}",
        f"{trained:,} parameters are trained, the others are frozen",
    )


def peft_config(asked: LoraConfig, model: PreTrainedModel) -> Any:
    """The adapters as peft describes them."""
    from peft import LoraConfig as PeftConfig
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    targets = asked.target_modules
    if targets == "all-linear":
        # By their full names: peft's own expansion includes experts, which are not linear layers.
        targets = tuple(_linear_layers(model))
    config = PeftConfig(
        r=asked.r,
        lora_alpha=2 * asked.r if asked.alpha is None else asked.alpha,  # type: ignore[arg-type]
        lora_dropout=asked.dropout,
        target_modules=list(targets) if isinstance(targets, tuple) else targets,
        use_rslora=asked.rslora,
        task_type="CAUSAL_LM",
    )
    if asked.target_modules == "all-linear":
        # Nor layers that peft takes for experts because of their names (those that all tokens share).
        kept = copy.copy(config)
        convert_peft_config_for_transformers(kept, model, conversions=None)
        config.target_modules = [
            name for name in targets or () if name in (kept.target_modules or ())
        ]
    return config


def initial(name: str, shape: torch.Size, *, seed: int) -> Tensor:
    """First values of an adapter's whole weight; they depend on the seed and the name, not on the mesh.

    A: uniform within 1 / sqrt(inputs), as torch's linear layers and peft begin. B: zeros, so that nothing changes yet.
    """
    if ".lora_B." in name:
        return torch.zeros(shape)
    key = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(key[:8], "little") % 2**63)
    bound = 1 / math.sqrt(shape[1])
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)


def _linear_layers(model: PreTrainedModel) -> list[str]:
    head = model.get_output_embeddings()
    return [
        name
        for name, module in model.named_modules()
        if type(module) is nn.Linear and module is not head
    ]


def _adapted(model: nn.Module) -> list[tuple[str, Any]]:
    from peft.tuners.lora import LoraLayer

    return [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, LoraLayer)
    ]
