"""A run's folder that somebody else has made: nothing waits, nothing comes from elsewhere, no memory is lost."""

from __future__ import annotations

import json
import os
import shutil
import threading
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from test_report import Parsed
from typer.testing import CliRunner

from report_runs import eventful_run, make_run, step_line, write_lines
from threefold.commands import main
from threefold.commands import report as report_command
from threefold.errors import ConfigError
from threefold.jsonl import Lines, open_file
from threefold.records.files import unsafe_files
from threefold.report.document import report
from threefold.report.facts import gather
from threefold.report.live import LiveRun
from threefold.report.run_list import listed, runs_in
from threefold.report.server import Reply, View

main._load(["report", "why", "data", "hash", "export"])
READ = [
    "metrics.jsonl", "journal.jsonl", "samples.jsonl", "run.json", "config.yaml", "audit.jsonl", "logs/rank-0000.log",
    "profile/rank-0000.summary.json", "rows/rank-0000.bin", "checkpoints/best.json",
    "checkpoints/step-00000080/manifest.json", "checkpoints/step-00000080/COMPLETE",
]  # fmt: skip


def within(seconds: float, act: Any) -> Any:
    """What `act` gives; a wait for a file that nobody writes to ends the test and not the suite."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(act()), daemon=True)
    thread.start()
    thread.join(seconds)
    assert found, "it waits, or it failed"
    return found[0]


def asked(view: View, target: str) -> Reply:
    """The answer to a holder of the token."""
    return view.answer(target, hosts=["127.0.0.1"], cookies="threefold=t")


def put(run: Path, name: str) -> Path:
    path = run / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    return path


@pytest.mark.parametrize("name", READ)
def test_nobody_waits_for_a_fifo(tmp_path: Path, name: str) -> None:
    run = eventful_run(tmp_path / "run")
    os.mkfifo(put(run, name))
    page = within(20, lambda: report([gather(run)]))
    assert "it is not a file" in Parsed(page).text
    within(20, lambda: listed(runs_in(tmp_path)))

    def watched() -> bool:
        seen = LiveRun(run)
        seen.prove()
        seen.of_step(10)
        return bool(seen.parts())

    within(20, watched)


@pytest.mark.parametrize(
    "name",
    ["audit.jsonl", "metrics.jsonl", "rows/rank-0000.bin", "run.json", "blocks/a.blocks"],
)
@pytest.mark.parametrize(
    "words",
    [
        ["why"],
        ["data", "audit"],
        ["data", "order", "--step", "1"],
        ["data", "show"],
        ["hash"],
        ["export", "--to", "exported"],
    ],
    ids=" ".join,
)
def test_no_command_waits_for_a_fifo(tmp_path: Path, words: list[str], name: str) -> None:
    run = eventful_run(tmp_path / "run")
    os.mkfifo(put(run, name))
    done = CliRunner().invoke(main.app, [*words, str(run)])
    assert isinstance(done.exception, ConfigError)
    assert f"{name} is not a file" in str(done.exception)


@pytest.mark.parametrize("name", READ)
def test_a_link_out_of_the_run_is_not_followed(tmp_path: Path, name: str) -> None:
    secret = tmp_path / "secret"
    secret.write_text("PRIVATE KEY\n2026-01-01 00:00:02,000 WARNING threefold: PRIVATE KEY\n")
    run = eventful_run(tmp_path / "run")
    put(run, name).symlink_to(secret)
    page = report([gather(run)])
    assert b"PRIVATE" not in page and "leads out of" in Parsed(page).text
    assert "PRIVATE" not in listed(runs_in(tmp_path))


def test_a_link_inside_a_run_and_a_linked_run_are_read(tmp_path: Path) -> None:
    run = make_run(tmp_path / "elsewhere", [step_line(1)])
    (run / "metrics.jsonl").rename(run / "metrics-1.jsonl")
    (run / "metrics.jsonl").symlink_to("metrics-1.jsonl")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "linked").symlink_to(run)
    facts = gather(runs_in(tmp_path / "runs")["linked"])
    assert facts.metrics.steps == [1] and list(unsafe_files(run)) == []


def test_a_config_that_stands_for_more_than_a_memory_holds(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [step_line(1)])
    lines = ["a0: &a0 {k: v}"]
    lines += [
        f"a{level}: &a{level} {{{', '.join(f'k{n}: *a{level - 1}' for n in range(10))}}}"
        for level in range(1, 20)
    ]
    (run / "config.yaml").write_text("\n".join(lines))
    page = within(60, lambda: report([gather(run), gather(run)]))
    assert "more than 1,000,000 entries" in Parsed(page).text
    (run / "config.yaml").write_text("a: b\n" * 200_000)
    assert (
        "config.yaml: it is larger than"
        in Parsed(within(20, lambda: report([gather(run)]))).text
    )


def test_a_page_is_written_through_no_link(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("mine")
    run = make_run(tmp_path / "run", [step_line(1)])
    for name in (".report.html", "report.html"):
        (run / name).symlink_to(own)
    done = CliRunner().invoke(main.app, ["report", str(run)])
    assert done.exit_code == 0 and own.read_text() == "mine"
    assert (run / "report.html").stat().st_size > 10_000 and not (
        run / "report.html"
    ).is_symlink()


@pytest.mark.parametrize("to", ["pipe", "link", "/dev/stdout", "/dev/null"])
def test_what_is_no_ordinary_file_is_not_replaced(tmp_path: Path, to: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    target = tmp_path / to  # of an absolute one, itself
    before = os.lstat(target)
    with pytest.raises(
        ConfigError, match="already exists, and `threefold report` did not write it"
    ):
        report_command._refuse_other(target)
    run = make_run(tmp_path / "run", [step_line(1)])
    if target.parent == tmp_path:
        done = CliRunner().invoke(main.app, ["report", str(run), "--to", str(target)])
        assert isinstance(done.exception, ConfigError)
    assert os.path.samestat(os.lstat(target), before)


def test_a_loop_of_links_is_an_error_of_reading(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to(tmp_path / "a")
    with pytest.raises(OSError):
        open_file(tmp_path / "a")


def test_a_huge_journal_is_read_at_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from threefold.report import facts as module

    monkeypatch.setattr(module, "MOST_BYTES", 100_000)
    run = make_run(tmp_path / "run", [step_line(1)])
    saves = [{"event": "save", "step": step, "time": "x"} for step in range(50_000)]
    write_lines(run / "journal.jsonl", [*saves, {"event": "done", "step": 7, "time": "x"}])
    facts = gather(run)
    assert facts.state == "done" and 0 < len(facts.events) < 5_000
    assert any("journal.jsonl is long" in note for note in facts.notes)
    assert ">done<" in listed(runs_in(tmp_path))


def test_a_line_without_an_end_takes_no_more_and_more_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from threefold import jsonl as module

    monkeypatch.setattr(module, "_BLOCK", 1000)
    monkeypatch.setattr(module, "_LONGEST", 5000)
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"x" * 1_000_000)
    lines = Lines(path)
    assert lines.read() == [] and lines.num_damaged
    assert lines.read() == []  # and it is not read again
    with path.open("a") as file:
        file.write("\n" + json.dumps(step_line(3)) + "\n")
    assert [line.values["step"] for line in lines.read()] == [3]


@pytest.mark.parametrize("left", [["metrics.jsonl"], ["checkpoints"], []])
def test_a_run_that_is_being_deleted_while_it_is_seen(tmp_path: Path, left: list[str]) -> None:
    run = eventful_run(tmp_path / "runs" / "run")
    view = View(tmp_path / "runs", token="t")
    assert asked(view, "/run?run=run").status == 200
    for path in run.iterdir():
        if path.name not in left:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    if not left:
        run.rmdir()
    for path in ("/", "/run?run=run", "/values?run=run", "/step/3?run=run"):
        assert asked(view, path).status in (200, 404), path


def test_a_folder_whose_name_is_markup(tmp_path: Path) -> None:
    name = "\"><img src=x onerror=alert(1)>'&\n\u202e"
    make_run(tmp_path / name, [step_line(1), step_line(2)])
    view, run = View(tmp_path, token="t"), urlencode({"run": name})
    for answer in (asked(view, "/"), asked(view, f"/run?{run}")):
        assert answer.status == 200 and "img" not in Parsed(answer.content).names
    assert asked(view, f"/run?{run}&token=t").content.count(b"<img") == 0


@pytest.mark.parametrize(
    "path",
    [
        f"/values?run=run&step={10**400}", "/values?run=run&step=-1&step=5", f"/step/{10**400}?run=run",
        f"/step/{'9' * 5000}?run=run", f"/values?run=run&have={'9' * 5000}&version=%00", "/run?run=%00",
        "/run?run=run&run=no",
        "/values?run=run&step=5&step=1", "/%2e%2e/", "/run?run=%ff",
    ],
)  # fmt: skip
def test_strange_requests_are_answered(tmp_path: Path, path: str) -> None:
    make_run(tmp_path / "run", [step_line(1), step_line(2)])
    assert asked(View(tmp_path, token="t"), path).status in (200, 404)
