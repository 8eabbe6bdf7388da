"""Loops of one's own for tests: functions of the public names alone, run on ranks and in one process."""

from __future__ import annotations

from typing import Any

from ranks.reference import TINY_LLAMA, make_batches

Sizes = dict[str, int]
ROWS, SEQ_LEN, LR = 8, 16, 3e-3


def weighted(logits: Any, batch: Any) -> tuple[Any, Any]:
    """A loss of one's own: cross entropy with a weight for each token and a penalty; its count is the weights' sum."""
    import torch.nn.functional as F

    losses = F.cross_entropy(
        logits.flatten(0, 1), batch["labels"].flatten(), reduction="none", ignore_index=-100
    )
    weights = batch["weights"].flatten() * (batch["labels"].flatten() != -100)
    penalty = logits.logsumexp(-1).square().flatten() * weights
    return (losses * weights + 1e-3 * penalty).sum(), weights.sum()


def on_hidden(hidden: Any, batch: Any) -> tuple[Any, Any]:
    weights = batch["weights"]
    return (hidden[..., ::3].square().mean(-1) * weights).sum(), weights.sum()


def batches(steps: int = 3) -> list[dict[str, Any]]:
    """Global batches with weights, and two documents in each row: what a preference pair is."""
    import torch

    found = make_batches(steps=steps, rows=ROWS, seq_len=SEQ_LEN)
    generator = torch.Generator().manual_seed(3)
    for batch in found:
        batch["weights"] = torch.rand(ROWS, SEQ_LEN, generator=generator)
        cuts = torch.randint(4, SEQ_LEN - 4, (ROWS, 1), generator=generator)
        batch["document_ids"] = (torch.arange(SEQ_LEN) >= cuts).long()
        batch.pop("position_ids")
    return found


def share(batch: dict[str, Any], mesh: Any) -> dict[str, Any]:
    return {name: values[mesh.dp_rank :: mesh.dp_size] for name, values in batch.items()}


def preference(model: Any) -> Any:
    """A preference loss over the two documents of each row: sums of log-probabilities over a whole document."""
    import torch
    import torch.nn.functional as F

    def loss(logits: Any, batch: Any) -> tuple[Any, Any]:
        labels = batch["labels"]
        chosen = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0] * (
            labels != -100
        )
        sums = torch.zeros(len(labels), 2).scatter_add(1, batch["document_ids"], chosen)
        sums = model.sum_over_context(sums)
        return -F.logsigmoid(0.1 * (sums[:, 0] - sums[:, 1])).sum(), len(labels)

    return loss


def whole(values: Any) -> Any:
    return (values.full_tensor() if hasattr(values, "full_tensor") else values).detach().clone()


def curve(
    mesh: Any,
    kind: str,
    model_config: dict[str, Any] = TINY_LLAMA,
    micro_batch: int | None = 2,
    **options: Any,
) -> Any:
    """(losses, norms, gradients of the first step, whole logits, evaluation) of a loop with one kind of loss."""
    import torch

    import threefold

    model = threefold.load_model(config=model_config, mesh=mesh, admission="off", **options)
    loss = {
        "default": None,
        "weighted": weighted,
        "hidden": on_hidden,
        "preference": preference(model),
    }[kind]
    on: Any = {"loss_on": "hidden_states"} if kind == "hidden" else {}
    first: dict[str, Any] = {}

    def observe() -> None:
        if not first:
            for name, parameter in model.named_parameters():
                if parameter.grad is not None:
                    first[name] = whole(parameter.grad).numpy()

    step = threefold.TrainStep(
        model, loss=loss, lr=LR, micro_batch=micro_batch, observe=observe, **on
    )
    numbers = []
    for batch in batches():
        own = share(batch, mesh)
        if loss is None:
            own.pop("weights")
        numbers.append(tuple(step(own)))
    last = batches()[0]
    with torch.no_grad():
        logits = model(input_ids=last["input_ids"], document_ids=last["document_ids"])
    # Unevenly: dp rank 0 has two batches more, one of another size.
    uneven = [share(batch, mesh) for batch in batches()]
    uneven = (
        uneven[:2]
        if mesh.dp_rank
        else [*uneven, {name: rows[:1] for name, rows in last.items()}]
    )
    if loss is None:
        uneven = [
            {name: rows for name, rows in each.items() if name != "weights"} for each in uneven
        ]
    evaluated = threefold.EvalStep(model, loss=loss, **on)(uneven)
    return numbers, first, logits.numpy(), tuple(evaluated)
