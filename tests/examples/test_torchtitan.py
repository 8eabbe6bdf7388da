"""Checkpoints that torchtitan itself has written become runs: its weights and its moments, fused or not."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from ranks.keeping import write_corpus
from ranks.runs import command, script

pytestmark = [
    pytest.mark.examples,
    pytest.mark.skipif(
        find_spec("torchtitan") is None,
        reason="pip install --no-deps torchtitan==0.3.0   (make test-examples does)",
    ),
]
# Run by itself: torchtitan's kernels of experts want a CUDA build of torch, and are stood in for.
TITAN = """
import importlib.machinery, sys
from unittest.mock import MagicMock
for name in ("", ".api", ".kernels"):
    module = MagicMock()
    module.__spec__ = importlib.machinery.ModuleSpec("torchtitan.distributed.minimal_async_ep" + name, None)
    module.__path__ = []
    sys.modules["torchtitan.distributed.minimal_async_ep" + name] = module

import torch
import torch.distributed.checkpoint as dcp
from torchtitan.components.checkpointer.base import ModelWrapper
from torchtitan.components.optimizer import default_adamw
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.llama3 import Llama3Model, _EMBEDDING_INIT, _NORM_INIT, _build_llama3_layers, _output_linear_init
from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter

fused, folder, dim = sys.argv[1] == "fused", sys.argv[2], 32
rope = ComplexRoPE.Config(dim=8, max_seq_len=128, theta=10000, scaling="none")
sizes = {"n_layers": 2, "dim": dim, "n_heads": 4, "n_kv_heads": 2, "hidden_dim": 64}
config = Llama3Model.Config(
    dim=dim,
    vocab_size=257,
    tok_embeddings=Embedding.Config(num_embeddings=257, embedding_dim=dim, param_init=_EMBEDDING_INIT),
    norm=RMSNorm.Config(normalized_shape=dim, param_init=_NORM_INIT),
    lm_head=Linear.Config(in_features=dim, out_features=257, param_init=_output_linear_init(dim)),
    layers=_build_llama3_layers(fuse_qkv=fused, rope=rope, attn_backend="flex", **sizes),
)
torch.manual_seed(0)
model = config.build()
for parameter in model.parameters():
    torch.nn.init.normal_(parameter)
optimizer = default_adamw(lr=1e-3).build(model_parts=[model])
draws = torch.Generator().manual_seed(1)


def step():
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=draws)
    optimizer.step()


for _ in range(3):
    step()
state = {"optimizer": optimizer, **ModelWrapper(model).state_dict(), "train_state": {"step": torch.tensor(3)}}
dcp.save(state, checkpoint_id=f"{folder}/step-3", no_dist=True)

# What transformers calls them, by torchtitan's own conversion: of weights, and of moments in the weights' places.
convert = Llama3StateDictAdapter(config, None).to_hf
expected = {"weights": {name: each.clone() for name, each in convert(model.state_dict()).items()}}
inner = next(iter(optimizer))
for moment in ("exp_avg", "exp_avg_sq"):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(inner.state[parameter][moment])
    expected[moment] = {name: each.clone() for name, each in convert(model.state_dict()).items()}
torch.save(expected, f"{folder}/expected.pt")
"""
LLAMA = (
    '{"model_type": "llama", "vocab_size": 257, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, '
    '"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "rope_theta": 10000.0}'
)


def _held(run: Path) -> dict[str, Any]:
    from threefold.checkpoint.checkpoint_folder import find
    from threefold.checkpoint.tensor_index import Index
    from threefold.checkpoint.tensors import read_whole

    state = find(run).state
    return {name: read_whole(state, entry) for name, entry in Index.read(state).entries.items()}


@pytest.mark.parametrize("layout", ["fused", "apart"])
def test_what_torchtitan_has_written_goes_on(layout: str, tmp_path: Path) -> None:
    import torch

    (tmp_path / "titan.py").write_text(TITAN)
    done = script(tmp_path, "titan.py", layout, str(tmp_path))
    assert done.returncode == 0, done.stderr
    write_corpus(tmp_path)
    keys = [
        "--model.config",
        LLAMA,
        "--data.source",
        "corpus.txt",
        "--data.tokenizer",
        "bytes",
        "--data.seq_len",
        "16",
    ]
    keys += [
        "--train.global_batch",
        "4",
        "--train.steps",
        "5",
        "--log.sample_tokens",
        "0",
        "--mesh.device",
        "cpu",
    ]
    made = command(tmp_path, "import", "step-3", "--to", "run", *keys)
    assert made.returncode == 0, made.stderr
    assert "step 3, " in made.stdout and "by the names of torchtitan" in made.stdout
    held, expected = _held(tmp_path / "run"), torch.load(tmp_path / "expected.pt")
    for kind, tensors in expected.items():
        for name, values in tensors.items():
            assert torch.equal(
                held[f"{'model' if kind == 'weights' else f'optimizer.{kind}'}.{name}"], values
            ), name
    assert {
        float(values) for name, values in held.items() if name.startswith("optimizer.step.")
    } == {3.0}
    on = command(tmp_path, "resume", "run")
    assert on.returncode == 0, on.stderr
    assert "step 5/5" in on.stdout
