"""Which layers are computed in 8 bits, and what is refused; the distance to bfloat16, where torchao is installed."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from threefold.check.compare import Bound, Comparison, compare_numbers
from threefold.config.loading import validate
from threefold.config.schema import Config
from threefold.errors import ConfigError
from threefold.mesh.topology import Topology
from threefold.model import float8
from threefold.plan import choices

FLOAT8 = Bound("loss", 0.02, "3 bits of mantissa in products of a small model", relative=False)
LARGE: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 2,
}
LARGE |= {"num_attention_heads": 16, "num_key_value_heads": 4}


def outline(kind: str, **sizes: Any) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(
            AutoConfig.for_model(kind, **{**LARGE, **sizes})
        )


@pytest.mark.parametrize(
    ("recipe", "outputs", "inputs", "expected"),
    [
        ("tensorwise", 2048, 2048, True),
        ("tensorwise", 1024, 4096, False),
        ("tensorwise", 1024, 8192, True),
        ("tensorwise", 2056, 2048, False),  # no multiple of 16
        ("rowwise", 2048, 8192, False),
        ("rowwise", 4096, 2048, False),
        ("rowwise", 8192, 2048, True),
        ("rowwise", 8192, 1024, False),
    ],
)
def test_what_pays(recipe: str, outputs: int, inputs: int, expected: bool) -> None:
    assert float8.pays(recipe, outputs, inputs) is expected


def test_layers_that_are_converted() -> None:
    """Of a Llama of a billion parameters: not the small keys and values, nor the head."""
    names = float8.layers_to_convert(outline("llama"), "tensorwise")
    kinds = {name.removeprefix("model.layers.0.") for name in names if ".0." in name}
    assert kinds == {
        "self_attn.q_proj",
        "self_attn.o_proj",
        "mlp.gate_proj",
        "mlp.up_proj",
        "mlp.down_proj",
    }
    assert len(names) == 10
    rowwise = float8.layers_to_convert(outline("llama"), "rowwise")
    assert {name.rpartition(".")[2] for name in rowwise} == {"gate_proj", "up_proj"}


def test_routers_and_experts_are_left() -> None:
    """A router may be a large linear layer; experts are parameters of their own."""
    sparse = {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 1,
        "expert_layer_offset": 0,
    }
    jamba = outline(
        "jamba", **sparse, num_experts=2048, num_experts_per_tok=2, use_mamba_kernels=False
    )
    assert any(name.endswith(".router") for name, _ in jamba.named_modules())
    assert not any("router" in name for name in float8.layers_to_convert(jamba, "tensorwise"))
    mixtral = float8.layers_to_convert(outline("mixtral", num_local_experts=4), "tensorwise")
    assert {name.split(".")[3] for name in mixtral} == {"self_attn"}


def asked(**values: Any) -> dict[str, Any]:
    given = {"model": {"dtype": "bfloat16"}, "train": {"float8": "tensorwise"}}
    return {key: {**given.get(key, {}), **values.get(key, {})} for key in {*given, *values}}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (
            {"model": {"dtype": "float32"}},
            "train.float8 = tensorwise with model.dtype = float32\n"
            "  expected: model.dtype bfloat16, whose largest products are then made of 8 bits\n"
            "  fix: --model.dtype bfloat16   (or leave train.float8 out)",
        ),
        (
            {"train": {"compile": False}},
            "train.float8 = tensorwise with train.compile = false\n"
            "  expected: compiled layers: casts in kernels of their own take longer than the products save\n"
            "  fix: --train.compile auto   (or leave train.float8 out)",
        ),
        (
            {"model": {"lora": {"r": 8}}},
            "train.float8 = tensorwise with model.lora.r = 8\n"
            "  expected: trained weights: it would compute gradients of frozen ones that nobody reads\n"
            "  fix: leave train.float8 out",
        ),
        (
            {"data": {"group_by_length": True, "packing": "none"}},
            "train.float8 = tensorwise with data.group_by_length = true\n"
            "  expected: rows of one length, a multiple of 16\n"
            "  fix: leave data.group_by_length out, or leave train.float8 out",
        ),
    ],
    ids=str,
)
def test_what_does_not_go_with_it(values: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError) as found:
        validate(asked(**values))
    assert str(found.value) == expected


def problems_of(
    config: Config, model: Any, topology: Topology | None = None, device: str = "cuda"
) -> str:
    found = list(float8.problems(config, model, topology or Topology(), device=device))
    return str(ConfigError.of(found)) if found else ""


def test_what_cannot_be_computed_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float8.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    config, model = validate(asked()), outline("llama")
    assert problems_of(config, model) == ""
    assert problems_of(config, model, device="cpu") == (
        "train.float8 = tensorwise on a cpu\n"
        "  expected: a CUDA device of capability 8.9 or newer (Ada, Hopper, Blackwell)\n"
        "  fix: leave train.float8 out"
    )
    assert problems_of(config, model, Topology(tp=2)) == (
        "train.float8 = tensorwise with mesh.tp = 2\n"
        "  expected: whole layers: each tp rank would scale its part of a weight by itself\n"
        "  fix: --mesh.tp 1   (or leave train.float8 out)"
    )
    assert problems_of(config, outline("llama", hidden_size=256, intermediate_size=512)) == (
        "train.float8 = tensorwise, but no layer of 'llama' is of a size that gains by it\n"
        "  expected: linear layers of more than 1024 outputs (or 4096 inputs), multiples of 16\n"
        "  fix: leave train.float8 out"
    )
    assert problems_of(validate(asked(data={"seq_len": 1000})), model, Topology(cp=2)) == (
        "train.float8 = tensorwise with 500 tokens of a row on a rank\n"
        "  expected: a multiple of 16, over which a weight's gradient is summed\n"
        "  fix: --data.seq_len 1024   (or leave train.float8 out)"
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    assert "train.float8 = tensorwise on a device of capability 8.0\n" in problems_of(
        config, model
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(
        choices.importlib.util, "find_spec", lambda name: None if name == "triton" else object()
    )
    assert problems_of(config, model) == (
        "train.float8 = tensorwise, but layers are not compiled: triton, which compiles for CUDA, is not installed\n"
        "  expected: compiled layers: casts in kernels of their own take longer than the products save\n"
        "  fix: pip install triton, or leave train.float8 out"
    )
    monkeypatch.setattr(
        float8.importlib.util, "find_spec", lambda name: None if name == "torchao" else object()
    )
    assert problems_of(config, model) == (
        "train.float8 = tensorwise, but torchao is not installed\n"
        "  expected: the package that has these products\n"
        "  fix: pip install 'threefold[torchao]', or leave train.float8 out"
    )


@pytest.mark.examples  # which install torchao
def test_what_is_gathered_in_8_bits() -> None:
    if importlib.util.find_spec("torchao") is None:
        pytest.skip("torchao is not installed: pip install 'threefold[torchao]'")
    from threefold.model.float8 import gather_in_8_bits

    model = outline("llama")
    float8.convert(model, "tensorwise", emulate=True)

    def said(shards: int = 2, recipe: str = "tensorwise", *, offloaded: bool = False) -> str:
        mesh: Any = SimpleNamespace(size=lambda axis: shards)
        return ": ".join(gather_in_8_bits(model, mesh, recipe, offloaded=offloaded))

    def of(layers: int, why: str) -> str:
        return f"float8 weights: {layers} of 10 gathered in 8 bits: {why}"

    rounded = "rounded before they are sent, by scales of whole weights; of others the shards do not divide the rows"
    assert (said(), said(4096)) == (of(10, rounded), of(4, rounded))
    assert said(offloaded=True) == of(
        0, "FSDP2 asks nothing of shards that it fetches from the host"
    )
    scaled = "rows and columns are scaled by themselves, for which a rank needs the weight in bfloat16"
    assert said(recipe="rowwise") == of(0, scaled)


@pytest.mark.examples  # which install torchao
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_distance_to_bfloat16(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Emulated: the products of rounded numbers, which differ from bfloat16's by some of 3 bits of mantissa."""
    if importlib.util.find_spec("torchao") is None:
        pytest.skip("torchao is not installed: pip install 'threefold[torchao]'")
    monkeypatch.setattr(
        float8, "pays", lambda recipe, outputs, inputs: outputs % 16 == inputs % 16 == 0
    )
    sizes = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 96}
    config = AutoConfig.for_model("llama", **{**LARGE, **sizes})
    ids = torch.randint(96, (4, 33), generator=torch.Generator().manual_seed(2))
    curves, gradients = [], []
    for emulated in (False, True):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        names = [name for name, _ in model.named_parameters()]
        if emulated:
            what, _ = float8.convert(model, recipe, emulate=True)
            assert what == f"float8 {recipe}: 14 of 15 linear layers"
            assert [name for name, _ in model.named_parameters()] == names
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for _ in range(8):
            logits = model(input_ids=ids[:, :-1], use_cache=False).logits.float()
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
            loss.backward()
            if not losses:
                gradients.append(
                    torch.cat([each.grad.flatten().float() for each in model.parameters()])
                )
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        curves.append(losses)
    assert curves[0] != curves[1]
    assert Comparison(compare_numbers(FLOAT8, *curves)).holds, curves
    assert (gradients[0] - gradients[1]).norm() <= 0.1 * gradients[0].norm()
