"""The referee's judgement of records: each fault refuted, its clean twin proved, what does not show not judged."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.data_loader import BatchSamplerShard
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    SequentialSampler,
    WeightedRandomSampler,
)

import threefold
from referee_records import judge_data
from threefold import Referee
from threefold.errors import ConfigError, DataError
from threefold.referee.judge.parts import PartStatus
from threefold.referee.judge.verdict import CommandVerdict
from threefold.referee.rank.loaders import Loaders, facts_of
from threefold.referee.rank.sealed import SealedFile, read_sealed

NUM_ROWS, BATCH = 40, 5
Orders = list[list[list[int]]]  # epoch, rank, place


def dealt(
    *, ranks: int = 2, epochs: int = 2, set_epoch: bool = True, seeds: Sequence[int] = (0, 0)
) -> Orders:
    """What DistributedSampler deals out: one shuffled order an epoch, each rank every so-manieth row of it."""
    orders = []
    for epoch in range(epochs):
        of_ranks = []
        for rank in range(ranks):
            order = list(range(NUM_ROWS))
            random.Random(100 * seeds[rank] + (epoch if set_epoch else 0)).shuffle(order)
            of_ranks.append(order[rank::ranks])
        orders.append(of_ranks)
    return orders


def sampler(rank: int, **settings: Any) -> dict[str, Any]:
    known = {
        "num_replicas": 2,
        "rank": rank,
        "seed": 0,
        "epoch": 0,
        "shuffle": True,
        "drop_last": False,
    }
    return {"class": "DistributedSampler", "package": "torch", **known, **settings}


class OneRank:
    dp_size, dp_rank = 1, 0


def record(
    folder: Path,
    orders: Orders,
    *,
    samplers: Callable[[int, int], dict[str, Any]] | None = None,
    placement: Callable[[int], dict[str, Any]] | None = None,
    name: Callable[[int, int], str] = lambda row, epoch: f"row {row}",
    batch: int = BATCH,
    calls_a_step: int = 1,
    unread_batches: int = 0,
    drop_last: bool = False,
    sized: bool = True,
    trial: int | None = None,
    trials: int = 0,
    **call: Any,
) -> CommandVerdict:
    """Writes what ranks would have recorded that read these orders, and judges it.

    Args:
        sized: whether the loader shows the size of its batches.
        trial: the model of which a step is taken before; the one that is trained is model 0.
        trials: in how many steps gradients of a call are set to zero again, which is made before those of the step.
    """
    num_ranks = len(orders[0])
    samplers = samplers or (lambda rank, epoch: sampler(rank, epoch=epoch))
    for rank in range(num_ranks):
        file = SealedFile(folder / f"rank-{rank:05d}.jsonl", most_bytes=1 << 20)
        file.write("start", {"rank": rank, "start": 1, "world_size": num_ranks, "versions": {}})
        ddp = {
            "together": [],
            "how": "DistributedDataParallel",
            "data_ranks": list(range(num_ranks)),
        }
        file.write(
            "placement", {"module": 0, "model": 0, **(placement(rank) if placement else ddp)}
        )
        step = 0
        if trial is not None:
            file.write("placement", {"module": 7, "model": trial, **ddp})
            tried = {
                "module": 7,
                "rows": ["trial"],
                "ignored": [],
                "labelled": False,
                "begin": 0,
                "pass": None,
            }
            file.write("step", {"step": 0, "optimizer": 9, "calls": [tried]})
        for epoch, order in enumerate(orders):
            for start in range(0, len(order[rank]), batch):
                step += 1
                rows = [name(row, epoch) for row in order[rank][start : start + batch]]
                values = {
                    "module": 0,
                    "rows": rows,
                    "ignored": [],
                    "labelled": False,
                    "begin": 0,
                    "pass": (0, epoch),
                    **call,
                }
                calls = [values] * calls_a_step
                if step <= trials:
                    calls = [
                        {**values, "rows": ["zeros"], "pass": None, "cleared": True},
                        *calls,
                    ]
                file.write("step", {"step": step, "optimizer": 0, "calls": calls})
        for epoch, order in enumerate(orders):
            batches = {"class": "BatchSampler", "package": "torch", "drop_last": drop_last}
            if sized:
                batches["batch_size"] = batch
            known = {"rows": NUM_ROWS, "samplers": [batches, samplers(rank, epoch)]}
            num_batches = -(-len(order[rank]) // batch) + unread_batches
            file.write(
                "pass", {"pass": (0, epoch), "batches": num_batches, "ended": True, **known}
            )
        file.write("end", {"steps": step, "calls_after": 0})
        file.close()
    (folder / "command.json").write_text(json.dumps({"command": ["train"], "exit_code": 0}))
    return judge_data(folder)


def status(verdict: CommandVerdict, name: str) -> PartStatus:
    return next(part.status for part in verdict.parts if part.name == name)


def text(verdict: CommandVerdict, name: str) -> str:
    return next(str(part) for part in verdict.parts if part.name == name)


def test_clean_run_is_proved(tmp_path: Path) -> None:
    verdict = record(tmp_path, dealt())
    assert verdict.exit_code == 0, verdict.lines()
    assert text(verdict, "rows of an epoch") == (
        "proved      rows of an epoch: each of 40 rows was read once in each epoch, of 2"
    )


def test_labels_of_trainings_in_turn_are_not_judged(tmp_path: Path) -> None:
    """A probe of its labels may have none on purpose."""
    verdict = record(tmp_path, dealt(epochs=3), trial=0, labelled=True, ignored=[0])
    assert status(verdict, "labels") is PartStatus.REFUTED
    (tmp_path / "turns").mkdir()
    verdict = record(tmp_path / "turns", dealt(), trial=0, labelled=True, ignored=[0])
    assert status(verdict, "labels") is PartStatus.NOT_JUDGED


def test_all_ranks_read_the_same_rows(tmp_path: Path) -> None:
    orders = [[list(range(NUM_ROWS))] * 2] * 2
    plain = {"class": "SequentialSampler", "package": "torch"}
    verdict = record(tmp_path, orders, samplers=lambda rank, epoch: plain)
    assert verdict.exit_code == 1
    assert text(verdict, "rows of data ranks") == (
        "refuted     rows of data ranks: ranks 0 and 1 trained on the same rows in 16 of 16 steps\n"
        "  expected: separate rows for each data rank (DistributedDataParallel); 2 ranks do the work of one\n"
        "  where: the DataLoader: give it a DistributedSampler, and call its set_epoch before each epoch"
    )


def test_sampler_seeded_by_rank(tmp_path: Path) -> None:
    orders = dealt(seeds=(0, 1))
    verdict = record(
        tmp_path, orders, samplers=lambda rank, epoch: sampler(rank, seed=rank, epoch=epoch)
    )
    twice = len(set(orders[0][0]) & set(orders[0][1]))
    assert text(verdict, "rows of an epoch") == (
        f"refuted     rows of an epoch: epoch 1 read {twice} rows more than once and {twice} of 40 never\n"
        "  expected: each of the 40 rows once, by one data rank\n"
        "  where: the sampler of each rank: same seed and epoch, num_replicas = number of data ranks, its own rank"
    )
    assert text(verdict, "order of epochs") == (
        "refuted     order of epochs: in epoch 1 the sampler of rank 1 has seed 1, that of rank 0 has 0\n"
        "  expected: one order of the data set, each data rank reading its share\n"
        "  where: where the sampler is made, or its epoch set: seed must not depend on the rank"
    )


def test_rows_are_refuted_without_a_word_of_the_sampler(tmp_path: Path) -> None:
    """The seeds do not show, as a sampler of the program's own may hide them: the rows do."""
    verdict = record(tmp_path, dealt(seeds=(0, 1)))
    assert status(verdict, "rows of an epoch") is PartStatus.REFUTED
    assert status(verdict, "order of epochs") is PartStatus.PROVED


