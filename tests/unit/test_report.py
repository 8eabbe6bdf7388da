"""The page of a run: what stands after rewinds, nothing lost by thinning, everything escaped, damage said."""

from __future__ import annotations

import json
import math
import os
import re
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_why import ROWS, write
from typer.testing import CliRunner

from report_runs import HOSTILE, eventful_run, head_of, make_run, step_line, write_lines
from threefold.commands import main
from threefold.errors import ConfigError
from threefold.records.metrics import Metrics, Points
from threefold.records.state import lock_holder
from threefold.report.document import points_of, report
from threefold.report.facts import RunFacts, gather
from threefold.report.markup import data, shown
from threefold.report.sections import judged
from threefold.report.thinned_curves import (
    curve_names,
    drawn,
    left_out,
    not_finite,
    summary,
    thinned,
)
from threefold.run.head import Head

main._load(["report"])
ELEMENTS = {
    "html", "head", "meta", "title", "style", "body", "header", "h1", "h2", "h3", "main", "section", "p", "span", "dl",
    "div", "dt", "dd", "noscript", "table", "caption", "thead", "tbody", "tr", "th", "td", "details", "summary", "pre",
    "code", "button", "blockquote", "bdi", "strong", "figure", "figcaption", "svg", "g", "rect", "text", "footer", "br",
    "script", "link",
}  # fmt: skip


class Parsed(HTMLParser):
    """The elements of a page, the attributes that run scripts or load, and the text of each script."""

    def __init__(self, page: bytes) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.running: list[str] = []
        self.scripts: list[str] = []
        self.text = ""
        self._inside = ""
        self.feed(page.decode())

    def handle_starttag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        self.names.add(name)
        self._inside = name
        if name == "script":
            self.scripts.append("")
        self.running += [
            key
            for key, _ in attributes
            if key.startswith("on") or key in ("src", "href", "style")
        ]

    def handle_endtag(self, name: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts[-1] += data
        else:
            self.text += data


def metrics_of(lines: list[dict]) -> Metrics:
    metrics = Metrics(Path(os.devnull))
    for line in lines:
        metrics.add(line)
    return metrics


@pytest.fixture(scope="module")
def eventful(tmp_path_factory: pytest.TempPathFactory) -> RunFacts:
    return gather(eventful_run(tmp_path_factory.mktemp("runs") / "eventful"))


@given(
    st.lists(
        st.floats(allow_nan=True, allow_infinity=True, width=32), min_size=1, max_size=400
    ),
    st.integers(min_value=5, max_value=60),
)
def test_thinning_loses_no_extreme_no_end_and_no_gap(values: list[float], most: int) -> None:
    points = Points(np.arange(len(values), dtype=np.int64), np.array(values))
    kept = thinned(points, most)
    assert len(kept.steps) <= max(most, 5) and (np.diff(kept.steps) > 0).all()
    assert (points.values[kept.steps] == kept.values)[~np.isnan(kept.values)].all()
    assert {kept.steps[0], kept.steps[-1]} == {0, len(values) - 1}
    finite = points.values[np.isfinite(points.values)]
    if len(finite):
        now = kept.values[np.isfinite(kept.values)]
        assert (now.min(), now.max()) == (finite.min(), finite.max())
    assert np.isfinite(kept.values).all() == (len(finite) == len(values))


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(1, 12)), min_size=1, max_size=8))
def test_of_steps_that_were_trained_again_the_last_pass_stands(
    passes: list[tuple[int, int]],
) -> None:
    lines, stands, last = [], {}, 0
    for number, (first, length) in enumerate(passes):
        first = min(first, last + 1)  # a run resumes at or before where it ended
        stands = {step: value for step, value in stands.items() if step < first}
        for step in range(first, first + length):
            lines.append({"step": step, "loss": float(number)})
            stands[step] = float(number)
        last = first + length - 1
    metrics = metrics_of(lines)
    points = metrics.points("loss")
    assert dict(zip(points.steps.tolist(), points.values.tolist(), strict=True)) == stands
    told = drawn(metrics.points("loss"), metrics.replaced("loss"), most=10_000)
    assert len(told["x"]) + sum(len(old["x"]) for old in told["old"]) == len(lines)


def test_an_evaluation_of_steps_that_were_trained_again_is_replaced() -> None:
    lines = [step_line(step) for step in range(1, 11)]
    lines += [
        {"step": 10, "eval_loss": 5.0},
        step_line(6),
        step_line(7),
        {"step": 7, "eval_loss": 4.0},
    ]
    metrics = metrics_of(lines)
    evaluated = metrics.points("eval_loss"), metrics.replaced("eval_loss")
    assert evaluated[0].steps.tolist() == [7]
    assert [old["x"] for old in drawn(*evaluated, most=100)["old"]] == [[10]]


