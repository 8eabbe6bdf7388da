"""What tp and cp ranks compute beside what they send, and that it is what one process computes."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from ranks.reference import STRICT, TINY_LLAMA, make_batches, require
from ranks.shared_memory import as_if_shared
from ranks.spawn import run_ranks
from threefold.check.compare import compare_tensors

pytestmark = pytest.mark.ranks

LAYERS = TINY_LLAMA["num_hidden_layers"]
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "whole": ({**TINY_LLAMA, "attention_bias": True, "mlp_bias": True}, {}),
    "adapters": (TINY_LLAMA, {"r": 4}),
}
CHECKPOINTING = ("none", "full", "selective")


def _gradients(tp: int) -> Any:
    """Whole gradients of a step of two micro-batches, and the order of what ranks send and multiply, by case."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from threefold.config.schema import Config
    from threefold.mesh.mesh import init_mesh
    from threefold.model import load
    from threefold.model.build import build
    from threefold.optim.build import build_optimizer
    from threefold.training.step import TrainStep

    class Order(TorchDispatchMode):
        """Names of collectives and products, as they are begun."""

        def __init__(self) -> None:
            super().__init__()
            self.names: list[str] = []

        def __torch_dispatch__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            name = str(function).split(".")[1]
            if function.namespace in ("c10d", "symm_mem") or name in ("mm", "addmm"):
                self.names.append(name)
            return function(*args, **(kwargs or {}))

    mesh = init_mesh(1, tp=tp, device="cpu")
    kernels = as_if_shared()
    batch = make_batches(steps=1, rows=4, seq_len=16)[0]
    pieces = [
        {name: rows[part] for name, rows in batch.items()}
        for part in (slice(0, 2), slice(2, 4))
    ]
    found: dict[Any, Any] = {}
    for kind, (architecture, adapters) in MODELS.items():
        for scattered in (False, True, "async") if tp > 1 else (False,):
            for checkpointing in CHECKPOINTING if tp > 1 and kind == "whole" else ("none",):
                config = Config.model_validate(
                    {
                        "model": {"config": architecture, "lora": adapters},
                        "mesh": {"sequence_parallel": scattered},
                        "train": {"activation_checkpointing": checkpointing},
                    }
                )
                model = build(config, load.read_config(config.model), mesh)
                own: dict[str, Any] = {}
                parameters = dict(model.module.named_parameters())

                def observe(own: Any = own, parameters: Any = parameters) -> None:
                    for name, each in parameters.items():
                        if each.grad is not None:
                            whole = (
                                each.grad.full_tensor()
                                if hasattr(each.grad, "full_tensor")
                                else each.grad
                            )
                            own[name] = whole.detach().clone().numpy()

                step = TrainStep(
                    model, build_optimizer(model.module, config.optimizer), observe=observe
                )
                step.run(pieces, lr=1e-2)
                step.run(pieces, lr=1e-2)  # adapters' first matrix has a gradient from here on
                step._observe = None
                with Order() as order:
                    step.run(pieces[:1], lr=0.0)
                found[kind, scattered, checkpointing] = own, order.names
    del kernels
    return found


def test_split_products_have_the_gradients_of_one_process() -> None:
    alone, together = run_ranks(_gradients, 1, 1)[0], run_ranks(_gradients, 2, 2)[0]
    assert len(together) == 3 * (len(MODELS) - 1 + len(CHECKPOINTING))
    for (kind, scattered, checkpointing), (gradients, _) in together.items():
        expected = alone[kind, False, "none"][0]
        require(compare_tensors(STRICT, gradients, expected), (kind, scattered, checkpointing))

    # Each layer's two sums of an input's gradient are begun before the product that gives a weight its gradient.
    for scattered, begun in ((False, "allreduce_"), (True, "_reduce_scatter_base_")):
        names = together["whole", scattered, "none"][1]
        beside = sum(
            first == begun and then == "mm" for first, then in itertools.pairwise(names)
        )
        assert beside >= 2 * LAYERS, names
    # In shared memory, each layer's two entries and two exits send and multiply in one operation, each way.
    names = together["whole", "async", "none"][1]
    assert names.count("fused_all_gather_matmul") == 4 * LAYERS
    assert names.count("fused_matmul_reduce_scatter") == 2 * LAYERS