def test_epochs_that_differ_by_rank(tmp_path: Path) -> None:
    verdict = record(
        tmp_path, dealt(), samplers=lambda rank, epoch: sampler(rank, epoch=epoch + rank)
    )
    assert "the sampler of rank 1 has epoch 1, that of rank 0 has 0" in text(
        verdict, "order of epochs"
    )
    assert verdict.exit_code == 1


def test_no_set_epoch(tmp_path: Path) -> None:
    verdict = record(
        tmp_path, dealt(epochs=3, set_epoch=False), samplers=lambda rank, epoch: sampler(rank)
    )
    assert status(verdict, "rows of an epoch") is PartStatus.PROVED
    assert text(verdict, "order of epochs") == (
        "refuted     order of epochs: epoch 2 read its rows in the order of the epoch before (2 of 2 epochs do)\n"
        "  expected: a new order in each epoch: DistributedSampler is asked to shuffle\n"
        "  where: the loop over epochs: sampler.set_epoch(epoch) before each of them"
    )


def test_order_that_is_not_shuffled_is_no_fault(tmp_path: Path) -> None:
    orders = dealt(set_epoch=False)
    verdict = record(
        tmp_path, orders, samplers=lambda rank, epoch: sampler(rank, shuffle=False)
    )
    assert status(verdict, "order of epochs") is PartStatus.NONE
    assert verdict.exit_code == 0


