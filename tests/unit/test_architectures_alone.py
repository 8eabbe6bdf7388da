"""One process, every kind of architecture: our loss and gradients are transformers' own, with each document alone."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from architectures import NAMES, NOT_RUN, config_of, perturbed
from ranks.reference import compare_gradients, require
from threefold.check.compare import LOSS, compare_number
from threefold.check.reference import forward_backward, gradients_of
from threefold.mesh.mesh import Mesh, init_mesh
from threefold.model import load, weight_loading
from threefold.model.context_parallel import attention_choice, limits, positions, recurrence
from threefold.model.context_parallel.attention import ContextParallel
from threefold.model.head import install
from threefold.model.reduced import reduced
from threefold.training.loss import TokenLoss

SEQ_LEN = 32
# Their own attention; masks, keys or terms of their own.
OWN = (
    "bloom",
    "falcon",
    "gpt_neo",
    "gpt_neox_japanese",
    "mpt",
    "xglm",
    "trocr",
    "git",
    "big_bird",
)
DERIVED = ("deepseek_v4", "deepseek_v32", "glm_moe_dsa", "minimax_m3_vl_text", "inkling2_text")
STATES = (
    *(
        "qwen3_next",
        "granitemoehybrid",
        "nemotron_h",
        "olmo_hybrid",
        "minimax",
        "lfm2_moe",
        "mamba2",
        "jamba",
    ),
    *(
        "zamba2",
        "falcon_h1",
        "recurrent_gemma",
        "rwkv",
        "xlstm",
        "zaya",
        "inkling_text",
        "kimi_linear",
    ),
)
# Positions: numbered from a cut row, after the padding's number, chunks of a document, two sets of factors.
POSITIONS = (
    "bart",
    "marian",
    "pegasus",
    "whisper",
    "roberta",
    "camembert",
    "llama4",
    "phi3",
    "bigbird_pegasus",
)
SAMPLE = ("llama", "gemma3_text", "gpt_oss", "bert", *OWN, *DERIVED, *STATES, *POSITIONS)
# One of each further kind of layer that the code meets: learned and shifted tables of positions, soft-caps, keys that
# layers share, latent attention, fused and single experts, blocks whose parts run side by side, a part for images.
KINDS = (
    *(
        "gpt2",
        "opt",
        "gemma2",
        "gemma3n_text",
        "gemma4_text",
        "deepseek_v3",
        "mixtral",
        "qwen3_moe",
        "dbrx",
    ),
    *("cohere2", "phi", "gpt_neox", "gemma3", "phi4_multimodal"),
)
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 48,
    "long_factor": [4.0] * 48,
    "rope_theta": 1e4,
}
# What transformers' own forward makes of a row's beginning depends on the row's length, or on later tokens.
NOT_CAUSAL = ("cpmant", "xlnet", "xlm", "reformer", "prophetnet")
# Of many near-equal keys it picks the largest: rounding decides.
PICKS = ("doge",)


def small(name: str) -> PretrainedConfig:
    values: dict[str, Any] = {
        "rope_parameters": LONGROPE | {"original_max_position_embeddings": 4096}
    }
    config = reduced(config_of(name, **(values if name == "phi3" else {})), seq_len=SEQ_LEN)
    if name == "minimax_m3_vl_text":  # two blocks of four keys are picked, of eight
        config.layer_types = ["full_attention", "minimax_m3_sparse"]
        config.index_block_size, config.index_topk_blocks, config.index_n_heads = (
            4,
            2,
            config.num_key_value_heads,
        )
        return config
    if hasattr(text := config.get_text_config(), "index_n_heads"):
        # With few, many scores are 0, and which of them are picked is left to chance.
        text.index_n_heads = 16
    return config


def rows(mask: str, config: PretrainedConfig) -> dict[str, Tensor]:
    """Two rows; `documents`: of several documents; `padded`: filled up after the first."""
    draws = torch.Generator().manual_seed(5)
    tokens = torch.randint(
        3, config.get_text_config().vocab_size, (2, SEQ_LEN + 1), generator=draws
    )
    batch = {"input_ids": tokens[:, :-1].clone(), "labels": tokens[:, 1:].clone()}
    documents = torch.zeros(2, SEQ_LEN, dtype=torch.int64)
    if mask == "documents":
        for row, begins in ((0, (4, 9)), (1, (19, 27))):
            for begin in begins:
                documents[row, begin:] += 1
                batch["labels"][row, begin - 1] = -100
    if mask == "padded":
        for row, length in ((0, 21), (1, 11)):
            documents[row, length:] = -1
            batch["labels"][row, length - 1 :] = -100
    batch["document_ids"] = documents
    begins = torch.cat([torch.ones(2, 1, dtype=torch.bool), documents.diff(dim=1) != 0], dim=1)
    places = torch.arange(SEQ_LEN).expand(2, -1)
    batch["position_ids"] = places - places.where(begins, 0).cummax(dim=1).values
    return (
        batch
        if mask != "causal"
        else {name: value for name, value in batch.items() if name != "document_ids"}
    )


def theirs(model: Any, batch: dict[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
    """Mean loss and gradients of transformers' own model, which is given each document alone, and no positions."""
    sums = forward_backward(model, batch)
    return sums.loss, gradients_of(model)


