"""A save beside the steps: what is saved is the state of its step, and a failure reaches every rank alike."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from ranks.keeping import Miniature, Sizes, write_corpus
from ranks.spawn import run_ranks
from threefold.data.text.listing import FILE
from threefold.errors import DataError

DP2: Sizes = (2, 1, 1, 1)


def _fail_on(rank: int, own: int, *, after: int) -> None:
    """Lets the disk of one rank be full from the save after `after` saves on."""
    from threefold.checkpoint import background_saver

    plain, count = background_saver.write_parts, [0]

    def full(folder: Path, stem: str, parts: Any) -> Any:
        count[0] += 1
        if own == rank and count[0] > after:
            path = folder / f"{stem}.safetensors"
            path.write_bytes(b"half of it")
            raise OSError(28, os.strerror(28), str(path))
        return plain(folder, stem, parts)

    background_saver.write_parts = full


def _six_steps(run: Miniature) -> None:
    """Saves after every second one."""
    for step in range(1, 7):
        run.advance(1)
        run.checkpointer.saver.check(step)
        run.checkpointer.save(step, None, step % 2 == 0)
    run.checkpointer.saver.wait()


def _steps_until_failure(folder: str, mode: str, on_error: str, failing: int) -> Any:
    """Saves after every second step of six; the second save fails. What the rank saw, and what was printed."""
    import contextlib
    import io

    from threefold.errors import RunError

    run = Miniature(DP2, folder, background=mode == "async", checkpoint={"on_error": on_error})
    _fail_on(failing, run.mesh.rank, after=1)
    error = None
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        try:
            _six_steps(run)
        except RunError as raised:
            error = str(raised)
    kept = [checkpoint.step for checkpoint in run.folder.checkpoints.all()]
    whole = [
        checkpoint.step
        for checkpoint in run.folder.checkpoints.complete()
        if checkpoint.damage() is None
    ]
    hidden = sorted(path.name for path in run.folder.checkpoints.path.glob(".step*"))
    return run.done, error, printed.getvalue(), kept, whole, hidden


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_full_disk_ends_the_run_on_every_rank_after_the_same_step(
    tmp_path: Path, mode: str, failing: int
) -> None:
    write_corpus(tmp_path)
    ranks = run_ranks(_steps_until_failure, 2, str(tmp_path / "run"), mode, "error", failing)
    assert ranks[0][0] == ranks[1][0] <= 6
    assert ranks[0][0] == 4 or mode == "async"
    for _, error, printed, kept, whole, hidden in ranks:
        assert error is not None and error.startswith(
            f"the checkpoint of step 4 could not be saved: rank {failing}: No space left on device ("
        )
        assert error == ranks[0][1]
        assert (
            "\n  expected: enough space, and a folder that every rank can write; earlier checkpoints"
            in error
        )
        assert "\n  fix: free space" in error
        assert (printed, kept, whole, hidden) == ("", [2], [2], [])


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_full_disk_is_printed_once_and_the_run_goes_on(tmp_path: Path, mode: str) -> None:
    write_corpus(tmp_path)
    ranks = run_ranks(_steps_until_failure, 2, str(tmp_path / "run"), mode, "continue", 1)
    for rank, (done, error, printed, kept, whole, hidden) in enumerate(ranks):
        assert (done, error, kept, whole, hidden) == (6, None, [2], [2], [])
        steps = [
            line for line in printed.splitlines() if line.startswith("the checkpoint of step")
        ]
        assert [line.split()[4] for line in steps] == (["4", "6"] if rank == 0 else [])


def _without_memory(folder: str, lacking: int, failing: int | None) -> Any:
    """Saves after every second step of six, on ranks of which one has no memory for the copy."""
    from threefold.checkpoint.checkpoint_folder import find
    from threefold.errors import RunError

    run = Miniature(DP2, folder, background=True)
    own, stage = run.mesh.rank, run.checkpointer.saver._stage
    if own == lacking:
        stage._made.join()
        stage._buffer, stage._make = None, lambda: None
    if failing is not None:
        _fail_on(failing, own, after=1)
    error = None
    try:
        _six_steps(run)
    except RunError as raised:
        error = str(raised).splitlines()[0]
    newest = find(Path(folder))
    return run.done, error, newest.step, newest.damage()


@pytest.mark.parametrize("lacking", [0, 1])
def test_a_rank_without_memory_for_the_copy_saves_while_it_waits(
    tmp_path: Path, lacking: int
) -> None:
    write_corpus(tmp_path)
    assert (
        run_ranks(_without_memory, 2, str(tmp_path / "run"), lacking, None)
        == [(6, None, 6, None)] * 2
    )


@pytest.mark.parametrize("failing", [0, 1])
def test_a_save_that_fails_beside_a_rank_without_memory_ends_all_after_the_same_step(
    tmp_path: Path, failing: int
) -> None:
    write_corpus(tmp_path)
    one, other = run_ranks(_without_memory, 2, str(tmp_path / "run"), 1, failing)
    assert one == other and one[0] <= 6 and one[2:] == (2, None)
    assert one[1].startswith(
        f"the checkpoint of step 4 could not be saved: rank {failing}: No space left on device"
    )


class _Runtime:
    """What of the CUDA runtime locks pages, with what it was asked."""

    def __init__(self, code: int) -> None:
        self.code, self.locked = code, {}

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.locked[address] = size
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        del self.locked[address]
        return 0


def test_pages_are_locked_at_their_exact_size_and_released(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch

    from threefold.checkpoint.background_saver import _lock_pages

    runtime = _Runtime(0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    buffer = torch.empty(1_000_003, dtype=torch.uint8)
    assert _lock_pages(buffer) is None and list(runtime.locked.values()) == [1_000_003]
    del buffer
    assert runtime.locked == {}
    runtime.code = 2
    refused = _lock_pages(torch.empty(10, dtype=torch.uint8))
    assert refused == "cudaHostRegister of 10 bytes returns 2"


def _folder_gone(folder: str, mode: str) -> Any:
    from threefold.errors import RunError

    run = Miniature(DP2, folder, background=mode == "async")
    run.advance(1)
    if run.mesh.rank == 0:
        run.folder.checkpoints.path.rmdir()
        run.folder.checkpoints.path.touch()  # the superuser may write everywhere, but not below a file
    run.mesh.barrier()
    try:
        run.checkpointer.save(1, None, True)
        run.checkpointer.saver.wait()
    except RunError as error:
        return str(error)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_folder_that_cannot_be_written_is_named_on_every_rank(
    tmp_path: Path, mode: str
) -> None:
    write_corpus(tmp_path)
    one, other = run_ranks(_folder_gone, 2, str(tmp_path / "run"), mode)
    assert one == other
    assert one.startswith("the checkpoint of step 1 could not be saved: ")
    assert "checkpoints" in one.splitlines()[0]


def _save_and_go_on(folder: str, mode: str) -> Any:
    """The weights when step 2 was done, and those that the checkpoint of step 2 gives, saved while steps 3 to 5 ran."""
    import torch

    from threefold.checkpoint.checkpoint_folder import find
    from threefold.checkpoint.state import holdings, parts, read_whole, state_of
    from threefold.checkpoint.tensor_index import Index

    run = Miniature(DP2, folder, background=mode == "async")
    run.advance(2)
    state = state_of(run.model.module, run.optimizer)
    expected = {name: tensor.clone() for name, tensor in state.items()}
    random = torch.get_rng_state()
    run.checkpointer.save(2, None, True)
    torch.rand(3)
    run.advance(3)
    run.checkpointer.saver.wait()
    saved = find(Path(folder))
    index = Index.read(saved.state)
    assert saved.step == 2 and saved.damage() is None
    for name, tensor in expected.items():
        assert torch.equal(read_whole(saved.state, index.entries[name]), tensor), name
        assert name.startswith("model.model.rotary") or not torch.equal(state[name], tensor), (
            f"{name} did not change"
        )
    assert torch.equal(
        read_whole(saved.state, index.entries[f"random.cpu.{run.mesh.rank}"]), random
    )
    return sum(part.values.nbytes for part in parts(state, holdings(state, run.mesh), run.mesh))


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_state_of_its_step_is_saved_and_replicas_share_the_work(
    tmp_path: Path, mode: str
) -> None:
    write_corpus(tmp_path)
    written = run_ranks(_save_and_go_on, 2, str(tmp_path / "run"), mode)
    assert max(written) < 1.1 * min(written)


def _changed_by_the_save(folder: str, waits: bool) -> list[str]:
    """Saves step 2 on a fake device that copies as late as it may, and steps on; names that were saved otherwise.

    Args:
        waits: whether the update waits for the copies, as it should.
    """
    import torch

    from ranks.late_copies import late_copies
    from threefold.checkpoint.background_saver import Stage
    from threefold.checkpoint.checkpoint_folder import find
    from threefold.checkpoint.state import read_whole, state_of
    from threefold.checkpoint.tensor_index import Index

    run = Miniature(DP2, folder, optimizer={"ema": 0.5})
    run.advance(2)
    state = state_of(run.model.module, run.optimizer) | run.ema.state()
    expected = {name: tensor.clone() for name, tensor in state.items()}
    with late_copies() as streams:
        saver = run.checkpointer.saver
        saver._stage = Stage(saver.parts(), torch.device("cuda"), saver.in_forward)
        waiting = []
        update = run.step.before_update if waits else lambda: None
        run.step.before_update = lambda: (waiting.append(streams.waiting), update())
        run.checkpointer.save(2, None, True)
        run.advance(3)
        streams.finish()
        saver.wait()
    # Forward and backward of step 3 had nothing to wait for.
    assert waiting[0] > 10 and (waiting[1:] == [0, 0]) is waits
    saved = find(Path(folder))
    index = Index.read(saved.state)
    assert saved.damage() is None
    read = {name: read_whole(saved.state, index.entries[name]) for name in expected}
    return [name for name, tensor in expected.items() if not torch.equal(read[name], tensor)]


@pytest.mark.parametrize("waits", [True, False])
def test_a_late_copy_is_of_its_step_because_the_update_waits_for_it(
    tmp_path: Path, waits: bool
) -> None:
    write_corpus(tmp_path)
    changed = run_ranks(_changed_by_the_save, 2, str(tmp_path / "run"), waits)
    kinds = {name.split(".")[0] for name in changed[0]}
    assert kinds == (set() if waits else {"model", "optimizer", "ema"})


def test_what_a_forward_may_write_is_copied_before_it_and_memory_is_kept_until_the_update() -> (
    None
):
    import weakref

    import torch

    from ranks.late_copies import late_copies
    from threefold.checkpoint.background_saver import Stage
    from threefold.checkpoint.tensor_index import Box
    from threefold.checkpoint.tensors import TensorPart

    parts = [
        TensorPart(name, (3,), Box((0,), (3,)), torch.zeros(3))
        for name in ("model.mean", "model.weight")
    ]
    mean, weight = (part.values for part in parts)
    with late_copies() as streams:
        stage = Stage(parts, torch.device("cuda"), ["model.mean"])
        staged = stage.copy(parts)
        mean += 1  # by a forward
        assert streams.waiting == 1
        freed, parts = weakref.ref(parts[1]), []
        assert freed() is not None
        stage.before_update()
        weight += 1
        assert streams.waiting == 0 and freed() is None
        assert [part.values.tolist() for part in staged] == [[0.0] * 3] * 2


def test_a_loop_that_does_not_say_when_it_updates_may_write_at_once() -> None:
    import torch

    from ranks.late_copies import late_copies
    from threefold.checkpoint.background_saver import Stage
    from threefold.checkpoint.tensor_index import Box
    from threefold.checkpoint.tensors import TensorPart

    weight = torch.zeros(3)
    parts = [TensorPart("model.weight", (3,), Box((0,), (3,)), weight)]
    with late_copies() as streams:
        staged = Stage(parts, torch.device("cuda")).copy(parts)
        weight += 1
        assert streams.waiting == 0 and staged[0].values.tolist() == [0.0] * 3


def _keep_some(folder: str) -> Any:
    run = Miniature((1, 1, 1, 1), folder, checkpoint={"keep": 1})
    for step, eval_loss in enumerate([5.0, 4.0, 4.5, 4.4, 4.3, 4.2, 4.1], start=1):
        run.advance(1)
        run.checkpointer.save(step, eval_loss, True)
    run.checkpointer.saver.wait()
    return [
        checkpoint.step for checkpoint in run.folder.checkpoints.complete()
    ], run.folder.checkpoints.best()


def test_newest_and_best_are_kept(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    assert run_ranks(_keep_some, 1, str(tmp_path / "run")) == [([2, 7], (2, 4.0))]


def _between(folder: str) -> Any:
    run, told = Miniature((2, 1, 1, 1), folder, checkpoint={"keep": 1, "every": 1}), []

    run.checkpointer.on_saved = lambda each: told.append((each.step, each.complete))
    for step in (1, 2, 3):
        run.advance(1)
        run.checkpointer.save(step, None, True)
    run.checkpointer.saver.wait()
    return told


def test_each_save_is_told_of_before_the_next_can_remove_it(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    assert run_ranks(_between, 2, str(tmp_path / "run")) == 2 * [[(1, True), (2, True)]]


def _saved_first(folder: str) -> Any:
    run = Miniature((2, 1, 1, 1), folder, checkpoint={"keep": 1, "every": 1})
    for step, eval_loss in enumerate([5.0, 6.0, 4.0], start=1):
        run.advance(1)
        run.checkpointer.save(step, None, True)
        run.checkpointer.save(step, eval_loss, False)
        run.checkpointer.save(step, eval_loss + 1, False)
    return run.folder.checkpoints.complete()[0].step, run.folder.checkpoints.best()


def test_a_step_that_was_saved_before_its_evaluation_becomes_the_best(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    assert run_ranks(_saved_first, 2, str(tmp_path / "run")) == 2 * [(3, (3, 4.0))]


def _evaluated(folder: str, rows: str | None, eval_loss: float | None) -> Any:
    run = Miniature((1, 1, 1, 1), folder, checkpoint={"keep": 1}, evaluation=rows)
    run.advance(1)
    run.checkpointer.save(run.done, eval_loss, True)
    run.checkpointer.saver.wait()
    return run.folder.checkpoints.best()


def test_best_is_of_the_rows_that_are_evaluated(tmp_path: Path) -> None:
    """Losses of other rows are not compared, and a start without an evaluation leaves the best where it is."""
    write_corpus(tmp_path)
    starts = (("a", 4.0), ("a", 4.5), (None, None), ("a", 4.4), ("b", 9.0), ("b", 9.5))
    best = [run_ranks(_evaluated, 1, str(tmp_path / "run"), *each)[0] for each in starts]
    assert best == [*[(1, 4.0)] * 4, *[(5, 9.0)] * 2]


def _refused(folder: str, data: dict[str, Any]) -> str:
    try:
        run = Miniature((1, 1, 1, 1), folder, data=data)
    except DataError as error:
        return str(error)
    run.advance(1)
    run.checkpointer.save(run.done, None, True)
    run.checkpointer.saver.wait()
    return ""


def test_other_data_is_named_by_its_keys_and_files(tmp_path: Path) -> None:
    """Not by a digest alone. Keys that change no order, and lines that nobody wrote, are no matter."""
    write_corpus(tmp_path)
    run, corpus = tmp_path / "run", tmp_path / "corpus.txt"
    text, size = corpus.read_text(), corpus.stat().st_size
    assert not run_ranks(_refused, 1, str(run), {})[0]
    lines = [{"path": str(corpus), "bytes": size}, {"path": 3, "bytes": "3"}, {}]
    lines += [{"path": str(corpus)}, {"path": str(corpus), "bytes": "3"}]
    (run / FILE).write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert not run_ranks(_refused, 1, str(run), {"num_workers": 1})[0]
    at, expected = run / "checkpoints" / "step-00000002", "  expected: what the run began with"
    [longer] = run_ranks(_refused, 1, str(run), {"seq_len": 32, "num_workers": 1})
    assert longer.startswith(
        f"data.seq_len 16 -> 32 since {at}\n{expected}\n  fix: --data.seq_len 16\n\nthe saved state has data = "
    )
    [order] = run_ranks(_refused, 1, str(run), {"seed": 3, "num_workers": 1})
    assert order.startswith("the saved state has seed = 0, but here seed = 3\n"), (
        "of the same data"
    )
    corpus.write_text(f"{text} and more")
    [changed] = run_ranks(_refused, 1, str(run), {"num_workers": 1})
    assert changed.startswith(
        f"{corpus} no longer has {size:,} bytes\n{expected}\n  fix: restore it\n\nthe saved state has data = "
    )
    for number in range(20):
        lines.append({"path": str(corpus), "bytes": size + number})
    (run / FILE).write_text("".join(json.dumps(line) + "\n" for line in lines))
    lines[:0] = [
        {"path": str(tmp_path / "gone.txt"), "bytes": 3},
        {"path": "gone.txt", "bytes": 3},
    ]
    (run / FILE).write_text("".join(json.dumps(line) + "\n" for line in lines))
    [many] = run_ranks(_refused, 1, str(run), {"num_workers": 1})
    assert many.startswith(
        f"{tmp_path / 'gone.txt'} is gone\n{expected}\n  fix: restore it\n\n"
    )
    assert many.count("no longer has") == 9
    assert "\n\n11 other files of the data have changed too\n" in many
    assert "the saved state has data = " in many
