"""The system's Chromium, driven by Playwright; where one of them is missing, the tests are skipped with the reason."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from report_runs import eventful_run, make_run, step_line

ARGUMENTS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip
SIZES = {"tiny": 20, "short": 10_000, "long": 100_000}


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    found = next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
    )
    if found is None:
        pytest.skip("no Chromium on this machine (Debian: chromium)")
    if find_spec("playwright") is None or find_spec("axe_core_python") is None:
        pytest.skip(
            "playwright or axe-core-python is not installed (tests/browser/requirements.txt)"
        )
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=found, args=ARGUMENTS)
        yield started
        started.close()


@pytest.fixture
def serve() -> Iterator[Callable[[Path], str]]:
    """Serves folders until the test is over, and its pages are closed."""
    with ExitStack() as stack:
        yield lambda folder: stack.enter_context(served(folder))


@pytest.fixture
def visit(browser: Any, serve: Any) -> Iterator[Callable[..., Any]]:
    """Opens a page; the test fails if it says anything on the console, raises, opens a dialog, or asks elsewhere."""
    wrong: list[str] = []
    contexts = []

    def go(address: str, **options: Any) -> Any:
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(120_000)  # what never comes fails; a busy machine takes long
        page.on("console", lambda message: wrong.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: wrong.append(f"error: {error}"))
        page.on("dialog", lambda dialog: wrong.append(f"dialog: {dialog.message}"))
        own = "file://" if address.startswith("file://") else "http://127.0.0.1:"
        page.on(
            "request",
            lambda request: None if request.url.startswith(own) else wrong.append(request.url),
        )
        page.goto(address)
        page.wait_for_selector("html[data-ready=yes]", state="attached")
        return page

    yield go
    for context in contexts:
        context.close()
    assert wrong == []


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address at which `threefold view` shows a folder, in this process."""
    from threefold.report.server import Server

    server = Server(folder, 0, token="t")
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/?token=t"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(20)


@pytest.fixture
def faults() -> Callable[[Any], list[str]]:
    """The serious and critical faults that axe-core finds in a page."""

    def found(page: Any) -> list[str]:
        import axe_core_python

        page.evaluate((Path(axe_core_python.__file__).parent / "axe.min.js").read_text())
        result = page.evaluate("() => axe.run()")
        return [
            f"{each['id']}: {each['nodes'][0]['html'][:200]} {each['nodes'][0].get('failureSummary', '')}"
            for each in result["violations"]
            if each["impact"] in ("serious", "critical")
        ]

    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of 20, 10,000 and 100,000 steps, each with a spike; and one with everything that can happen."""
    runs = tmp_path_factory.mktemp("runs")
    for name, size in SIZES.items():
        lines = [step_line(step) for step in range(1, size + 1)]
        lines[size // 2] = step_line(size // 2 + 1, loss=8.0)
        make_run(runs / name, lines)
    eventful_run(runs / "eventful")
    return runs


def shown(page: Any) -> None:
    """Waits until the charts are drawn, and what is judged of the runs has come: the page does not move any more."""
    page.wait_for_selector(".chart canvas")
    page.wait_for_function(
        "() => [...document.querySelectorAll('[data-box]:not([data-box=top])')]"
        ".every((box) => box.querySelector('[data-part=data]'))"
    )
    page.wait_for_function(
        "() => document.querySelector('.chart .read').textContent.includes('at step')"
    )