class Ours:
    """The product's model in one process, with the weights of transformers' own."""

    def __init__(
        self, config: PretrainedConfig, weights: dict[str, Tensor], mesh: Mesh
    ) -> None:
        self.context = ContextParallel(mesh)
        self.model = load.build_without_storage(
            copy.deepcopy(config), attention=self.context.name
        )
        self.context.adapt(self.model)
        install(self.model, chunk=7)
        weight_loading.fill(
            self.model,
            {name: lambda each=each: each for name, each in weights.items()},
            mesh=mesh,
            tp_placements={},
            first_value=lambda name, shape: torch.empty(shape),
        )
        self.model.eval()

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        with self.context.batch(batch) as local:
            sums = self.model(
                labels=local["labels"],
                token_loss=TokenLoss(),
                input_ids=local["input_ids"],
                position_ids=local["position_ids"],
                attention_mask=torch.ones_like(local["input_ids"]),
                use_cache=False,
            )
            if torch.is_grad_enabled():
                self.model.zero_grad()
                sums.objective.backward()
            return sums.cross_entropy.detach()


@pytest.fixture
def mesh() -> Iterator[Mesh]:
    found = init_mesh(device="cpu")
    yield found
    found.close()


def compare(name: str, mesh: Mesh) -> None:
    torch.manual_seed(0)
    config = small(name)
    own = perturbed(
        AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="eager")
    ).eval()
    ours = Ours(config, dict(own.state_dict()), mesh)
    kept = not limits.document_problems(ours.model) and name not in PICKS and name != "blt"
    for mask in ("causal", "documents", "padded") if kept else ("causal",):
        batch = rows(mask, config)
        own.zero_grad()
        loss, gradients = theirs(own, batch)
        targets = int((batch["labels"] != -100).sum())
        loss_of_ours = ours.loss(batch).item() / targets
        actual = {
            name: gradient / targets for name, gradient in gradients_of(ours.model).items()
        }
        require(
            [compare_number(LOSS, loss_of_ours, loss), *compare_gradients(actual, gradients)],
            mask,
        )
    with torch.no_grad():
        early = rows("causal", config)
        early["labels"][:, 8:] = -100
        changed = {**early, "input_ids": early["input_ids"].clone()}
        changed["input_ids"][:, 16:] = 5
        assert abs(ours.loss(early) - ours.loss(changed)) < 1e-3


@pytest.mark.parametrize("name", SAMPLE)
def test_it_computes_as_transformers_does_with_each_document_alone(
    name: str, mesh: Mesh
) -> None:
    compare(name, mesh)


OTHERS = [name for name in NAMES if name not in {*SAMPLE, *KINDS, *NOT_RUN, *NOT_CAUSAL}]


@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(name, marks=pytest.mark.examples) for name in KINDS),
        *(pytest.param(name, marks=pytest.mark.long) for name in OTHERS),
    ],
)
def test_every_architecture_computes_as_transformers_does(name: str, mesh: Mesh) -> None:
    compare(name, mesh)


def outline(name: str, **values: Any) -> Any:
    config = small(name)
    for key, value in values.items():
        setattr(config, key, value)
    return load.outline(config)


@pytest.mark.parametrize("name", [*OWN, *DERIVED])
def test_own_attention_is_kept(name: str) -> None:
    assert attention_choice.own_attention(outline(name)) is not None


@pytest.mark.parametrize(
    "name", ["llama", "gemma2", "gpt2", "gpt_oss", "bert", "bart", "qwen3_next", "gemma3"]
)
def test_attention_that_is_asked_for_is_given(name: str) -> None:
    assert attention_choice.own_attention(outline(name)) is None


