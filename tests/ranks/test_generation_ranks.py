"""What a model writes on a mesh is what transformers' generate writes with the same weights in one process."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from ranks.spawn import run_ranks

pytestmark = pytest.mark.ranks

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 2, "tie_word_embeddings": True},
    "gemma2": {"num_key_value_heads": 2, "sliding_window": 4, "head_dim": 8},
    "gpt_oss": {
        "num_key_value_heads": 2,
        "sliding_window": 4,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
    },
    "bloom": {"n_head": 4, "n_layer": 2},
}
SHAPE = {
    "vocab_size": 127,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
PROMPTS = [[[1, 2, 3, 4, 5], [90, 3, 3, 7, 8]], [[21, 22, 23, 25, 26, 27, 28]]]
SPLIT: list[dict[str, Any]] = [{"tp": 2}, {"tp": 2, "sequence_parallel": True}, {"cp": 2}]
SHARDS = {"dp": 2, "dp_shard": 2}
OPTIONS: list[dict[str, Any]] = [
    {"max_new_tokens": 9, "do_sample": False},
    {"max_new_tokens": 9, "do_sample": True, "temperature": 1.3, "top_k": 20},
    {"max_new_tokens": 6, "num_beams": 3, "do_sample": False},
]


def _written(sizes: dict[str, int], kind: str) -> Any:
    import copy

    import torch
    from transformers import AutoModelForCausalLM

    import threefold
    from threefold.config.schema import Config
    from threefold.model import load
    from threefold.model.build import build

    axes = {axis: size for axis, size in sizes.items() if axis != "sequence_parallel"}
    mesh = threefold.init_mesh(**axes)
    shape = {
        name: size
        for name, size in SHAPE.items()
        if kind != "bloom" or name in ("vocab_size", "hidden_size")
    }
    config = {
        "model_type": kind,
        **shape,
        **CONFIGS[kind],
        "pad_token_id": 0,
        "eos_token_id": 11,
    }
    if "sequence_parallel" in sizes:  # which no CPU chooses
        asked = Config.model_validate(
            {"model": {"config": config}, "mesh": sizes, "data": {"seq_len": 16}}
        )
        model = build(asked, load.read_config(asked.model), mesh)
        assert model.tensor.sequence_group is not None
    else:
        model = threefold.load_model(config=config, mesh=mesh, admission="off")
    state = torch.get_rng_state()
    texts = PROMPTS if mesh.dp_size == 1 else [PROMPTS[mesh.dp_rank]]
    written = [
        model.generate(torch.tensor(text), seed=5, **options).tolist()
        for text in texts
        for options in OPTIONS
    ]
    assert torch.equal(torch.get_rng_state(), state) and model.module.training
    # The model trains as before.
    ids = torch.arange(32).view(2, 16) + 1
    loss = threefold.TrainStep(model, lr=1e-3)({"input_ids": ids, "labels": ids + 1}).loss
    if mesh.world_size > 1:
        mesh.close()
        return written, loss
    torch.manual_seed(0)
    again = threefold.load_model(config=config, mesh=mesh, admission="off")
    whole: Any = AutoModelForCausalLM.from_config(
        copy.deepcopy(again.config), attn_implementation="eager"
    )
    whole.load_state_dict(again.module.state_dict())
    whole.eval()
    expected = []
    for text in texts:
        for options in OPTIONS:
            torch.manual_seed(5)
            rows = torch.tensor(text)
            expected.append(
                whole.generate(rows, attention_mask=torch.ones_like(rows), **options).tolist()
            )
    assert written == expected
    mesh.close()
    return written, loss


@cache
def _alone(kind: str) -> Any:
    return run_ranks(_written, 1, {}, kind)[0]


# transformers has a plan for the layers of two of them; bloom keeps its own attention, whose rows cp cannot split.
CASES = [
    ("llama", SPLIT),
    ("gemma2", [SPLIT[0], SPLIT[2]]),
    ("gpt_oss", SPLIT[2:]),
    ("bloom", [{"dp": 2}]),
]


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [(kind, sizes) for kind, meshes in CASES for sizes in [SHARDS, *meshes]],
    ids=str,
)
def test_a_mesh_writes_what_one_process_of_transformers_writes(
    kind: str, sizes: dict[str, Any]
) -> None:
    alone, loss = _alone(kind)
    assert len({str(each) for each in alone}) == len(alone)
    for rank, (found, its_loss) in enumerate(
        run_ranks(_written, 2, sizes, kind, timeout_s=120)
    ):
        own = (
            alone
            if "dp" not in sizes
            else alone[rank * len(OPTIONS) : (rank + 1) * len(OPTIONS)]
        )
        assert found == own
        if "dp" not in sizes:
            assert its_loss == pytest.approx(loss, rel=1e-5)


def _refused(sizes: dict[str, int], wrong: dict[str, Any]) -> Any:
    import torch

    import threefold

    mesh = threefold.init_mesh(**sizes)
    model = threefold.load_model(
        config={"model_type": "llama", **SHAPE, "pad_token_id": 0}, mesh=mesh, admission="off"
    )
    ids, said = torch.tensor([[1, 2, 3]]), ""
    options: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False}
    try:
        model.generate(ids, **options, **(wrong if mesh.rank == mesh.world_size - 1 else {}))
    except threefold.errors.ThreefoldError as error:
        said = error.problems[0].what
    written = model.generate(ids, **options).tolist()
    whole = model.generate(ids, **options, return_dict_in_generate=True, output_scores=True)
    assert whole.sequences.tolist() == written and len(whole.scores) == len(written[0]) - 3
    mesh.close()
    return said, written, model.module.training


@pytest.mark.parametrize(
    "wrong", [{"nonsense": 1}, {"generation_config": 5}], ids=["option", "no config"]
)
@pytest.mark.parametrize("sizes", [{}, {"dp": 2}, SHARDS, {"tp": 2}], ids=str)
def test_what_transformers_refuses_on_one_rank_is_refused_on_all(
    sizes: dict[str, int], wrong: dict[str, Any]
) -> None:
    for said, written, training in run_ranks(
        _refused, max(1, 2 * bool(sizes)), sizes, wrong, timeout_s=60
    ):
        assert said.startswith("generate is refused by transformers: ")
        assert "nonsense" in said or "generation_config" in wrong
        assert len(written[0]) in (5, 6) and training