def test_shares_of_more_ranks_than_there_are(tmp_path: Path) -> None:
    orders = [[order[0], order[1]] for order in dealt(ranks=4, seeds=(0, 0, 0, 0))]
    verdict = record(
        tmp_path,
        orders,
        samplers=lambda rank, epoch: sampler(rank, num_replicas=4, epoch=epoch),
    )
    assert "epoch 1 made 20 reads of 40 rows: 20 never" in text(verdict, "rows of an epoch")
    assert text(verdict, "order of epochs") == (
        "refuted     order of epochs: the samplers divide the rows by 4 and read the shares 0, 1 on 2 data ranks\n"
        "  expected: num_replicas is the number of data ranks, and each of them reads a different share\n"
        "  where: where the sampler is made: num_replicas and rank are those of the data ranks"
    )


def test_every_rank_reads_all_rows_in_an_order_of_its_own(tmp_path: Path) -> None:
    orders = [
        [random.Random(10 * epoch + rank).sample(range(NUM_ROWS), NUM_ROWS) for rank in (0, 1)]
        for epoch in (0, 1)
    ]
    plain = {
        "class": "RandomSampler",
        "package": "torch",
        "num_samples": NUM_ROWS,
        "replacement": False,
    }
    verdict = record(tmp_path, orders, samplers=lambda rank, epoch: plain)
    assert "epoch 1 made 80 reads of 40 rows: 40 more than once" in text(
        verdict, "rows of an epoch"
    )


def test_ranks_with_files_of_their_own_are_no_fault(tmp_path: Path) -> None:
    orders = [[[*range(NUM_ROWS)], [*range(NUM_ROWS, 2 * NUM_ROWS)]]] * 2
    plain = {"class": "SequentialSampler", "package": "torch"}
    verdict = record(tmp_path, orders, samplers=lambda rank, epoch: plain)
    assert "each of 80 rows was read once" in text(verdict, "rows of an epoch")
    assert verdict.exit_code == 0


def test_padding_of_the_last_batch_is_no_fault(tmp_path: Path) -> None:
    orders = dealt()
    for first, second in orders:
        second.append(first[0])
        first.append(second[0])
    verdict = record(tmp_path, orders)
    assert "2 were read again to fill its last batches" in text(verdict, "rows of an epoch")
    assert status(verdict, "rows of an epoch") is PartStatus.PROVED


def test_dropped_rows_need_drop_last(tmp_path: Path) -> None:
    orders = [[rows[:18] for rows in epoch] for epoch in dealt()]
    kept = record(tmp_path, orders, samplers=lambda rank, epoch: sampler(rank, epoch=epoch))
    assert "4 of 40 rows left the DataLoader and did not reach the model" in text(
        kept, "rows of an epoch"
    )
    assert kept.exit_code == 3
    (again := tmp_path / "again").mkdir()
    dropped = record(
        again, orders, samplers=lambda rank, epoch: sampler(rank, epoch=epoch, drop_last=True)
    )
    assert "4 were left out at its end (drop_last)" in text(dropped, "rows of an epoch")


def test_equal_rows_of_a_data_set_are_not_refuted(tmp_path: Path) -> None:
    verdict = record(tmp_path, dealt(epochs=4), name=lambda row, epoch: f"row {row % 30}")
    assert verdict.exit_code == 3
    assert status(verdict, "rows of an epoch") is PartStatus.NOT_JUDGED


