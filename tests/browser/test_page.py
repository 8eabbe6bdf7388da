"""The page of a run in a real browser: drawn, without an error, usable with a keyboard, readable by everyone, live."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from browser.conftest import SIZES, served, shown
from threefold.report.document import report
from threefold.report.facts import gather

pytestmark = [pytest.mark.browser, pytest.mark.timing]
# Pixels of a chart that are not empty: axes alone have fewer.
DRAWN = """() => [...document.querySelectorAll('.chart canvas')].map((canvas) => {
  const {data} = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
  const colours = new Set();
  for (let at = 0; at < data.length; at += 4) {
    if (data[at + 3] > 200) colours.add(data[at] << 16 | data[at + 1] << 8 | data[at + 2]);
  }
  return colours.size;
})"""


@pytest.fixture(scope="module", params=["report", "view"])
def address_of(
    request: pytest.FixtureRequest, folder: Path, tmp_path_factory: Any
) -> Iterator[Callable[..., str]]:
    """The address of a page of some runs: a file on the disk, or of a server."""
    if request.param == "view":
        with served(folder) as address:
            yield lambda *names: address.replace(
                "?", "run?" + "".join(f"run={name}&" for name in names)
            )
        return
    pages = tmp_path_factory.mktemp("pages")

    def written(*names: str) -> str:
        target = pages / f"{'-'.join(names)}.html"
        if not target.exists():
            target.write_bytes(report([gather(folder / name) for name in names]))
        return target.as_uri()

    yield written


@pytest.mark.parametrize("name", [*SIZES, "eventful"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_page_is_drawn_and_has_no_serious_fault(
    name: str, scheme: str, address_of: Any, visit: Any, faults: Any
) -> None:
    page = visit(address_of(name), color_scheme=scheme)
    shown(page)
    colours = page.evaluate(DRAWN)
    assert len(colours) >= 8 and min(colours) > 5
    assert page.evaluate("window.hacked") is None
    page.evaluate(
        "document.querySelectorAll('details').forEach((each) => { each.open = true; })"
    )
    assert faults(page) == []


@pytest.mark.parametrize("name", SIZES)
def test_a_page_can_be_used_with_a_keyboard(name: str, address_of: Any, visit: Any) -> None:
    page = visit(address_of(name))
    shown(page)
    for _ in range(20):
        page.keyboard.press("Tab")
        if (
            page.evaluate("document.activeElement.getAttribute('aria-roledescription')")
            == "chart"
        ):
            break
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"
    read = page.locator(".chart .read").first
    page.keyboard.press("Home")
    assert "at step 1 " in f"{read.inner_text()} "
    page.keyboard.press("ArrowRight")
    # Of a long run some steps are points.
    assert ("at step 2" if name == "tiny" else "at step") in read.inner_text()
    assert not read.inner_text().endswith("at step 1")
    page.keyboard.press("End")
    assert f"at step {SIZES[name]:,}" in read.inner_text()
    reset = page.get_by_role("button", name="show all")
    assert reset.is_disabled()
    page.keyboard.press("Home")
    page.keyboard.press("+")
    page.wait_for_function("() => !document.querySelector('#controls button').disabled")
    page.keyboard.press("0")
    page.wait_for_function("() => document.querySelector('#controls button').disabled")
    page.keyboard.press("Home")
    page.keyboard.press("Enter")
    assert "Step 1\n" in page.locator("#chosen").inner_text()
    assert page.evaluate("document.activeElement.id") == "chosen"
    page.get_by_role("button", name="close").press("Enter")
    assert (
        page.evaluate("document.activeElement.getAttribute('aria-roledescription')") == "chart"
    )


def test_smoothing_logarithms_and_zoom(address_of: Any, visit: Any) -> None:
    page = visit(address_of("short"))
    shown(page)
    before = page.evaluate("document.querySelector('.chart canvas').toDataURL()")
    for label, act in (("smoothing", "fill"), ("log y", "check"), ("log x", "check")):
        control = page.get_by_label(label)
        control.fill("0.9") if act == "fill" else control.check()
        page.wait_for_function(
            "(before) => document.querySelector('.chart canvas').toDataURL() !== before",
            arg=before,
        )
        before = page.evaluate("document.querySelector('.chart canvas').toDataURL()")
    page.get_by_label("log x").uncheck()
    for by, said in (("tokens", "at token "), ("seconds", " s"), ("step", "at step ")):
        page.get_by_role("combobox").select_option(by)
        page.wait_for_function(
            "(by) => document.querySelector('.chart .read').textContent.includes(by)", arg=said
        )
    box = page.locator(".u-over").first.bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.4, box["y"] + 50)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + 50, steps=5)
    page.mouse.up()
    page.wait_for_function("() => !document.querySelector('#controls button').disabled")
    assert page.locator("#chosen").count() == 0  # a drag is no click
    page.get_by_role("button", name="show all").click()
    page.wait_for_function("() => document.querySelector('#controls button').disabled")


def test_a_spike_is_shown_at_every_size_and_a_click_names_its_step(
    address_of: Any, visit: Any
) -> None:
    page = visit(address_of("long"))
    shown(page)
    box = page.locator(".u-over").first.bounding_box()
    for x in range(int(box["width"] / 2) - 6, int(box["width"] / 2) + 7):
        page.mouse.move(box["x"] + x, box["y"] + 8)
        if "loss 8 at step 50,001" in page.locator(".chart .read").first.inner_text():
            break
    page.mouse.click(box["x"] + x, box["y"] + 8)
    assert "Step 50,001\n" in page.locator("#chosen").inner_text()


def test_runs_are_laid_over_one_another(address_of: Any, visit: Any, faults: Any) -> None:
    page = visit(address_of("tiny", "eventful"))
    shown(page)
    read = page.locator(".chart .read").first
    assert "tiny: loss" in read.inner_text() and "eventful: loss" in read.inner_text()
    page.get_by_role("checkbox", name="tiny").uncheck()
    page.wait_for_function(
        "() => !document.querySelector('.chart .read').textContent.includes('tiny')"
    )
    assert faults(page) == []


@pytest.mark.parametrize("name", ["tiny", "eventful"])
def test_a_phone_and_a_sheet_of_paper(
    name: str, address_of: Any, visit: Any, faults: Any
) -> None:
    page = visit(
        address_of(name), viewport={"width": 360, "height": 700}, is_mobile=True, has_touch=True
    )
    shown(page)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert faults(page) == []
    page.emulate_media(media="print")
    assert (
        not page.locator("#controls").is_visible()
        and page.locator(".chart canvas").first.is_visible()
    )
    assert page.pdf()[:4] == b"%PDF"


def test_what_happened_to_a_run_is_on_its_page(address_of: Any, visit: Any) -> None:
    page = visit(address_of("eventful"))
    shown(page)
    text = page.locator("main").inner_text()
    for said in (
        "done",
        "Damaged lines",
        "metrics.jsonl",
        "Samples",
        "Late ranks",
        "What stands out",
        "4 ranks",
    ):
        assert said in text, said
    assert "</script><script>window.hacked = 1</script>" in text
    page.get_by_text("All numbers, unrounded").click()
    assert page.locator("caption", has_text="Every curve in numbers").is_visible()
