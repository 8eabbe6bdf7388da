"""Faults that the reduced twin never meets are found in the run's own forward before its first step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ranks.spawn import run_ranks

pytestmark = pytest.mark.ranks

LLAMA = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.1,
}
Change = Callable[[Any, Any], Any]


def _after_mlp(change: Change) -> None:
    """Lets `change(module, output)` replace what a layer's MLP gives, [rows, tokens, hidden]."""
    from transformers.models.llama.modeling_llama import LlamaMLP

    plain = LlamaMLP.forward
    LlamaMLP.forward = lambda module, x: change(module, plain(module, x))  # type: ignore[method-assign]


def _leak(output: Any) -> Any:
    """Each token sees a little of the next one."""
    return output + 0.1 * output.roll(-1, dims=1)


def nothing(module: Any, output: Any) -> Any:
    return output


def each_fourth_layer(module: Any, output: Any) -> Any:
    if not hasattr(module, "number"):
        each_fourth_layer.built = getattr(each_fourth_layer, "built", 0) + 1  # type: ignore[attr-defined]
        module.number = each_fourth_layer.built  # type: ignore[attr-defined]
    return _leak(output) if module.number % 4 == 0 else output


def blocks_of_64(module: Any, output: Any) -> Any:
    """Beyond 64 tokens, those of a block see its mean."""
    rows, tokens, hidden = output.shape
    if tokens <= 64:
        return output
    blocks = output.view(rows, -1, 64, hidden)
    return (blocks + 0.1 * blocks.mean(dim=2, keepdim=True)).view(output.shape)


def widths_from_192(module: Any, output: Any) -> Any:
    return _leak(output) if output.shape[-1] >= 192 else output


def more_than_four_rows(module: Any, output: Any) -> Any:
    return output + 0.1 * output.roll(1, dims=0) if len(output) > 4 else output


def near_the_end_of_long_rows(module: Any, output: Any) -> Any:
    """One token, far from every place that is divided by a half, sees the last one."""
    changed = output.clone()
    if output.shape[1] > 8000:
        changed[:, 8000] += 0.1 * output[:, -1]
    return changed


def from_token_8000_on(module: Any, output: Any) -> Any:
    """Each token from there on sees a little of the next one."""
    import torch

    return torch.cat([output[:, :8000], _leak(output[:, 8000:])], dim=1)


def only_in_bfloat16(module: Any, output: Any) -> Any:
    import torch

    return _leak(output) if output.dtype == torch.bfloat16 else output


def only_compiled(module: Any, output: Any) -> Any:
    import torch

    return _leak(output) if torch.compiler.is_compiling() else output


def overflows_in_deep_layers(module: Any, output: Any) -> Any:
    if not hasattr(module, "number"):
        overflows_in_deep_layers.built = getattr(overflows_in_deep_layers, "built", 0) + 1  # type: ignore[attr-defined]
        module.number = overflows_in_deep_layers.built  # type: ignore[attr-defined]
    return output * float("inf") if module.number == 7 else output


def sees_earlier_documents(module: Any, output: Any) -> Any:
    """Every token sees the first of a long row, which may be another document's."""
    return output + 0.1 * output[:, :1] if output.shape[1] > 64 else output


def _admitted(
    plant: Change,
    sizes: dict[str, int],
    model: dict[str, Any],
    run: dict[str, Any],
    rows: int,
    seq_len: int,
) -> str:
    from threefold.check.full_size import admit_full_size
    from threefold.config.loading import validate
    from threefold.errors import ThreefoldError
    from threefold.mesh.mesh import init_mesh
    from threefold.model import load
    from threefold.model.build import build

    _after_mlp(plant)
    mesh = init_mesh(device="cpu", **sizes)
    values = {
        "data": {"seq_len": seq_len},
        "train": {"global_batch": rows * mesh.dp_size},
        **run,
    }
    config = validate(
        {**values, "model": {"config": {**LLAMA, **model}, **run.get("model", {})}}
    )
    built = build(config, load.read_config(config.model), mesh)
    before = [parameter.detach().clone() for parameter in built.module.parameters()]
    try:
        said = admit_full_size(
            built, rows=rows, seq_len=seq_len, documents=bool(config.data.document_mask)
        )
    except ThreefoldError as error:
        return str(error)
    assert all((a == b).all() for a, b in zip(before, built.module.parameters(), strict=True))
    assert said is not None
    return ": ".join(said)


