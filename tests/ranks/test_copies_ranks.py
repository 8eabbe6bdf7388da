"""Copies that drift apart on a mesh end the run, or refuse the save, with the tensor's and the ranks' names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ranks.spawn import run_ranks

pytestmark = pytest.mark.ranks

LLAMA = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
NORM = "model.layers.1.input_layernorm.weight"


def _up_by_one_ulp(tensor: Any) -> None:
    import torch

    local = getattr(tensor, "to_local", lambda: tensor)().detach().view(-1)
    local[0] = torch.nextafter(local[0], torch.tensor(2.0))


def _drift(model: Any, optimizer: Any, what: str) -> None:
    """Changes one tensor of this rank."""
    parameters = dict(model.module.named_parameters())
    if what == "parameter":
        _up_by_one_ulp(parameters[NORM])
    elif what == "moment":
        # By more: what rounding makes of one ulp a step later may be equal again.
        optimizer.state[parameters[NORM]]["exp_avg_sq"].mul_(2.0)
    else:
        _up_by_one_ulp(dict(model.module.named_buffers())["model.rotary_emb.inv_freq"])


def _a_loop(sizes: dict[str, int], what: str, drifts: int, at: str, folder: str) -> str:
    """A loop of one's own in which one rank's copy changes after its third step."""
    import torch

    import threefold
    from threefold.errors import RunError

    mesh = threefold.init_mesh(**sizes)
    model = threefold.load_model(config=LLAMA, mesh=mesh)
    step = threefold.TrainStep(model, lr=1e-2)
    rows = torch.randint(
        64, (2 * mesh.dp_size, 17), generator=torch.Generator().manual_seed(1)
    )[mesh.dp_rank :: mesh.dp_size]
    batch = {"input_ids": rows[:, :-1], "labels": rows[:, 1:]}
    try:
        for number in range(1, 11):
            step(batch)
            if number == 3 and mesh.rank == drifts:
                _drift(model, step.optimizer, what)
            if number == 3 and at == "save":
                threefold.save(folder, model=model, step=number, optimizer=step)
            if number == 3 and at == "evaluation":
                threefold.EvalStep(model)([batch])
    except RunError as error:
        return str(error)
    finally:
        mesh.close()
    return "nothing"


@pytest.mark.parametrize(
    ("sizes", "what", "drifts", "others"),
    [
        ({"tp": 2}, "parameter", 1, "rank 1 from rank 0"),
        ({"dp": 2}, "moment", 0, "rank 1 from rank 0"),
        ({"cp": 2}, "buffer", 1, "rank 1 from rank 0"),
        ({"dp": 4, "dp_shard": 2}, "parameter", 3, "rank 3 from rank 1"),
        ({"dp": 2, "dp_shard": 2, "tp": 2}, "moment", 3, "rank 3 from rank 2"),
    ],
    ids=str,
)
def test_drift_ends_a_loop_at_its_next_comparison(
    sizes: dict[str, int], what: str, drifts: int, others: str, tmp_path: Path
) -> None:
    world = sizes.get("dp", 1) * sizes.get("cp", 1) * sizes.get("tp", 1)
    messages = run_ranks(_a_loop, world, sizes, what, drifts, "", str(tmp_path))
    assert len(set(messages)) == 1  # the same on every rank
    name = "rotary_emb.inv_freq" if what == "buffer" else "input_layernorm.weight"
    first, *rest = messages[0].splitlines()
    assert (
        first.startswith("the copies of ")
        and "differ after 10 steps" in first
        and others in first
    ), first
    # What a changed norm or table did to other tensors since is counted.
    assert name in first or "more tensor" in first, first
    assert "expected:" in rest[0] and "fix:" in rest[1]


@pytest.mark.parametrize("at", ["save", "evaluation"])
def test_drift_refuses_a_save_and_an_evaluation(at: str, tmp_path: Path) -> None:
    messages = run_ranks(_a_loop, 2, {"tp": 2}, "parameter", 1, at, str(tmp_path))
    when = "after step 3, which is not saved" if at == "save" else "before an evaluation"
    assert all(
        message.startswith(
            f"the copies of model.{NORM[6:]} differ {when}: rank 1 from rank 0\n"
        )
        for message in messages
    )
    assert not list(tmp_path.glob("checkpoints/step-*"))


@pytest.mark.parametrize("sizes", [{"tp": 2}, {"dp": 2, "tp": 2}], ids=str)
def test_equal_copies_train_on(sizes: dict[str, int], tmp_path: Path) -> None:
    world = sizes.get("dp", 1) * sizes["tp"]
    assert set(run_ranks(_a_loop, world, sizes, "parameter", 99, "save", str(tmp_path))) == {
        "nothing"
    }


# Attention that the plan of deepseek_v3 leaves whole, that of olmo2 makes whole behind its projections, and that of
# qwen3 splits over heads.
GATHERED = {**LLAMA, "model_type": "olmo2", "pad_token_id": 0}
WHOLE = {
    **LLAMA,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 1,
}
WHOLE |= {
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "topk_group": 1,
}
WHOLE |= {
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}


def _noise(model_config: dict[str, Any]) -> list[float]:
    """The loss of a few steps with dropout on attention weights, and the sum of this rank's first projection."""
    import torch

    import threefold

    mesh = threefold.init_mesh(tp=2)
    model = threefold.load_model(
        config={**model_config, "attention_dropout": 0.3, "head_dim": 8}, mesh=mesh
    )
    step = threefold.TrainStep(model, lr=1e-2)
    rows = torch.randint(64, (2, 17), generator=torch.Generator().manual_seed(1))
    losses = [step({"input_ids": rows[:, :-1], "labels": rows[:, 1:]}).loss for _ in range(3)]
    mesh.close()
    return losses


