"""The law that gradients show: sums of a small model's own gradients, each wrong in one known way."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate
from torch.distributed.tensor._ops._math_ops import _NormPartial
from transformers import Qwen3Config, Qwen3ForCausalLM, T5Config, T5ForConditionalGeneration
from transformers.integrations.neftune import activate_neftune

from threefold.referee.judge.checked_steps import CheckedStep, TrainedRows, _assembled, _clip_of
from threefold.referee.judge.gradients import judge_gradients, judge_target_places
from threefold.referee.judge.groups import RankGroups
from threefold.referee.judge.own_model import OwnModel
from threefold.referee.judge.parts import JudgedPart, PartStatus, Unjudgeable
from threefold.referee.judge.shared_rows import judge_copies
from threefold.referee.judge.updates import judge_norms, judge_updates
from threefold.referee.rank.rows import token_weights
from threefold.referee.rank.weights import StepCurve, architecture_of, norm_of
from threefold.referee.record import RankRecord

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
CONFIG = {
    "vocab_size": 97,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "tie_word_embeddings": False,
    **SIZES,
}
# Two ranks, each with two micro-batches of two rows.
COUNTS = [[[23, 5], [12, 20]], [[3, 9], [17, 22]]]
NUM_TARGETS = 111
Gradients = dict[str, Tensor]


def _rows() -> list[TrainedRows]:
    torch.manual_seed(1)
    rows = []
    for rank, calls in enumerate(COUNTS):
        for call, counts in enumerate(calls):
            for row, count in enumerate(counts):
                ids = torch.randint(0, 97, (1, 24))
                targets = torch.full_like(ids, -100)
                targets[:, :count] = ids[:, 1 : count + 1]
                weights = (targets != -100).float()
                counted = weights * sum(counts)
                rows.append(
                    TrainedRows(
                        rank, call, row, {"input_ids": ids}, targets, weights, counted=counted
                    )
                )
    return rows


@pytest.fixture(scope="module")
def model() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    made = Qwen3ForCausalLM(Qwen3Config(**CONFIG))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    return made


ROWS = _rows()
SIZES_OF = [(row.rank, row.call, COUNTS[row.rank][row.call][row.row or 0]) for row in ROWS]


def combined(model: Qwen3ForCausalLM, weight: Callable[[int, int, int], float]) -> Gradients:
    """The gradient in which a target of (rank, call, targets of the row) has a weight."""
    names = [name for name, _ in model.named_parameters()]
    losses = [(row, weight(*size)) for row, size in zip(ROWS, SIZES_OF, strict=True)]
    return dict(zip(names, OwnModel(model).gradients(losses, names, low=None), strict=True))


def judged(
    model: Qwen3ForCausalLM,
    gradients: Gradients,
    types: set[str] | None = None,
    rows: list[TrainedRows] = ROWS,
) -> JudgedPart:
    weights = {name: value.detach().clone() for name, value in model.named_parameters()}
    step = CheckedStep(
        1, weights, gradients, rows, types or {"float32"}, {"float32"}, list(weights), {}, {}
    )
    shown = {"architecture": {"dropout": []}, "device": "cpu"}
    return judge_gradients([step], shown, model)


def mean(rank: int, call: int, targets: int) -> float:
    return 1 / NUM_TARGETS


def of_calls(rank: int, call: int, targets: int) -> float:
    return 1 / (4 * sum(COUNTS[rank][call]))


def of_ranks(rank: int, call: int, targets: int) -> float:
    return 1 / (2 * sum(map(sum, COUNTS[rank])))


LAWS = [
    (
        of_calls,
        "those of row 1 of micro-batch 1 of rank 1 (3 targets) count 3.25 x those of row 1 of micro-batch 2 of",
    ),
    (of_calls, "it is the mean of each micro-batch's mean"),
    (of_ranks, "it is the mean of each rank's mean"),
    (lambda rank, call, targets: 1 / (8 * targets), "it is the mean of each row's mean"),
    (
        lambda rank, call, targets: 2 / NUM_TARGETS,
        "x2.0000: the number of ranks or the number of micro-batches of a rank",
    ),
    (
        lambda rank, call, targets: 0.25 / NUM_TARGETS,
        "x0.2500: one over the number of all micro-batches",
    ),
    (
        lambda rank, call, targets: (call == 0) / NUM_TARGETS,
        "4 of 8 rows are missing from the gradient: row 1 of micro-batch 2",
    ),
    (
        lambda rank, call, targets: (rank == 0) / NUM_TARGETS,
        "4 of 8 rows are missing from the gradient: row 1 of micro-batch 1",
    ),
]


@pytest.mark.parametrize(("weight", "what"), LAWS)
def test_law_that_is_not_the_mean_over_all_targets_is_named(
    model: Any, weight: Any, what: str
) -> None:
    part = judged(model, combined(model, weight))
    assert part.status is PartStatus.REFUTED and what in part.what


def test_mean_and_sum_over_all_targets_are_proved(model: Any) -> None:
    part = judged(model, combined(model, mean))
    assert part.status is PartStatus.PROVED
    assert (
        "each of 25 parameters has the gradient of the mean over all targets (111 in step 1)"
        in part.what
    )
    part = judged(model, combined(model, lambda *size: 1.0))
    assert (
        part.status is PartStatus.PROVED
        and "the gradient of the sum over all targets" in part.what
    )


def test_weights_of_the_programs_own_loss_are_said_and_not_refuted(model: Any) -> None:
    """Classes that count more, rows that are drawn less often: each row has a weight that no law gives it."""
    wanted = [1.0, 3.0, 0.5, 2.0, 1.0, 1.5, 0.1, 4.0]
    rows = [
        replace(
            row,
            weights=torch.as_tensor(row.weights) * by,
            counted=torch.as_tensor(row.counted) * by,
        )
        for row, by in zip(ROWS, wanted, strict=True)
    ]
    names = [name for name, _ in model.named_parameters()]
    made = OwnModel(model).gradients(
        [(row, by / 9) for row, by in zip(ROWS, wanted, strict=True)], names, low=None
    )
    gradients = dict(zip(names, made, strict=True))
    part = judged(model, gradients, rows=rows)
    assert part.status is PartStatus.NOT_JUDGED
    assert (
        "count 40 x those of row 1 of micro-batch 2 of rank 1 (17 targets), as the program's"
        in part.what
    )
    gradients["lm_head.weight"] = gradients["lm_head.weight"] * 2
    part = judged(model, gradients, rows=rows)
    assert part.status is PartStatus.REFUTED and part.what.endswith("lm_head.weight x2")


@pytest.mark.parametrize(
    ("first_rank", "otherwise"),
    [
        (
            lambda row: 12,
            "the program's loss counts the targets of a row differently, as it may",
        ),
        (
            lambda row: 6,
            "the program's loss counts the targets of a row differently, as it may",
        ),
        # Of each row all targets are on one rank.
        (
            lambda row: 24 * (row < 3),
            "as the program's own loss weighs them; each parameter follows it",
        ),
    ],
)
def test_ranks_that_share_rows_and_divide_by_their_own_targets_are_refuted(
    model: Any, first_rank: Callable[[int], int], otherwise: str
) -> None:
    """As the gradients at the logits show it; weights that this does not explain are the program's own."""
    places = torch.arange(24)[None]
    on_first = [places < first_rank(number) for number in range(len(ROWS))]
    targets = [torch.as_tensor(row.targets) != -100 for row in ROWS]
    held = [
        sum(int((own & on).sum()) for own, on in zip(targets, on_first, strict=True)),
        NUM_TARGETS,
    ]
    held[1] -= held[0]
    rows = []
    for row, own, on in zip(ROWS, targets, on_first, strict=True):
        divisor = torch.where(on, held[0], held[1])
        weights = own / (2 * divisor)
        rows.append(replace(row, weights=weights, counted=weights * divisor))
    names = [name for name, _ in model.named_parameters()]
    losses = [(row, row.mean_weight or 0.0) for row in rows]
    gradients = dict(zip(names, OwnModel(model).gradients(losses, names), strict=True))
    part = judged(model, gradients, rows=rows)
    assert part.status is PartStatus.REFUTED
    assert part.what.endswith("each rank divides by those that it holds")
    part = judged(model, gradients, rows=[replace(row, counted=row.weights) for row in rows])
    assert part.status is PartStatus.NOT_JUDGED and part.what.endswith(otherwise)


