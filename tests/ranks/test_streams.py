"""A stream of torch in a run: every rank reads it, and keeps its share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.utils.data

from ranks import own_runs
from ranks.spawn import run_ranks

pytestmark = pytest.mark.ranks


class Stream(torch.utils.data.IterableDataset[Any]):
    def __init__(self, first: int = 0) -> None:
        self.first = first

    def __iter__(self) -> Any:
        return (own_runs.Windows()[self.first + number] for number in range(42))


def _trained(sizes: dict[str, int], folder: str, until: int) -> list[float]:
    """Losses of the steps that a run has left."""
    import threefold
    from threefold.data.sampling.streaming import StreamingLoader

    mesh, step, *_ = own_runs.parts(sizes)
    loader = StreamingLoader(Stream(), mesh, batch_size=8 // mesh.dp_size, drop_last=True)
    with threefold.Run(folder, mesh=mesh) as run:
        run.load(step, loader)
        losses = [step(batch).loss for batch in run.steps(loader, until=until)]
    mesh.close()
    return losses


@pytest.mark.parametrize("sizes", [{"dp": 2}, {"tp": 2}], ids=str)
def test_run_over_a_stream_is_that_of_one_process_and_resumes(
    sizes: dict[str, int], tmp_path: Path
) -> None:
    whole = run_ranks(_trained, 1, {}, str(tmp_path / "one"), 8)[0]
    # A stop inside of an epoch, and one in the next.
    starts = [
        run_ranks(_trained, 2, sizes, str(tmp_path / "two"), until) for until in (3, 7, 8)
    ]
    for parts in zip(*starts, strict=True):
        assert [loss for part in parts for loss in part] == pytest.approx(whole, rel=1e-5)


def _differs(shuffled: bool) -> str:
    import datasets

    import threefold
    from threefold.data.sampling.streaming import StreamingLoader

    mesh = threefold.init_mesh(dp=2)
    rows = datasets.Dataset.from_dict({"i": list(range(8))}).to_iterable_dataset()
    # Without a seed, each process draws one.
    stream: Any = rows.shuffle(buffer_size=4) if shuffled else Stream(mesh.dp_rank)
    try:
        next(iter(StreamingLoader(stream, mesh, batch_size=2)))
    except threefold.errors.DataError as error:
        return str(error)
    finally:
        mesh.close()
    return "no error"


@pytest.mark.parametrize("shuffled", [False, True], ids=["split already", "without a seed"])
def test_stream_that_differs_by_rank_is_named(shuffled: bool) -> None:
    for text in run_ranks(_differs, 2, shuffled, timeout_s=60):
        assert text.startswith("the stream does not begin with the same row on ranks 0 and 1")
        assert "with one seed on every rank" in text
