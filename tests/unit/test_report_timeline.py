"""The phases of the ranks, tasks and exports on a run's page: every bar in its place, few enough, only text."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from test_report import Parsed

from report_runs import HOSTILE, eventful_run, make_run, step_line, write_lines, write_timeline
from threefold.report.document import points_of, report
from threefold.report.drawn_timeline import timeline_part
from threefold.report.gathered import gather
from threefold.report.lanes import traced

STEPS = range(10, 14)


def bars(part: str) -> list[list[list[float]]]:
    """Of each lane the bars: x, width; phase, step, begin and length in ms."""
    lanes = re.findall(r"<svg[^>]*aria-hidden.*?</svg>", part)
    one = re.compile(r'x="(\S+)" width="(\S+)" height="14" data-at="(\d+) (\d+) (\S+) (\S+)"')
    return [[list(map(float, found)) for found in one.findall(lane)] for lane in lanes]


def test_each_phase_of_each_rank_is_a_bar_where_it_was(tmp_path: Path) -> None:
    write_timeline(tmp_path, ranks=3, names=["log"])
    found = traced(tmp_path)
    part = timeline_part(found)
    assert re.findall(r'<th scope="col">(.*?)</th>', part) == ["rank", "data", "forward", "backward", "reduce", "log"]
    lanes = bars(part)
    assert [len(lane) for lane in lanes] == [5 * len(STEPS)] * 3
    whole = 0.113 * len(STEPS) * 1e3  # ms of the last rank, which reduces for longer
    for lane in lanes:
        assert [bar[3] for bar in lane] == [step for step in STEPS for _ in range(5)]
        for (x, width, _, _, begin, length), following in zip(lane, [*lane[1:], None], strict=True):
            assert x == pytest.approx(1e4 * begin / whole, abs=1) and width == pytest.approx(
                1e4 * length / whole, abs=1
            )
            assert following is None or following[4] == pytest.approx(begin + length, abs=0.01)
    assert max(x + width for lane in lanes for x, width, *_ in lane) == pytest.approx(1e4, abs=1)
    assert found.means[2, "host"]["reduce"] == pytest.approx(0.02, abs=1e-5)
    assert found.means[0, "host"]["reduce"] == pytest.approx(0.01, abs=1e-5)
    assert "rank 2" in part and "20.000" in part and "steps 10 to 13" in part


def test_a_long_timeline_is_cut_and_the_page_says_so(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [step_line(1)])
    write_timeline(run, ranks=70, steps=range(1, 101), names=[f"phase {number}" for number in range(40)])
    page = report([gather(run)])
    assert len(page) < 500_000
    text = Parsed(page).text
    assert "6 more ranks are not drawn" in text and re.search(r"of step 1 only the first \d+ phases of each rank", text)
    assert "step 1 to 1 of 1 to 100" in text.replace("steps", "step")
    lanes = bars(page.decode())
    assert len(lanes) == 64 and 1000 < sum(map(len, lanes)) <= 2400
    write_timeline(run, ranks=4, steps=range(1, 1001))
    for rank in range(4, 70):
        (run / "timeline" / f"rank-{rank:04}.json").unlink()
    found = traced(run)
    assert len(next(iter(found.means.values()))) == 4  # what was read before is not taken for what is there now
    assert sum(map(len, found.drawn.values())) == 2400
    assert found.notes == [
        "steps 1 to 150 of 1 to 1,000 are drawn; timeline/timeline.json has all of them, for ui.perfetto.dev"
    ]


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{}", b"[]", b'{"traceEvents": 1}', b'{"traceEvents": ["ph"]}', b"{" * 2000, b"\xff",
        *(f'{{"traceEvents": [{{"ph": "X", "name": "a", "pid": {pid}, "tid": {tid}, "ts": {ts}, "dur": {dur}, "args": '
          f'{{"step": 1}}}}]}}'.encode()
          for pid, tid, ts, dur in (
              ("1e999", 0, 1, 1), (0, 7, 1, 1), (0, 0, "NaN", 1), (0, 0, 1, "1e999"), (0, 0, 1, -5), (0, 0, 1, 1e300),
              (10**4000, 0, 1, 1), (-1, 0, 1, 1),
          )),
    ],
)  # fmt: skip
def test_a_file_that_no_rank_has_written_is_named_and_the_others_are_drawn(tmp_path: Path, content: bytes) -> None:
    write_timeline(tmp_path, ranks=2)
    (tmp_path / "timeline" / "rank-0000.json").write_bytes(content)
    part = timeline_part(traced(tmp_path))
    assert "rank-0000.json is not what a rank writes" in part and len(bars(part)) == 1


def test_names_of_phases_are_only_ever_text(tmp_path: Path) -> None:
    run = eventful_run(tmp_path / "run")
    parsed = Parsed(report([gather(run)]))
    assert "window.hacked" not in "".join(parsed.scripts[1:]) and parsed.running == ["href"]
    assert "style" not in parsed.running and HOSTILE[:20] in parsed.text


def test_figures_of_tasks_are_curves_and_among_the_first_figures(tmp_path: Path) -> None:
    runs = [gather(eventful_run(tmp_path / name)) for name in "ab"]
    charts = {chart["title"]: chart["names"] for chart in points_of(runs, [None, None])["charts"]}
    assert charts["Tasks"] == ("task_choose_acc", "task_choose_acc_norm")  # shares together, others by themselves
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
    assert [(each.name, each.step) for each in facts.exported] == [("exports/step-00000080", 80)]
    assert "exports/step-00000080" in Parsed(report([facts])).text


def test_a_page_stays_small_whatever_is_in_a_timeline(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [step_line(1)])
    write_timeline(run, ranks=2, steps=range(3), names=[f"{number} {'x' * 100_000}" for number in range(40)])
    write_timeline(run, ranks=1, steps=range(3), names=[f"{number} \u202e{HOSTILE}" for number in range(300)])
    for number in range(300):
        (run / "timeline" / f"rank-1{number:03}.json").write_text("{")
    page = report([gather(run)])
    assert len(page) < 600_000 and "other phases" in Parsed(page).text and "\u202e" not in page.decode()
