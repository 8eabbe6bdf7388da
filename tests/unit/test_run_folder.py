"""Opening a run's folder: what is made, and where the run goes on."""

from __future__ import annotations

import dataclasses
import errno
import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from threefold.checkpoint import lineage
from threefold.checkpoint.checkpoint_folder import Checkpoint, CheckpointFolder
from threefold.checkpoint.lineage import Author, Identity
from threefold.config import loading
from threefold.config.paths import run_and_checkpoint
from threefold.config.schema import Config
from threefold.errors import EXIT_FAILED, CheckpointError, ConfigError, RunError
from threefold.mesh.mesh import Mesh
from threefold.mesh.topology import Topology
from threefold.run.failure import report_failure
from threefold.run.folder import RunFolder, log_to_file, open_run
from threefold.run.watch.watchdog import Watchdog


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def config(resume: str = "auto", log_dir: str | None = "run") -> Config:
    values: dict[str, Any] = {"log": {"dir": log_dir}, "checkpoint": {"resume": resume}}
    return loading.validate(values)


def save(run: str, *steps: int) -> Checkpoint:
    """The last checkpoint of a run that has saved after these steps."""
    checkpoints = CheckpointFolder(Path(run))
    Path(run).mkdir(exist_ok=True)
    identity = Identity.read(Path(run)) or Identity.new()
    identity.write(Path(run))
    for step in steps:
        checkpoints.begin(step)
        saved = checkpoints.commit(step, dataclasses.asdict(identity.author))
    return saved


@pytest.mark.parametrize("resume", ["auto", "never"])
def test_new_folder_is_made_and_begins_at_step_1(resume: str) -> None:
    opened = open_run(config(resume, "deep/er/run"))
    assert opened == RunFolder(Path("deep/er/run"))
    opened.begin()
    opened.accept(config(resume))
    assert sorted(path.name for path in opened.path.iterdir()) == [
        "checkpoints",
        "config.yaml",
        "journal.jsonl",
        "logs",
        "run.json",
    ]
    assert opened.metrics == Path("deep/er/run/metrics.jsonl") and not opened.metrics.exists()


def test_resolved_config_is_written_when_the_request_is_accepted_and_reads_back() -> None:
    asked = config()
    opened = open_run(asked)
    assert not (opened.path / "config.yaml").exists()
    opened.begin()
    opened.accept(asked)
    assert loading.load(str(opened.path / "config.yaml"), environ={}).config == asked


def test_a_start_saves_no_more_in_a_folder_that_is_not_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened = open_run(config())
    opened.begin()
    author = opened.accept(config())["author"]
    opened = dataclasses.replace(opened, author=Author(**author))
    assert opened.refusal() is None

    def unreadable(path: Path) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    with monkeypatch.context() as patch:
        patch.setattr(lineage, "open_file", unreadable)
        assert opened.refusal() is None, "what lasts is for the save to find"
    kept = (opened.path / "run.json").read_bytes()
    (opened.path / "run.json").write_bytes(kept[:-20])
    assert "run.json cannot be read" in str(opened.refusal())
    (opened.path / "run.json").write_bytes(kept)
    again = open_run(config())
    again.begin()
    again.accept(config())
    assert "now belongs to another start" in str(opened.refusal())
    opened.path.rename("moved")
    assert f"is not at {opened.path.absolute()} any more" in str(opened.refusal())
    Path("moved").rename(opened.path)
    os.chdir(opened.path)
    assert f"is not at {Path.cwd() / opened.path} any more" in str(opened.refusal())


def test_default_folders_do_not_collide() -> None:
    """Two runs of the same second have folders of their own."""
    opened = [open_run(config(log_dir=None)).path for _ in range(4)]
    assert len(set(opened)) == 4
    assert {path.parent for path in opened} == {Path("runs")}


def test_auto_goes_on_from_the_newest_complete_checkpoint() -> None:
    newest = save("run", 5, 10)
    CheckpointFolder(Path("run")).begin(15)
    assert open_run(config()).candidates[0] == newest


