"""The page as a bench: zoom along y, hidden curves, time as it passed, charts as files, runs by their keys."""

from __future__ import annotations

import csv
import struct
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from browser.conftest import shown
from report_runs import at, make_run, step_line
from threefold.report.document import report
from threefold.report.facts import gather

pytestmark = [pytest.mark.browser, pytest.mark.timing]
SIZES = [{"width": 1280, "height": 900}, {"width": 400, "height": 800}]


def runs_of(folder: Path) -> list[Path]:
    """Four runs that differ in their rates, the last of which went back once, an hour later."""
    runs = []
    for name, rate in (("a", 0.1), ("b", 0.02), ("c", 0.003)):
        runs.append(
            make_run(
                folder / name, [step_line(step, loss=5 * rate + step) for step in range(1, 21)]
            )
        )
    again = [step_line(step, time=at(3600 + step)) for step in range(11, 31)]
    events = [{"event": "start", "time": at(3605), "start": 2, "step": 10}]
    runs.append(
        make_run(
            folder / "d", [*(step_line(step) for step in range(1, 21)), *again], events=events
        )
    )
    for run, rate in zip(runs, (0.1, 0.02, 0.003, 0.1), strict=True):
        (run / "config.yaml").write_text(f"optimizer: {{lr: {rate}}}\ntrain: {{steps: 100}}\n")
    return runs


@pytest.fixture
def page_of(tmp_path: Path, visit: Any) -> Any:
    """Opens the page of some of the runs, by number."""
    runs = runs_of(tmp_path / "runs")

    def opened(*numbers: int, link: str = "", **options: Any) -> Any:
        target = tmp_path / "page.html"
        target.write_bytes(report([gather(runs[number]) for number in numbers]))
        page = visit(target.as_uri() + link, **options)
        shown(page)
        return page

    return opened


def saved(page: Any, kind: str, to: Path) -> Path:
    with page.expect_download() as download:
        page.get_by_role("button", name=f"Loss as {kind}").click()
    assert download.value.suggested_filename.endswith(f"Loss.{kind.lower()}")
    download.value.save_as(to)
    return to


def y_range(page: Any) -> list[float]:
    """The range of the first chart's y axis, of the link that holds it."""
    low, high = page.evaluate("new URLSearchParams(location.hash.slice(1)).get('y0')").split(
        "~"
    )
    return [float(low), float(high)]


@pytest.mark.parametrize("size", SIZES)
def test_a_range_of_y_is_zoomed_by_dragging_kept_in_the_link_and_ended(
    size: dict[str, int], page_of: Any
) -> None:
    page = page_of(0, viewport=size)
    page.locator(".u-over").first.scroll_into_view_if_needed()
    box = page.locator(".u-over").first.bounding_box()
    page.mouse.move(box["x"] + 100, box["y"] + 20)
    page.mouse.down()
    page.mouse.move(box["x"] + 104, box["y"] + 100, steps=5)
    page.mouse.up()
    page.wait_for_function("() => location.hash.includes('y0=')")
    low, high = y_range(page)
    assert 0 < low < high < 22 and "x=" not in page.url  # the losses are 1.5 to 20.5
    again = page_of(0, link=page.evaluate("location.hash"), viewport=size)
    assert y_range(again) == [low, high]
    again.get_by_role("button", name="show all").click()
    again.wait_for_function("() => location.hash === ''")
    assert again.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_the_keyboard_zooms_along_y(page_of: Any) -> None:
    page = page_of(0)
    page.locator("[aria-roledescription=chart]").first.focus()
    page.keyboard.press("End")
    page.keyboard.press("ArrowUp")
    page.wait_for_function("() => location.hash.includes('y0=')")
    low, high = y_range(page)
    assert low < 20.5 < high and high - low < 15
    page.keyboard.press("0")
    page.wait_for_function("() => location.hash === ''")


def test_a_curve_is_hidden_by_its_button(page_of: Any) -> None:
    page = page_of(0)
    button = page.get_by_role("button", name="data_wait_s")
    read = page.locator(".chart", has_text="Time of a step").locator(".read")
    assert "data_wait_s" in read.inner_text() and button.get_attribute("aria-pressed") == "true"
    button.click()
    assert "data_wait_s" not in read.inner_text() and "step_time_s" in read.inner_text()
    assert button.get_attribute("aria-pressed") == "false"
    assert page.evaluate("document.activeElement.textContent") == "data_wait_s"
    button.click()
    assert "data_wait_s" in read.inner_text()