@pytest.mark.parametrize("different", [1, 2, 4, 10])
def test_data_set_of_few_different_rows_is_not_refuted(tmp_path: Path, different: int) -> None:
    verdict = record(
        tmp_path, dealt(epochs=4), name=lambda row, epoch: f"row {row % different}", batch=1
    )
    assert verdict.exit_code == 3, verdict.lines()


def test_augmented_rows_are_neither_proved_nor_refuted(tmp_path: Path) -> None:
    plain = {
        "class": "RandomSampler",
        "package": "torch",
        "num_samples": NUM_ROWS,
        "replacement": False,
    }
    orders = [[[*range(NUM_ROWS)], [*range(50, 50 + NUM_ROWS)]]] * 2
    verdict = record(
        tmp_path,
        orders,
        samplers=lambda rank, epoch: plain,
        name=lambda row, epoch: f"{row} {epoch}",
    )
    assert verdict.exit_code == 3
    assert {part.status for part in verdict.parts[1:]} == {
        PartStatus.NOT_JUDGED,
        PartStatus.NONE,
    }


def test_sampler_of_an_unknown_kind_is_judged_by_its_epochs(tmp_path: Path) -> None:
    mine = {"class": "MySampler", "package": "mine"}
    verdict = record(tmp_path, dealt(), samplers=lambda rank, epoch: mine)
    assert "2 epochs read the same 40 rows, each once" in text(verdict, "rows of an epoch")
    (again := tmp_path / "again").mkdir()
    faulty = record(again, dealt(seeds=(0, 1)), samplers=lambda rank, epoch: mine)
    assert status(faulty, "rows of an epoch") is PartStatus.NOT_JUDGED


def test_replacement_and_skipped_batches_are_not_judged(tmp_path: Path) -> None:
    drawn = {
        "class": "RandomSampler",
        "package": "torch",
        "num_samples": NUM_ROWS,
        "replacement": True,
    }
    verdict = record(tmp_path, dealt(), samplers=lambda rank, epoch: drawn)
    assert "with replacement" in text(verdict, "rows of an epoch")


def test_one_epoch_is_proved_only_by_samplers_that_deal_rows_out(tmp_path: Path) -> None:
    assert record(tmp_path, dealt(epochs=1)).exit_code == 0
    plain = {
        "class": "RandomSampler",
        "package": "torch",
        "num_samples": NUM_ROWS,
        "replacement": False,
    }
    (again := tmp_path / "again").mkdir()
    orders = [[[*range(NUM_ROWS)], [*range(NUM_ROWS, 2 * NUM_ROWS)]]]
    verdict = record(again, orders, samplers=lambda rank, epoch: plain)
    assert "one epoch does not show whether a row looks the same each time" in text(
        verdict, "rows of an epoch"
    )
    assert "no row recurred" in text(verdict, "rows of data ranks")


@pytest.mark.parametrize(
    "settings",
    [{"class": "SubsetRandomSampler"}, {"class": "RandomSampler", "num_samples": 20}],
)
def test_part_of_a_data_set_is_no_fault(tmp_path: Path, settings: dict[str, Any]) -> None:
    verdict = record(
        tmp_path,
        [[rows[:10] for rows in epoch] for epoch in dealt(set_epoch=False)],
        samplers=lambda rank, epoch: {"package": "torch", "shuffle": False, **settings},
    )
    assert "2 epochs read the same 20 rows, each once" in text(verdict, "rows of an epoch")


def test_batches_that_do_not_reach_the_model_are_not_judged(tmp_path: Path) -> None:
    orders = [[rows[:10] for rows in epoch] for epoch in dealt()]
    verdict = record(tmp_path, orders, unread_batches=2)
    assert "the model is called with 10 rows of 4 batches of 5" in text(
        verdict, "rows of an epoch"
    )
    assert verdict.exit_code == 3


def test_row_that_a_full_batch_has_lost_is_not_said_to_be_dropped(tmp_path: Path) -> None:
    orders = dealt()
    orders[1][1].pop()
    verdict = record(tmp_path, orders, drop_last=True)
    assert "the model is called with 19 rows of 4 batches of 5" in text(
        verdict, "rows of an epoch"
    )
    assert verdict.exit_code == 3