def test_numbers_that_are_not_finite_are_found() -> None:
    values = np.array([1, math.nan, math.nan, 2, math.inf])
    assert not_finite(Points(np.array([10, 20, 30, 40, 50]), values)) == [(20, 30), (50, 50)]


@pytest.mark.examples
def test_a_run_of_100_000_steps_is_a_small_page_soon_and_keeps_its_extremes(
    tmp_path: Path,
) -> None:
    lines = [step_line(step) for step in range(1, 100_001)]
    lines[54_320] = step_line(54_321, loss=77.7)
    lines[12_344] = step_line(12_345, loss=-1.5)
    lines[70_000] = step_line(70_001, loss=math.nan)
    run = make_run(tmp_path / "long", lines)
    began = time.process_time()
    page = report([gather(run)])
    assert time.process_time() - began < 15
    assert len(page) < 1_000_000
    curve = json.loads(re.search(rb'id="values">(.*?)</script>', page)[1])["runs"][0]["curves"][
        "loss"
    ]
    known = dict(zip(curve["x"], curve["y"], strict=True))
    assert known[54_321] == 77.7 and known[12_345] == -1.5 and known[70_001] is None
    assert curve["x"][0] == 1 and curve["x"][-1] == 100_000


def test_a_page_says_what_happened(eventful: RunFacts) -> None:
    page = report([eventful])
    text = Parsed(page).text
    for said in (
        "done",
        "80 of 80",
        "aside-1-step-00000060",
        "mesh.tp 2 -> 1",
        "was not finite",
        "the loss rose to 9.0000",
    ):
        assert said in text, said
    assert (
        "fsdp: as asked" in text
        and "dp=4 (2 replicas x 2 shards) x cp=1 x tp=1: 4 ranks" in text
    )
    assert "not proved" in text and "has no audit.jsonl" in text
    marks = points_of([eventful], [None])["runs"][0]["marks"]
    assert marks == [
        {"step": 60, "kind": "stop", "seconds": 59.0},
        {"step": 50, "kind": "rewind", "seconds": 60.0},
    ]


def test_damaged_lines_are_said_and_the_rest_is_shown(eventful: RunFacts) -> None:
    lines = sorted((each.file, each.line) for each in eventful.damaged)
    assert lines == [
        *(("metrics.jsonl", number) for number in (47, 48, 49, 50, 51)),
        ("samples.jsonl", 2),
    ]
    # That of step 46 is no number.
    assert summary(eventful.metrics.points("loss"))["count"] == 80 - 1
    assert summary(eventful.metrics.points("loss"))["not_finite"] == 1


def test_texts_of_a_run_are_only_ever_text(eventful: RunFacts) -> None:
    parsed = Parsed(report([eventful, eventful]))
    assert parsed.names <= ELEMENTS
    assert parsed.running == ["href"]  # the empty icon
    assert len(parsed.scripts) == 3 and "window.hacked" not in "".join(parsed.scripts[1:])
    assert "window.hacked" in parsed.text and "\u202e" not in parsed.text
    assert "<" not in parsed.scripts[0]


def test_the_page_has_a_policy_that_allows_its_own_script_and_nothing_else(
    eventful: RunFacts,
) -> None:
    import base64
    import hashlib

    page = report([eventful]).decode()
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)[1]
    assert (
        policy.startswith("default-src 'none';")
        and "unsafe" not in policy
        and "http" not in policy
    )
    assert "connect-src 'none'" in policy
    for script in Parsed(page.encode()).scripts[1:]:
        assert base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() in policy
    style = re.search(r"<style>(.*?)</style>", page, re.DOTALL)[1]
    assert base64.b64encode(hashlib.sha256(style.encode()).digest()).decode() in policy


@given(st.text())
def test_any_text_in_a_block_of_json_reads_back_and_ends_nothing(text: str) -> None:
    block = data("values", {"text": text})
    assert block.count("<") == 2 and "\u2028" not in block
    assert json.loads(block.partition(">")[2].rpartition("</script>")[0]) == {"text": text}
    shown(text).encode()


@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "journal.jsonl", "run.json", "config.yaml", "samples.jsonl"]
)
@pytest.mark.parametrize(
    "content",
    [b"", b"\x00\xff\xfe", b"{" * 1_200, b"[]\n", b"null\nnull\n", b'{"step": 1e999}\n'],
)
def test_any_file_may_be_damaged(tmp_path: Path, name: str, content: bytes) -> None:
    run = eventful_run(tmp_path / "run")
    (run / name).write_bytes(content)
    Parsed(report([gather(run)]))
    (run / name).unlink()
    Parsed(report([gather(run)]))


