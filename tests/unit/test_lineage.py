"""A run is one thing: what it resumes, what it forks, and what it refuses, is decided by its id."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from threefold.checkpoint.checkpoint_folder import CheckpointFolder
from threefold.checkpoint.lineage import Ending, Identity, Journal
from threefold.config import loading
from threefold.config.schema import Config
from threefold.errors import CheckpointError, ConfigError, Problem
from threefold.records.state import ending_of, state_of
from threefold.run.folder import RunFolder, open_run
from threefold.run.watch import main_thread, pulse


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in (
        "SLURM_JOB_ID",
        "SLURM_RESTART_COUNT",
        "TORCHELASTIC_RUN_ID",
        "TORCHELASTIC_RESTART_COUNT",
    ):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def config(run: str, resume: str = "auto") -> Config:
    values: dict[str, Any] = {"log": {"dir": run}, "checkpoint": {"resume": resume}}
    return loading.validate(values)


def start(run: str, resume: str = "auto", *, saves: tuple[int, ...] = ()) -> int:
    """One start of a run: where it resumed (0: at step 1), and what it saved then."""
    opened = open_run(config(run, resume))
    chosen = next(iter(opened.candidates), None)
    opened = opened.resuming(chosen, ())
    opened.begin()
    author = opened.accept(config(run, resume))["author"]
    for step in saves:
        checkpoints = CheckpointFolder(Path(run))
        checkpoints.begin(step)
        checkpoints.commit(step, author)
    return chosen.step if chosen is not None else 0


def step(run: str, number: int) -> str:
    return f"{run}/checkpoints/step-{number:08d}"


def read(run: str) -> RunFolder:
    return open_run(config(run))


def test_forked_run_resumes_itself() -> None:
    """By its config, which asks for nothing any more, and by the command that forked it, as a requeued job gives it."""
    start("a", saves=(5, 10))
    assert start("b", step("a", 5), saves=(7,)) == 5
    assert start("b") == 7
    assert start("b", step("a", 5)) == 7
    assert loading.load("b/config.yaml", environ={}).config.checkpoint.resume == "auto"
    identity = Identity.read(Path("b"))
    assert identity is not None and identity.origin is not None
    assert (identity.origin.step, identity.origin.run) == (5, Identity.read(Path("a")).id)  # type: ignore[union-attr]


def test_fork_that_has_not_saved_begins_at_its_origin_again() -> None:
    start("a", saves=(5,))
    start("b", step("a", 5))
    assert start("b") == 5


def test_fork_that_has_not_saved_takes_no_other_run_at_its_origins_place() -> None:
    """The origin was deleted and trained anew under its name; where a copy of the old one lies, the fork begins."""
    start("a", saves=(5,))
    start("b", step("a", 5))
    shutil.copytree("a", "archive")
    origin = Identity.read(Path("a"))
    shutil.rmtree("a")
    with pytest.raises(
        CheckpointError, match=r"log.dir = b forks step 5 of run .*, and .* is gone"
    ):
        read("b")
    start("a", saves=(5,))
    assert origin is not None
    with pytest.raises(
        CheckpointError,
        match=rf"forks step 5 of run {origin.id}, and .* is another checkpoint now, of",
    ):
        read("b")
    (candidate,) = open_run(config("b", step("archive", 5))).candidates
    assert candidate.path == Path(step("archive", 5))


def test_fork_that_has_not_saved_takes_no_other_timeline_of_its_origin() -> None:
    """Of the same run and step, but saved by another start: its manifest tells."""
    start("a", saves=(5,))
    start("b", step("a", 5))
    shutil.rmtree(step("a", 5))
    start("a", saves=(5,))
    with pytest.raises(CheckpointError, match=r"is another checkpoint now"):
        read("b")
    with pytest.raises(
        ConfigError,
        match=r"log.dir = b holds a run, and another run wrote checkpoint.resume = .*",
    ):
        open_run(config("b", "a"))


def test_fork_is_known_when_its_origin_was_moved() -> None:
    start("a", saves=(5,))
    start("b", step("a", 5), saves=(6,))
    shutil.move("a", "archive")
    assert start("b", step("archive", 5)) == 6


def test_moved_run_is_the_same_run(folder: Path) -> None:
    start("a", saves=(5,))
    shutil.move("a", folder / "elsewhere")
    assert start("elsewhere", saves=(6,)) == 5
    assert [each.step for each in CheckpointFolder(Path("elsewhere")).complete()] == [5, 6]


def test_another_runs_folder_is_refused() -> None:
    start("a", saves=(20,))
    start("b", saves=(5, 10))
    with pytest.raises(
        ConfigError,
        match=r"log.dir = b holds a run, and another run wrote checkpoint.resume = .*",
    ):
        open_run(config("b", step("a", 20)))


def test_another_runs_checkpoint_is_refused() -> None:
    start("a", saves=(20,))
    start("b", saves=(5,))
    shutil.copytree(step("a", 20), step("b", 20))
    with pytest.raises(
        ConfigError, match=r"has a checkpoint that another run wrote: step-00000020"
    ):
        read("b")


def test_own_checkpoint_that_was_copied_out_is_gone_back_to() -> None:
    start("a", saves=(5, 10))
    shutil.copytree(step("a", 5), "kept/checkpoints/step-00000005")
    assert start("a", "kept/checkpoints/step-00000005") == 5
    assert sorted(path.name for path in Path("a/checkpoints").iterdir()) == [
        "aside-1-step-00000010",
        "step-00000005",
    ]


def test_rewind_is_repeated_by_hand_and_not_by_a_restart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    start("a", saves=(5, 10))
    assert start("a", step("a", 5), saves=(6,)) == 5
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert start("a", step("a", 5), saves=(8,)) == 6
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    assert start("a", step("a", 5)) == 8
    monkeypatch.delenv("SLURM_RESTART_COUNT")
    assert start("a", step("a", 5)) == 5


def test_restart_before_the_rewind_was_accepted_goes_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The run's own later checkpoints are of the future that the request abandons."""
    start("a", saves=(5, 10, 20))
    monkeypatch.setenv("SLURM_JOB_ID", "8")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert start("a", step("a", 5)) == 5


