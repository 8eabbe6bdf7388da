"""What of a model is compared at its real size, and what a difference is."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from transformers import AutoConfig

from architectures import config_of
from ranks.reference import TINY_LLAMA
from threefold.check import admit, real_size
from threefold.check.compare import PROBE_GRADIENT, REAL_SIZE, Difference
from threefold.check.probe_rows import Mode, longer_row, row_length
from threefold.config.loading import validate
from threefold.mesh.mesh import init_mesh
from threefold.mesh.topology import Topology
from threefold.model import load
from threefold.model.reduced import reduced, shallow

SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8}
SIZES |= {"num_hidden_layers": 12}


def _asked(
    model_type: str, seq_len: int, topology: Topology | None = None, **sizes: Any
) -> Any:
    config = validate(
        {
            "data": {"seq_len": seq_len},
            "mesh": {"device": "cpu"},
            "model": {"config": {"model_type": "llama"}},
        }
    )
    share = sizes.pop("share", 1.0)
    architecture = AutoConfig.for_model(model_type, **{**SIZES, **sizes})
    return real_size.real_sizes(
        config, architecture, topology or Topology(), ranks=1, leading=0, share=share
    )


def test_a_shallow_model_keeps_every_size_but_depth_vocabulary_and_experts() -> None:
    own = {"head_dim": 64, "num_experts": 64, "use_sliding_window": True, "sliding_window": 777}
    cut = shallow(AutoConfig.for_model("qwen3_moe", **SIZES, **own))
    assert (cut.hidden_size, cut.intermediate_size, cut.num_attention_heads, cut.head_dim) == (
        256,
        512,
        8,
        64,
    )
    assert (cut.num_hidden_layers, cut.vocab_size, cut.num_experts, cut.sliding_window) == (
        2,
        131,
        4,
        777,
    )
    gemma = AutoConfig.for_model("gemma3_text", num_hidden_layers=26)
    assert set(shallow(gemma).layer_types) == {"sliding_attention", "full_attention"}


def test_it_has_the_real_width_and_row_length_where_they_fit() -> None:
    asked, other = _asked("llama", 512)
    assert (asked.architecture.hidden_size, asked.seq_len, asked.width) == (
        256,
        512,
        "at its real width",
    )
    assert (other.seq_len, other.width) == (512, "at a reduced width")


def test_a_row_that_is_too_long_is_cut_and_a_layer_too_wide_is_reduced() -> None:
    wide, long = _asked("llama", 8192, Topology(cp=2))
    assert (wide.architecture.hidden_size, wide.seq_len) == (256, 5376)
    assert (long.architecture.hidden_size < 256, long.seq_len, long.width) == (
        True,
        8192,
        "at a reduced width",
    )
    # Where many ranks share a core.
    assert _asked("llama", 8192, Topology(cp=2), share=0.1)[0].seq_len < 4096
    (reduced,) = _asked(
        "llama", 512, hidden_size=8192, intermediate_size=28_672, num_attention_heads=64
    )
    assert (reduced.architecture.hidden_size < 8192, reduced.seq_len) == (True, 512)


def test_a_reduced_width_is_compared_where_the_real_one_falls_short_or_cannot_be_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def compared(fails: set[int], *lengths: int) -> list[int]:
        """The lengths that were compared, the failing ones too."""
        found: list[int] = []

        def compare(config: Any, asked: Any, *_: Any, seed: int) -> Difference:
            found.append(asked.seq_len)
            quantity = real_size.NOT_COMPARED if len(found) - 1 in fails else REAL_SIZE.quantity
            return Difference(quantity, 0.0, 0.0)

        monkeypatch.setattr(real_size, "_compare", compare)
        sizes = [
            real_size.RealSize(AutoConfig.for_model("llama"), length, "") for length in lengths
        ]
        real_size.compare_real_sizes(validate({}), sizes, Mode(False, False), None, seed=0)  # type: ignore[arg-type]
        return found

    assert compared(set(), 512, 512) == [512]
    assert compared(set(), 128, 512) == [128, 512]
    assert compared({0}, 512, 512) == [512, 512]
    assert compared({0}, 512, 256) == [512, 256]


@pytest.mark.parametrize("number", [math.nan, math.inf, 0.5])
def test_a_part_of_the_row_is_found_and_a_single_token_is_not(number: float) -> None:
    expected, counted = np.zeros(256), np.ones(256, dtype=bool)
    places = np.arange(255, -1, -1)  # a rank holds its places in any order

    def figure(changed: slice) -> float:
        losses = np.zeros(256)
        losses[changed] = number
        part = np.concatenate([places, losses[::-1].copy().view(np.int64)])
        return real_size._difference(part, expected, counted)

    assert figure(slice(248, 256)) == (0.5 if number == 0.5 else math.inf)
    assert figure(slice(100, 101)) == 0.0
    assert figure(slice(0, 0)) == 0.0


@pytest.mark.parametrize(
    "mesh", [Topology(), Topology(cp=2), Topology(dp_shard=2, cp=4, tp=2), Topology(tp=6)]
)
def test_on_cuda_a_probe_has_the_queries_of_a_kernel_that_trains(mesh: Topology) -> None:
    short, long = row_length(mesh, device="cuda"), longer_row(mesh, device="cuda")
    assert min(short, long) // mesh.cp >= 256 and max(short, long) <= 4 * 256 * mesh.cp
    assert all(
        length % math.lcm(4, 2 * mesh.cp, mesh.cp * mesh.tp) == 0 for length in (short, long)
    )


@pytest.mark.parametrize("documents", [False, True])
def test_its_probes_hold_in_such_rows(documents: bool) -> None:
    asked = validate(
        {
            "model": {"config": TINY_LLAMA, "dtype": "bfloat16"},
            "data": {"document_mask": documents},
        }
    )
    mesh = init_mesh(1, device="cpu")
    try:
        device = SimpleNamespace(type="cuda")
        as_on_cuda: Any = SimpleNamespace(
            topology=mesh.topology,
            device=device,
            local_world_size=1,
            share=lambda name, make: make(),
        )
        subject = admit._subject(asked, load.read_config(asked.model), as_on_cuda)
        assert (subject.config.data.seq_len, subject.longer) == (256, 508)
        tried = admit._tried(subject, mesh)
    finally:
        mesh.close()
    assert tried.error is None and tried.holds
    lengths = [each for each in tried.results if each.quantity == PROBE_GRADIENT.quantity]
    assert len(lengths) == 2


def test_the_longer_rows_of_a_probe_can_be_split_as_the_shorter_ones() -> None:
    assert (row_length(Topology()), longer_row(Topology())) == (32, 60)
    for cp, tp in ((2, 2), (4, 2), (8, 1), (16, 1), (8, 8), (3, 1)):
        topology = Topology(cp=cp, tp=tp)
        short, long = row_length(topology), longer_row(topology)
        assert short < long <= 2 * short and long % (2 * cp) == long % (cp * tp) == 0


def test_nothing_to_compare_is_no_proof() -> None:
    part = np.concatenate([np.arange(4), np.zeros(4).view(np.int64)])
    assert real_size._difference(part, np.zeros(4), np.zeros(4, dtype=bool)) == math.inf


def test_layers_that_only_code_tells_apart_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    plain = LlamaDecoderLayer.__init__

    def init(layer: Any, config: Any, layer_idx: int) -> None:
        plain(layer, config, layer_idx)
        layer.is_global = layer_idx % 4 == 3

    architecture = AutoConfig.for_model("llama", **SIZES)
    config = validate({"mesh": {"device": "cpu"}, "model": {"config": {"model_type": "llama"}}})
    assert admit._leading(config, architecture) == 0
    monkeypatch.setattr(LlamaDecoderLayer, "__init__", init)
    assert admit._leading(config, architecture) == 4
    assert (
        reduced(architecture, leading=4).num_hidden_layers
        == shallow(architecture, leading=4).num_hidden_layers
        == 4
    )


@pytest.mark.parametrize(
    "model_type", ["bert", "xlm-roberta", "mbart", "mamba", "zamba2", "llama"]
)
def test_layers_are_no_parts_of_one_another_and_have_no_tied_weight(model_type: str) -> None:
    """FSDP2 shards each by itself, where they are large: a weight of two of them would belong to both."""
    model: Any = load.outline(reduced(config_of(model_type)))
    layers = load.layers_of(model)
    parts = [id(part) for layer in layers for part in layer.modules()]
    assert (
        layers and len({*parts}) == len(parts) and id(model.get_input_embeddings()) not in parts
    )