@pytest.mark.parametrize("name", STATES)
def test_states_are_found(name: str) -> None:
    assert list(recurrence.carriers(outline(name)))


@pytest.mark.parametrize(
    "name", ["llama", "bloom", "gpt2", "deepseek_v3", "gemma4", "whisper", "phi4_multimodal"]
)
def test_no_state_is_found_where_there_is_none(name: str) -> None:
    """Convolutions of parts that hear or see are not in the way of a text."""
    assert not list(recurrence.carriers(outline(name)))


def test_documents_as_rows_and_back() -> None:
    documents = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2], [0, 1, 1, 1, 1, 1, 1, -1]])
    values = torch.arange(16).reshape(2, 8, 1)
    laid_out = recurrence.DocumentRows.of(documents)
    seen: list[list[int]] = []

    def forward(rows: Tensor, state: None = None) -> tuple[Tensor, Tensor]:
        seen.extend(row.flatten().tolist() for row in rows)
        return rows * 10, torch.zeros(7)

    output, state = laid_out.run(forward, values)
    assert output.equal(values * 10)
    assert state is None
    runs = [[0, 1, 2], [3, 4], [5, 6, 7], [8], [9, 10, 11, 12, 13, 14], [15]]
    assert sorted(sorted(set(row)) for row in seen) == runs


@pytest.mark.parametrize(
    "name", ["bert", "roberta", "camembert", "electra", "megatron-bert", "big_bird", "rembert"]
)
def test_a_model_of_both_sides_is_no_causal_one(name: str) -> None:
    assert limits.direction_problems(outline(name), pretrained=False) == []
    model = load.outline(reduced(AutoConfig.for_model(name)))
    found = limits.direction_problems(model, pretrained=False)
    assert [str(problem) for problem in found] == [
        f"the model {name!r} is not causal: with its config each token sees the ones after it\n"
        "  expected: a model that predicts each token from the ones before it\n"
        "  fix: --model.config '{..., is_decoder: true}'"
    ]


def test_given_weights_of_a_model_of_both_sides() -> None:
    model = load.outline(reduced(AutoConfig.for_model("bert")))
    assert [str(problem) for problem in limits.direction_problems(model, pretrained=True)] == [
        "the model 'bert' is not causal: with its config each token sees the ones after it\n"
        "  expected: a causal language model: these weights were trained to see both sides of a token\n"
        "  fix: use a causal model; to continue training this one as causal: is_decoder: true in config.json"
    ]


def test_gpt_neox_says_that_it_is_no_decoder_and_is_one() -> None:
    assert (
        limits.direction_problems(outline("gpt_neox", is_decoder=False), pretrained=False) == []
    )


def test_a_buffer_that_nothing_writes_is_an_error(mesh: Mesh) -> None:
    model = load.build_without_storage(small("llama"), attention="eager")
    weights = {name: torch.zeros(each.shape) for name, each in model.named_parameters()}
    model.model.register_buffer("forgotten", torch.zeros(3, device="meta"), persistent=False)
    with pytest.raises(RuntimeError, match=r"never written: model\.forgotten"):
        weight_loading.fill(
            model,
            {name: lambda each=each: each for name, each in weights.items()},
            mesh=mesh,
            tp_placements={},
            first_value=lambda name, shape: torch.empty(shape),
        )


def test_only_positions_that_may_be_left_out_are_replaced() -> None:
    class ByItselfPosition(torch.nn.Module):
        def forward(self, states: Any, position_ids: Any = None) -> None: ...

    class GivenPosition(torch.nn.Module):
        def forward(self, states: Any, distance: Any, position_ids: Any) -> None: ...

    found = positions.numbering(torch.nn.ModuleList([ByItselfPosition(), GivenPosition()]))
    assert [type(each) for each in found] == [ByItselfPosition]


@pytest.mark.parametrize("name", ["bloom", "falcon", "deepseek_v4"])
def test_kept_attention_is_said(name: str, mesh: Mesh) -> None:
    context = ContextParallel(mesh)
    model = load.build_without_storage(small(name), attention=context.name)
    assert context.adapt(model) is not None


@pytest.mark.parametrize("name", ["llama", "mamba", "qwen3_next"])
def test_no_attention_of_its_own_is_said(name: str, mesh: Mesh) -> None:
    context = ContextParallel(mesh)
    model = load.build_without_storage(small(name), attention=context.name)
    assert context.adapt(model) is None
