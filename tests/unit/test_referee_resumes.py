"""The referee on programs that save, are started again and export: each fault with its class, clean ones proved."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from threefold.referee.judge.parts import JudgedPart, PartStatus
from threefold.referee.judge.verdict import judge
from threefold.referee.rank.sealed import SealedFile
from threefold.referee.rank.state import state_of, sum_of
from threefold.referee.rank.weights import architecture_of

NUM_ROWS, BATCH = 32, 4
State = dict[str, Any]


# --- sums of tensors ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float64, torch.int64])
def test_sums_of_parts_add_up_to_that_of_the_whole(kind: torch.dtype) -> None:
    whole = torch.randn(7, 5, 3).to(kind)
    for axis in range(3):
        parts = whole.split(2, dim=axis)
        begins = [
            [2 * place if each == axis else 0 for each in range(3)]
            for place in range(len(parts))
        ]
        sums = [
            sum_of(part, begin, whole.shape) for part, begin in zip(parts, begins, strict=True)
        ]
        assert sum(sums) % (1 << 64) == sum_of(whole, [0, 0, 0], whole.shape)
    assert sum_of(torch.tensor(3.0), [], []) == sum_of(torch.tensor([3.0]), [0], [1])
    assert sum_of(torch.empty(0, 4), [0, 0], [0, 4]) == 0


def test_sums_of_large_tensors_are_taken_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = torch.randn(40, 3)
    expected = sum_of(whole, [0, 0], [40, 3])
    monkeypatch.setattr("threefold.referee.rank.state._MOST_VALUES", 9)
    assert sum_of(whole, [0, 0], [40, 3]) == expected


def test_another_value_place_or_order_is_another_sum() -> None:
    whole = torch.randn(6, 4)
    known = {sum_of(whole, [0, 0], [6, 4])}
    others = [
        whole.t().contiguous().reshape(6, 4),
        whole.flip(0),
        whole.roll(1, 1),
        whole * (1 + 2**-23),
    ]
    others += [
        torch.where(torch.arange(24).reshape(6, 4) == place, 0.0, whole) for place in range(24)
    ]
    for other in others:
        known.add(sum_of(other, [0, 0], [6, 4]))
    assert len(known) == 1 + len(others)


@pytest.mark.parametrize(("held", "is_whole"), [("ds_tensor", False), ("_hp_mapping", True)])
def test_what_zero_divides_is_not_taken_for_the_state(held: str, is_whole: bool) -> None:
    model = nn.Linear(2, 1)
    setattr(model.weight, held, None)
    known = state_of(model)
    assert ("weights" in known) == is_whole
    unknown = {"unknown": "DeepSpeed's ZeRO keeps weights and moments in its own format"}
    assert state_of(model, torch.optim.AdamW(model.parameters())) == unknown
    assert is_whole or known == unknown


# --- programs that are started again -----------------------------------------------------------------------------


def trained(steps: int) -> dict[int, State]:
    """The state after each step, from 0 on."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    states = {0: state_of(model, optimizer)}
    for step in range(1, steps + 1):
        model(torch.randn(4, 3)).sum().backward()
        optimizer.step()
        states[step] = state_of(model, optimizer)
    return states


STATES = trained(8)