@pytest.mark.parametrize(
    "model",
    [WHOLE, GATHERED, {**LLAMA, "model_type": "qwen3"}],
    ids=lambda model: model["model_type"],
)
def test_attention_drops_alike_where_it_is_whole(model: dict[str, Any]) -> None:
    """The comparison after the first step ends this if tp ranks draw noise of their own for whole attention."""
    first, second = run_ranks(_noise, 2, model)
    assert first == second


def _adapters_in_part() -> str:
    """An adapter's gradient that each tp rank knows only in part, not summed."""
    import dataclasses

    import torch

    import threefold
    from threefold.errors import RunError

    mesh = threefold.init_mesh(tp=2)
    model = threefold.load_model(
        config=LLAMA, mesh=mesh, lora={"r": 4, "target_modules": "all-linear"}
    )
    unsummed = dataclasses.replace(model.tensor, partial_gradients=())
    step = threefold.TrainStep(dataclasses.replace(model, tensor=unsummed), lr=1e-2)
    rows = torch.randint(64, (2, 17), generator=torch.Generator().manual_seed(1))
    try:
        step({"input_ids": rows[:, :-1], "labels": rows[:, 1:]})
    except RunError as error:
        return str(error)
    finally:
        mesh.close()
    return "nothing"


def test_a_partial_gradient_of_an_adapter_is_named_after_the_first_step() -> None:
    for message in run_ranks(_adapters_in_part, 2):
        assert (
            message.startswith("the copies of model.layers.0.self_attn.")
            and ".lora_" in message
        )
        assert " differ after the first step: rank 1 from rank 0" in message


def _after_evaluate(folder: str, first: str) -> tuple[str, float]:
    from ranks.huggingface_cases import Reviews, arguments, classifier
    from threefold.integrations.huggingface import Trainer

    trainer = Trainer(
        classifier(),
        arguments(
            folder,
            max_steps=4,
            per_device_train_batch_size=2,
            save_strategy="no",
            logging_steps=1,
        ),
        train_dataset=Reviews(16),
        eval_dataset=Reviews(6),
    )
    for name in filter(None, first.split()):
        getattr(trainer, name)(*([Reviews(4)] if name == "predict" else []))
    trainer.train()
    return type(trainer.model_wrapped).__name__, sum(
        p.double().sum().item() for p in trainer.model.parameters()
    )


@pytest.mark.parametrize("first", ["evaluate", "predict evaluate", "train evaluate"])
def test_the_trainer_trains_one_model_after_any_of_its_calls(
    first: str, tmp_path: Path
) -> None:
    ranks = run_ranks(_after_evaluate, 2, str(tmp_path / "after"), first)
    assert ranks[0] == ranks[1] and ranks[0][0] == "DistributedDataParallel"
    if not first.startswith("train"):
        assert ranks == run_ranks(_after_evaluate, 2, str(tmp_path / "alone"), "")


def _drifting_trainer(folder: str) -> str:
    import torch
    from transformers import TrainerCallback

    from ranks.huggingface_cases import Reviews, arguments, classifier
    from threefold.errors import RunError
    from threefold.integrations.huggingface import Trainer

    class Drift(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2 and torch.distributed.get_rank() == 1:
                _up_by_one_ulp(next(kwargs["model"].parameters()))

    args = arguments(
        folder,
        max_steps=12,
        per_device_train_batch_size=2,
        save_strategy="no",
        learning_rate=0.0,
    )
    try:
        Trainer(classifier(), args, train_dataset=Reviews(64), callbacks=[Drift()]).train()
    except RunError as error:
        return str(error)
    return "nothing"


def test_drift_ends_the_trainer(tmp_path: Path) -> None:
    first, second = run_ranks(_drifting_trainer, 2, str(tmp_path))
    assert (
        first == second
        and first.startswith("the copies of ")
        and "differ after step 10: rank 1 from rank 0" in first
    )
