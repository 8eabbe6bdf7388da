"""The embedding, and the last norm with the head, gathered and reduced apart: other collectives, the same bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ranks.keeping import LLAMA, Miniature, Sizes, write_corpus
from ranks.spawn import run_ranks
from threefold.model import data_parallel
from threefold.plan import choices

pytestmark = pytest.mark.ranks

DEEP = {**LLAMA, "num_hidden_layers": 3}


def _steps(
    sizes: Sizes, folder: str, apart: bool, model: dict[str, Any], train: dict[str, Any]
) -> Any:
    """(curve and whole weights after two steps, numbers of each collective of the first micro-batch)."""
    import torch.distributed as dist

    choices.UNIT_BYTES, choices.KEPT_WHOLE_BYTES = 1, 0
    if not apart:
        data_parallel._ends = lambda *of: []  # type: ignore[assignment]
    run = Miniature(
        sizes,
        folder,
        micro_batch=1,
        model={"config": DEEP, **model},
        train={"micro_batch": 1, **train},
    )
    sent: list[tuple[str, int]] = []

    def watched(call: Any, what: str) -> Any:
        def counted(*args: Any, **settings: Any) -> Any:
            tensors = [
                each for each in (*args, *settings.values()) if isinstance(each, torch.Tensor)
            ]
            sent.append((what, max(each.numel() for each in tensors)))
            return call(*args, **settings)

        return counted

    # torch 2.13 gave them other names.
    for what, names in (
        ("gather", ("all_gather_single", "all_gather_into_tensor")),
        ("reduce", ("reduce_scatter_single", "reduce_scatter_tensor")),
    ):
        name = next(name for name in names if hasattr(dist, name))
        setattr(dist, name, watched(getattr(dist, name), what))
    curve = [each[:2] for each in run.advance(1)]
    batches = 8 // (sizes[0] * sizes[1])
    # Nothing is gathered again for a micro-batch that is over.
    assert len(sent) % batches == 0, sent
    first = sent[: len(sent) // batches]
    curve += [each[:2] for each in run.advance(1)]
    named = run.model.module.named_parameters()
    whole = {
        name: getattr(each, "full_tensor", each.detach)().detach().clone()
        for name, each in named
    }
    return curve, whole, first


CASES: list[tuple[Sizes, dict[str, Any], dict[str, Any]]] = [
    ((1, 2, 1, 1), {}, {}),
    ((1, 4, 1, 1), {}, {}),
    ((2, 2, 1, 1), {"dtype": "bfloat16"}, {"activation_checkpointing": "full"}),
    ((1, 1, 2, 2), {}, {}),
    ((1, 2, 1, 1), {}, {"reduce": "exact"}),
    ((1, 2, 1, 1), {"lora": {"r": 4}}, {}),
    ((1, 2, 1, 1), {"config": {**DEEP, "tie_word_embeddings": True}}, {}),
]


@pytest.mark.parametrize(("sizes", "model", "train"), CASES, ids=str)
def test_the_same_bits(
    sizes: Sizes, model: Any, train: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("runs")
    write_corpus(folder)
    ranks = sizes[0] * sizes[1] * sizes[2] * sizes[3]
    (curve, whole, sent), (expected, weights, together) = (
        run_ranks(_steps, ranks, sizes, str(folder / str(apart)), apart, model, train)[0]
        for apart in (True, False)
    )
    assert curve == expected
    assert all(torch.equal(each, weights[name]) for name, each in whole.items())
    if "config" in model:
        assert sent == together
    elif not train.get("reduce") and not model.get("lora"):
        reduced = [number for what, number in sent if what == "reduce"]
        assert len(reduced) == DEEP["num_hidden_layers"] + 2
        assert reduced[0] != reduced[1] and sum(reduced) == sum(
            n for what, n in together if what == "reduce"
        )
        assert sent[0][1] < together[0][1]