def test_penalty_on_the_weights_is_no_fault_and_hides_none(model: Any) -> None:
    gradients = combined(model, mean)
    own = dict(model.named_parameters())
    penalized = {name: value + 0.02 * own[name].detach() for name, value in gradients.items()}
    part = judged(model, penalized)
    assert part.status is PartStatus.NOT_JUDGED
    assert (
        part.what
        == "in step 1 the gradient contains a multiple of the weights, as from a penalty"
    )
    torch.manual_seed(3)
    noisy = {
        name: value + 0.1 * value.norm() * torch.randn_like(value)
        for name, value in penalized.items()
    }
    assert judged(model, noisy).status is PartStatus.REFUTED


def test_a_term_that_the_program_adds_to_its_model_s_loss_is_no_fault(model: Any) -> None:
    """Such as a z-loss: its gradient at the logits is that of no cross-entropy, as the recorder notes."""
    torch.manual_seed(4)
    added = {
        name: value + 0.1 * value.norm() * torch.randn_like(value)
        for name, value in combined(model, mean).items()
    }
    rows = labelled(ROWS, later=1)
    for unit in rows:
        del unit.inputs["attention_mask"]
    assert judged(model, added, rows=rows).status is PartStatus.REFUTED
    part = judged(model, added, rows=[replace(unit, is_other_loss=True) for unit in rows])
    assert part.status is PartStatus.NOT_JUDGED
    assert part.what.endswith("as if a term were added")


