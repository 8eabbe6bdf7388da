"""`threefold.TrainStep`: the global batch's numbers, whatever the ranks and the micro-batches."""

from __future__ import annotations

from typing import Any

from ranks.reference import compare_curves, require
from ranks.spawn import run_ranks

CONFIG = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def _steps(
    sizes: dict[str, int], micro_batch: int | None, given_positions: bool
) -> list[tuple[float, float]]:
    import torch

    import threefold

    mesh = threefold.init_mesh(**sizes)
    model = threefold.load_model(config=CONFIG, mesh=mesh)
    step = threefold.TrainStep(model, lr=1e-2, micro_batch=micro_batch)
    rows = torch.randint(64, (3, 8, 17), generator=torch.Generator().manual_seed(1))
    numbers = []
    for batch in rows:
        own = batch[mesh.dp_rank :: mesh.dp_size]
        labels = own[:, 1:].clone()
        labels[0, :9] = -100  # uneven numbers of targets
        given: dict[str, Any] = (
            {"position_ids": torch.arange(16).expand(len(own), 16)} if given_positions else {}
        )
        numbers.append(tuple(step({"input_ids": own[:, :-1], "labels": labels, **given})))
    step.lr = 0.0  # type: ignore[attr-defined]
    before = [parameter.detach().clone() for parameter in model.module.parameters()]
    step({"input_ids": rows[0][:, :-1], "labels": rows[0][:, 1:]})
    assert all(
        torch.equal(a, b) for a, b in zip(before, model.module.parameters(), strict=True)
    )
    mesh.close()
    return numbers


def _plain_loss() -> float:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import threefold

    weights = threefold.load_model(
        config=CONFIG, mesh=threefold.init_mesh()
    ).module.state_dict()
    model = LlamaForCausalLM(LlamaConfig(**CONFIG))
    model.load_state_dict(weights)
    rows = torch.randint(64, (3, 8, 17), generator=torch.Generator().manual_seed(1))[0]
    labels = rows[:, 1:].clone()
    labels[0, :9] = -100
    with torch.no_grad():
        logits = model(input_ids=rows[:, :-1], use_cache=False).logits
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=-100
    ).item()


def test_numbers_are_those_of_the_whole_batch() -> None:
    alone = run_ranks(_steps, 1, {}, None, True)[0]
    assert abs(alone[0][0] - run_ranks(_plain_loss, 1)[0]) < 1e-5
    assert alone[2] != alone[0]
    in_parts = run_ranks(_steps, 1, {}, 2, False)[0]
    split = run_ranks(_steps, 2, {"tp": 2}, None, False)
    assert split[0] == split[1]
    for other in (in_parts, split[0]):
        require(compare_curves(other, alone))