def _exchanged() -> Any:
    """Rows gathered and summed in both ways of sending, and keys in the order of their rows."""
    import torch
    import torch.distributed as dist

    from threefold.mesh.mesh import init_mesh
    from threefold.model import collectives

    mesh = init_mesh(1, cp=2, device="cpu")
    group = mesh.group("cp")
    assert group is not None
    rank = dist.get_rank(group)
    whole = torch.arange(3 * 8 * 2, dtype=torch.float32).reshape(3, 8, 2)
    part = whole.chunk(2, dim=1)[rank]
    found = []
    for row_bytes in (2**20, 1):  # a copy around one collective; a collective for each row
        collectives._ROW_BYTES = row_bytes
        mine = part.clone().requires_grad_()
        gathered = collectives.gather_parts(mine, group)
        (gathered * (rank + 1)).sum().backward()
        assert mine.grad is not None
        summed = collectives.scatter_sum(whole * (rank + 1), group)
        found.append(
            (
                bool((gathered == whole).all()),
                mine.grad.unique().tolist(),
                bool((summed == 3 * part).all()),
            )
        )

    row = torch.arange(2 * 4 * 8 * 3, dtype=torch.float32).reshape(2, 4, 8, 3)
    chunks = row.chunk(4, dim=2)
    held = torch.cat([chunks[rank], chunks[3 - rank]], dim=2)
    key, value = held.clone().requires_grad_(), held[..., :2].clone().requires_grad_()
    keys, values = collectives.gather_sequence(key, value, group)
    (keys * row + (values * row[..., :2]).sum()).sum().backward()
    assert key.grad is not None and value.grad is not None
    in_order = bool((keys == row).all() and (values == row[..., :2]).all())
    summed_back = bool((key.grad == 2 * held).all())
    heads = collectives.heads_to_sequence(held, group)
    back = collectives.sequence_to_heads(heads, group)
    by_heads = bool((heads == row.chunk(2, dim=1)[rank]).all() and (back == held).all())
    return found, in_order, summed_back, by_heads


def test_rows_are_exchanged_in_their_own_order() -> None:
    for found, *others in run_ranks(_exchanged, 2):
        assert found[0] == found[1] == (True, [3.0], True)
        assert others == [True, True, True]


def _choices() -> Any:
    from threefold.config.schema import Config
    from threefold.mesh.mesh import init_mesh
    from threefold.model import load
    from threefold.model.build import build

    said = {}
    for tp, cp in ((2, 1), (1, 2)):
        mesh = init_mesh(1, tp=tp, cp=cp, device="cpu")
        config = Config.model_validate(
            {"model": {"config": TINY_LLAMA}, "data": {"seq_len": 16}}
        )
        said |= dict(build(config, load.read_config(config.model), mesh).choices)
    return said


def test_choices_are_told_with_their_reasons() -> None:
    said = run_ranks(_choices, 2)[0]
    assert said["sequence parallelism: off"].startswith("on a CPU, ")
    assert said["weights: gathered once a step"].endswith(
        "up to 512 MiB stay from forward to backward"
    )


def _refused() -> str:
    from threefold.config.schema import Config
    from threefold.errors import ConfigError
    from threefold.mesh.mesh import init_mesh
    from threefold.model import load
    from threefold.model.build import build

    config = Config.model_validate(
        {"model": {"config": TINY_LLAMA}, "mesh": {"sequence_parallel": "async"}}
    )
    try:
        build(config, load.read_config(config.model), init_mesh(1, tp=2, device="cpu"))
    except ConfigError as error:
        return str(error)
    return "nothing"