def test_auto_begins_at_step_1_where_nothing_is_complete() -> None:
    begun = open_run(config())
    begun.begin()
    begun.accept(config())
    begun.metrics.write_text('{"step": 1}\n')
    CheckpointFolder(Path("run")).begin(5)
    assert open_run(config()).candidates == ()


def test_never_refuses_a_folder_with_a_run() -> None:
    begun = open_run(config())
    begun.begin()
    begun.accept(config())
    begun.metrics.write_text('{"step": 1}\n')
    save("other", 5)
    for name in ("run", "other"):
        with pytest.raises(
            ConfigError, match=f"log.dir = {name} holds a run, and checkpoint.resume is never"
        ):
            open_run(config("never", name))
    assert not Path("other/config.yaml").exists()


def test_never_takes_a_folder_in_which_nothing_was_done() -> None:
    """A request that was refused after the folder was made does not stand in the way of the next."""
    open_run(config("never"))
    assert open_run(config("never")).candidates == ()


def test_path_of_a_checkpoint_or_of_a_run() -> None:
    save("earlier", 5, 10)
    older = Path("earlier/checkpoints/step-00000005")
    assert open_run(config(str(older))).candidates == (Checkpoint(older, 5),)
    newest = Checkpoint(Path("earlier/checkpoints/step-00000010"), 10)
    assert open_run(config("earlier", "another")).candidates == (newest,)


def test_path_wins_over_what_the_folder_holds() -> None:
    save("run", 5, 10)
    older = Path("run/checkpoints/step-00000005")
    assert open_run(config(str(older))).candidates == (Checkpoint(older, 5),)


def test_path_that_holds_nothing_is_refused_before_anything_is_made(folder: Path) -> None:
    Path("empty").mkdir()
    for path in ("nothing", "empty"):
        with pytest.raises(CheckpointError):
            open_run(config(path))
    assert [path.name for path in folder.iterdir()] == ["empty"]


@pytest.mark.parametrize("place", ["run", "run/logs", "run/checkpoints"])
def test_file_in_the_place_of_a_folder_is_refused(place: str) -> None:
    Path(place).parent.mkdir(exist_ok=True)
    Path(place).touch()
    with pytest.raises(ConfigError, match=r"log\.dir = run cannot be written: "):
        open_run(config())


def test_file_above_the_folder_is_refused() -> None:
    Path("runs").touch()
    with pytest.raises(
        ConfigError, match=r"log\.dir = runs/a cannot be written: Not a directory"
    ):
        open_run(config(log_dir="runs/a"))


@pytest.mark.parametrize("resumes", [False, True])
def test_other_ranks_open_the_same(resumes: bool) -> None:
    if resumes:
        save("run", 5)
    opened = open_run(config())
    assert RunFolder.from_values(opened.to_values()) == opened
    assert bool(opened.candidates) == resumes


@pytest.mark.parametrize(
    "names",
    [
        ("config.yaml",),
        ("a.jsonl",),
        ("config.json", "model.safetensors"),
        (".bashrc",),
        ("logs/", "src/"),
    ],
)
def test_folder_with_files_of_others_is_refused_and_left_as_it_was(
    names: tuple[str, ...], folder: Path
) -> None:
    """A project, data, a model, a home: and the fix is a folder that is taken."""
    for name in names:
        made = folder / name
        made.mkdir() if name.endswith("/") else made.write_text("# mine")
    with pytest.raises(ConfigError) as error:
        open_run(config(log_dir="."))
    (problem,) = error.value.problems
    assert problem.what.startswith("log.dir = . is not empty and holds no run: it has ")
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        name.strip("/") for name in names
    )
    assert all(path.read_text() == "# mine" for path in folder.iterdir() if path.is_file())
    option, another = problem.fix.split()
    assert option == "--log.dir" and open_run(config(log_dir=another)).path == Path(another)


def test_the_file_systems_root_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"log\.dir = / is not empty and holds no run: "):
        open_run(config(log_dir="/"))