ONE: dict[str, int] = {}
CASES: list[tuple[Change, dict[str, int], dict[str, Any], dict[str, Any], int, int, str]] = [
    (
        each_fourth_layer,
        ONE,
        {"num_hidden_layers": 8},
        {},
        2,
        32,
        "lets a token see later ones",
    ),
    (blocks_of_64, ONE, {}, {}, 2, 256, "lets a token see later ones"),
    (widths_from_192, ONE, {"hidden_size": 192}, {}, 2, 32, "lets a token see later ones"),
    (more_than_four_rows, ONE, {}, {}, 6, 32, "lets a row see the other rows"),
    (near_the_end_of_long_rows, ONE, {}, {}, 1, 8192, "lets a token see later ones"),
    (from_token_8000_on, ONE, {}, {}, 1, 8192, "lets a token see later ones"),
    (
        only_in_bfloat16,
        ONE,
        {},
        {"model": {"dtype": "bfloat16"}},
        2,
        32,
        "lets a token see later ones",
    ),
    (
        overflows_in_deep_layers,
        ONE,
        {"num_hidden_layers": 8},
        {},
        2,
        32,
        "gives a number that is not finite",
    ),
    (
        sees_earlier_documents,
        ONE,
        {},
        {"data": {"document_mask": True}},
        2,
        256,
        "lets a token see another document",
    ),
    (blocks_of_64, {"tp": 2}, {}, {}, 2, 256, "lets a token see later ones"),
    (
        each_fourth_layer,
        {"dp": 2, "dp_shard": 2},
        {"num_hidden_layers": 8},
        {},
        1,
        32,
        "lets a token see later ones",
    ),
]


def _name(value: Any) -> str:
    return getattr(value, "__name__", str(value))


@pytest.mark.parametrize(
    ("plant", "sizes", "model", "run", "rows", "seq_len", "named"), CASES, ids=_name
)
def test_a_fault_beyond_the_twins_size_is_refused(
    plant: Change,
    sizes: dict[str, int],
    model: dict[str, Any],
    run: dict[str, Any],
    rows: int,
    seq_len: int,
    named: str,
) -> None:
    if "data" in run:
        run = {**run, "data": {**run["data"], "seq_len": seq_len}}
    world = sizes.get("dp", 1) * sizes.get("tp", 1)
    messages = set(run_ranks(_admitted, world, plant, sizes, model, run, rows, seq_len))
    assert len(messages) == 1
    (message,) = messages
    assert named in message.splitlines()[0] and "fix:" in message, message


LORA = {"model": {"lora": {"r": 4, "target_modules": "all-linear"}}}
RIGHT: list[tuple[dict[str, int], dict[str, Any], dict[str, Any]]] = [
    (ONE, {}, {}),
    (ONE, {"model_type": "mistral", "sliding_window": 48}, {}),
    (ONE, {}, {"data": {"document_mask": True, "seq_len": 128}}),
    (ONE, {}, {"model": {"dtype": "bfloat16"}}),
    (
        {"tp": 2},
        {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
        LORA | {},
    ),
    ({"cp": 2}, {"attention_dropout": 0.2}, {"data": {"document_mask": True, "seq_len": 128}}),
    ({"dp": 2, "dp_shard": 2, "tp": 2}, {}, LORA),
]


@pytest.mark.parametrize(("sizes", "model", "run"), RIGHT, ids=str)
def test_a_right_model_is_admitted_and_left_as_it_is(
    sizes: dict[str, int], model: dict[str, Any], run: dict[str, Any]
) -> None:
    world = sizes.get("dp", 1) * sizes.get("cp", 1) * sizes.get("tp", 1)
    if model.get("model_type") == "mixtral":
        run = {"model": {"lora": {"r": 4, "target_modules": ["q_proj", "o_proj"]}}}
    messages = run_ranks(_admitted, world, nothing, sizes, model, run, 2, 128)
    assert all(
        message.startswith("its own forward: causal to token 128 of 128: ")
        for message in messages
    ), messages


def test_what_is_only_wrong_compiled_is_refused() -> None:
    (message,) = run_ranks(
        _admitted,
        1,
        only_compiled,
        ONE,
        {},
        {"train": {"compile": True, "global_batch": 2}},
        2,
        32,
    )
    assert "lets a token see later ones" in message, message


def _own_loop(plant: Change, sizes: dict[str, int]) -> list[str]:
    import torch

    import threefold
    from threefold.errors import ThreefoldError

    _after_mlp(plant)
    mesh = threefold.init_mesh(device="cpu", **sizes)
    config = {**LLAMA, "num_hidden_layers": 8}
    step = threefold.TrainStep(threefold.load_model(mesh=mesh, config=config), lr=1e-3)
    said = []
    for _ in range(2):
        # Data ranks need not have equally many rows, nor equally long ones.
        ids = torch.randint(
            3,
            64,
            (5 + mesh.dp_rank, 32 + 8 * mesh.dp_rank),
            generator=torch.Generator().manual_seed(0),
        )
        try:
            said.append(f"loss {step({'input_ids': ids, 'labels': ids.roll(-1, 1)}).loss:.0f}")
        except ThreefoldError as error:
            said.append(str(error).splitlines()[0])
    return said


@pytest.mark.parametrize("sizes", [{"dp": 2}, {"dp": 2, "dp_shard": 2}, {"tp": 2}], ids=str)
def test_the_first_step_of_a_custom_loop_is_probed(sizes: dict[str, int]) -> None:
    for said in run_ranks(_own_loop, 2, more_than_four_rows, sizes):
        assert "lets a row see the other rows of its micro-batch, at its full size" in said[0]
    assert {tuple(said) for said in run_ranks(_own_loop, 2, nothing, sizes)} == {
        ("loss 4", "loss 4")
    }