@pytest.mark.parametrize("length", [20, 21])
def test_pass_has_ended_once_its_last_batch_was_trained_on(length: int) -> None:
    """Though the program asks for no more: it counts them, or has its steps counted."""
    loaders, loader = Loaders(), DataLoader(range(length), batch_size=5)  # type: ignore[arg-type]
    passing = iter(loader)
    loaders.begins(passing, loader)
    for number in range(1, len(loader) + 1):
        loaders.hands_out(next(passing), passing)
        assert not loaders.passes[0, 0]["ended"]
        if number < len(loader):
            loaders.trained_on([(0, 0)])
    loaders.trained_on([(1, 0)])
    assert not loaders.passes[0, 0]["ended"]
    loaders.trained_on([(0, 0)])
    assert loaders.passes[0, 0]["ended"]


def test_last_batch_of_a_loader_that_fetches_ahead_is_of_its_pass() -> None:
    loaders = Loaders()
    train, held_out = (DataLoader(range(length), batch_size=2) for length in (4, 2))  # type: ignore[arg-type]
    trains = iter(train)
    loaders.begins(trains, train)
    for batch in (0, 1):
        loaders.hands_out(batch, trains)
    # The loop evaluates while the second batch waits; asked for the next one, the loader has no more to fetch.
    evaluates = iter(held_out)
    loaders.begins(evaluates, held_out)
    loaders.hands_out(0, evaluates)
    loaders.ends(evaluates)
    assert loaders.last == (1, 0)
    loaders.ends(trains)
    assert loaders.last == (0, 0)


def test_share_that_a_sampler_reads_is_seen() -> None:
    rows: Any = range(12)
    dealt_out = DistributedSampler(rows, num_replicas=3, rank=1)
    batches = BatchSampler(SequentialSampler(rows), 2, drop_last=False)
    loaders = Loaders()
    assert loaders.share == (None, None)
    for settings, share in (
        ({"sampler": dealt_out, "batch_size": 2}, (3, 1)),
        (
            {"batch_sampler": BatchSamplerShard(batches, num_processes=2, process_index=1)},
            (2, 1),
        ),
        ({"batch_size": 2}, (None, None)),
    ):
        loader = DataLoader(rows, **settings)
        passing = iter(loader)
        loaders.begins(passing, loader)
        loaders.hands_out(next(passing), passing)
        assert loaders.share == share


def test_draws_with_weights_are_seen_to_have_replacement() -> None:
    weighted = WeightedRandomSampler([1.0] * 8, 8)
    for sampler in (None, weighted):
        plain = DataLoader(range(8), batch_size=2, sampler=sampler)  # type: ignore[arg-type]
        known = facts_of(threefold.distribute(plain, OneRank()))
        assert bool(known["samplers"][-1].get("replacement")) is (sampler is not None)


def test_call_that_repeats_the_one_before_reads_nothing_more(tmp_path: Path) -> None:
    verdict = record(tmp_path, dealt(), calls_a_step=2)
    assert verdict.exit_code == 0, verdict.lines()


def test_ranks_that_cannot_be_told_apart_are_not_judged(tmp_path: Path) -> None:
    verdict = record(
        tmp_path,
        dealt(seeds=(0, 1)),
        placement=lambda rank: {"together": [], "unknown": "no wrapper"},
    )
    why = "it is not known which ranks read separate rows (rank 0: no wrapper)"
    assert text(verdict, "rows of data ranks") == f"not judged  rows of data ranks: {why}"
    assert text(verdict, "rows of an epoch") == f"not judged  rows of an epoch: {why}"
    assert verdict.exit_code == 3


def test_ranks_with_other_numbers_of_steps(tmp_path: Path) -> None:
    verdict = record(tmp_path, [[first, second[:10]] for first, second in dealt()])
    assert text(verdict, "record") == "not judged  record: ranks recorded 4 to 8 steps"


def model_copies(rank: int) -> dict[str, Any]:
    """2 data ranks of 2 ranks each."""
    first = rank - rank % 2
    return {
        "together": [first, first + 1],
        "how": "fully_shard",
        "data_ranks": [rank % 2, rank % 2 + 2],
    }