def test_requeued_job_of_a_new_run_resumes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    start("a", "never", saves=(5,))
    with pytest.raises(ConfigError, match=r"holds a run, and checkpoint.resume is never"):
        open_run(config("a", "never"))
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert start("a", "never") == 5
    monkeypatch.setenv("SLURM_JOB_ID", "8")
    with pytest.raises(ConfigError, match=r"holds a run, and checkpoint.resume is never"):
        open_run(config("a", "never"))


def refused(run: str) -> Problem:
    with pytest.raises(ConfigError) as error:
        read(run)
    (problem,) = error.value.problems
    return problem


def test_runs_files_without_an_id_are_refused_and_taken_by_the_pasted_fix() -> None:
    """A copy that left run.json out: its checkpoints and its journal name the run."""
    start("a run", saves=(5,))
    before = Identity.read(Path("a run"))
    assert before is not None
    for left_out in ("run.json", "checkpoints"):
        shutil.copytree("a run", left_out, ignore=shutil.ignore_patterns(left_out, "run.json"))
        kept = {path: path.stat().st_mtime_ns for path in Path(left_out).rglob("*")}
        problem = refused(left_out)
        assert (
            problem.what == f"{left_out} has a run's files, but no run.json that names the run"
        )
        assert {path: path.stat().st_mtime_ns for path in Path(left_out).rglob("*")} == kept
        subprocess.run(["bash", "-c", problem.fix], check=True)
        after = Identity.read(Path(left_out))
        assert after is not None and (after.id, after.starts) == (before.id, before.starts)
    assert start("run.json") == 5


def test_files_whose_starts_nobody_tells_of_are_forked() -> None:
    """Without run.json and the journal, nothing shows that a checkpoint is on the way to where the run is now."""
    start("a", saves=(5,))
    Path("a/run.json").unlink()
    Path("a/journal.jsonl").unlink()
    assert refused("a").fix.startswith("--log.dir ANOTHER_FOLDER   (its files name ")


def parted() -> None:
    """A run and a copy of it, which have both gone on from step 5."""
    start("a", saves=(5,))
    shutil.copytree("a", "copy")
    assert start("a", saves=(10,)) == 5
    assert start("copy", saves=(10, 20)) == 5