def test_a_head_reads_back_and_what_is_none_is_left_out() -> None:
    values = head_of("tiny", rate=[0.5, "as asked"], lost_bits=[], resumed="/run/step-4")
    head = Head.from_values(values)
    assert head is not None and head.to_values() == values
    lines = head.lines()
    assert "  steps  51 to 80, 4 rows each" in lines and "  lr     0.5: as asked" in lines
    assert (
        "  data parallelism: fsdp: as asked" in lines
        and lines[-1] == "  resumed from /run/step-4, bit for bit"
    )
    for strange in (
        None,
        [],
        {},
        {"path": 1},
        head_of("x", mesh=[1] * 5),
        head_of("x", rate=[]),
        head_of("x", other=1),
    ):
        assert Head.from_values(strange) is None


def test_strange_numbers_are_no_curves() -> None:
    metrics = metrics_of([])
    huge = 10**400
    for step in (True, -1, 1.5, "1", None, huge):
        assert metrics.add({"step": step, "loss": 1.0}) is not None
    assert metrics.add({"step": 1, "loss": True, "other": huge, "lr": None}) == "loss is 'True'"
    assert metrics.points("other").values.tolist() == [math.inf]
    for number in range(200):
        metrics.add({"step": 2, f"name {number}": 1.0})
    assert len(curve_names(metrics)) == 48 and len(left_out(metrics)) > 48


def test_a_file_that_grows_is_read_once_and_one_that_was_cut_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = Metrics(path)
    write_lines(path, [step_line(1), step_line(2)])
    metrics.read()
    assert metrics.steps == [1, 2]
    with path.open("a") as file:
        file.write('{"step": 3, "loss": ')
    metrics.read()
    assert metrics.steps == [1, 2] and metrics.lines.torn == 3
    with path.open("a") as file:
        file.write("4.0}\n")
    metrics.read()
    assert metrics.steps == [1, 2, 3] and not metrics.lines.torn and metrics.lines.again == 0
    write_lines(path, [step_line(7)])
    metrics.read()
    assert metrics.lines.again == 1 and metrics.steps == [7]
    path.unlink()
    metrics.read()
    assert metrics.steps == [7]
    write_lines(path, [step_line(8), step_line(9)])
    metrics.read()
    assert metrics.steps == [8, 9]


def test_several_runs_are_compared(tmp_path: Path) -> None:
    runs = [
        gather(make_run(tmp_path / name, [step_line(step) for step in range(1, 30)]))
        for name in "ab"
    ]
    runs[1].config = {**runs[1].config, "optimizer": {"lr": 0.5}}
    page = report(runs)
    assert "optimizer.lr" in Parsed(page).text and "Keys that differ" in Parsed(page).text
    assert len(points_of(runs, [None, None])["runs"]) == 2


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    for name in "ab":
        make_run(tmp_path / name / "run", [step_line(1), step_line(2)])
    done = CliRunner().invoke(
        main.app, ["report", *(str(tmp_path / name / "run") for name in "ab")]
    )
    text = Parsed((tmp_path / "a" / "run" / "report.html").read_bytes()).text
    assert (
        done.exit_code == 0
        and str(tmp_path / "a" / "run") in text
        and str(tmp_path / "b" / "run") in text
    )


def test_a_page_stays_small_whatever_is_in_the_files(tmp_path: Path) -> None:
    run = eventful_run(tmp_path / "run")
    long = "x" * 2_000_000
    write_lines(
        run / "metrics.jsonl",
        [{"step": 90, long: 1.0, "skipped": long}, long, {"step": long}],
        append=True,
    )
    start = {
        "event": "start",
        "step": 80,
        "mesh": long,
        "head": head_of(long),
        "changed": {long: [1, 2]},
    }
    write_lines(run / "journal.jsonl", [start] * 3)
    write_lines(run / "samples.jsonl", [{"step": 80, "prompt": long, "text": long}])
    (run / "config.yaml").write_text(f"data: {{source: {long}}}\n")
    with (run / "logs" / "rank-0000.log").open("a") as file:
        file.write(f"2026-01-01 00:00:03,000 WARNING threefold: {long}\n")
    assert len(report([gather(run)])) < 1_000_000


def test_the_state_of_a_run(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [step_line(1)])
    assert gather(run).state == "running" and "logged a step" in gather(run).why
    os.utime(run / "metrics.jsonl", (0, 0))
    assert gather(run).state == "ended"
    assert any("threefold explain" in command for command, _ in gather(run).commands())
    write_lines(run / "journal.jsonl", [{"event": "stop", "step": 1, "time": "?"}], append=True)
    assert gather(run).state == "stopped"
    assert lock_holder(run) is None


