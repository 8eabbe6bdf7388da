"""The audit on real ranks: every planted fault is found by its name, on every rank alike; a clean run is proved."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ranks.runs import command, prepare, stop_after, torchrun
from ranks.spawn import run_ranks
from threefold.checkpoint import checkpoint_folder
from threefold.data.rows.concat import ConcatRows
from threefold.data.store.store import StoreInfo, TokenStore
from threefold.data.store.writer import StoreWriter

pytestmark = pytest.mark.ranks

MESH = ("--mesh.dp", "2", "--mesh.tp", "2")
SIZES = {"dp": 2, "tp": 2}
GLOBAL_BATCH, SEQ_LEN, FIRST, LAST = 8, 8, 3, 16


class ChangedInWorker(ConcatRows):
    """Rows whose first token is another one where a loader's worker reads row 5."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _changed_in_worker, (self.store,)

    def rows(self, indices: npt.NDArray[np.integer[Any]]) -> dict[str, npt.NDArray[np.int64]]:
        from torch.utils.data import get_worker_info

        batch = super().rows(indices)
        if get_worker_info() is not None:
            batch["input_ids"][indices == 5, 0] = 99
        return batch


def _changed_in_worker(store: TokenStore) -> ChangedInWorker:
    return ChangedInWorker(store, seq_len=SEQ_LEN)


def _read(prefix: Path, fault: str) -> tuple[str, int]:
    """One rank that reads and audits steps 3 to 16 with a fault; (the error, steps that the last audit passed)."""
    from threefold.audit.compare import Audit
    from threefold.audit.offences import explain
    from threefold.audit.record import SegmentLine
    from threefold.data.order.order import Order, Place
    from threefold.data.sampling.loader import TokenLoader
    from threefold.errors import RunError
    from threefold.mesh.mesh import init_mesh

    mesh = init_mesh(**SIZES, device="cpu")
    planted = fault == "changed token" and mesh.rank == 1
    rows = ConcatRows(TokenStore(prefix), seq_len=SEQ_LEN)
    read = ChangedInWorker(rows.store, seq_len=SEQ_LEN) if planted else rows
    dp_rank = mesh.tp_rank if fault == "wrong dp rank" else mesh.dp_rank
    order = Order(rows.num_rows, GLOBAL_BATCH, seed=0, shuffle=True)
    loader = TokenLoader(
        read, order, dp_rank=dp_rank, dp_size=mesh.dp_size, num_workers=int(planted)
    )
    steps_before = FIRST - 1 + (fault == "one step late") - (fault == "one step early")
    loader.load_state_dict({**loader.state_dict(), "position": steps_before * GLOBAL_BATCH})
    begin = order.after(Place(0, 0), FIRST - 1)
    start = SegmentLine.of(order, begin, first_step=FIRST, topology=mesh.topology, every=5)
    audit = Audit(start, gather=mesh.gather, explain=partial(explain, resume="CMD"), rows=rows)
    batches = iter(loader)
    passed, batch = 0, {}
    try:
        for step in range(FIRST, LAST + 1):
            if step == 7 and fault == "skipped batch":
                next(batches)
            if step != 7 or fault != "repeated batch":
                batch = next(batches)
            audit.observe(
                step, *(batch[name].numpy() for name in ("indices", "input_ids", "labels"))
            )
            if step == LAST or audit.due(step):
                audit.check()
                passed = step
    except RunError as error:
        return str(error), passed
    return "", passed


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """600 tokens, all different: 74 rows, nine batches an epoch."""
    prefix = tmp_path_factory.mktemp("store") / "tokens"
    with StoreWriter(prefix, dtype=np.dtype("<u2")) as writer:
        writer.add_block(np.arange(600, dtype=np.uint16) + 1000, np.array([600], np.int32))
        writer.finish(
            lambda made: StoreInfo(
                made.content_hash(),
                "",
                made.num_tokens,
                1,
                0,
                "numbers",
                "",
                "none",
                "",
                2000,
                0,
            )
        )
    return prefix


@pytest.mark.parametrize(
    ("fault", "named", "passed"),
    [
        ("none", "", LAST),
        (
            "wrong dp rank",
            "rank 1 (dp rank 0, cp rank 0, tp rank 1) read the samples of dp rank 1 in step 3",
            0,
        ),
        (
            "wrong dp rank",
            "rank 2 (dp rank 1, cp rank 0, tp rank 0) read the samples of dp rank 0 in step 3",
            0,
        ),
        ("repeated batch", "ranks 0 to 3 read the batch of step 6 again in step 7", 5),
        (
            "skipped batch",
            "ranks 0 to 3 read the batch of step 8 in step 7: the batch of step 7 was left out",
            5,
        ),
        ("changed token", "rank 1 trained on a changed token in step ", 5),
        (
            "one step late",
            "read the batch of step 4 in step 3 (the first after the resume): the batch of step 3 was",
            0,
        ),
        (
            "one step early",
            "ranks 0 to 3 read the batch of step 2 again in step 3 (the first after the resume)",
            0,
        ),
    ],
)
def test_planted_fault_is_named_on_every_rank(
    store: Path, fault: str, named: str, passed: int
) -> None:
    found = run_ranks(_read, 4, store, fault)
    assert found == [found[0]] * 4, (
        "ranks that do not raise the same error leave one another waiting"
    )
    error, last = found[0]
    assert named in error
    if fault == "changed token":
        assert ": row 5 has input_ids[0] = 99, the source 1040\n" in error
    else:
        assert last == passed
    if error:
        assert "\n  expected: " in error and "\n  fix: " in error and "CMD" in error