def test_a_chart_is_saved_as_its_numbers_as_paths_and_as_a_picture(
    page_of: Any, tmp_path: Path
) -> None:
    page = page_of(3)
    page.get_by_role("combobox").select_option("seconds")
    page.wait_for_function("() => location.hash === '#by=seconds'")
    with saved(page, "CSV", tmp_path / "a.csv").open() as file:
        lines = list(csv.DictReader(file))
    points = {(int(line["pass"]), int(line["step"])): line for line in lines}
    assert len(lines) == len(points) == 40  # 20 of each pass
    assert float(points[2, 30]["value"]) == pytest.approx(step_line(30)["loss"], rel=1e-6)
    # What was trained again an hour later is at the time at which it was trained.
    assert float(points[1, 20]["seconds"]) == 19 and float(
        points[2, 11]["seconds"]
    ) == pytest.approx(3610, abs=1)
    drawing = ElementTree.parse(saved(page, "SVG", tmp_path / "a.svg"))
    texts = [each.text for each in drawing.iter("{http://www.w3.org/2000/svg}text")]
    assert "Loss by seconds" in texts and "loss" in texts and "resume" in texts
    content = saved(page, "PNG", tmp_path / "a.png").read_bytes()
    assert (
        content[:8] == b"\x89PNG\r\n\x1a\n" and min(struct.unpack(">II", content[16:24])) > 150
    )


def test_a_name_that_a_spreadsheet_would_compute_is_a_text(tmp_path: Path, visit: Any) -> None:
    run = make_run(tmp_path / "=1+1", [step_line(1), step_line(2)])
    target = tmp_path / "page.html"
    target.write_bytes(report([gather(run)]))
    page = visit(target.as_uri())
    shown(page)
    assert (
        saved(page, "CSV", tmp_path / "a.csv")
        .read_text()
        .splitlines()[1]
        .startswith('"\'=1+1"')
    )


@pytest.mark.parametrize(
    ("words", "left"),
    [
        ("lr>0.01", ["a", "b", "d"]), ("lr<=0.02", ["b", "c"]), ("optimizer.lr=0.1 step>20", ["d"]),
        ("lr!=0.1", ["b", "c"]), ("nothing>1", []), ("done", []), ("c", ["c"]), ("lr>", []),
    ],
)  # fmt: skip
@pytest.mark.parametrize("size", SIZES)
def test_runs_are_filtered_by_their_keys(
    words: str, left: list[str], size: dict[str, int], tmp_path: Path, serve: Any, visit: Any
) -> None:
    runs_of(tmp_path / "runs")
    page = visit(serve(tmp_path / "runs"), viewport=size)
    page.get_by_label("compare a").wait_for()
    page.get_by_label("filter runs").fill(words)
    rows = page.locator("[data-part=list] tbody tr:visible th")
    assert sorted(rows.all_inner_texts()) == left
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_runs_are_sorted_by_a_column_and_compared_by_a_filter(
    scheme: str, tmp_path: Path, serve: Any, visit: Any, faults: Any
) -> None:
    runs_of(tmp_path / "runs")
    page = visit(serve(tmp_path / "runs"), color_scheme=scheme)
    page.get_by_role("button", name="optimizer.lr").click()
    names = page.locator("[data-part=list] tbody th")
    assert names.all_inner_texts()[:2] == ["c", "b"]
    page.get_by_role("button", name="optimizer.lr").click()
    assert names.all_inner_texts()[2:] == ["b", "c"]
    assert page.locator("th[aria-sort=descending]").inner_text() == "optimizer.lr"
    # What is made anew stays sorted.
    make_run(tmp_path / "runs" / "e", [step_line(1)])
    (tmp_path / "runs" / "e" / "config.yaml").write_text(
        "optimizer: {lr: 0.01}\ntrain: {steps: 100}\n"
    )
    page.get_by_label("compare e").wait_for()
    assert names.all_inner_texts()[2:] == ["b", "e", "c"]
    assert faults(page) == []
    for name in "abc":
        page.get_by_label(f"compare {name}").check()
    page.get_by_role("button", name="compare").click()
    shown(page)
    read = page.locator(".chart .read").first
    assert "a: loss" in read.inner_text() and "c: loss" in read.inner_text()
    page.get_by_label("filter runs").fill("lr<0.05")
    page.wait_for_function(
        "() => !document.querySelector('.chart .read').textContent.includes('a: loss')"
    )
    assert "b: loss" in read.inner_text()
    assert page.locator("[data-part=compared] tbody tr:visible").count() == 2
    assert faults(page) == []