def test_gradient_of_the_step_before_is_found(model: Any) -> None:
    own = copy.deepcopy(model)
    steps: list[CheckedStep] = []
    for number in (1, 2):
        weights = {name: value.detach().clone() for name, value in own.named_parameters()}
        gradients = combined(own, mean)
        if steps:  # clipped, and never set to zero
            gradients = {
                name: value + 0.7 * steps[0].gradients[name]
                for name, value in gradients.items()
            }
        steps.append(
            CheckedStep(
                number,
                weights,
                gradients,
                ROWS,
                {"float32"},
                {"float32"},
                list(weights),
                {},
                {},
            )
        )
        with torch.no_grad():
            for parameter in own.parameters():
                parameter += 0.02 * torch.randn_like(parameter)
    part = judge_gradients(steps, {"architecture": {"dropout": []}, "device": "cpu"}, own)
    assert part.status is PartStatus.REFUTED
    assert part.what == "in step 2 the gradient still contains that of the step before"


def test_labels_that_are_counted_before_they_are_shifted(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OwnModel, "num_labels", lambda self, rows: self.num_targets(rows) + 1)
    part = judged(model, combined(model, lambda *size: 1 / (NUM_TARGETS + len(ROWS))))
    assert part.status is PartStatus.PROVED
    assert "divided by the number of labels (119: before they are shifted)" in part.what


def test_factor_that_nobody_knows_is_not_judged(model: Any) -> None:
    part = judged(model, combined(model, lambda *size: 0.3 / NUM_TARGETS))
    assert (
        part.status is PartStatus.NOT_JUDGED
        and "each gradient is x0.3 of the mean over all targets" in part.what
    )


@pytest.mark.parametrize(
    ("pattern", "factor", "what"),
    [
        ("q_norm", 2.0, "2 of 25 parameters have a different factor from the rest: model.layers.*.self_attn.q_norm"),
        ("lm_head", 0.5, "1 of 25 parameters have a different factor from the rest: lm_head.weight x0.5"),
        ("norm", 0.0, "model.norm.weight x0"),
        ("embed", -1.0, "model.embed_tokens.weight x-1"),
        ("down_proj", 1.02, "model.layers.*.mlp.down_proj.weight x1.02"),
    ],
)  # fmt: skip
def test_parameters_with_another_factor_are_named(
    model: Any, pattern: str, factor: float, what: str
) -> None:
    gradients = combined(model, mean)
    wrong = {
        name: value * factor if pattern in name else value for name, value in gradients.items()
    }
    part = judged(model, wrong)
    assert part.status is PartStatus.REFUTED and what in part.what


def test_gradient_of_a_part_is_no_multiple(model: Any) -> None:
    gradients = combined(model, mean)
    gradients["model.layers.0.self_attn.o_proj.weight"][:, :16] = 0  # of one rank's heads
    part = judged(model, gradients)
    assert part.status is PartStatus.REFUTED
    assert (
        "1 of 25 parameters have a gradient that is no multiple of their own: model.layers.0.self_attn.o_proj"
        in part.what
    )


@pytest.mark.parametrize("changed", ["positions", "two rows seen as one", "layer"])
def test_another_forward_is_no_sum_of_the_rows(model: Any, changed: str) -> None:
    ids = torch.cat([row.inputs["input_ids"] for row in ROWS])
    targets = torch.cat([row.targets for row in ROWS if row.targets is not None])
    if changed == "two rows seen as one":
        ids, targets = ids.reshape(4, -1), targets.reshape(4, -1)
    given = {"position_ids": torch.arange(24)[None] * 2} if changed == "positions" else {}
    hooks = []
    if changed == "layer":
        hooks.append(
            model.model.layers[0].register_forward_hook(
                lambda module, inputs, output: output * 1.05
            )
        )
    logits = model(input_ids=ids, **given).logits
    loss = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=-100
    )
    gradients = dict(
        zip(
            [name for name, _ in model.named_parameters()],
            torch.autograd.grad(loss, model.parameters()),
            strict=True,
        )
    )
    for hook in hooks:
        hook.remove()
    part = judged(model, gradients)
    assert (
        part.status is PartStatus.REFUTED
        and "is not the sum of its rows' gradients" in part.what
    )


