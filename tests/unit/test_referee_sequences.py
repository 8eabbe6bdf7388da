"""Ranks that share a sequence: found by the positions of their parts, and put back together as whole rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from threefold.referee.judge.groups import groups_of, sequences_of
from threefold.referee.judge.parts import PartStatus, Unjudgeable
from threefold.referee.judge.shared_rows import judge_model_copies
from threefold.referee.record import RankRecord, ReadCall

LENGTH = 16
WHOLE = torch.arange(LENGTH).repeat(3, 1)
# Two documents in each row, which begin anew.
DOCUMENTS = torch.stack(
    [torch.cat((torch.arange(cut), torch.arange(LENGTH - cut))) for cut in (3, 7, 11)]
)


def head_and_tail(whole: Tensor, size: int) -> list[Tensor]:
    chunks = whole.chunk(2 * size, dim=1)
    return [torch.cat((chunks[rank], chunks[-1 - rank]), dim=1) for rank in range(size)]


def one_after_another(whole: Tensor, size: int) -> list[Tensor]:
    return list(whole.chunk(size, dim=1))


def in_turn(whole: Tensor, size: int) -> list[Tensor]:
    return [whole[:, rank::size] for rank in range(size)]


def records(
    folder: Path, positions: list[Tensor], groups: list[list[int]], **inputs: list[Tensor]
) -> list[RankRecord]:
    """Ranks that called their model once with these positions; groups: the process groups of all of them."""
    ranks = []
    for rank, own in enumerate(positions):
        name = f"rank-{rank}.safetensors"
        tensors = {
            "0.position_ids": own,
            **{f"0.{key}": values[rank] for key, values in inputs.items()},
        }
        save_file({key: value.contiguous() for key, value in tensors.items()}, folder / name)
        call = ReadCall(
            1,
            0,
            tuple(f"row {row} of {own[0, 0]}" for row in range(len(own))),
            (),
            False,
            None,
            int(own[:, 0].min()),
        )
        placement: dict[str, Any] = {
            "how": "fully_shard",
            "data_ranks": list(range(len(positions))),
        }
        placement |= {
            "together": placement["data_ranks"],
            "groups": [group for group in groups if rank in group],
        }
        checked = [{"inputs": {"file": name}, "calls": [{}]}]
        ranks.append(
            RankRecord(
                rank,
                len(positions),
                calls=[call],
                placement=placement,
                checked=checked,
                folder=folder,
            )
        )
    return ranks


@pytest.mark.parametrize("whole", [WHOLE, DOCUMENTS])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("split", [head_and_tail, one_after_another])
def test_parts_are_put_back_together(
    tmp_path: Path, split: Callable[[Tensor, int], list[Tensor]], size: int, whole: Tensor
) -> None:
    ids = torch.randint(0, 97, whole.shape)
    ranks = records(tmp_path, split(whole, size), [list(range(size))], ids=split(ids, size))
    groups = groups_of(ranks)
    assert groups.num_data_ranks == 1 and len(groups.members) == 1, groups.unknown
    shared = groups.shared[0]
    parts = [
        {"0.position_ids": each, "0.ids": own}
        for each, own in zip(split(whole, size), split(ids, size), strict=True)
    ]
    joined = shared.whole(parts)
    assert torch.equal(joined["0.position_ids"], whole) and torch.equal(joined["0.ids"], ids)
    assert groups.records[0].calls[0].rows[1].count("+") == size - 1
    with pytest.raises(Unjudgeable, match="set dropout to 0"):
        shared.whole([{**part, "0.!random": torch.zeros(2)} for part in parts])


def test_ranks_that_take_turns(tmp_path: Path) -> None:
    shared = sequences_of(records(tmp_path, in_turn(WHOLE, 2), [[0, 1]]))
    assert (shared[0].ranks, shared[0].order) == ((0, 1), 2)


def test_pairs_of_several_data_ranks_are_process_groups(tmp_path: Path) -> None:
    """2 data ranks of 2: which parts belong together follows from the groups, not from the positions."""
    parts = head_and_tail(WHOLE, 2)
    groups = groups_of(
        records(tmp_path, [*parts, *parts], [[0, 1, 2, 3], [0, 1], [2, 3], [0, 2], [1, 3]])
    )
    assert [[record.rank for record in group] for group in groups.members] == [[0, 1], [2, 3]]
    alone = groups_of(records(tmp_path, [*parts, *parts], [[0, 1, 2, 3]]))
    why = "rank 1 reads rows from position 4 on, as if ranks shared a sequence; the positions do not show which"
    assert alone.unknown == why


@pytest.mark.parametrize("whole", [WHOLE, DOCUMENTS])
def test_ranks_with_rows_of_their_own_share_nothing(tmp_path: Path, whole: Tensor) -> None:
    groups = groups_of(records(tmp_path, [whole, whole], [[0, 1]]))
    assert groups.num_data_ranks == 2
    # Left-padded rows begin later, and make no row with those of another rank.
    padded = WHOLE.clone()
    padded[1:] = torch.cat((torch.ones(2, 2, dtype=torch.long), WHOLE[1:, :-2]), dim=1)
    assert groups_of(records(tmp_path, [padded, whole], [[0, 1]])).num_data_ranks == 2


def test_positions_that_do_not_join_are_refuted(tmp_path: Path) -> None:
    first, second = head_and_tail(WHOLE, 2)
    groups = groups_of(records(tmp_path, [first, second + 1], [[0, 1]]))
    part = judge_model_copies(groups)
    assert part.status is PartStatus.REFUTED
    assert (
        part.what
        == "the positions of the parts of each row that ranks 0 and 1 hold do not fit together"
    )
    right = judge_model_copies(groups_of(records(tmp_path, [first, second], [[0, 1]])))
    assert right.status is PartStatus.PROVED
