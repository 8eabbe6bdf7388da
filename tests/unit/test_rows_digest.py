"""The digest by which ranks of one copy compare their rows: of values and shapes, in whatever memory they lie."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from threefold.mesh.exchange import described_rows, digest_of_rows

WHOLE = torch.arange(48).view(2, 24)
PARTS = {
    "one element": WHOLE[:1, :1],
    "a column": WHOLE[:, 3:4],
    "every second": WHOLE[:, ::2],
    "transposed": WHOLE.T,
    "nothing": WHOLE[:0],
    "bool": WHOLE > 7,
    "bfloat16": WHOLE.to(torch.bfloat16),
    "a number": torch.tensor(3),
}


@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS.keys())
def test_memory_does_not_count_and_every_value_does(part: Tensor) -> None:
    copy = part.clone(memory_format=torch.contiguous_format)
    assert digest_of_rows([{"rows": part}]) == digest_of_rows([{"rows": copy}])
    assert described_rows([{"rows": part}]) == described_rows([{"rows": copy}])
    if part.numel():
        changed = part.clone(memory_format=torch.contiguous_format)
        changed.view(-1)[-1] = changed.view(-1)[-1] == 0
        assert digest_of_rows([{"rows": changed}]) != digest_of_rows([{"rows": part}])
    assert digest_of_rows([{"other": part}]) != digest_of_rows([{"rows": part}])


def test_the_same_values_in_another_shape_differ() -> None:
    assert digest_of_rows([{"rows": WHOLE}]) != digest_of_rows([{"rows": WHOLE.view(4, 12)}])
    assert digest_of_rows([{"rows": WHOLE}]) != digest_of_rows(
        [{"rows": WHOLE[:1]}, {"rows": WHOLE[1:]}]
    )