def test_noise_of_bfloat16_is_no_fault_and_hides_none(model: Any) -> None:
    names = [name for name, _ in model.named_parameters()]
    low = OwnModel(model).gradients(
        [(row, 1 / NUM_TARGETS) for row in ROWS], names, low=torch.bfloat16
    )
    torch.manual_seed(2)
    gradients = {
        n: g * (1 + 0.003 * torch.randn_like(g)) for n, g in zip(names, low, strict=True)
    }
    assert judged(model, gradients, {"bfloat16"}).status is PartStatus.PROVED
    # Where float32 is computed in, it is one.
    assert judged(model, gradients).status is PartStatus.REFUTED
    gradients["lm_head.weight"] = gradients["lm_head.weight"] * 2
    part = judged(model, gradients, {"bfloat16"})
    assert part.status is PartStatus.REFUTED and part.what.endswith("lm_head.weight x2")


def test_weights_that_are_no_longer_tied_are_refuted() -> None:
    tied = Qwen3ForCausalLM(Qwen3Config(**{**CONFIG, "tie_word_embeddings": True}))
    weights = {name: value.detach().clone() for name, value in tied.named_parameters()}
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    gradients = {name: torch.ones_like(value) for name, value in weights.items()}
    step = CheckedStep(
        1, weights, gradients, ROWS, {"float32"}, {"float32"}, list(weights), {}, {}
    )
    part = judge_gradients([step], {"architecture": {"dropout": []}, "device": "cpu"}, tied)
    assert part.status is PartStatus.REFUTED
    assert part.what.startswith("lm_head.weight is a separate weight in the program")


def test_gradient_where_there_is_none_is_refuted(model: Any) -> None:
    """Queries of zero leave keys without a gradient, as the second matrix of a new adapter does its first one."""
    model = copy.deepcopy(model)
    model.model.layers[0].self_attn.q_proj.weight.data.zero_()
    gradients = combined(model, mean)
    name = "model.layers.0.self_attn.k_proj.weight"
    assert not gradients[name].any()
    assert "zero up to rounding, and not compared" in judged(model, gradients).what
    gradients[name] += 0.1
    part = judged(model, gradients)
    assert (
        part.status is PartStatus.REFUTED and f"no multiple of their own: {name}" in part.what
    )


def test_what_is_not_finite_or_too_large_is_not_judged(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gradients = combined(model, mean)
    gradients["lm_head.weight"][0, 0] = torch.nan
    part = judged(model, gradients)
    assert (
        part.status is PartStatus.NOT_JUDGED
        and part.what == "step 1 has a gradient that is not finite"
    )
    monkeypatch.setattr("threefold.referee.judge.gradients._MOST_WORK", 1.0)
    assert (
        "operations are needed for the gradients of step 1 here, more than 1e+00"
        in judged(model, combined(model, mean)).what
    )


# --- what a loss outside of the model trains on ------------------------------------------------------------------


def test_targets_and_weights_are_read_from_the_gradient() -> None:
    torch.manual_seed(0)
    logits = torch.randn(3, 7, 11, requires_grad=True)
    targets = torch.randint(0, 11, (3, 7))
    weights = torch.rand(3, 7)
    weights[0, :3] = 0
    losses = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), reduction="none"
    )
    (gradient,) = torch.autograd.grad((losses * weights.flatten()).sum(), logits)
    known = token_weights(logits.detach(), gradient)
    assert known is not None
    assert torch.equal(known[0], torch.where(weights > 0, targets, -100))
    assert torch.allclose(known[1], weights, atol=1e-5)


def test_loss_that_is_no_cross_entropy_is_seen() -> None:
    torch.manual_seed(0)
    logits = torch.randn(4, 5, requires_grad=True)
    for loss in (
        logits.square().mean(),
        torch.nn.functional.cross_entropy(logits, torch.arange(4), label_smoothing=0.1),
    ):
        (gradient,) = torch.autograd.grad(loss, logits)
        assert token_weights(logits.detach(), gradient) is None


# --- updates -----------------------------------------------------------------------------------------------------


