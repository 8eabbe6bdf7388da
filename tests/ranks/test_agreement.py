"""Ranks that do not make one step together are named on all of them, in that step; nothing hangs or is updated."""

from __future__ import annotations

from typing import Any

import pytest

from ranks import loops
from ranks.reference import TINY_LLAMA, make_batches
from ranks.spawn import run_ranks

pytestmark = pytest.mark.ranks


def _said(do: Any) -> str:
    try:
        do()
    except Exception as error:
        return str(error).splitlines()[0]
    return "no error"


def _batches() -> list[dict[str, Any]]:
    found = make_batches(steps=4, rows=8, seq_len=16)
    for batch in found:
        batch.pop("position_ids")
    return found


def _later(sizes: dict[str, int]) -> list[Any]:
    """What is said of a second batch that is wrong in several ways, and of a step after each."""
    import torch

    import threefold

    mesh = threefold.init_mesh(**sizes)
    model = threefold.load_model(config=TINY_LLAMA, mesh=mesh, admission="off")
    step = threefold.TrainStep(model, lr=1e-3, micro_batch=2)
    first, second, third, _ = (loops.share(batch, mesh) for batch in _batches())
    other = {name: rows.roll(mesh.rank, 0) for name, rows in second.items()}
    uneven = {name: rows[: len(rows) - 2 * mesh.rank] for name, rows in second.items()}
    bad = {**second, **({"junk": torch.zeros(1)} if mesh.rank == 1 else {})}
    losses = [step(first).loss]
    model.train(mesh.rank == 0)  # as after an evaluation that the other forgot to end
    said_of_mode = _said(lambda: step(second))
    model.train()
    part = model.module.model.layers[0].mlp  # as a hook does that freezes a part
    part.train(mesh.rank == 0)
    said_of_part = _said(lambda: step(second))
    model.train()
    frozen = model.module.model.layers[mesh.rank].mlp  # drawn on each rank by itself
    frozen.requires_grad_(False)
    said_of_frozen = _said(lambda: step(second))
    frozen.requires_grad_(True)
    before = [loops.whole(values) for values in model.parameters()]
    said = {
        "frozen": said_of_frozen,
        "mode": said_of_mode,
        "part": said_of_part,
        "modules": {
            name: len([*each.modules()])
            for name, each in (("mode", model.module), ("part", part))
        },
        "rows": _said(lambda: step(other)) if mesh.dp_size == 1 else "",
        "pieces": _said(lambda: step(uneven)),
        "batch": _said(lambda: step(bad)),
        "call": _said(
            lambda: step(second) if mesh.rank else threefold.EvalStep(model)([second])
        ),
    }
    assert all(
        torch.equal(a, loops.whole(b)) for a, b in zip(before, model.parameters(), strict=True)
    )
    losses += [step(second).loss, step(third).loss]
    mesh.close()
    return [said, losses]


MESHES = [{"dp": 2}, {"dp": 2, "dp_shard": 2}, {"tp": 2}, {"cp": 2}]


@pytest.fixture(scope="module")
def alone() -> Any:
    return run_ranks(_later_alone, 1)[0]


def _later_alone() -> list[float]:
    import threefold

    mesh = threefold.init_mesh()
    model = threefold.load_model(config=TINY_LLAMA, mesh=mesh, admission="off")
    step = threefold.TrainStep(model, lr=1e-3, micro_batch=2)
    losses = [step(batch).loss for batch in _batches()[:3]]
    mesh.close()
    return losses


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_a_later_batch_that_is_wrong_is_named_on_every_rank(
    sizes: dict[str, int], alone: list[float]
) -> None:
    for said, losses in run_ranks(_later, 2, sizes, timeout_s=60):
        for mode in ("mode", "part"):
            assert said[mode] == (
                "ranks are not in the same call: rank 0 is in step 2, "
                f"rank 1 in eval-mode ({said['modules'][mode]} modules) step 2"
            )
        frozen = [part.split(": ")[0] for part in said["frozen"].split("step (")[1:]]
        assert frozen == ["3 parameters frozen"] * 2, said["frozen"]
        if "dp" not in sizes:
            same = "ranks 0 and 1 belong to dp rank 0 and give different rows to step 2"
            assert said["rows"] == f"{same}: row 0 of input_ids"
        pieces = (2, 1) if "dp" in sizes else (4, 3)
        assert said["pieces"] == (
            f"the batch of step 2 is split into {pieces[1]} micro-batches on rank 1, into {pieces[0]} on rank 0"
        )
        assert said["batch"] == "the batch has 'junk', which the step does not know"
        assert (
            said["call"]
            == "ranks are not in the same call: rank 0 is in an evaluation, rank 1 in step 2"
        )
        # Nothing was left behind by what was refused.
        assert losses == pytest.approx(alone, rel=1e-5)


