"""Boxes: whatever two meshes hold of a tensor, each element is read once and from where it lies."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from threefold.checkpoint.tensor_index import Box, Chunk, Entry, Index, boxes_of


@st.composite
def cuts(draw: st.DrawFn, size: int) -> list[list[int]]:
    """The indices of a dim of `size`, dealt to a few ranks in any pattern."""
    ranks = draw(st.integers(1, 4))
    owners = draw(st.lists(st.integers(0, ranks - 1), min_size=size, max_size=size))
    return [[index for index in range(size) if owners[index] == rank] for rank in range(ranks)]


@st.composite
def tensors(
    draw: st.DrawFn,
) -> tuple[tuple[int, ...], list[list[list[int]]], list[list[list[int]]]]:
    """A shape, and for each of its dims how the saving and the loading ranks divide it."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    return shape, [draw(cuts(size)) for size in shape], [draw(cuts(size)) for size in shape]


def _ranks(divided: list[list[list[int]]]) -> list[list[list[int]]]:
    held: list[list[list[int]]] = [[]]
    for along in divided:
        held = [[*before, indices] for before in held for indices in along]
    return held


@given(tensors())
def test_any_mesh_reads_its_own_from_any_other(
    case: tuple[tuple[int, ...], list[list[list[int]]], list[list[list[int]]]],
) -> None:
    shape, saving, loading = case
    whole = np.arange(int(np.prod(shape))).reshape(shape)
    files: dict[str, np.ndarray] = {}
    entry = Entry("I64", shape)
    for indices in _ranks(saving):
        local = whole[np.ix_(*indices)]
        for box, inside in boxes_of(indices):
            file = f"{len(files)}"
            files[file] = local[
                tuple(
                    slice(o, o + n) for o, n in zip(inside.offsets, inside.sizes, strict=True)
                )
            ]
            entry.chunks.append(Chunk(file, 0, box))
    assert entry.problem() is None
    for indices in _ranks(loading):
        target = np.full([len(along) for along in indices], -1)
        for box, inside in boxes_of(indices):
            view = target[
                tuple(
                    slice(o, o + n) for o, n in zip(inside.offsets, inside.sizes, strict=True)
                )
            ]
            for chunk, part in entry.reads(box):
                into = view[part.within(box)]
                assert (into == -1).all()
                into[...] = files[chunk.file][part.within(chunk.box)]
        assert (target == whole[np.ix_(*indices)]).all()


def test_overlap() -> None:
    one = Box((0, 2), (4, 4))
    assert one.overlap(Box((2, 0), (4, 4))) == Box((2, 2), (2, 2))
    assert one.overlap(Box((4, 2), (1, 1))) is None
    assert Box((), ()).overlap(Box((), ())) == Box((), ())
    assert Box((2, 2), (2, 2)).within(one) == (slice(2, 4), slice(0, 2))


def test_index_reads_back(tmp_path: Path) -> None:
    entries = {
        "model.a": Entry(
            "F32",
            (2, 3),
            [Chunk("x", 64, Box((0, 0), (1, 3))), Chunk("y", 8, Box((1, 0), (1, 3)))],
        ),
        "step": Entry("F32", (), [Chunk("y", 20, Box((), ()))]),
        "none": Entry("BF16", (0, 5), []),
    }
    for name in ("x", "y"):
        (tmp_path / name).write_bytes(bytes(76))
    (tmp_path / "index.json").write_text(Index(entries).to_json())
    assert Index.read(tmp_path).entries == entries
    assert json.loads((tmp_path / "index.json").read_text())["files"] == ["x", "y"]


def test_what_is_missing_is_a_problem() -> None:
    assert (
        Entry("F32", (4,), [Chunk("x", 0, Box((0,), (3,)))]).problem()
        == "the chunks do not add up to the tensor"
    )
    assert (
        Entry("F32", (4,), [Chunk("x", 0, Box((3,), (2,)))]).problem()
        == "a chunk lies outside the tensor"
    )