def trained(
    *,
    clip: float | None = None,
    change: Callable[[dict[str, Tensor]], None] | None = None,
    lr: float = 1e-2,
) -> list[CheckedStep]:
    """Three steps of AdamW on two parameters, as they would be recorded."""
    torch.manual_seed(0)
    weights = {
        "a": torch.nn.Parameter(torch.randn(8, 8)),
        "b": torch.nn.Parameter(torch.randn(8)),
    }
    optimizer = torch.optim.AdamW(weights.values(), lr=lr, weight_decay=0.1)
    settings = {"lr": lr, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.1}
    steps = []
    for number in (1, 2, 3):
        gradients = {name: torch.randn_like(value) for name, value in weights.items()}
        described = {
            "class": "AdamW",
            "is_new": number == 1,
            "groups": [{"names": ["a", "b"], "settings": settings}],
        }
        norm = float(
            torch.linalg.vector_norm(
                torch.cat([value.flatten() for value in gradients.values()])
            )
        )
        clipped = {} if clip is None else {"most": clip, "norm": norm, "by_norm": True}
        held = {name: value.detach().clone() for name, value in weights.items()}
        steps.append(
            CheckedStep(
                number,
                held,
                gradients,
                [],
                {"float32"},
                {"float32"},
                ["a", "b"],
                clipped,
                described,
            )
        )
        scale = 1.0 if clip is None else min(1.0, clip / (norm + 1e-6))
        for name, value in weights.items():
            value.grad = gradients[name] * scale
        optimizer.step()
        if change is not None:
            change({name: value.data for name, value in weights.items()})
    return steps


@pytest.mark.parametrize("clip", [None, 1.0])
def test_updates_of_adamw_are_proved(clip: float | None) -> None:
    part = judge_updates(trained(clip=clip))
    assert (
        str(part)
        == "proved      updates: in steps 1 to 2 each of 2 parameters moves as torch's AdamW says"
    )


def test_updates_that_are_others_are_refuted() -> None:
    part = judge_updates(trained(change=lambda weights: weights["b"].add_(0.01)))
    assert (
        part.status is PartStatus.REFUTED
        and "1 of 2 parameters do not move as AdamW says: b differently" in part.what
    )
    steps = trained()
    for step in steps:
        step.optimizer["groups"][0]["settings"] = {
            **step.optimizer["groups"][0]["settings"],
            "lr": 2e-2,
        }
    part = judge_updates(steps)
    assert part.status is PartStatus.REFUTED and "a x0.5, b x0.5" in part.what
    steps = trained()
    steps[0].optimizer["groups"][0]["names"] = ["a"]
    assert (
        "1 parameters that are trained are in no group of the optimizer: b"
        in judge_updates(steps).what
    )


@pytest.mark.parametrize("share", [-1e-2, 1e-2])
def test_a_decay_that_is_done_twice_or_undone_is_refuted(share: float) -> None:
    """Of weights of 0.02, as of most models, a decay of 0.01 is 1/5000 of an update."""

    def small(weights: dict[str, Tensor]) -> None:
        for value in weights.values():
            value.mul_(1 + share * 0.02 * 1e-2)

    part = judge_updates(trained(change=small))
    assert part.status is PartStatus.REFUTED and "a differently, b differently" in part.what


def test_a_weight_whose_update_is_mostly_rounding_is_judged_beside_that() -> None:
    assert (
        "no weight moves by more than its rounding error"
        in judge_updates(trained(lr=1e-6)).what
    )
    part = judge_updates(trained(lr=1e-6, change=lambda weights: weights["b"].sub_(3e-6)))
    assert part.status is PartStatus.REFUTED and "1 of 2 parameters" in part.what


def test_updates_that_do_not_show_are_not_judged() -> None:
    steps = trained()
    assert judge_updates(steps[:1]).status is PartStatus.NOT_JUDGED
    assert "had a state before" in judge_updates(steps[1:]).what
    steps[0].weight_types.add("bfloat16")
    assert "weights in bfloat16 round" in judge_updates(steps).what
    steps[0].optimizer["class"] = "apex.FusedAdam"
    assert "apex.FusedAdam is not one of AdamW, Adam, SGD" in judge_updates(steps).what


def test_what_is_not_a_number_proves_nothing(model: Any) -> None:
    steps = trained(clip=1.0)
    steps[0].clip["norm"] = math.nan
    assert judge_norms(steps).status is PartStatus.REFUTED
    for name in ("a", "b"):
        steps = trained()
        steps[1].weights[name].view(-1)[-1] = math.nan
        assert judge_updates(steps).status is PartStatus.REFUTED
        steps = trained()
        steps[0].gradients[name].view(-1)[-1] = math.nan
        assert judge_updates(steps).status is PartStatus.REFUTED
        steps[1].weights[name].view(-1)[-1] = math.nan  # as the optimizer makes of it
        assert judge_updates(steps).what == "step 1 has a gradient that is not finite"
    weights = {name: value.detach().clone() for name, value in model.named_parameters()}
    weights["model.norm.weight"][0] = math.nan
    step = CheckedStep(
        1, weights, combined(model, mean), ROWS, {"float32"}, {"float32"}, list(weights), {}, {}
    )
    part = judge_gradients(
        [step], {"architecture": {"dropout": []}, "device": "cpu"}, copy.deepcopy(model)
    )
    assert part.status is PartStatus.REFUTED