def _by_default(links: int, fault: str, reduce: str) -> tuple[str, bool]:
    """What ranks on NVLink are told that they do, and whether a split part's entry then multiplies what arrives."""
    from types import SimpleNamespace

    import torch

    from ranks.shared_memory import as_if_shared
    from threefold.config.schema import Config
    from threefold.mesh.mesh import init_mesh
    from threefold.model import load
    from threefold.model.build import build
    from threefold.model.tensor_parallel import symmetric
    from threefold.plan import choices

    kernels = as_if_shared()
    matrix = SimpleNamespace(matrix=[[links] * 2] * 2)
    if links >= 0:
        torch._C._distributed_c10d._detect_dma_connectivity = lambda device, kind: matrix  # type: ignore[assignment]
    mesh = init_mesh(1, tp=2, device="cpu")
    object.__setattr__(mesh, "device", torch.device("cpu", mesh.rank))
    gathered, summed = symmetric._EntryProduct.forward, symmetric._ExitSum.forward

    def entry(ctx: Any, *own: Any) -> Any:
        whole, product = gathered(ctx, *own)
        if fault == "raises" and mesh.rank == 1:
            raise RuntimeError("symm_mem: no fabric handle")
        wrong = {"one off": 1.0, "no number": float("nan")}.get(fault, 0.0)
        return whole, product + wrong * mesh.rank

    def unshared(group: Any) -> None:
        raise RuntimeError("symm_mem: no fabric for this group")

    if fault == "unshared":
        symmetric.share_memory = unshared
    symmetric._EntryProduct.forward = staticmethod(entry)  # type: ignore[method-assign]
    symmetric._ExitSum.forward = staticmethod(  # type: ignore[method-assign]
        lambda ctx, *own: summed(ctx, *own).flip(1) if fault == "order" else summed(ctx, *own)
    )
    choices.sequence_parallel = lambda *own, **more: choices.Decision("possible", "on CUDA")  # type: ignore[assignment]
    config = Config.model_validate(
        {"model": {"config": TINY_LLAMA}, "train": {"reduce": reduce}}
    )
    model = build(config, load.read_config(config.model), mesh)
    overlapped = model.tensor.shared_input.overlapped  # type: ignore[union-attr]
    del kernels
    return next(
        f"{what}: {why}" for what, why in model.choices if "sequence parallelism" in what
    ), overlapped


@pytest.mark.parametrize(
    ("links", "fault", "reduce", "why"),
    [
        (18, "", "fast", "on: sent beside the products"),
        (
            0,
            "",
            "fast",
            "on: not sent beside the products: NVLink does not join devices 0 and 1",
        ),
        (-1, "", "fast", "on: not sent beside the products: NVLink cannot be looked for: "),
        (
            18,
            "raises",
            "fast",
            "on: not sent beside the products: torch's operations fail there: symm_mem: no fabric",
        ),
        (
            18,
            "unshared",
            "fast",
            "on: not sent beside the products: torch's operations fail there: symm_mem: no fabric",
        ),
        (
            18,
            "one off",
            "fast",
            "on: not sent beside the products: what torch's operations compute there is wrong",
        ),
        (
            18,
            "no number",
            "fast",
            "on: not sent beside the products: what torch's operations compute there is wrong",
        ),
        (
            18,
            "order",
            "fast",
            "on: not sent beside the products: what torch's operations compute there is wrong",
        ),
        (18, "", "exact", "on: "),
    ],
)
def test_ranks_on_nvlink_send_beside_products_if_these_are_right(
    links: int, fault: str, reduce: str, why: str
) -> None:
    overlapped = not links < 1 and not fault and reduce == "fast"
    for said, own in run_ranks(_by_default, 2, links, fault, reduce):
        assert f"sequence parallelism: {why}" in said
        assert own == overlapped == ("on: sent" in said)


def test_devices_that_share_no_memory_are_refused() -> None:
    for said in run_ranks(_refused, 2):
        assert "mesh.sequence_parallel = async" in said and "a cpu has none" in said
        assert "--mesh.sequence_parallel auto" in said