def start(
    folder: Path,
    number: int,
    rows: Sequence[Sequence[int]],
    *,
    begins: State | None = None,
    loaded: bool = True,
    saved: Sequence[int] = (),
    rates: Callable[[int], float] = lambda step: 0.1,
    first_step: int = 0,
    ranks: int = 2,
    cut: bool = False,
    rank_0_saves: bool = False,
) -> None:
    """A start of ranks whose steps read these rows, each its share of them.

    Args:
        first_step: how many steps the training has taken before.
    """
    for rank in range(ranks):
        name = f"rank-{rank:05d}" + (f"-{number}" if number > 1 else "")
        file = SealedFile(folder / f"{name}.jsonl", most_bytes=1 << 20)
        file.write(
            "start",
            {
                "rank": rank,
                "start": number,
                "world_size": ranks,
                "program": "a.py",
                "versions": {},
            },
        )
        ddp = {
            "together": [],
            "how": "DistributedDataParallel",
            "data_ranks": list(range(ranks)),
        }
        file.write("placement", {"module": 0, "model": 0, **ddp})
        samplers = [
            {
                "class": "BatchSampler",
                "package": "torch",
                "batch_size": BATCH // ranks,
                "drop_last": False,
            },
            {
                "class": "DistributedSampler",
                "package": "torch",
                "num_replicas": ranks,
                "rank": rank,
                "seed": 0,
            },
        ]
        ended = 0
        for step, read in enumerate(rows, start=1):
            mine = [f"row {row}" for row in read[rank::ranks]]
            call = {
                "module": 0,
                "rows": mine,
                "ignored": [],
                "labelled": False,
                "begin": 0,
                "pass": (0, 0),
            }
            values = {
                "step": step,
                "optimizer": 0,
                "calls": [call],
                "rates": [rates(first_step + step)],
            }
            if step == 1 and number > 1:
                values["begins"] = {**(begins or STATES[first_step]), "loaded": loaded}
            file.write("step", values)
            ended += len(mine)
            if step in saved and (rank == 0 or not rank_0_saves):
                file.write("saved", {"step": step, "optimizer": 0, **STATES[first_step + step]})
        known = {"rows": NUM_ROWS, "samplers": samplers, "batches": len(rows), "ended": not cut}
        file.write("pass", {"pass": (0, 0), **known})
        if not cut:
            file.write("end", {"steps": len(rows), "calls_after": 0})
        file.close()
    (folder / "command.json").write_text(json.dumps({"command": ["train"], "exit_code": 0}))


ROWS = [list(range(begin, begin + BATCH)) for begin in range(0, NUM_ROWS, BATCH)]


def part(folder: Path, name: str) -> JudgedPart:
    return next(each for each in judge(folder).parts if each.name == name)


def told(folder: Path, name: str = "resume") -> str:
    return str(part(folder, name)).splitlines()[0]


def test_one_start_has_no_resume(tmp_path: Path) -> None:
    start(tmp_path, 1, ROWS)
    assert told(tmp_path) == "none        resume: no program of the command resumed from a save"


@pytest.mark.parametrize("rank_0_saves", [False, True])
def test_start_that_goes_on_is_proved(tmp_path: Path, rank_0_saves: bool) -> None:
    """The first start was killed two steps after its save: what it read then is read again."""
    start(tmp_path, 1, ROWS[:6], saved=[2, 4], cut=True, rank_0_saves=rank_0_saves)
    start(tmp_path, 2, ROWS[4:], first_step=4)
    assert told(tmp_path) == (
        "proved      resume: start 2 resumes from step 4: 2 weights and 6 values of the optimizer as they were saved; "
        "in 2 steps the learning rates and rows of start 1"
    )
    assert part(tmp_path, "record").status is PartStatus.PROVED
    assert told(tmp_path, "rows of an epoch") == (
        "proved      rows of an epoch: each of 32 rows was read once in each epoch, of 1"
    )
    assert judge(tmp_path).as_values()["steps"] == 10


def test_three_starts_on_other_ranks(tmp_path: Path) -> None:
    start(tmp_path, 1, ROWS[:4], saved=[2], cut=True)
    start(tmp_path, 2, ROWS[2:6], first_step=2, saved=[2], cut=True)
    start(tmp_path, 3, ROWS[4:], first_step=4, ranks=1)
    resumes = [str(each) for each in judge(tmp_path).parts if each.name == "resume"]
    assert [each.split(":")[1].split(" resumes")[1] for each in resumes] == [
        " from step 2",
        " from step 4",
    ]
    assert all(each.startswith("proved") for each in resumes)