def test_what_is_not_finite_in_a_later_step_ends_the_proof(model: Any) -> None:
    gradients = combined(model, mean)
    weights = {name: value.detach().clone() for name, value in model.named_parameters()}
    kinds = {"float32"}
    steps = [
        CheckedStep(number, weights, each, ROWS, kinds, kinds, list(weights), {}, {})
        for number, each in enumerate((gradients, {**gradients}), start=1)
    ]
    shown = {"architecture": {"dropout": []}, "device": "cpu"}
    assert judge_gradients(steps, shown, model).status is PartStatus.PROVED
    steps[1].gradients["lm_head.weight"] = gradients["lm_head.weight"] * math.inf
    part = judge_gradients(steps, shown, model)
    assert part.status is PartStatus.NOT_JUDGED
    assert part.what == "step 2 has a gradient that is not finite"
    clipped = trained(clip=1.0)
    clipped[2].clip["norm"] = None  # as a record has what is not finite
    part = judge_norms(clipped)
    assert part.status is PartStatus.NOT_JUDGED
    assert "the norm of step 3 is not finite, or was computed in a way" in part.what


def test_targets_are_tokens_of_their_rows_where_a_model_writes_them() -> None:
    """An encoder reads the tokens that its decoder is to write: of the same number, and mostly the same."""
    rows = [replace(row, targets=row.inputs["input_ids"]) for row in ROWS]
    step = CheckedStep(1, {}, {}, rows, set(), set(), [], {}, {})
    assert judge_target_places([step], {}).status is PartStatus.REFUTED
    of_two = {"class": "T5ForConditionalGeneration", "config": {"is_encoder_decoder": True}}
    assert judge_target_places([step], of_two).status is PartStatus.NONE
    rows = [replace(row, targets=row.inputs["input_ids"].roll(3, 1)) for row in ROWS]
    step = CheckedStep(1, {}, {}, rows, set(), set(), [], {}, {})
    for name, status in (("Qwen3ForCausalLM", "not judged"), ("BertForMaskedLM", "proved")):
        assert judge_target_places([step], {"class": name}).status == status


def test_an_encoder_decoder_reads_its_labels() -> None:
    torch.manual_seed(0)
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4}
    model = T5ForConditionalGeneration(
        T5Config(vocab_size=97, dropout_rate=0.0, decoder_start_token_id=0, **sizes)
    )
    inputs = {"input_ids": torch.randint(1, 97, (1, 9)), "labels": torch.randint(1, 97, (1, 6))}
    inputs["labels"][:, 4:] = -100
    row = TrainedRows(0, 0, 0, inputs, inputs["labels"], None)
    names = [name for name, _ in model.named_parameters()]
    found = OwnModel(model).gradients([(row, 1.0)], names)
    (4 * model(**inputs).loss).backward()
    for name, gradient in zip(names, found, strict=True):
        torch.testing.assert_close(gradient, model.get_parameter(name).grad, msg=name)


def test_padding_that_is_a_token_too_is_told_apart() -> None:
    """GPT-2 pads with the token that rows begin with: padding on the left is followed by it, and predicts it."""
    ids = torch.tensor([[7, 7, 7, 1, 2, 3]])
    targets = torch.tensor([[-100, 7, 1, 2, 3, -100]])
    mask = torch.tensor([[0, 0, 1, 1, 1, 1]])
    row = TrainedRows(0, 0, 0, {"input_ids": ids, "attention_mask": mask}, targets, None)
    step = CheckedStep(1, {}, {}, [row], set(), set(), [], {}, {})
    shown = {"class": "GPT2LMHeadModel", "config": {}}
    assert judge_target_places([step], shown).status is PartStatus.PROVED
    targets[0, 0] = 7
    part = judge_target_places([step], shown)
    assert part.what.startswith("1 outputs are trained to predict padding")


@pytest.mark.parametrize("order", [1.0, math.inf])
def test_norm_of_another_order_is_that_of_all_gradients(order: float) -> None:
    steps = trained(clip=1.0)
    for step in steps:
        values = torch.cat([each.flatten() for each in step.gradients.values()])
        step.clip["norm"] = float(values.norm(order))
    assert judge_norms(steps).status is PartStatus.PROVED
    steps[1].clip["norm"] *= 0.99
    assert judge_norms(steps).status is PartStatus.REFUTED


