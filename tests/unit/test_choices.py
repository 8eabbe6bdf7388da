"""What `auto` means: a constant moves the model on its mesh and the planner's estimate, on a CPU and on CUDA."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ranks.traffic import traffic
from threefold.config.loading import validate
from threefold.config.schema import Config
from threefold.mesh.topology import Topology
from threefold.model import data_parallel, head, load
from threefold.model.build import resolved_on
from threefold.model.precision import DTYPES
from threefold.plan import choices
from threefold.plan.accelerators import ACCELERATORS
from threefold.plan.decoder import Decoder, decoder_of
from threefold.plan.memory import timeline
from threefold.plan.setup import Setup, setup_of
from threefold.plan.units import kept_whole, units_of

_MODEL: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192,
    "num_hidden_layers": 4, "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192,
}  # fmt: skip
_GPU = ACCELERATORS["h100-80gb"]
_BOTH = pytest.mark.parametrize("kind", ["cpu", "cuda"])


@pytest.fixture(autouse=True)
def _device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA device that is not there, with its compiler."""
    memory = SimpleNamespace(total_memory=_GPU.memory_bytes)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: memory)
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation: not including_emulation
    )
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *package: object() if name == "triton" else find(name, *package),
    )


class Sides:
    """One config as the model has it on a mesh, and as the planner estimates it."""

    def __init__(self, kind: str, topology: Topology, **sections: Any) -> None:
        self.config: Config = validate(
            {
                "model": {"config": _MODEL, "dtype": "bfloat16"},
                "data": {"seq_len": 4096},
                **sections,
            }
        )
        self.architecture = load.read_config(self.config.model)
        sizes = {"fsdp": topology.dp_shard * topology.cp, "cp": topology.cp, "tp": topology.tp}
        self.mesh: Any = SimpleNamespace(
            device=torch.device(kind),
            on_cuda=kind == "cuda",
            topology=topology,
            size=sizes.__getitem__,
            cp_size=topology.cp,
            tp_size=topology.tp,
        )
        self.outline = load.outline(self.architecture)
        self.decoder: Decoder = decoder_of(self.architecture.to_dict())
        self.device = _GPU if kind == "cuda" else None

    @property
    def resolved(self) -> choices.Resolved:
        return resolved_on(self.mesh, self.config, self.architecture)

    @property
    def setup(self) -> Setup:
        units_of.cache_clear()
        return setup_of(self.config, self.decoder, self.mesh.topology, self.device)

    def num_units(self) -> tuple[int, int]:
        setup = self.setup
        planned = units_of(self.decoder, setup.topology.tp, setup.shards).units
        return len(data_parallel._units(load.layers_of(self.outline))), len(planned)

    def whole(self) -> tuple[bool, bool]:
        """Whether gathered weights stay from forward to backward."""
        told = data_parallel.gathering(
            self.outline, self.mesh, self.config, DTYPES[self.resolved.dtype.value]
        )
        assert told is not None
        return "gathered once a step" in told[0], kept_whole(self.decoder, self.setup)

    def chunk(self) -> tuple[int, int]:
        class Hidden:
            device = self.mesh.device

            def __len__(self) -> int:
                return 10**6

        end = head._End(self.outline, "plain", self.config.train.loss_chunk_tokens, None, None)
        rows: Any = Hidden()
        return end._size(rows), self.setup.chunk(self.decoder)