def test_folder_with_a_jobs_files_or_of_a_start_that_was_refused_is_taken() -> None:
    open_run(config(log_dir="begun"))
    for name in ("submitted.yaml", "job.sh", "srun.err", "slurm-7.out", "train.log"):
        Path("begun", name).touch()
    assert open_run(config(log_dir="begun")).candidates == ()


def test_folder_is_a_runs_before_its_first_records_are_written() -> None:
    """A start that is killed, or finds the disk full, while it is accepted can be repeated."""
    opened = open_run(config())
    Path("run/.run.json").write_bytes(b"{")
    assert open_run(config()).candidates == ()
    identity = opened.claim()
    Path("run/data.files.jsonl").touch()
    assert open_run(config()).claim() == identity


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_log_on_a_full_disk_leaves_lines_out_without_a_word(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """logging prints a traceback for each line otherwise; the run says once what it could not write."""
    Path("run/logs").mkdir(parents=True)
    Path("run/logs/rank-0000.log").symlink_to("/dev/full")
    logger = logging.getLogger("threefold")
    before = [*logger.handlers], logger.level, logger.propagate
    try:
        log_to_file(Path("run"), 0)
        logger.error("the checkpoint of step 5 could not be saved")
    finally:
        for handler in [each for each in logger.handlers if each not in before[0]]:
            with suppress(OSError):
                handler.close()
            for name in ("threefold", "py.warnings"):
                logging.getLogger(name).removeHandler(handler)
        logger.level, logger.propagate = before[1:]
    assert capfd.readouterr() == ("", "")


def test_full_disk_at_a_start_is_said_in_three_parts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Whatever of its files a run was writing: of the tests' own, none is as small as a disk."""
    for number, told in ((errno.ENOSPC, True), (errno.EIO, False)):
        try:
            raise OSError(number, "why")
        except OSError as error:
            assert report_failure(error, None, 0) == EXIT_FAILED
        text = capsys.readouterr().err
        assert text.startswith(f"a disk is full: [Errno {number}] why\n  expected: ") == told
        assert ("Traceback" in text) != told


def test_a_rank_that_still_joins_does_not_report_that_another_has_failed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The mesh's store is the ranks' own with a prefix, so a count in each would have two first failures."""
    store = dist.HashStore()
    joined = Mesh(
        Topology(dp_replicate=2),
        0,
        torch.device("cpu"),
        store=dist.PrefixStore("mesh-1", store),
    )
    watches = [Watchdog(rank, stall_s=60, timeout_s=60) for rank in range(2)]
    for watch in watches:
        watch.store = store
    refused = ConfigError("a wrong key", expected="a right one", fix="--right key")
    report_failure(refused, joined, 0, watches[0])
    report_failure(RunError("lost", expected="a peer", fix="none"), None, 1, watches[1])
    assert capsys.readouterr().err == f"{refused}\n"


@pytest.mark.parametrize("inside", ["sub", "checkpoints/sub", "exports/deep/er"])
def test_new_run_inside_another_runs_folder_is_refused(inside: str) -> None:
    save("a run", 5)
    before = sorted(Path("a run").rglob("*"))
    with pytest.raises(ConfigError) as refused:
        open_run(config(log_dir=f"a run/{inside}"))
    (problem,) = refused.value.problems
    assert (
        problem.what
        == f"log.dir = a run/{inside} is inside the folder of another run: {Path('a run').resolve()}"
    )
    assert problem.fix == f"--log.dir {Path(Path(inside).name).resolve()}"
    assert sorted(Path("a run").rglob("*")) == before
    Path("link").symlink_to("a run")
    assert open_run(config(log_dir="link")).candidates[0].step == 5


def test_name_that_no_folder_can_have_is_refused(folder: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"log\.dir = x+ cannot be written: File name too long"
    ):
        open_run(config(log_dir="x" * 256))
    with pytest.raises(ConfigError, match=r"x+ is not a run"):
        run_and_checkpoint(Path("x" * 256))
    assert list(folder.iterdir()) == []
    assert open_run(config(log_dir="x" * 255)).path.is_dir()