WRONG = [
    (
        {"begins": STATES[2]},
        "from step 2 and reads different rows from start 1: 4 of 4 in step 3",
    ),
    (
        {"begins": {**STATES[4], "moments": STATES[2]["moments"]}},
        "from step 4 with the moments of step 2",
    ),
    (
        {"begins": {**STATES[4], "moments": {}}, "loaded": False},
        "from step 4 with an optimizer without a state: weight step, weight exp_avg, weight exp_avg_sq, bias step, "
        "bias exp_avg, bias exp_avg_sq begin at 0",
    ),
    (
        {
            "begins": {
                **STATES[4],
                "moments": {
                    k: v for k, v in STATES[4]["moments"].items() if k.startswith("weight")
                },
            }
        },
        "with 3 of 6 values of the optimizer that are not as saved: bias step, bias exp_avg, bias exp_avg_sq",
    ),
    (
        {
            "begins": {
                **STATES[4],
                "weights": {**STATES[4]["weights"], "bias": STATES[0]["weights"]["bias"]},
            }
        },
        "from step 4 with 1 of 2 weights that are not as saved: bias",
    ),
    (
        {
            "begins": {
                **STATES[4],
                "weights": {**STATES[4]["weights"], "head": STATES[0]["weights"]["bias"]},
            }
        },
        "from step 4 with weights that were not saved: head",
    ),
    ({"begins": STATES[8]}, "with 2 of 2 weights that are not as saved: weight, bias"),
    (
        {"rates": lambda step: 0.2},
        "from step 4 with other learning rates: in step 5 they were 0.1 and 0.2",
    ),
    ({"rows": ROWS}, "from step 4 and reads different rows from start 1: 4 of 4 in step 5"),
    (
        {"rows": [*ROWS[5:], ROWS[4]]},
        "from step 4 and reads different rows from start 1: 4 of 4 in step 5",
    ),
]


@pytest.mark.parametrize(("settings", "what"), WRONG)
def test_start_that_goes_on_otherwise_is_refuted(
    tmp_path: Path, settings: dict[str, Any], what: str
) -> None:
    start(tmp_path, 1, ROWS[:6], saved=[2, 4], cut=True)
    start(tmp_path, 2, settings.pop("rows", ROWS[4:]), first_step=4, **settings)
    assert told(tmp_path).startswith("refuted     resume: start 2 resumes ")
    assert told(tmp_path).endswith(what)
    assert judge(tmp_path).exit_code == 1


def test_data_that_begins_anew_where_start_1_ended_shows_in_the_epoch(tmp_path: Path) -> None:
    start(tmp_path, 1, ROWS[:4], saved=[4], cut=True)
    start(tmp_path, 2, ROWS, first_step=4)
    assert told(tmp_path, "rows of an epoch").endswith(
        "epoch 1 made 48 reads of 32 rows: 16 more than once"
    )


def test_what_does_not_show_is_not_judged(tmp_path: Path) -> None:
    """Learning rates that change, of a first start that ended where it saved; and other ranks."""
    start(tmp_path, 1, ROWS[:4], saved=[4], cut=True, rates=float)
    start(tmp_path, 2, ROWS[4:], first_step=4, rates=float)
    assert told(tmp_path).endswith(
        "its next learning rates are not known: let it train beyond a save"
    )
    for path in tmp_path.glob("rank-*-2.jsonl"):
        path.unlink()
    start(tmp_path, 2, ROWS[4:], first_step=4, ranks=1)
    assert told(tmp_path).endswith(
        "with other ranks, later rows cannot be compared: let start 1 train beyond a save"
    )


def test_ranks_that_begin_with_different_weights(tmp_path: Path) -> None:
    start(tmp_path, 1, ROWS[:6], saved=[4], cut=True)
    start(tmp_path, 2, ROWS[4:], first_step=4)
    (tmp_path / "rank-00001-2.jsonl").unlink()
    assert told(tmp_path) == "not judged  resume: start 2: not all of its ranks left a record"
    other = tmp_path / "other"
    other.mkdir()
    start(other, 2, ROWS[4:], first_step=4, begins=STATES[3])
    (other / "rank-00001-2.jsonl").rename(tmp_path / "rank-00001-2.jsonl")
    assert (
        told(tmp_path)
        == "not judged  resume: start 2: ranks hold different values of weight in the same place"
    )


def test_program_that_does_not_go_on_is_another_training(tmp_path: Path) -> None:
    start(tmp_path, 1, ROWS, saved=[4])
    start(tmp_path, 2, ROWS, begins=STATES[7], loaded=False)
    verdict = judge(tmp_path)
    assert str(verdict.parts[0]) == (
        "not judged  record: two programs trained, and the second does not resume from a save"
    )
    assert verdict.exit_code == 3


# --- what is exported --------------------------------------------------------------------------------------------