def _raises_on_one(sizes: dict[str, int]) -> list[Any]:
    import torch
    import torch.nn.functional as F

    import threefold

    mesh = threefold.init_mesh(**sizes)
    model = threefold.load_model(config=TINY_LLAMA, mesh=mesh, admission="off")
    fails = [False]

    def loss(logits: Any, batch: Any) -> Any:
        if mesh.rank == mesh.world_size - 1 and fails[0] and (batch["row"] == 0).any():
            raise ValueError("rows that it cannot take")
        sums = F.cross_entropy(
            logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum", ignore_index=-100
        )
        return sums, (batch["labels"] != -100).sum()

    step = threefold.TrainStep(model, loss=loss, lr=1e-3, micro_batch=2)
    first, second, third, _ = (loops.share(batch, mesh) for batch in _batches())
    numbers: list[Any] = []
    alone = mesh.world_size == 1
    for number, batch in enumerate(
        (first, second, third) if alone else (first, second, second, third)
    ):
        fails[0] = number == 1 and not alone
        # In the last micro-batch, after gradients.
        batch["row"] = torch.arange(len(batch["labels"])).flip(0)
        try:
            numbers.append(step(batch).loss)
        except Exception as error:
            numbers.append(f"{type(error).__name__}: {str(error).splitlines()[0]}")
    fails[0] = mesh.world_size > 1
    said = _said(lambda: threefold.EvalStep(model, loss=loss)([first]))
    numbers.append(said if fails[0] else "")
    mesh.close()
    return numbers


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_a_loss_that_raises_on_one_rank_ends_the_step_of_all(sizes: dict[str, int]) -> None:
    alone = run_ranks(_raises_on_one, 1, {})[0]
    first, last = run_ranks(_raises_on_one, 2, sizes, timeout_s=60)
    assert (
        first.pop(1)
        == "OtherRankError: the loss raised on rank 1: ValueError: rows that it cannot take"
    )
    assert last.pop(1) == "ValueError: rows that it cannot take"
    assert (
        first.pop()
        == "another rank failed in 'agreement': ValueError: rows that it cannot take"
    )
    assert last.pop() == "rows that it cannot take" and alone.pop() == ""
    # All left the step out, with what it had of gradients: the same batch then is a step as if nothing had been.
    assert first == last == pytest.approx(alone, rel=1e-5)


def _distilled(sizes: dict[str, int]) -> Any:
    """Losses with a teacher that the loss calls, and with the model itself; what is said of other rows there."""
    import torch
    import torch.nn.functional as F

    import threefold

    mesh = threefold.init_mesh(**sizes)
    model = threefold.load_model(config=TINY_LLAMA, mesh=mesh, admission="off")
    teacher = threefold.load_model(config=TINY_LLAMA, mesh=mesh, admission="off", seed=7)
    said = []

    def loss(logits: Any, batch: Any) -> Any:
        rows = {name: batch[name] for name in ("input_ids", "document_ids")}
        with torch.no_grad():
            wanted = teacher(**rows) + 0.5 * model(**rows)
            whole = teacher(input_ids=batch.whole["input_ids"])
        assert wanted.shape == logits.shape and whole.shape[1] == batch.whole["labels"].shape[1]
        if not said:
            said.append(_said(lambda: teacher(input_ids=batch["input_ids"].clone())))
        divergence = F.kl_div(
            logits.log_softmax(-1), wanted.log_softmax(-1), reduction="none", log_target=True
        ).sum(-1)
        counted = batch["labels"] != -100
        return (divergence * counted).sum(), counted.sum()

    step = threefold.TrainStep(model, loss=loss, lr=1e-3, micro_batch=2)
    numbers = [step(loops.share(batch, mesh)) for batch in loops.batches()]
    mesh.close()
    return numbers, said


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_a_model_that_a_loss_calls_is_that_of_one_process(sizes: dict[str, int]) -> None:
    alone, _ = run_ranks(_distilled, 1, {})[0]
    for numbers, said in run_ranks(_distilled, 2, sizes, timeout_s=60):
        for (loss, norm), (one_loss, one_norm) in zip(numbers, alone, strict=True):
            assert loss == pytest.approx(one_loss, rel=1e-4) and norm == pytest.approx(
                one_norm, rel=1e-3
            )
        if "cp" in sizes:
            assert said == ["a loss calls a model with rows of 8 tokens, of 16 in the batch"]


def _called(sizes: dict[str, int]) -> list[str]:
    import torch

    import threefold

    mesh = threefold.init_mesh(**sizes)
    model = threefold.load_model(config=TINY_LLAMA, mesh=mesh, admission="off")
    ids = torch.arange(1, 17)[None] + 20 * mesh.rank
    said = [
        _said(lambda: model(input_ids=ids)),
        _said(lambda: model.generate(ids, max_new_tokens=2, do_sample=False, pad_token_id=0)),
        _said(lambda: model(input_ids=torch.arange(1, 17)[None]).sum().backward()),
    ]
    mesh.close()
    return said


@pytest.mark.parametrize("sizes", MESHES[2:], ids=str)
def test_other_rows_on_ranks_of_one_copy_are_refused_by_a_call(sizes: dict[str, int]) -> None:
    for said in run_ranks(_called, 2, sizes, timeout_s=60):
        same = "ranks 0 and 1 belong to dp rank 0 and give different rows to"
        assert said[:2] == [
            f"{same} model(...): row 0 of input_ids",
            f"{same} generate: row 0 of input_ids",
        ]
        assert said[2] == "backward through what model(...) returned"