def test_place_that_holds_two_values_is_not_judged() -> None:
    def written(values: list[float]) -> tuple[dict[str, Any], dict[str, Tensor]]:
        curve = StepCurve(
            torch.nn.ParameterDict({"w": torch.tensor(values)}),
            0,
            keeps_copy=True,
            most_bytes=1000,
        )
        return {"curve": curve.values}, curve.tensors

    whole, other, short = written([1.0, 2.0]), written([1.0, math.nan]), written([1.0])
    assert torch.equal(whole[1]["weight.w"], torch.tensor([1.0, 2.0]))
    lines, files = zip(whole, whole, strict=True)
    assert torch.equal(
        dict(_assembled("weight", [*lines], [*files]))["w"], torch.tensor([1.0, 2.0])
    )
    lines, files = zip(whole, other, strict=True)
    with pytest.raises(Unjudgeable, match="ranks hold different values of w in the same place"):
        dict(_assembled("weight", [*lines], [*files]))
    short[0]["curve"]["weights"]["w"]["shape"] = [2]
    with pytest.raises(Unjudgeable, match="do not make up the whole"):
        dict(_assembled("weight", [short[0]], [short[1]]))


def test_nothing_to_compare_is_not_judged(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = trained(clip=1.0)
    for step in steps:
        step.gradients = {
            name: torch.zeros_like(value) for name, value in step.gradients.items()
        }
        assert step.clip is not None
        step.clip["norm"] = 0.0
    assert judge_norms(steps).status is PartStatus.PROVED
    steps = trained()
    steps[1].optimizer["groups"] = [
        *steps[1].optimizer["groups"],
        {"names": [], "settings": {}},
    ]
    assert "groups of the optimizer change" in judge_updates(steps).what
    monkeypatch.setattr("threefold.referee.judge.gradients._TOO_NOISY", 0.0)
    part = judged(model, combined(model, mean))
    assert part.status is PartStatus.NOT_JUDGED and part.what.endswith(
        "each gradient is no larger than its rounding error"
    )


def test_norm_of_a_part_is_refuted() -> None:
    steps = trained(clip=1.0)
    assert judge_norms(steps).status is PartStatus.PROVED
    assert steps[1].clip is not None
    steps[1].clip["norm"] *= 0.7
    assert "x0.7000 of theirs" in judge_norms(steps).what
    assert judge_norms(trained()).status is PartStatus.NONE


# --- copies ------------------------------------------------------------------------------------------------------


def holding(rank: int, value: str, *, module: int = 0, **placement: Any) -> RankRecord:
    part = {"w": {"shape": [4], "begin": [0], "size": [4], "digest": value}}
    checked = [{"step": 1, "curve": {"module": module, "weights": part, "gradients": {}}}]
    return RankRecord(
        rank, 2, placement={"module": 0, "data_ranks": [0, 1], **placement}, checked=checked
    )


@pytest.mark.parametrize(
    ("placements", "status"),
    [
        ([{"how": "DistributedDataParallel"}] * 2, PartStatus.REFUTED),
        ([{"how": "parameters are sharded over tp only"}] * 2, PartStatus.REFUTED),
        ([{"how": "FullyShardedDataParallel"}] * 2, PartStatus.REFUTED),
        # Each of another group, as ranks that divide tensors by hand.
        (
            [{"how": "DistributedDataParallel", "data_ranks": [each]} for each in (0, 1)],
            PartStatus.NONE,
        ),
        ([{"unknown": "nothing shows it"}] * 2, PartStatus.NONE),
        # A step of another model, which may be divided in another way.
        ([{"how": "DistributedDataParallel", "module": 1}] * 2, PartStatus.NONE),
    ],
)
def test_only_what_is_known_to_be_a_copy_is_compared(
    placements: list[dict[str, Any]], status: PartStatus
) -> None:
    ranks = [holding(rank, str(rank), **placement) for rank, placement in enumerate(placements)]
    part = judge_copies(RankGroups([[each] for each in ranks], "", 2))
    assert part.status is status
    if status is PartStatus.REFUTED:
        assert part.what == "ranks 0 and 1 hold different weights of w in step 1"
        equal = [
            holding(rank, "the same", **placement) for rank, placement in enumerate(placements)
        ]
        assert (
            judge_copies(RankGroups([[each] for each in equal], "", 2)).status
            is PartStatus.PROVED
        )


# --- attention and losses of the program's own --------------------------------------------------------------------


def labelled(rows: list[TrainedRows], *, later: int) -> list[TrainedRows]:
    """The rows of a program that hands labels to its own loss: each stands `later` places after what predicts it."""
    units = []
    for unit in rows:
        assert unit.targets is not None
        labels = torch.nn.functional.pad(unit.targets, (later, 0), value=-100)[
            :, : unit.targets.shape[1]
        ]
        # A mask of another meaning than that of transformers.
        inputs = {**unit.inputs, "labels": labels, "attention_mask": torch.zeros_like(labels)}
        units.append(
            replace(unit, inputs=inputs, targets=None, weights=None, has_own_loss=True)
        )
    return units


@pytest.mark.parametrize(
    ("attention", "loss", "later", "status"),
    [
        ("of_the_program", None, 1, PartStatus.PROVED),
        ("of_the_program", "mine.loss", 0, PartStatus.PROVED),
        ("of_the_program", "mine.loss", 2, PartStatus.NOT_JUDGED),
        ("threefold_2", "threefold.model.head.forward", 0, PartStatus.PROVED),
        ("threefold_2", "threefold.model.head.forward", 1, PartStatus.REFUTED),
    ],
)
def test_programs_own_mask_and_labels_are_read_as_its_gradients_say(
    model: Any, attention: str, loss: str | None, later: int, status: PartStatus
) -> None:
    weights = {name: value.detach().clone() for name, value in model.named_parameters()}
    kinds = {"float32"}
    rows = labelled(ROWS, later=later)
    step = CheckedStep(
        1, weights, combined(model, mean), rows, kinds, kinds, list(weights), {}, {}
    )
    architecture = {**architecture_of(model), "attention": attention, "replaced": loss}
    part = judge_gradients([step], {"architecture": architecture, "device": "cpu"})
    assert part.status is status, part
    if status is PartStatus.NOT_JUDGED:
        assert part.what.endswith("and no interpretation explains its gradients")


def test_parts_in_a_row_are_put_together() -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    parts = [(0, whole.flatten()[:5]), (5, whole.flatten()[5:])]
    described = [
        {
            "curve": {
                "weights": {
                    "w": {"shape": [3, 4], "begin": [begin], "size": [len(part)], "digest": ""}
                }
            }
        }
        for begin, part in parts
    ]
    files = [{"weight.w": part} for _, part in parts]
    assert torch.equal(dict(_assembled("weight", described, files))["w"], whole)
    described[1]["curve"]["weights"]["w"] |= {"begin": [6], "size": [6]}
    files[1]["weight.w"] = whole.flatten()[6:]
    with pytest.raises(Unjudgeable, match="do not make up the whole"):
        dict(_assembled("weight", described, files))


@pytest.mark.parametrize(
    ("placements", "order", "ranks"),
    [
        ([Replicate(), Replicate()], 2, [[0], [1], [2], [3]]),
        ([Replicate(), _NormPartial(2.0)], 2, [[0, 1], [0, 1], [2, 3], [2, 3]]),
        ([_NormPartial(3.0), Replicate()], 3, [[0, 2], [1, 3], [0, 2], [1, 3]]),
        ([Partial("max"), Partial("max")], math.inf, [[0, 1, 2, 3]] * 4),
        ([Partial("sum"), Replicate()], 1, [[0, 2], [1, 3], [0, 2], [1, 3]]),
    ],
)
def test_a_norm_in_parts_is_taken_over_the_ranks_that_hold_them(
    placements: list[Any], order: float, ranks: list[list[int]]
) -> None:
    parts = [3.0, 4.0, 12.0, 84.0]
    lines = [
        {"curve": {"clip": part_of_norm(placements, rank, parts[rank])}} for rank in range(4)
    ]
    for rank, over in enumerate(ranks):
        first = lines[rank:] + lines[:rank]
        records: Any = [SimpleNamespace(rank=(rank + each) % 4) for each in range(4)]
        expected = torch.tensor([parts[each] for each in over], dtype=torch.float64).norm(order)
        assert _clip_of(first, records)["norm"] == pytest.approx(float(expected), rel=1e-12)
    lines[0]["curve"]["clip"]["norm"] = None  # as a record has what is not finite
    records = [SimpleNamespace(rank=rank) for rank in range(4)]
    assert _clip_of(lines, records)["norm"] is None


def test_a_norm_of_an_unknown_kind_is_not_known() -> None:
    lines = [
        {"curve": {"clip": part_of_norm([Partial("avg"), Replicate()], rank, 1.0)}}
        for rank in range(4)
    ]
    records: Any = [SimpleNamespace(rank=rank) for rank in range(4)]
    assert _clip_of(lines, records)["norm"] is None


def part_of_norm(placements: list[Any], rank: int, part: float) -> Any:
    """What a rank of a 2 x 2 mesh records of a norm in parts, read back."""
    mesh = SimpleNamespace(
        mesh=torch.arange(4).view(2, 2), get_coordinate=lambda: [rank // 2, rank % 2]
    )
    total = SimpleNamespace(
        placements=placements, device_mesh=mesh, to_local=lambda: torch.tensor(part)
    )
    return json.loads(json.dumps(norm_of(total)))


def test_a_model_with_noise_of_neftune_is_not_rebuilt() -> None:
    model = Qwen3ForCausalLM(Qwen3Config(**CONFIG))
    assert "unknown" not in architecture_of(model)
    activate_neftune(model, 5.0)
    shown = architecture_of(model)
    assert (
        shown["unknown"] == "neftune_noise_alpha adds noise to what model.embed_tokens computes"
    )