@pytest.mark.parametrize("place", [10, 20], ids=["in place of an own one", "beside them"])
def test_checkpoint_of_a_copy_that_has_parted_is_refused(place: int) -> None:
    parted()
    shutil.rmtree(step("a", place), ignore_errors=True)
    shutil.copytree(step("copy", place), step("a", place))
    assert refused("a").what == (
        f"log.dir = a has a checkpoint that start 2 of a copy of this run, which has diverged, wrote: "
        f"step-{place:08d}"
    )
    shutil.rmtree(step("a", place))
    assert start("a") in (5, 10)


def test_copy_that_has_parted_is_not_gone_back_to() -> None:
    """Its id is the run's; a checkpoint from before the two parted is."""
    parted()
    with pytest.raises(
        ConfigError, match=r"and start 2 of a copy of this run, which has diverged, wrote"
    ):
        open_run(config("a", step("copy", 20)))
    assert start("a", step("copy", 5)) == 5
    assert start("fork", step("copy", 20)) == 20


def test_checkpoint_that_was_left_behind_is_not_taken_under_its_old_name() -> None:
    start("a", saves=(5, 10))
    assert start("a", step("a", 5), saves=(7,)) == 5
    Path("a/checkpoints/aside-1-step-00000010").rename(step("a", 10))
    with pytest.raises(
        ConfigError, match=r"is abandoned: start 2 of the run went back to step 5"
    ):
        open_run(config("a", step("a", 10)))
    assert start("a") == 7
    assert Path("a/checkpoints/aside-1-step-00000010").exists()


def test_start_that_was_killed_before_it_set_aside_has_gone_back() -> None:
    start("a", saves=(5, 10))
    opened = open_run(config("a", step("a", 5)))
    opened.resuming(opened.candidates[0], ()).begin()
    assert [each.step for each in read("a").candidates] == [5]


def test_starts_hold_the_checksum_of_the_one_before_and_of_what_they_resume() -> None:
    start("a", saves=(5,))
    start("a", saves=(6,))
    start("b", step("a", 5))
    checkpoints, identity = CheckpointFolder(Path("a")).all(), Identity.read(Path("a"))
    fork = Identity.read(Path("b"))
    assert identity is not None and fork is not None and fork.origin is not None
    first, second = identity.starts
    assert (
        second.before == first.link
        and first.resumed is None
        and second.resumed == checkpoints[0].checksum
    )
    assert fork.starts[0].resumed == fork.origin.manifest == checkpoints[0].checksum
    assert [each.author.link for each in checkpoints if each.author is not None] == [
        first.link,
        second.link,
    ]


@pytest.mark.parametrize("change", [{"step": 4}, {"nonce": "0"}, {"before": "0"}])
def test_broken_chain_is_refused(change: dict[str, Any]) -> None:
    start("a", saves=(5,))
    start("a")
    values = json.loads(Path("a/run.json").read_text())
    values["starts"][0] |= change
    Path("a/run.json").write_text(json.dumps(values))
    with pytest.raises(
        ConfigError, match=r"its start [12] does not follow from the one before"
    ):
        read("a")


def test_loops_checkpoint_in_a_runs_folder_is_refused() -> None:
    start("a", saves=(5,))
    checkpoints = CheckpointFolder(Path("loop"))
    checkpoints.begin(7)
    checkpoints.commit(7, {})
    shutil.copytree(step("loop", 7), step("a", 7))
    assert refused("a").what == "log.dir = a has a checkpoint that no run wrote: step-00000007"


def test_fork_whose_checkpoints_are_gone_does_not_begin_at_its_origin_again() -> None:
    start("a", saves=(5,))
    start("b", step("a", 5), saves=(7,))
    Journal(Path("b")).append("save", step=7, start=1)
    shutil.rmtree("b/checkpoints")
    with pytest.raises(
        CheckpointError, match=r"a run that has saved checkpoints, and none of them is left"
    ):
        read("b")


def test_files_of_no_run_or_of_several_are_refused() -> None:
    checkpoints = CheckpointFolder(Path("nameless"))
    checkpoints.begin(5)
    checkpoints.commit(5, {})
    assert refused("nameless").fix == "--log.dir ANOTHER_FOLDER   (its files name no run)"
    start("a", saves=(20,))
    start("b", saves=(5,))
    shutil.copytree(step("a", 20), step("b", 20))
    Path("b/run.json").unlink()
    ids = sorted(
        each.author.run for each in CheckpointFolder(Path("b")).all() if each.author is not None
    )
    assert (
        refused("b").fix == f"--log.dir ANOTHER_FOLDER   (its files name {ids[0]} and {ids[1]})"
    )


