"""What an architecture cannot do is refused by name, before the first collective."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from threefold.errors import ConfigError
from threefold.mesh.mesh import init_mesh
from threefold.mesh.topology import Topology
from threefold.model import load
from threefold.model.context_parallel import limits
from threefold.model.context_parallel.attention import ContextParallel
from threefold.model.context_parallel.limits import split_problems
from threefold.model.layer_kinds import heads_of
from threefold.plan.choices import cp_method
from unit.test_architectures_alone import small

ALONE = "--mesh.cp 1   (use mesh.dp or mesh.dp_shard instead)"
SPLIT = {
    "bloom": (
        "mesh.cp = 2, but 'bloom' keeps its own attention: BloomForCausalLM computes attention in layers of its own",
        "attention that is selected by name: it gets the keys of the other cp ranks",
    ),
    "deepseek_v4": (
        "mesh.cp = 2, but 'deepseek_v4' keeps its own attention: DeepseekV4Attention derives a mask of its own from "
        "the one that it is given",
        "attention that is selected by name: it gets the keys of the other cp ranks",
    ),
    "rwkv": (
        "mesh.cp = 2, but 'rwkv' has recurrent layers (RwkvFeedForward, RwkvSelfAttention)",
        "attention layers only: a recurrent state runs along the whole sequence",
    ),
    "openai-gpt": (
        "mesh.cp = 2, but 'openai-gpt' makes its masks itself, for the tokens that it is given",
        "masks from transformers' mask functions, which are given true positions",
    ),
}
DOCUMENTS = {
    "openai-gpt": (
        "data.document_mask = true, but 'openai-gpt' makes its masks itself, for whole rows",
        "masks from transformers' mask functions, which keep documents apart",
    ),
    "roformer": (
        "data.document_mask = true, but 'roformer' gives every row the same positions",
        "positions that can restart with each document",
    ),
    "deepseek_v4": (
        "data.document_mask = true, but 'deepseek_v4' has a DeepseekV4Attention, which takes keys of a row several at "
        "a time",
        "keys that each stand for one token: what stands for several would join two documents",
    ),
    "minimax_m3_vl_text": (
        "data.document_mask = true, but 'minimax_m3_vl_text' has a MiniMaxM3VLAttention, which takes keys of a row "
        "several at a time",
        "keys that each stand for one token: what stands for several would join two documents",
    ),
}


def text(what: str, expected: str, fix: str) -> str:
    return f"{what}\n  expected: {expected}\n  fix: {fix}"


@pytest.mark.parametrize("name", SPLIT)
def test_rows_that_cannot_be_split(name: str) -> None:
    model = load.outline(small(name))
    assert limits.cp_problems(model, Topology(dp_shard=2)) == []
    assert [str(each) for each in limits.cp_problems(model, Topology(cp=2))] == [
        text(*SPLIT[name], ALONE)
    ]


@pytest.mark.parametrize("name", ["llama", "bart", "gpt2", "gemma3", "phi4_multimodal"])
def test_rows_that_can_be_split(name: str) -> None:
    assert limits.cp_problems(load.outline(small(name)), Topology(cp=2)) == []


@pytest.mark.parametrize("name", DOCUMENTS)
def test_documents_that_cannot_be_kept_apart(name: str) -> None:
    expected = [text(*DOCUMENTS[name], "--data.document_mask false")]
    assert [
        str(each) for each in limits.document_problems(load.outline(small(name)))
    ] == expected


@pytest.mark.parametrize(
    "name", ["llama", "bloom", "mpt", "bart", "qwen3_next", "mamba", "glm_moe_dsa"]
)
def test_documents_that_can_be_kept_apart(name: str) -> None:
    assert limits.document_problems(load.outline(small(name))) == []


def test_a_batch_with_documents_of_a_model_that_does_not_keep_them_apart() -> None:
    mesh = init_mesh(device="cpu")
    context = ContextParallel(mesh)
    context.adapt(load.outline(small("roformer")))
    rows = dict.fromkeys(
        ("input_ids", "labels", "position_ids", "document_ids"),
        torch.zeros(1, 8, dtype=torch.int64),
    )
    with pytest.raises(ConfigError) as caught, context.batch(rows):
        pass
    mesh.close()
    assert str(caught.value) == text(*DOCUMENTS["roformer"], "--data.document_mask false")


def test_one_key_for_all_heads_is_not_shared_by_ranks() -> None:
    config = small("gpt_bigcode")
    found = split_problems("ulysses", Topology(cp=2), load.outline(config))
    assert [str(each).splitlines()[0] for each in found] == [
        "mesh.cp_method = ulysses, but the heads of a tp rank do not divide by mesh.cp (2)"
    ]
    assert (
        cp_method("auto", Topology(cp=2), heads=heads_of(config), seq_len=4096).value
        == "gather"
    )


@pytest.mark.parametrize("name", ["mamba", "rwkv", "xlstm", "blt"])
def test_a_config_that_does_not_say_how_many_heads_it_has(name: str) -> None:
    heads = heads_of(small(name))
    assert cp_method("auto", Topology(), heads=heads, seq_len=4096).value == "gather"
    assert cp_method("auto", Topology(cp=2), heads=heads, seq_len=4096).value == "gather"


def test_a_mask_for_other_places_than_a_row_has() -> None:
    """blt attends to patches; a mask of documents is one of tokens."""
    said = masked(
        {"document_ids": torch.zeros(1, 8, dtype=torch.int64)}, q_length=9, mask_function=_seen
    )
    assert said == text(
        "the model asks for a mask of 9 places; its rows have 8 tokens",
        "attention over the tokens of a row, if rows hold documents or are split",
        "--data.document_mask false --mesh.cp 1",
    )


def test_a_mask_made_of_the_tokens_of_a_rank() -> None:
    """gemma4_unified numbers the images among the tokens that it is given."""
    blocks = torch.zeros(1, 4)

    def beyond(
        row: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        return blocks[row, query] == blocks[row, key]

    said = masked(
        {"document_ids": torch.zeros(1, 8, dtype=torch.int64)}, q_length=4, mask_function=beyond
    )
    assert said == text(
        "a mask of this model is made of the 4 tokens that a rank holds (mesh.cp > 1)",
        "masks that are functions of a token's place in its row",
        ALONE,
    )


def _seen(
    row: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor
) -> torch.Tensor:
    return key <= query


def masked(more: dict[str, torch.Tensor], *, q_length: int, mask_function: Any) -> str:
    """What is said when a layer of a model asks for such a mask."""
    mesh = init_mesh(device="cpu")
    context = ContextParallel(mesh)
    rows = dict.fromkeys(
        ("input_ids", "labels", "position_ids"), torch.zeros(1, 8, dtype=torch.int64)
    )
    with pytest.raises(ConfigError) as caught, context.batch(rows | more):
        context._mask(1, q_length=q_length, kv_length=q_length, mask_function=mask_function)
    mesh.close()
    return str(caught.value)