def exported(
    folder: Path, *, tied: bool = False, first: float | None = None, **saving: Any
) -> LlamaForCausalLM:
    """A record of a model that was written to `folder`/model after its second step.

    Args:
        first: the first value of its head; None: a random one.
    """
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    config = LlamaConfig(
        vocab_size=31, num_key_value_heads=1, tie_word_embeddings=tied, **sizes
    )
    model = LlamaForCausalLM(config)
    if first is not None:
        torch.nn.init.constant_(model.lm_head.weight[0], first)
    model.save_pretrained(folder / "model", **saving)
    file = SealedFile(folder / "rank-00000.jsonl", most_bytes=1 << 20)
    file.write(
        "start", {"rank": 0, "start": 1, "world_size": 1, "program": "a.py", "versions": {}}
    )
    shown = {
        "how": "one process",
        "architecture": architecture_of(model),
        "data_ranks": [0],
        "together": [],
    }
    file.write("placement", {"module": 0, "model": 0, **shown})
    for step in (1, 2):
        call = {
            "module": 0,
            "rows": ["row"],
            "ignored": [],
            "labelled": False,
            "begin": 0,
            "pass": None,
        }
        file.write("step", {"step": step, "optimizer": 0, "calls": [call], "rates": [0.1]})
    where = {"step": 2, "module": 0, "folder": str(folder / "model")}
    file.write("exported", {**where, **state_of(model)})
    file.write("end", {"steps": 2, "calls_after": 0})
    file.close()
    (folder / "command.json").write_text(json.dumps({"command": ["train"], "exit_code": 0}))
    return model


@pytest.mark.parametrize("tied", [False, True])
def test_export_that_is_the_model_is_proved(tmp_path: Path, tied: bool) -> None:
    exported(tmp_path, tied=tied)
    assert told(tmp_path, "exports") == (
        "proved      exports: 1 of 1 folders read back have all weights and the config of the model"
    )


def _change(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = {
        name: value.clone() for name, value in load_file(folder / "model.safetensors").items()
    }
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def _other_config(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "rms_norm_eps": 1e-3}))


NORM = "model.layers.1.input_layernorm.weight"
BROKEN: list[tuple[Callable[[Path], Any], str]] = [
    (
        lambda folder: _change(folder, lambda tensors: tensors.pop("lm_head.weight")),
        "1 of 21 weights that have changed",
    ),
    (
        lambda folder: _change(folder, lambda tensors: tensors[NORM].add_(1e-6)),
        f"have changed: {NORM}",
    ),
    (
        lambda folder: _change(folder, lambda tensors: tensors[NORM].fill_(torch.nan)),
        f"have changed: {NORM}",
    ),
    (_cut, "no readable model"),
    (lambda folder: (folder / "model.safetensors").unlink(), "no readable model"),
    (_other_config, "rms_norm_eps 0.001 in its config, where the model has 1e-06"),
]


@pytest.mark.parametrize(("spoil", "what"), BROKEN)
def test_export_that_is_another_model_is_refuted(
    tmp_path: Path, spoil: Callable[[Path], Any], what: str
) -> None:
    exported(tmp_path)
    spoil(tmp_path / "model")
    assert part(tmp_path, "exports").status is PartStatus.REFUTED
    assert what in told(tmp_path, "exports")


def test_export_of_weights_that_are_not_finite_is_not_proved(tmp_path: Path) -> None:
    exported(tmp_path, first=torch.inf)
    assert part(tmp_path, "exports").status is PartStatus.NOT_JUDGED
    assert told(tmp_path, "exports").endswith("but not all of them are finite")


def test_export_without_one_of_its_shards_is_refuted(tmp_path: Path) -> None:
    exported(tmp_path, max_shard_size=4000)
    shards = sorted((tmp_path / "model").glob("model-*.safetensors"))
    assert len(shards) > 2
    assert part(tmp_path, "exports").status is PartStatus.PROVED
    shards[1].unlink()
    assert part(tmp_path, "exports").status is PartStatus.REFUTED


def test_exports_that_cannot_be_compared_are_not_judged(tmp_path: Path) -> None:
    model = exported(tmp_path)
    model.bfloat16().save_pretrained(tmp_path / "model")
    assert told(tmp_path, "exports").endswith(
        "weights were written as bfloat16, and are float32 in memory"
    )
    for path in (tmp_path / "model").iterdir():
        path.unlink()
    assert told(tmp_path, "exports").endswith("model is not here, or was removed")
