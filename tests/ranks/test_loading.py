"""Loading: each rank reads its own shard of a checkpoint and no more than one tensor beyond it."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from ranks.spawn import run_ranks

BIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 16384,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
SLACK_BYTES = 24 * 2**20  # what building modules and torch's allocator take on top


class _AnonymousMemory:
    """Largest anonymous memory of this process while it is open (mapped files do not count)."""

    def __enter__(self) -> _AnonymousMemory:
        self.start = self.peak = self._now()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(0.002):
            self.peak = max(self.peak, self._now())

    @staticmethod
    def _now() -> int:
        status = Path("/proc/self/status").read_text()
        return next(
            int(line.split()[1]) * 1024
            for line in status.splitlines()
            if line.startswith("RssAnon")
        )


def _save(folder: str) -> int:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    values = dict(BIG)
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder, max_shard_size="40MB")
    return sum(parameter.nbytes for parameter in model.parameters())


def _load(folder: str, sizes: dict[str, int]) -> Any:
    from safetensors import safe_open
    from torch.distributed.tensor import DTensor

    from threefold.mesh.mesh import init_mesh
    from threefold.run.load_model import load_model

    mesh = init_mesh(device="cpu", **sizes)
    with _AnonymousMemory() as memory:
        model = load_model(folder, mesh=mesh, admission="off").module
    own = sum(
        (p.to_local() if isinstance(p, DTensor) else p).nbytes for p in model.parameters()
    )
    largest = max(p.numel() * 4 for p in model.parameters())
    files = {}
    for file in Path(folder).glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            files.update({name: tensors.get_tensor(name) for name in tensors.keys()})  # noqa: SIM118
    wrong = []
    for name, parameter in model.named_parameters():
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        if not whole.equal(files[name]):
            wrong.append(name)
    return memory.peak - memory.start, own, largest, wrong


@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="needs /proc to see anonymous memory"
)
@pytest.mark.ranks
@pytest.mark.parametrize(
    "sizes", [{"dp": 2, "dp_shard": 2}, {"tp": 2}, {"dp": 2, "dp_shard": 2, "tp": 2}], ids=str
)
def test_a_rank_reads_its_shard(tmp_path: Path, sizes: dict[str, int]) -> None:
    folder = str(tmp_path / "model")
    whole = run_ranks(_save, 1, folder)[0]
    world = sizes.get("dp", 1) * sizes.get("tp", 1)
    for peak, own, largest, wrong in run_ranks(_load, world, folder, sizes):
        assert wrong == []
        assert own <= whole / world * 1.1
        assert peak <= own + largest + SLACK_BYTES, (
            f"{peak / 2**20:.0f} MiB for {own / 2**20:.0f} + {largest / 2**20:.0f}"
        )
