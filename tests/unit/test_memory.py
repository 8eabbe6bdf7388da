"""What would fit when a device's memory is used up: only what is not used up yet, in the order of what saves most."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from threefold.config.loading import validate
from threefold.config.schema import Config
from threefold.errors import RunError
from threefold.mesh.mesh import Mesh
from threefold.mesh.topology import Topology
from threefold.model import load
from threefold.run import memory_check
from threefold.run.request import Asked

OFFLOAD = "--train.activation_checkpointing offload"
TWO, FOUR = Topology(dp_replicate=2), Topology(dp_shard=4)


def asked(**sections: Any) -> Config:
    return validate(sections)


_ESTIMATED = {"model_type": "llama", "vocab_size": 8192, "hidden_size": 256, "intermediate_size": 512,
              "num_hidden_layers": 2, "num_attention_heads": 4}  # fmt: skip


def _advice(topology: Topology, **sections: Any) -> tuple[str, str]:
    config = asked(**{"model": {"config": _ESTIMATED}, "data": {"seq_len": 512}, **sections})
    request = Asked(config, None, load.read_config(config.model))  # type: ignore[arg-type]
    return memory_check._advice(request, Mesh(topology, 0, torch.device("cpu")))


@pytest.mark.parametrize(
    ("sections", "topology", "fix"),
    [
        # What a CPU's activations take: fewer rows at a time, or less kept of each.
        ({}, TWO, "--train.micro_batch 4"),
        ({"train": {"global_batch": 12, "micro_batch": 3}}, TWO, "--train.micro_batch 1"),
        # Where state takes most of it, a part of the state.
        ({"train": {"micro_batch": 1, "global_batch": 2}}, TWO, "--mesh.dp_shard 2"),
        # Where nothing saves a fifth, what saves anything.
        (
            {"train": {"micro_batch": 1, "global_batch": 4}},
            FOUR,
            "--train.activation_checkpointing selective",
        ),
    ],
    ids=str,
)
def test_what_would_fit_by_the_estimate(sections: Any, topology: Topology, fix: str) -> None:
    expected, found = _advice(topology, **sections)
    assert expected.startswith("about ") and "GiB of weights, gradients and moments" in expected
    assert found == fix


def test_a_model_that_is_not_estimated_is_given_the_first_that_needs_less() -> None:
    config = {"model": {"config": {"model_type": "gpt2", "n_layer": 1}}}
    assert _advice(TWO, **config) == ("a step that fits in its device", "--mesh.dp_shard 2")


def test_where_all_is_used_up_more_ranks_are_left() -> None:
    train = {"micro_batch": 1, "global_batch": 4, "activation_checkpointing": "full"}
    assert (
        _advice(FOUR, train=train)[1]
        == "more ranks: threefold plan shows what fits on which devices"
    )


@pytest.mark.parametrize("writes", [True, False], ids=["snapshot", "no snapshot"])
def test_error_of_torch_becomes_ours(
    writes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dump(path: str) -> None:
        if not writes:
            raise OSError("no space left on device")
        Path(path).write_text("held")

    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", dump)
    config = asked()
    request = Asked(config, None, load.read_config(config.model, vocab_size=257))  # type: ignore[arg-type]
    with (
        pytest.raises(RunError) as caught,
        memory_check.explained(request, Mesh(Topology(), 0, torch.device("cpu")), tmp_path),
    ):
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2 GiB. GPU 0 has a total capacity of 8 GiB."
        )
    snapshot = (
        f"; what it holds is in {tmp_path}/memory/rank-0000.pickle, for pytorch.org/memory_viz"
        if writes
        else ""
    )
    assert str(caught.value) == (
        "rank 0 has no memory left: CUDA out of memory. Tried to allocate 2 GiB\n"
        "  expected: about 0.2 GiB to fit in its device, as estimated for the backward of layer 3: 0.0 GiB of weights, "
        f"gradients and moments, together with activations and gathered weights{snapshot}\n"
        "  fix: --train.micro_batch 8"
    )


def test_on_a_device_the_allocator_remembers_who_holds_what(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked_for: list[Any] = []

    def record(*arguments: Any, **settings: Any) -> None:
        asked_for.append((arguments, settings))
        if len(asked_for) > 1:
            raise RuntimeError("no history")

    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", record)
    request: Any = None
    for kind, count in (("cpu", 0), ("cuda", 1), ("cuda", 2)):
        with memory_check.explained(request, Mesh(Topology(), 0, torch.device(kind)), tmp_path):
            pass
        assert len(asked_for) == count
    assert asked_for[0] == (("state",), {"context": "state", "stacks": "python"})


def test_other_errors_pass() -> None:
    request: Any = None
    mesh = Mesh(Topology(), 0, torch.device("cpu"))
    with (
        pytest.raises(ValueError, match="another"),
        memory_check.explained(request, mesh, request),
    ):
        raise ValueError("another")