def test_ranks_of_one_model_copy(tmp_path: Path) -> None:
    shares = [[first, first, second, second] for first, second in dealt()]
    by_copy = lambda rank, epoch: sampler(rank // 2, epoch=epoch)  # noqa: E731
    clean = record(tmp_path, shares, samplers=by_copy, placement=model_copies)
    assert clean.exit_code == 0, clean.lines()
    assert "the same rows in each of 8 steps" in text(clean, "rows of one model copy")
    (again := tmp_path / "again").mkdir()
    by_rank = dealt(ranks=4, seeds=(0, 0, 0, 0))
    faulty = record(
        again,
        by_rank,
        samplers=lambda rank, epoch: sampler(rank, num_replicas=4),
        placement=model_copies,
    )
    assert text(faulty, "rows of one model copy") == (
        "refuted     rows of one model copy: ranks 0 and 1 read different rows in 4 of 4 steps, first in step 1\n"
        "  expected: the same rows on ranks that compute one copy of the model: each holds a part of it\n"
        "  where: the sampler: num_replicas and rank are those of the data ranks, not of all ranks"
    )


def test_ranks_that_share_nothing_are_not_one_copy(tmp_path: Path) -> None:

    def apart(rank):
        return {"together": [], "how": "DistributedDataParallel", "data_ranks": [rank]}

    verdict = record(tmp_path, dealt(), placement=apart)
    assert "have the same data rank and share no parameter" in text(
        verdict, "rows of one model copy"
    )
    assert verdict.exit_code == 3


def test_rows_whose_labels_are_all_ignored(tmp_path: Path) -> None:
    verdict = record(tmp_path, dealt(), ignored=[2], labelled=True)
    assert text(verdict, "labels") == (
        "refuted     labels: all labels are ignored (-100) in 16 of 80 rows: the first is row 2 of rank 0 in step 1\n"
        "  expected: a label that is trained on in every row that is not padding\n"
        "  where: what makes the labels: a prompt longer than the row, a template without its answer, a collator's mask"
    )


def test_rows_that_fill_up_the_last_step_are_not_refuted(tmp_path: Path) -> None:
    orders = [[rows[:10] for rows in epoch] for epoch in dealt(epochs=1)]
    verdict = record(tmp_path, orders, ignored=[3, 4], labelled=True, batch=10)
    assert status(verdict, "labels") is PartStatus.REFUTED  # in the midst of a batch
    (again := tmp_path / "again").mkdir()
    verdict = record(again, orders, ignored=[8, 9], labelled=True, batch=10)
    assert "they fill it up, or have lost theirs" in text(verdict, "labels")


def test_every_changed_byte_is_found(tmp_path: Path) -> None:
    record(tmp_path, dealt())
    path = tmp_path / "rank-00001.jsonl"
    content = path.read_bytes()
    for place in random.Random(0).sample(range(len(content)), 60):
        changed = bytearray(content)
        changed[place] ^= 1
        path.write_bytes(changed)
        verdict = judge_data(tmp_path)
        assert verdict.exit_code != 0, (place, verdict.lines())
    path.write_bytes(b"".join(content.splitlines(keepends=True)[:-1]))
    assert "rank 1 was killed, or its record is cut: rank-00001.jsonl has no end" in text(
        judge_data(tmp_path), "record"
    )
    path.unlink()
    assert "rank 1 left no record" in text(judge_data(tmp_path), "record")
    assert "only 1 of 2 data ranks left a record" in text(
        judge_data(tmp_path), "rows of data ranks"
    )


def test_second_process_of_a_rank_and_a_failed_command_are_not_judged(tmp_path: Path) -> None:
    record(tmp_path, dealt())
    (tmp_path / "rank-00000.77.jsonl").write_bytes((tmp_path / "rank-00000.jsonl").read_bytes())
    (tmp_path / "command.json").write_text(json.dumps({"command": ["train"], "exit_code": 7}))
    assert text(judge_data(tmp_path), "record") == (
        "not judged  record: rank-00000.jsonl is one of two records of rank 0; the command ended with exit code 7"
    )


def test_folder_without_a_record(tmp_path: Path) -> None:
    with pytest.raises(DataError) as error:
        judge_data(tmp_path)
    assert str(error.value) == (
        f"{tmp_path} holds no record of the referee\n"
        "  expected: a folder with command.json and rank-*.jsonl\n"
        f"  fix: threefold referee --record {tmp_path} -- torchrun --nproc-per-node 2 train.py"
    )


def test_sealed_lines_hold_what_is_not_finite_as_null(tmp_path: Path) -> None:
    file = SealedFile(tmp_path / "a.jsonl", most_bytes=1000)
    file.write("step", {"losses": [float("nan"), 1.5], "text": '"seal": "x', "empty": {}})
    file.close()
    lines, damage = read_sealed(tmp_path / "a.jsonl")
    assert damage is None
    assert lines == [{"kind": "step", "losses": [None, 1.5], "text": '"seal": "x', "empty": {}}]


# --- programs that show little of their loaders ------------------------------------------------------------------


@pytest.mark.parametrize(
    "loader_pass", [None, (0, 0)], ids=["no loader", "a loader without end"]
)
def test_epochs_are_found_by_their_rows(tmp_path: Path, loader_pass: Any) -> None:
    verdict = record(tmp_path, dealt(epochs=3), **{"pass": loader_pass}, sized=False)
    assert text(verdict, "rows of an epoch") == (
        "proved      rows of an epoch: 3 epochs read the same 40 rows, each once"
    )
    assert status(verdict, "order of epochs") is PartStatus.PROVED
    assert status(verdict, "rows of data ranks") is PartStatus.PROVED


def test_row_that_comes_again_before_the_others_is_no_epoch(tmp_path: Path) -> None:
    orders = dealt(epochs=3)
    orders[1][0][-1], orders[2][0][0] = orders[2][0][0], orders[1][0][-1]
    verdict = record(tmp_path, orders, **{"pass": None})
    assert text(verdict, "rows of an epoch") == (
        "not judged  rows of an epoch: the rows do not come from torch's DataLoader"
    )


def test_step_may_end_an_epoch_and_begin_the_next(tmp_path: Path) -> None:
    """20 rows of each rank in steps of 8: both ranks may read a row in such a step, each in another epoch."""
    one_rank = [[row for epoch in dealt(epochs=4) for row in epoch[rank]] for rank in range(2)]
    one_rank[1][16:20], one_rank[0][20:24] = one_rank[0][20:24], one_rank[1][16:20]
    verdict = record(tmp_path, [one_rank], **{"pass": None}, batch=8)
    assert status(verdict, "rows of data ranks") is not PartStatus.REFUTED


def test_ranks_that_hold_later_places_of_rows_are_no_data_ranks(tmp_path: Path) -> None:
    verdict = record(tmp_path, dealt(), begin=16)
    assert text(verdict, "rows of data ranks").endswith(
        "(rank 0 reads rows from position 16 on, as if ranks shared a sequence; the positions do not show which)"
    )
    assert verdict.exit_code == 3


@pytest.mark.parametrize(("model", "is_left_out"), [(5, True), (0, False)])
def test_trial_of_another_model_is_left_out(
    tmp_path: Path, model: int, is_left_out: bool
) -> None:
    """Of a model that the training wraps it is a part of the training, which is then not known."""
    verdict = record(tmp_path, dealt(epochs=1), trial=model)
    assert "steps of other optimizers left out: 1" in text(verdict, "record")
    assert (status(verdict, "rows of an epoch") is PartStatus.PROVED) is is_left_out, (
        verdict.lines()
    )


def test_calls_whose_gradients_are_not_in_the_first_step_are_no_rows(tmp_path: Path) -> None:
    verdict = record(tmp_path, dealt(), trials=1)
    assert verdict.exit_code == 0, verdict.lines()


def test_calls_whose_gradients_are_in_no_step_are_rows(tmp_path: Path) -> None:
    """Of a program that sets gradients to zero in each step once more than it should: these rows are lost."""
    verdict = record(tmp_path, dealt(), trials=2)
    assert text(verdict, "rows of an epoch") == (
        "not judged  rows of an epoch: the rows do not come from torch's DataLoader"
    )


def test_block_needs_a_folder_of_its_own(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"file cannot be made \(File exists\)"):
        Referee(model, optimizer, record=tmp_path / "file")
    (tmp_path / "rank-00000.jsonl").touch()
    with pytest.raises(ConfigError, match="has a record of the referee"):
        Referee(model, optimizer, record=tmp_path)
