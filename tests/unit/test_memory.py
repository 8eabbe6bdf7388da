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
from threefold.run import memory
from threefold.run.request import Asked

OFFLOAD = "--train.activation_checkpointing offload"
TWO, FOUR = Topology(dp_replicate=2), Topology(dp_shard=4)


def asked(**sections: Any) -> Config:
    return validate(sections)


@pytest.mark.parametrize(
    ("sections", "topology", "share", "first"),
    [
        ({}, TWO, 0.1, ["--train.micro_batch 4", "--train.activation_checkpointing selective", "--mesh.dp_shard 2"]),
        # Of 6 rows a rank: the next smaller divisor.
        ({"train": {"global_batch": 12, "micro_batch": 3}}, TWO, 0.1, ["--train.micro_batch 2"]),
        ({"train": {"micro_batch": 1}}, TWO, 0.1, ["--train.activation_checkpointing selective"]),
        ({"train": {"micro_batch": 1, "activation_checkpointing": "full"}}, TWO, 0.1, [OFFLOAD]),
        ({"train": {"micro_batch": 1, "activation_checkpointing": "offload"}}, TWO, 0.1, ["--mesh.dp_shard 2"]),
        # Where state takes most of the device, smaller activations would not help.
        ({}, TWO, 0.9, ["--mesh.dp_shard 2", "--optimizer.moments bfloat16", "--mesh.cpu_offload true"]),
        ({}, FOUR, 0.9, ["--optimizer.moments bfloat16", "--mesh.cpu_offload true", "--train.micro_batch 2"]),
        ({"optimizer": {"name": "muon"}}, FOUR, 0.9, ["--train.micro_batch 2"]),
        ({"train": {"accumulate": "unsharded", "micro_batch": 1}}, FOUR, 0.1, ["--train.accumulate sharded"]),
    ],
)  # fmt: skip
def test_first_of_what_would_fit(sections: Any, topology: Topology, share: float, first: list[str]) -> None:
    assert memory.what_fits(asked(**sections), topology, state_share=share)[: len(first)] == first


def test_where_all_is_used_up_more_ranks_or_shorter_rows_are_left() -> None:
    config = asked(
        train={"micro_batch": 1, "activation_checkpointing": "offload"},
        optimizer={"moments": "bfloat16"},
        mesh={"cpu_offload": True},
        data={"seq_len": 64},
    )
    found = memory.what_fits(config, FOUR, state_share=0.5)
    assert found == ["--mesh.tp 2   (more ranks for a layer)", "--data.seq_len 32, whose rows are shorter"]


def test_state_is_16_bytes_a_parameter_shared_by_the_ranks_of_a_copy() -> None:
    assert memory.state_bytes(asked(), TWO, 1000) == 16_000
    assert memory.state_bytes(asked(), FOUR, 1000) == 4_000
    assert memory.state_bytes(asked(optimizer={"moments": "bfloat16"}), TWO, 1000) == 12_000
    assert memory.state_bytes(asked(model={"lora": {"r": 8}}), TWO, 1000) == 4_000


@pytest.mark.parametrize("writes", [True, False], ids=["snapshot", "no snapshot"])
def test_error_of_torch_becomes_ours(writes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def dump(path: str) -> None:
        if not writes:
            raise OSError("no space left on device")
        Path(path).write_text("held")

    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", dump)
    config = asked()
    request = Asked(config, None, load.read_config(config.model, vocab_size=257))  # type: ignore[arg-type]
    with (
        pytest.raises(RunError) as caught,
        memory.explained(request, Mesh(Topology(), 0, torch.device("cpu")), tmp_path),
    ):
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2 GiB. GPU 0 has a total capacity of 8 GiB."
        )
    snapshot = f"; what it holds is in {tmp_path}/memory/rank-0000.pickle, for pytorch.org/memory_viz" if writes else ""
    assert str(caught.value) == (
        "rank 0 has no memory left: CUDA out of memory. Tried to allocate 2 GiB\n"
        "  expected: 0.0 GiB of weights, gradients and moments to fit in its device, together with activations and "
        f"gathered weights{snapshot}\n"
        "  fix: --train.micro_batch 8   (then --train.activation_checkpointing selective, "
        "--optimizer.moments bfloat16, --mesh.cpu_offload true)"
    )


def test_other_errors_pass() -> None:
    request: Any = None
    with pytest.raises(ValueError, match="another"), memory.explained(request, request, request):
        raise ValueError("another")
