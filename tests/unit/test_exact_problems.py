"""What `train.reduce: exact` does not go with is refused by name, before any process, with a fix that works."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from threefold.checkpoint.checkpoint_folder import Checkpoint
from threefold.checkpoint.manifest import ChangedKey, lost_bits, refuse_unconfirmed, with_axes
from threefold.config.loading import validate
from threefold.config.schema import Config
from threefold.errors import CheckpointError, ConfigError
from threefold.mesh.divisibility import batch_problems
from threefold.mesh.exact_limits import MOST_MICRO_BATCHES, exact_problems
from threefold.mesh.mesh import Mesh
from threefold.mesh.topology import Topology
from threefold.model import load
from threefold.model.exact import limits
from threefold.model.exact.sums import exact_norm
from threefold.run import user_objects
from threefold.training.batches import micro_batches

TOPOLOGY = Topology(1, 1, 1, 1)
TINY = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "vocab_size": 67,
}


def config(**sections: Any) -> Config:
    train = {"reduce": "exact", "micro_batch": 1, **sections.pop("train", {})}
    return validate({"train": train, **sections})


def test_nothing_is_refused_of_a_plain_run_nor_of_fast() -> None:
    assert list(batch_problems(config(), TOPOLOGY)) == []
    assert (
        exact_problems(
            config(train={"reduce": "fast", "micro_batch": "auto"}), Topology(1, 1, 2, 2)
        )
        == []
    )


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("train", "micro_batch", "auto"),
        ("train", "objective", "dpo"),
        ("train", "compile", True),
        ("train", "fused_loss", True),
        ("train", "activation_checkpointing", "offload"),
        ("model", "trust_remote_code", True),
        ("model", "attention", "flex"),
        ("mesh", "cpu_offload", True),
        ("mesh", "ep", 2),
        ("mesh", "sequence_parallel", "async"),
        ("mesh", "device", "cuda"),
        ("optimizer", "name", "muon"),
        ("optimizer", "name", "adafactor"),
        ("optimizer", "name", "torch.optim.NAdam"),
        ("optimizer", "name", "adamw_8bit"),
        ("optimizer", "options", {"amsgrad": True}),
    ],
)
def test_what_was_not_compared_is_refused_by_name(section: str, key: str, value: Any) -> None:
    (problem,) = exact_problems(config(**{section: {key: value}}), TOPOLOGY)
    shown = (
        "optimizer.options.amsgrad = true"
        if key == "options"
        else "on cuda"
        if key == "device"
        else f"{section}.{key} = {str(value).lower() if value is True else ''}"
    )
    assert problem.what.startswith("train.reduce = exact") and shown in problem.what
    assert "--train.reduce fast" in problem.fix or problem.fix == "--train.micro_batch 1"


def test_wide_axes_and_too_many_micro_batches_are_refused() -> None:
    assert exact_problems(config(), Topology(2, 2, 2, 2)) == []
    named = [problem.what for problem in exact_problems(config(), Topology(1, 1, 4, 4))]
    assert named == [
        "train.reduce = exact with mesh.cp = 4",
        "train.reduce = exact with mesh.tp = 4",
    ]
    most = config(train={"global_batch": MOST_MICRO_BATCHES})
    assert exact_problems(most, TOPOLOGY) == []
    (problem,) = exact_problems(
        config(train={"global_batch": MOST_MICRO_BATCHES + 1}), TOPOLOGY
    )
    assert problem.fix.startswith("--train.micro_batch 2 ")


@pytest.mark.parametrize(
    ("architecture", "named"),
    [
        ({"model_type": "llama", "num_key_value_heads": 2}, None),
        ({"model_type": "llama", "num_key_value_heads": 2, "attention_dropout": 0.1}, None),
        ({"model_type": "gpt2"}, None),
        ({"model_type": "granite", "num_key_value_heads": 2}, "'granite'"),
    ],
)
def test_models_that_were_not_compared_are_refused_by_name(
    architecture: dict[str, Any], named: str | None
) -> None:
    asked = config(model={"config": {**TINY, **architecture}})
    read = load.read_config(asked.model)
    outline = load.outline(read)
    found = list(limits.problems(asked, read, outline, device="cpu"))
    assert bool(found) == (named is not None)
    assert named is None or any(named in problem.what for problem in found)
    assert list(limits.problems(asked, read, outline, device="cuda"))


def test_losses_and_optimizers_of_ones_own_are_refused() -> None:
    with pytest.raises(ConfigError, match="with a custom loss"):
        user_objects.check(
            user_objects.UserObjects(loss=lambda outputs, batch: (outputs.sum(), 1)), config()
        )


@pytest.mark.parametrize("dp", [1, 2, 3, 6])
def test_micro_batches_are_the_same_rows_on_any_number_of_data_ranks(dp: int) -> None:
    rows = torch.arange(12)
    own = [micro_batches({"rows": rows[rank::dp]}, 2, spread=True) for rank in range(dp)]
    found = [[each["rows"].tolist() for each in of_rank] for of_rank in own]
    in_order = [found[number % dp][number // dp] for number in range(6)]
    assert in_order == [[number, number + 6] for number in range(6)]


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_norm_does_not_depend_on_the_order_or_the_shards(scale: float) -> None:
    numbers = torch.randn(1001, generator=torch.Generator().manual_seed(0)) * scale
    alone = Mesh(TOPOLOGY, 0, torch.device("cpu"))
    shards = [[*numbers.flip(0).split(size), numbers[:0]] for size in (1, 7, 500, 1001)]
    found = {exact_norm(own[::2], own[1::2], alone).item() for own in shards}
    assert len(found) == 1
    assert found.pop() == pytest.approx(numbers.double().norm().item(), rel=1e-6)
    numbers[3] = float("nan")
    assert exact_norm([numbers], [], alone).isnan()


@pytest.mark.parametrize(
    ("change", "exact", "refused"),
    [
        (ChangedKey("train.micro_batch", 2, 4), True, True),
        (ChangedKey("train.micro_batch", 2, 4), False, False),
        (ChangedKey("train.reduce", "exact", "fast"), False, True),
        (ChangedKey("train.reduce", "fast", "exact"), True, True),
        (ChangedKey("mesh.tp", 1, 2), True, True),
        (ChangedKey("mesh.cp", 1, 2), False, False),
        (ChangedKey("log.every", 1, 2), True, False),
    ],
)
def test_what_bits_depend_on_must_be_confirmed(
    change: ChangedKey, exact: bool, refused: bool
) -> None:
    checkpoint = Checkpoint(Path("runs/a/checkpoints/step-00000002"), 2)
    if not refused:
        return refuse_unconfirmed([change], checkpoint, exact=exact)
    with pytest.raises(
        CheckpointError,
        match=rf"{change.key} = {change.now}, but .* was saved with {change.before}",
    ):
        refuse_unconfirmed([change], checkpoint, exact=exact)
    return None


VERSIONS = {"torch": "2.12.0", "transformers": "5.20", "cpu": "one, AVX512", "python": "3.11"}


@pytest.mark.parametrize(
    ("changed", "topology", "versions", "lost"),
    [
        ([], (4, 2, 1, 2), {}, []),
        (
            [ChangedKey("log.every", 1, 2), ChangedKey("mesh.dp", 1, 8)],
            (8, 1, 1, 2),
            {"python": "3.12"},
            [],
        ),
        ([ChangedKey("mesh.tp", "auto", 2)], (1, 1, 1, 2), {}, []),
        ([], (1, 1, 2, 1), {}, ["mesh.cp 1 -> 2", "mesh.tp 2 -> 1"]),
        (
            [ChangedKey("train.micro_batch", 2, 4)],
            (1, 1, 1, 2),
            {},
            ["train.micro_batch 2 -> 4"],
        ),
        ([ChangedKey("optimizer.lr", 0.1, 0.2)], (1, 1, 1, 2), {}, ["optimizer.lr 0.1 -> 0.2"]),
        ([], (1, 1, 1, 2), {"torch": "2.13.0"}, ["torch 2.12.0 -> 2.13.0"]),
        ([], (1, 1, 1, 2), {"cpu": "another, AVX2"}, ["cpu one, AVX512 -> another, AVX2"]),
    ],
)
def test_a_resume_says_by_what_its_bits_are_lost(
    changed: Any, topology: Any, versions: Any, lost: list[str]
) -> None:
    manifest = {"mesh": [2, 1, 1, 2], "versions": VERSIONS}
    found = with_axes(changed, manifest, Topology(*topology))
    assert lost_bits(manifest, found, {**VERSIONS, **versions}) == lost


def test_bits_of_a_checkpoint_that_does_not_say_where_it_was_written_are_not_promised() -> None:
    found = lost_bits({"mesh": [1, 1, 1, 1]}, [], VERSIONS)
    assert found == [
        "torch unknown -> 2.12.0",
        "transformers unknown -> 5.20",
        "cpu unknown -> one, AVX512",
    ]


def test_ranks_on_other_processors_do_not_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    from threefold.run import process

    name, fast = (
        "what the bits of train.reduce exact depend on",
        config(train={"reduce": "fast"}),
    )
    here = process.facts_of(config())[name]
    monkeypatch.setattr(process, "versions", lambda: VERSIONS)
    assert process.facts_of(config())[name] == "2.12.0, 5.20, one, AVX512" != here
    assert name not in process.facts_of(fast)