def test_run_whose_checkpoints_are_all_gone_does_not_begin_again() -> None:
    start("a", saves=(5,))
    Journal(Path("a")).append("save", step=5, start=1)
    shutil.rmtree("a/checkpoints")
    with pytest.raises(
        CheckpointError, match=r"a run that has saved checkpoints, and none of them is left"
    ):
        read("a")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"id": "x"}'])
def test_damaged_id_is_refused(text: str) -> None:
    start("a", saves=(5,))
    Path("a/run.json").write_text(text)
    with pytest.raises(ConfigError, match=r"a/run.json cannot be read"):
        read("a")


def test_journal_has_a_line_for_each_start_and_rewind_and_survives_a_torn_one() -> None:
    start("a", saves=(5, 10))
    with Path("a/journal.jsonl").open("a") as file:
        file.write('{"event": "sta')
    start("a", step("a", 5))
    lines = Journal(Path("a")).lines()
    assert [(line["event"], line["start"], line["step"]) for line in lines] == [
        ("start", 1, 0),
        ("start", 2, 5),
        ("rewind", 2, 5),
    ]


def test_best_of_an_abandoned_future_is_forgotten() -> None:
    start("a", saves=(5, 10))
    checkpoints = CheckpointFolder(Path("a"))
    checkpoints.mark_best(10, 1.0)
    start("a", step("a", 5))
    assert checkpoints.best() is None


def test_ending_comes_back_from_the_journal_and_a_damaged_one_is_left_out(
    tmp_path: Path,
) -> None:
    ending = Ending(
        "numbers",
        (2, 3),
        "a",
        0,
        "optimizer",
        4,
        (7, 8),
        "not finite\n  expected: ...",
        "in step",
        1,
    )
    journal = Journal(tmp_path)
    journal.append("start", start=1)
    (tmp_path / "logs").mkdir()
    journal.end(ending)  # before the folder is a run's
    assert Ending.of(journal.endings()[0]) == ending and len(journal.lines()) == 1
    (tmp_path / "run.json").touch()
    lost = replace(ending, how="lost", ranks=(0,))
    for each in (lost, ending, replace(ending, ranks=(1,))):
        journal.end(each)
    # The first that knows more than that a rank was lost.
    assert ending_of(journal.lines()) == ending
    journal.end(replace(ending, how="signal", code=9))  # who has started the ranks knows most
    assert ending_of(journal.lines()) == replace(ending, how="signal", code=9)
    for damage in (
        {"ranks": ["a"]},
        {"step": "4"},
        {"rows": None},
        {"how": 3},
        {"rows": [True]},
        {"error": ""},
    ):
        journal.append("ending", **{**asdict(ending), **damage})
        assert ending_of(journal.lines()[-1:]) is None or damage == {"error": ""}
    assert state_of(tmp_path, journal.lines()[-1:])[0] == "failed"
    journal.append("start", start=2)
    assert ending_of(journal.lines()) is None


@pytest.mark.parametrize(
    ("files", "count"),
    [
        (
            {
                "proc/self/cgroup": "0::/job\n",
                "sys/fs/cgroup/job/memory.events": "oom 1\noom_kill 3\n",
            },
            3,
        ),
        ({"proc/self/cgroup": "0::/job\n", "sys/fs/cgroup/memory.events": "oom_kill 2\n"}, 2),
        (
            {
                "proc/self/cgroup": "9:cpu:/\n4:memory:/a/b\n0::/\n",
                "sys/fs/cgroup/memory/a/b/memory.oom_control": "under_oom 0\noom_kill 5\n",
                "sys/fs/cgroup/memory/memory.oom_control": "oom_kill 0\n",
                "proc/vmstat": "oom_kill 9\n",
            },
            5,
        ),
        ({"proc/vmstat": "pgfault 3\noom_kill 4\n"}, 4),
        ({}, 0),
    ],
)
def test_kernels_kills_are_counted_in_the_cgroup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], count: int
) -> None:
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)

    def moved(first: str, *rest: str) -> Path:
        return Path(tmp_path, first[1:], *rest)

    for module in (pulse, main_thread):
        monkeypatch.setattr(module, "Path", moved)
    monkeypatch.setattr(main_thread, "proc_text", lambda name: files.get(f"proc/{name}", ""))
    assert pulse.memory_kills() == count
