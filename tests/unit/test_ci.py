"""tools/ci.py on small stages of the tests' own: all of them report, whatever one of them does."""

from __future__ import annotations

import importlib.util
import io
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

from ranks.faults import alive, wait_for

ROOT = Path(__file__).parents[2]
TOOL = ROOT / "tools" / "ci.py"


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("threefold_ci", TOOL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


ci = _load()


def stage(
    name: str, script: str, *, lane: str = ci.COMPUTE, limit_s: float = 60.0, prepare: str = ""
) -> ci.Stage:
    """A stage that runs a shell script."""
    return ci.Stage(
        name, ("sh", "-c", script), lane, limit_s, ("sh", "-c", prepare) if prepare else ()
    )


def run(folder: Path, *stages: ci.Stage) -> tuple[int, dict[str, ci.Result], str]:
    """The exit code, the results by stage, and what was printed."""
    out = io.StringIO()
    whole = ci.Run(stages, folder / "out", out, grace_s=0.5)
    return whole(), whole.results, out.getvalue()


def write_test(folder: Path, text: str) -> str:
    """A shell command that runs pytest on one file, with the project's settings, journal and retries."""
    file = folder / "test_small.py"
    file.write_text(f"import pytest\n{text}")
    settings = (
        f"-c {ROOT / 'pyproject.toml'} --rootdir {folder} -p no:cacheprovider -p conftest"
    )
    return f"PYTHONPATH={ROOT / 'tests'} exec {sys.executable} -m pytest -q {settings} {file}"


def test_others_report_where_one_fails(tmp_path: Path) -> None:
    failing = stage(
        "first", "echo the reason; for i in $(seq 30); do echo line $i; done; exit 3"
    )
    code, results, printed = run(
        tmp_path, failing, stage("second", "echo well"), stage("third", "exit 2", lane=ci.WAIT)
    )
    assert code == 3
    assert {name: result.outcome for name, result in results.items()} == {
        "first": "failed",
        "second": "passed",
        "third": "failed",
    }
    assert "the reason" in printed  # the whole output of what failed
    table = printed[printed.rindex("\nstage ") :]
    assert [
        line.split()[:2]
        for line in table.splitlines()
        if line.startswith(("first", "second", "third"))
    ] == [["first", "failed"], ["second", "passed"], ["third", "failed"]]


def test_end_of_what_passes_has_pytests_closing_line(tmp_path: Path) -> None:
    lines = "; ".join(f"echo line {number}" for number in range(ci.TAIL_LINES + 5))
    code, _, printed = run(
        tmp_path, stage("only", f"echo begins; echo '3 passed, 1 skipped in 4.56s'; {lines}")
    )
    assert code == 0
    assert "3 passed, 1 skipped in 4.56s" in printed and "begins" not in printed
    assert f"line {ci.TAIL_LINES + 4}" in printed and "line 4\n" not in printed


def test_stage_that_hangs_is_named_with_its_test(tmp_path: Path) -> None:
    started = tmp_path / "child"
    events = "".join(f'{{"event": "{event}", "test": "{test}"}}\n' for event, test in EVENTS)
    (tmp_path / "events").write_text(events)
    script = f'cp {tmp_path / "events"} "${ci.JOURNAL}/tests.jsonl"; sleep 600 & echo $! > {started}; wait'
    code, results, printed = run(
        tmp_path, stage("hangs", script, limit_s=4), stage("after", "true")
    )
    assert code == ci.HUNG
    assert results["hangs"].outcome == "hung" and results["after"].outcome == "passed"
    assert "no end within 4 s; running: test_small.py::test_that_hangs" in printed
    assert not alive(int(started.read_text()))


EVENTS = (
    ("start", "test_small.py::test_before"),
    ("finish", "test_small.py::test_before"),
    ("start", "test_small.py::test_that_hangs"),
)


def test_child_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    numbers = tmp_path / "numbers"
    # Both ignore the signal, and the second has a process group of its own, as ranks have.
    deaf = f'trap "" TERM; echo $$ >> {numbers}; sleep 600'
    code, results, _ = run(
        tmp_path, stage("deaf", f"setsid sh -c '{deaf}' & {deaf}", limit_s=4)
    )
    assert code == ci.HUNG and results["deaf"].outcome == "hung"
    processes = [int(line) for line in numbers.read_text().split()]
    assert len(processes) == 2
    wait_for(lambda: not any(alive(process) for process in processes), "their end")


def test_process_that_a_stage_leaves_is_killed_and_counted(tmp_path: Path) -> None:
    code, results, printed = run(
        tmp_path, stage("leaves", f"setsid sleep 600 & echo $! > {tmp_path / 'number'}")
    )
    assert code == 0 and results["leaves"].outcome == "passed"
    # It may not be a `sleep` yet, but the shell that becomes one.
    assert re.search(r"processes left running, and killed: 1 \(.*sleep 600", printed), printed
    wait_for(
        lambda: not alive(int((tmp_path / "number").read_text())), "the end of what was left"
    )


def test_stage_that_cannot_be_prepared_is_skipped_with_the_reason(tmp_path: Path) -> None:
    missing = stage("docs", "exit 1", prepare="echo no network here; exit 1")
    noted = stage("launchers", f'echo "no srun here" >> "${ci.NOTES}"')
    code, results, printed = run(tmp_path, missing, noted)
    assert code == 0
    assert (
        results["docs"].outcome == "skipped"
        and "cannot be done here: no network here" in printed
    )
    assert results["launchers"].notes == ["no srun here"]


def test_tests_are_counted_and_named(tmp_path: Path) -> None:
    tests = (
        "def test_good(): pass\n"
        "def test_bad(): assert False\n"
        "@pytest.fixture\ndef broken(): raise OSError\n"
        "def test_without_set_up(broken): pass\n"
        "def test_skipped(): pytest.skip('no srun here')\n"
    )
    code, results, printed = run(tmp_path, stage("tests", write_test(tmp_path, tests)))
    tests_of = results["tests"].tests
    assert code == 1 and [
        tests_of.count(outcome) for outcome in ("passed", "failed", "skipped")
    ] == [1, 2, 1]
    (journal,) = (tmp_path / "out" / "tests").glob("*.jsonl")
    assert journal.read_text().count('"start"') == 4 and tests_of.running == []
    assert (
        "  tests: test_small.py::test_bad" in printed
        and "  tests: test_small.py::test_without_set_up" in printed
    )
    assert "  tests: 1 x no srun here" in printed


def test_stage_of_skipped_tests_says_so(tmp_path: Path) -> None:
    code, results, printed = run(
        tmp_path,
        stage(
            "tests", write_test(tmp_path, "def test_skipped(): pytest.skip('no srun here')\n")
        ),
    )
    assert code == 0 and results["tests"].outcome == "skipped"
    assert "every test was skipped" in printed and "1 x no srun here" in printed


def test_only_what_is_marked_is_tried_again_and_that_is_printed(tmp_path: Path) -> None:
    text = (
        "from pathlib import Path\n"
        f"FOLDER = Path({str(tmp_path)!r})\n"
        "def second_time(name):\n"
        "    there = (FOLDER / name).exists()\n"
        "    (FOLDER / name).touch()\n"
        "    return there\n"
        "@pytest.mark.timing\n"
        "def test_marked(): assert second_time('marked')\n"
        "def test_plain(): assert second_time('plain')\n"
    )
    code, results, printed = run(tmp_path, stage("tests", write_test(tmp_path, text)))
    tests_of = results["tests"].tests
    why = "AssertionError: assert False |  +  where False = second_time('{}')"
    assert code == 1 and tests_of.failed() == [
        f"test_small.py::test_plain: {why.format('plain')}"
    ]
    assert tests_of.retried == [f"test_small.py::test_marked: {why.format('marked')}"]
    assert "retried:\n  tests: test_small.py::test_marked" in printed


def test_crash_is_named_where_the_stage_passed(tmp_path: Path) -> None:
    text = (
        "import sys\ndef test_good(): print('Fatal Python error: Aborted', file=sys.stderr)\n"
    )
    code, results, _ = run(
        tmp_path,
        stage("tests", write_test(tmp_path, text)),
        stage("words", "echo 'malloc_consolidate(): invalid'"),
    )
    assert code == 0
    assert results["tests"].notes == [
        "a process crashed (1 times in the output): test_small.py::test_good: Fatal Python error: Aborted"
    ]
    assert "malloc_consolidate" in results["words"].notes[0]


def test_lanes_run_side_by_side_and_after_what_comes_first(tmp_path: Path) -> None:
    order = tmp_path / "order"
    # Each of the two waits for the other: one after the other, neither would end.
    meet = "echo >> {own}; until [ -e {other} ]; do sleep 0.02; done"
    one, two = tmp_path / "one", tmp_path / "two"
    code, _, _ = run(
        tmp_path,
        stage("compute", meet.format(own=one, other=two), limit_s=30),
        stage("wait", meet.format(own=two, other=one), lane=ci.WAIT, limit_s=30),
        stage(
            "install", f"[ -e {one} ] || [ -e {two} ] || echo first > {order}", lane=ci.FIRST
        ),
    )
    assert code == 0 and order.read_text() == "first\n"


def test_stage_waits_for_one_of_the_other_lane(tmp_path: Path) -> None:
    there = tmp_path / "there"
    later = ci.Stage("later", ("sh", "-c", f"[ -e {there} ]"), ci.COMPUTE, 60, after="earlier")
    earlier = stage("earlier", f"sleep 0.5; touch {there}", lane=ci.WAIT)
    assert run(tmp_path, later, earlier)[0] == 0
    there.unlink()
    assert run(tmp_path, later)[0] == 1  # alone, it waits for nobody


def test_others_do_not_run_without_what_comes_first(tmp_path: Path) -> None:
    code, results, printed = run(
        tmp_path,
        stage("install", "exit 2", lane=ci.FIRST),
        stage("test", f"touch {tmp_path / 'ran'}"),
    )
    assert (
        code == 2 and results["test"].outcome == "not run" and "install did not pass" in printed
    )
    assert not (tmp_path / "ran").exists()


PROGRAM = """
import signal, sys
sys.path.insert(0, {tools!r})
from pathlib import Path
import ci

def stage(lane):
    return ci.Stage(lane, ("sh", "-c", "echo $$ > {folder}/" + lane + "; sleep 600"), lane, 600)

stages = [stage(ci.COMPUTE), stage(ci.WAIT), ci.Stage("later", ("true",), ci.WAIT, 60)]
run = ci.Run(stages, Path({folder!r}) / "out", sys.stdout, grace_s=0.5)
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, run.stop)
sys.exit(run())
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_ends_everything_and_the_table_is_printed(tmp_path: Path, number: int) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(tools=str(TOOL.parent), folder=str(tmp_path)))
    numbers = [tmp_path / ci.COMPUTE, tmp_path / ci.WAIT]
    with subprocess.Popen(
        [sys.executable, str(program)], stdout=subprocess.PIPE, text=True
    ) as process:
        wait_for(
            lambda: all(path.exists() and path.read_text().strip() for path in numbers),
            "both stages",
        )
        os.kill(process.pid, number)
        printed, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert not any(alive(int(path.read_text())) for path in numbers)
    table = printed[printed.rindex("\nstage ") :]
    assert table.count(" stopped   ") == 2 and "the run was stopped before" in table


def test_stages_are_targets_of_the_makefile_and_installed_first() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for name in (word for each in ci.STAGES for word in each.command[1:] if "=" not in word):
        assert f"\n{name}:" in makefile
    assert [each.name for each in ci.chosen(["docs"])] == ["install", "docs"]
    assert ci.chosen([]) == list(ci.STAGES)


def test_unknown_stage_is_refused() -> None:
    done = subprocess.run(
        [sys.executable, str(TOOL), "tset"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2 and "tset: not one of install, check" in done.stderr


def test_journal_that_breaks_off_is_read_up_to_there(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"event": "start", "test": "t"}\n{"event": "rep')
    assert ci.read_tests(tmp_path).running == ["t"]


def test_limit_ends_in_time(tmp_path: Path) -> None:
    began = time.monotonic()
    assert run(tmp_path, stage("sleeps", "sleep 600", limit_s=0.5))[0] == ci.HUNG
    assert time.monotonic() - began < 60