def test_who_holds_a_lock_is_seen_without_taking_it(tmp_path: Path) -> None:
    import sys

    from threefold.checkpoint.lock import RunLock

    if not Path("/proc/locks").exists() or sys.platform != "linux":
        pytest.skip("no /proc/locks here")
    with RunLock() as lock:
        lock.take(tmp_path, fresh=False)
        assert lock_holder(tmp_path) == os.getpid()


def test_the_command_writes_a_file_and_refuses_what_is_no_run(tmp_path: Path) -> None:
    run = eventful_run(tmp_path / "run")
    done = CliRunner().invoke(main.app, ["report", str(run)])
    assert done.exit_code == 0 and (run / "report.html").stat().st_size > 10_000
    assert sorted(path.name for path in run.iterdir() if path.name.startswith(".")) == []
    for arguments in (
        [str(tmp_path / "nothing")],
        [str(run), str(run)],
        [str(run), "--to", str(tmp_path / "no" / "a")],
    ):
        refused = CliRunner().invoke(main.app, ["report", *arguments])
        assert refused.exit_code != 0 and refused.exception.problems[0].fix


def test_the_command_writes_nothing_beside_no_run_and_over_no_other_file(
    tmp_path: Path,
) -> None:
    """A folder above with a config.yaml is no run of what is named; an earlier page is replaced."""
    run = eventful_run(tmp_path / "runs" / "a")
    (tmp_path / "config.yaml").write_text("train: {steps: 1}")
    (tmp_path / "notes.jsonl").write_text("mine")
    for arguments in (
        [str(tmp_path)],
        [str(tmp_path / "runs")],
        [str(tmp_path / "notes.jsonl")],
        [str(run / "metrics.jsonl")],
        [str(run), "--to", str(tmp_path / "notes.jsonl")],
    ):
        refused = CliRunner().invoke(main.app, ["report", *arguments])
        assert isinstance(refused.exception, ConfigError) and refused.exception.problems[0].fix
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "config.yaml",
        "notes.jsonl",
        "runs",
    ]
    assert (tmp_path / "notes.jsonl").read_text() == "mine"
    for _ in range(2):
        assert (
            CliRunner()
            .invoke(main.app, ["report", str(run), "--to", str(tmp_path / "page")])
            .exit_code
            == 0
        )


def test_a_page_names_the_row_that_made_a_spike_and_what_the_step_read(tmp_path: Path) -> None:
    def plant(losses: Any, lines: Any) -> None:
        losses[69, 3] += 4

    run = write(tmp_path / "run", plant)
    facts, known = gather(run), judged(run)
    assert "100% of the rise" in Parsed(report([facts])).text
    read = points_of([facts], [known])["runs"][0]["batches"]["70"]
    assert read["rows"][0]["place"] == 3 and len(read["rows"]) + read["more"] == ROWS
    assert read["mesh"].startswith("dp=1") and known.reasons.of_step(10**9) is None


def test_figures_of_tasks_are_curves_and_among_the_first_figures(tmp_path: Path) -> None:
    runs = [gather(eventful_run(tmp_path / name)) for name in "ab"]
    charts = {
        chart["title"]: chart["names"] for chart in points_of(runs, [None, None])["charts"]
    }
    # Shares together, others by themselves.
    assert charts["Tasks"] == ("task_choose_acc", "task_choose_acc_norm")
    assert charts["task_roll_perplexity"] == ("task_roll_perplexity",)
    for page in (report(runs[:1]), report(runs)):
        text = Parsed(page).text
        assert "choose_acc_norm" in text and "0.5 (step 80)" in text and "40 (step 80)" in text


def test_a_task_of_a_hostile_name_is_only_ever_text(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [step_line(1)])
    write_lines(run / "metrics.jsonl", [{"step": 1, f"task_{HOSTILE[:80]}": 0.5}], append=True)
    parsed = Parsed(report([gather(run), gather(run)]))
    assert "window.hacked" not in "".join(parsed.scripts[1:]) and "window.hacked" in parsed.text


def test_folders_for_transformers_are_beside_the_checkpoints(tmp_path: Path) -> None:
    run = eventful_run(tmp_path / "run")
    (run / "exports" / "step-00000090").mkdir()  # being written
    facts = gather(run)
    assert [(each.name, each.step) for each in facts.exported] == [
        ("exports/step-00000080", 80)
    ]
    assert "exports/step-00000080" in Parsed(report([facts])).text


def test_what_is_vendored_is_what_it_was() -> None:
    import importlib.util

    path = Path(__file__).parents[2] / "tools" / "vendor.py"
    spec = importlib.util.spec_from_file_location("vendor", path)
    vendor = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(vendor)
    assert vendor.wrong() == []