# --- whole runs ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped by a signal, went on on another mesh, and left two batches out there."""
    folder = tmp_path_factory.mktemp("audit")
    prepare(folder)
    arguments = ("config.yaml", "--log.dir", "run", "--audit.every", "3")
    stopped = stop_after(folder, 4, "train", *arguments, *MESH)
    assert stopped.returncode == 75, stopped.stdout
    skip = ("--data.skip", "[[11, 12]]")
    resumed = command(
        folder, "train", *arguments, "--mesh.dp", "4", "--mesh.dp_shard", "2", *skip
    )
    assert resumed.returncode == 0, resumed.stderr
    assert "data.skip: the batches of steps [11, 12] are left out" in resumed.stdout
    return folder


def lines_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "audit.jsonl").read_text().splitlines()]


def test_stopped_and_resized_run_is_proved(folder: Path) -> None:
    lines = lines_of(folder / "run")
    assert [line["mesh"] for line in lines if line["kind"] == "segment"] == [
        [2, 1, 1, 2],
        [2, 2, 1, 1],
    ]
    steps = [
        step
        for line in lines
        if line["kind"] == "steps"
        for step in range(line["first"], line["last"] + 1)
    ]
    assert steps == list(range(1, 13))
    proved = command(folder, "data", "audit", "run")
    assert proved.returncode == 0, proved.stderr
    assert "run: steps 1 to 12, 2 starts\n" in proved.stdout
    assert "  epoch 0: 96 of 774 rows, each exactly once; 662 not yet\n" in proved.stdout
    assert "  left out by data.skip: positions 80 to 95 of epoch 0 (rows " in proved.stdout
    assert "proved: 96 reads, each by exactly one dp rank in exactly one step" in proved.stdout
    again = command(folder, "data", "audit", "run", "--contents")
    assert again.returncode == 0, again.stderr
    assert again.stdout.endswith("samples and tokens\n")


def test_step_and_sample_name_one_another(folder: Path) -> None:
    step = command(folder, "data", "order", "run", "--step", "2", "--show")
    assert step.returncode == 0, step.stderr
    assert "step 2: epoch 0, positions from 8 on, dp=2 x cp=1 x tp=2\n" in step.stdout
    line = next(
        line
        for line in step.stdout.splitlines()
        if line.startswith("  dp rank 1 (ranks 2 and 3): rows ")
    )
    row = int(line.split(", ")[-1])
    assert f"row {row}:\n  | " in step.stdout
    assert "word" in step.stdout
    sample = command(folder, "data", "order", "run", "--sample", str(row))
    assert sample.returncode == 0
    assert (
        sample.stdout == f"row {row}: step 2 (epoch 0, position 15), dp rank 1: ranks 2 and 3\n"
    )
    for arguments, what in [
        (
            ("--step", "99"),
            "--step 99 is not in the record of run\n  expected: a step from 1 to 12\n  fix: --step 12\n",
        ),
        (
            ("--sample", "774"),
            "--sample 774 is not a row of the source\n  expected: a row from 0 to 773\n",
        ),
        ((), "neither --sample nor --step is given"),
    ]:
        refused = command(folder, "data", "order", "run", *arguments)
        assert refused.returncode == 2
        assert refused.stderr.startswith(what)