@_BOTH
def test_units(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sides = Sides(kind, Topology(1, 2))
    assert sides.num_units() == (4, 4)
    layer = sum(parameter.nbytes for parameter in load.layers_of(sides.outline)[0].parameters())
    for unit_bytes, expected in ((2 * layer, 2), (2 * layer + 1, 1), (4 * layer + 1, 0)):
        monkeypatch.setattr(choices, "UNIT_BYTES", unit_bytes)
        assert sides.num_units() == (expected, expected)
    units_of.cache_clear()


@pytest.mark.parametrize(
    ("kind", "constant"),
    [("cpu", "KEPT_WHOLE_BYTES"), ("cuda", "KEPT_WHOLE_BYTES"), ("cuda", "KEPT_WHOLE_PART")],
)
def test_weights_kept_whole(kind: str, constant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # More than an 80 GiB device keeps by default.
    sides = Sides(
        kind,
        Topology(1, 2),
        model={"config": {**_MODEL, "num_hidden_layers": 32}, "dtype": "bfloat16"},
    )
    assert sides.whole() == (False, False)
    before = traffic(sides.decoder, sides.setup)
    size = data_parallel._gathered_bytes(sides.outline, torch.bfloat16)
    scale = 1.0 if constant == "KEPT_WHOLE_BYTES" else 1 / _GPU.memory_bytes
    monkeypatch.setattr(choices, constant, (size - 2**20) * scale)
    assert sides.whole() == (False, False)
    monkeypatch.setattr(choices, constant, (size + 2**20) * scale)
    assert sides.whole() == (True, True)
    gathers = ("fsdp", "all-gather")
    assert traffic(sides.decoder, sides.setup)[gathers][0] < before[gathers][0]


@pytest.mark.parametrize(
    ("kind", "constant"), [("cpu", "CHUNK_BYTES"), ("cuda", "CHUNK_BYTES_CUDA")]
)
def test_chunks_of_the_loss(kind: str, constant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sides = Sides(kind, Topology())
    model, planned = sides.chunk()
    assert model == planned == getattr(choices, constant) // (4 * 128256)
    held = timeline(sides.decoder, sides.setup)[0].total
    monkeypatch.setattr(choices, constant, 2**20)
    assert sides.chunk() == (2, 2)
    assert timeline(sides.decoder, sides.setup)[0].total < held


@_BOTH
def test_method_of_context_parallelism(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sides = Sides(kind, Topology(1, 1, 2))
    assert sides.resolved.cp_method.value == "ulysses" and sides.setup.ulysses
    monkeypatch.setattr(choices, "ULYSSES_FROM", 4096)
    assert sides.resolved.cp_method.value == "ulysses" and sides.setup.ulysses
    monkeypatch.setattr(choices, "ULYSSES_FROM", 4097)
    assert (
        sides.resolved.cp_method == ("gather", "rows shorter than 4097 tokens")
        and not sides.setup.ulysses
    )
    assert ("cp", "all-to-all") not in traffic(sides.decoder, sides.setup)


@_BOTH
@pytest.mark.parametrize("topology", [
    Topology(), Topology(2), Topology(1, 2), Topology(2, 2), Topology(1, 1, 2), Topology(1, 1, 1, 2), Topology(2, 1, 2),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("sections", [
    {}, {"model": {"config": _MODEL}}, {"mesh": {"cpu_offload": True}},
    {"train": {"reduce": "exact", "micro_batch": 1}},
    {"train": {"micro_batch": 2, "compile": False}, "mesh": {"sequence_parallel": True, "cp_method": "gather"}},
    {"data": {"seq_len": 6}},
], ids=str)  # fmt: skip
def test_planner_and_model_choose_alike(
    kind: str, topology: Topology, sections: dict[str, Any]
) -> None:
    sides = Sides(kind, topology, **sections)
    resolved, setup = sides.resolved, sides.setup
    assert (
        setup.micro_batch == resolved.micro_batch.value
        and setup.num_batches == resolved.num_micro_batches
    )
    assert setup.sharing == resolved.data_parallel.value
    assert setup.compiled == resolved.compiled.value
    if topology.cp > 1:
        assert setup.ulysses == (resolved.cp_method.value == "ulysses")
    if topology.tp > 1:
        assert setup.sequence_parallel == bool(resolved.sequence_parallel.value)


@pytest.mark.parametrize(
    ("topology", "sections", "model", "chosen", "why"),
    [
        (
            Topology(),
            {},
            {},
            "varlen",
            "causal documents by their lengths, other masks by blocks",
        ),
        (Topology(tp=2), {}, {}, "varlen", "causal documents"),
        (Topology(cp=2), {}, {}, "varlen", "causal documents"),  # whole rows of some heads
        (Topology(), {}, {"attention": "varlen"}, "varlen", "causal documents"),
        (Topology(), {}, {"attention": "flex"}, "flex", "as given"),
        (Topology(), {}, {"attention": "sdpa"}, "sdpa", "as given"),
        (Topology(), {}, {"dtype": "float32"}, "flex", "flash computes in bfloat16 alone"),
        (
            Topology(),
            {},
            {"dtype": "float32", "attention": "varlen"},
            "flex",
            "flash computes in bfloat16 alone",
        ),
        (
            Topology(cp=2),
            {"mesh": {"cp_method": "gather"}},
            {},
            "flex",
            "cp ranks that gather keys have parts of rows",
        ),
        (
            Topology(),
            {},
            {"config": {**_MODEL, "head_dim": 100}},
            "flex",
            "flash does not serve heads of 100",
        ),
        (
            Topology(),
            {},
            {"config": {**_MODEL, "attention_dropout": 0.1}},
            "sdpa",
            "the model drops attention weights",
        ),
    ],
    ids=str,
)
def test_attention_of_documents_on_cuda(
    topology: Topology, sections: dict[str, Any], model: dict[str, Any], chosen: str, why: str
) -> None:
    sides = Sides(
        "cuda", topology, model={"config": _MODEL, "dtype": "bfloat16", **model}, **sections
    )
    kernel = sides.resolved.attention
    assert kernel.value == chosen and why in kernel.why


@pytest.mark.parametrize(("rows", "dp", "expected"), [
    ("auto", 2, (8, "all rows of a dp rank")), (2, 2, (2, "as given")), ("auto", 32, (1, "all rows of a dp rank")),
])  # fmt: skip
def test_rows_of_a_forward(rows: Any, dp: int, expected: tuple[int, str]) -> None:
    config = validate({"train": {"global_batch": 16, "micro_batch": rows}})
    assert choices.micro_batch(config, Topology(dp)) == expected


def test_a_row_that_tp_ranks_cannot_share_equally() -> None:
    choice = choices.sequence_parallel(
        "auto", Topology(1, 1, 1, 4), choices.Device("cuda"), seq_len=6
    )
    assert choice == (False, "the ranks cannot share rows of this length equally")


@pytest.mark.parametrize(
    ("asked", "device", "chosen"),
    [
        ("auto", choices.Device("cpu"), "float32"),
        ("auto", choices.Device("cuda"), "bfloat16"),
        ("auto", choices.Device("cuda", bfloat16=False), "float32"),
        ("float32", choices.Device("cuda"), "float32"),
        ("bfloat16", choices.Device("cpu"), "bfloat16"),
    ],
)
def test_compute_type_is_what_the_device_is_fast_in(
    asked: str, device: choices.Device, chosen: str
) -> None:
    config = choices.with_dtype(validate({"model": {"dtype": asked}}), device)
    assert config.model.dtype == chosen
    assert choices.dtype(config, device) == (chosen, choices.GIVEN)


@_BOTH
def test_model_and_planner_compute_in_the_same_type(kind: str) -> None:
    sides = Sides(kind, Topology(dp_replicate=2), model={"config": _MODEL})
    narrow = kind == "cuda"
    assert sides.resolved.dtype.value == ("bfloat16" if narrow else "float32")
    assert sides.resolved.data_parallel.value == ("fsdp" if narrow else "ddp")
    estimate = setup_of(sides.config, sides.decoder, sides.mesh.topology, sides.device)
    assert estimate.element == (2 if narrow else 4)