def test_changed_record_fails_the_proof(folder: Path) -> None:
    for name, change, what in [
        (
            "digest",
            lambda lines: lines[1].update(samples=["0" * 16] * 2),
            "steps 1 to 3: dp rank 0 did not read its",
        ),
        (
            "place",
            lambda lines: lines[1].update(position=8),
            "step 1 begins at position 8 of epoch 0, but the steps",
        ),
        ("gap", lambda lines: lines.pop(2), "step"),
        (
            "end",
            lambda lines: lines.pop(),
            "step 12 has no record, but changed-end/checkpoints/step-00000012 was saved",
        ),
    ]:
        changed = folder / f"changed-{name}"
        shutil.copytree(folder / "run", changed)
        lines = lines_of(changed)
        change(lines)
        (changed / "audit.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        failed = command(folder, "data", "audit", changed.name)
        assert failed.returncode == 1, name
        assert failed.stderr.startswith(what)
        assert "Traceback" not in failed.stderr and "\n  fix: " in failed.stderr


def test_changed_source_fails_the_proof(folder: Path) -> None:
    shutil.copytree(folder / "run", folder / "moved")
    text = (folder / "moved" / "config.yaml").read_text()
    source = f"source: {folder}/corpus"
    assert source in text
    (folder / "moved" / "config.yaml").write_text(text.replace(source, f"{source}/part-0.txt"))
    failed = command(folder, "data", "audit", "moved", "--contents")
    assert failed.returncode == 1
    assert failed.stderr.startswith("the source of moved/config.yaml has the fingerprint ")


def test_resume_from_a_checkpoint_that_is_one_step_off_is_refused(folder: Path) -> None:
    shutil.copytree(folder / "run", folder / "off")
    manifest = folder / "off" / "checkpoints" / "step-00000012" / "manifest.json"
    values = json.loads(manifest.read_text())
    values["data"]["position"] += 8
    manifest.write_text(json.dumps(values))
    # The marker is sealed again, so that the checkpoint looks whole and only the record can tell.
    (manifest.parent / "COMPLETE").write_bytes(
        checkpoint_folder._marker(12, manifest.read_bytes())
    )
    refused = command(
        folder,
        "train",
        "config.yaml",
        "--log.dir",
        "off",
        "--mesh.dp",
        "2",
        "--train.steps",
        "14",
    )
    assert refused.returncode == 1
    assert refused.stderr.startswith(
        "step 13 would begin at position 120 of epoch 0, but by audit.jsonl step 12 ended at position 112 of epoch 0: "
    )
    assert refused.stderr.count("would be left out\n") == 1
    assert (
        "expected: a checkpoint and a record of the run that agree on what was read"
        in refused.stderr
    )


def test_range_that_is_done_is_refused(folder: Path) -> None:
    shutil.copytree(folder / "run", folder / "late")
    more = ("train", "config.yaml", "--log.dir", "late", "--mesh.dp", "1")
    # Also where no step is left.
    for steps in ("13", "12"):
        refused = command(folder, *more, "--train.steps", steps, "--data.skip", "[[5, 6]]")
        assert refused.returncode == 2
        assert refused.stderr.startswith(
            "data.skip has [5, 6], but step 5 is done: the run resumes with step 13\n"
        )
    done = command(folder, *more, "--train.steps", "13", "--data.skip", "[[11, 12]]")
    assert done.returncode == 0, done.stderr
    assert command(folder, "data", "audit", "late").returncode == 0


def test_fault_ends_a_run_with_its_name_and_stays_on_record(folder: Path) -> None:
    code = (
        "import sys\n"
        "from threefold.data.sampling import loader\n"
        "plain = loader.TokenLoader.__iter__\n"
        "def repeat(self):\n"
        "    for number, batch in enumerate(plain(self), start=1):\n"
        "        yield batch if number != 5 else kept\n"
        "        kept = batch\n"
        "loader.TokenLoader.__iter__ = repeat\n"
        "from threefold.__main__ import main\n"
        "sys.argv = ['threefold', 'train', 'config.yaml', '--mesh.dp', '2', '--log.dir', 'faulty',\n"
        "            '--audit.every', '3', '--checkpoint.every', '6']\n"
        "main()\n"
    )
    (folder / "faulty.py").write_text(code)
    done = torchrun(folder, 2, "faulty.py")
    assert done.returncode == 1
    assert done.stderr.count("ranks 0 and 1 read the batch of step 4 again in step 5") == 1
    assert not list((folder / "faulty" / "checkpoints").glob("step-*")), (
        "nothing is saved of a step that was not proved"
    )
    failed = command(folder, "data", "audit", "faulty")
    assert failed.returncode == 1
    assert failed.stderr.startswith(
        "steps 4 to 6: the run itself found: ranks 0 and 1 read the batch of step 4 again"
    )


def test_prepared_folder_trains_and_is_made_once(folder: Path) -> None:
    arguments = (
        "data",
        "prepare",
        "--data.source",
        "corpus",
        "--data.tokenizer",
        "bytes",
        "--to",
        "prepared",
    )
    made = command(folder, *arguments)
    assert made.returncode == 0, made.stderr
    assert made.stdout.startswith(
        "prepared/tokens.bin is made: 24,775 tokens in 4 documents (bytes)\n"
    )
    assert made.stderr.startswith("4 files read (24.19 KiB)\n")
    assert command(folder, *arguments).stdout.startswith(
        "prepared/tokens.bin already exists: 24,775 tokens"
    )
    run = (
        "train",
        "config.yaml",
        "--mesh.dp",
        "1",
        "--train.steps",
        "2",
        "--log.dir",
        "from-store",
    )
    trained = command(folder, *run, "--data.source", "prepared", "--audit.every", "0")
    assert trained.returncode == 0, trained.stderr
    off = command(folder, "data", "audit", "from-store")
    assert off.returncode == 1
    assert off.stderr.startswith("step 2 has no record")
