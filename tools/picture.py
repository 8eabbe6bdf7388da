"""Takes the picture of the README, docs/images/report.png: `python tools/picture.py [--keep FOLDER] [--to FILE]`.

It trains for 150 steps (some minutes on two cores) on dp=2 x tp=2; after 90 it is stopped, as a cluster would, and
goes on on dp=2 x cp=2. The text is the standard library's source, with one short document in another script. Of the
page that `threefold report` writes of this run, the system's Chromium shows two curves, and the first of what stands
out: the text behind the spike. playwright drives it (tests/browser/requirements.txt).
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "images" / "report.png"
MOST_BYTES = 200_000
CHARACTERS = 600_000
STEPS, STOPPED = 150, 90
SHOWN = """
section.part, footer, .chart:nth-of-type(n+3) { display: none }
section[data-part=why] { display: block }
[data-part=why] tbody tr:not(:first-of-type) { display: none }
"""
LETTERS = "აბგდევზთიკლმნოპჟრსტუფქღყშჩცძწჭხჯჰ"  # Georgian: no source code has them


def write_texts(folder: Path) -> None:
    """Text to train on and to evaluate: source code, and one document that stands out."""
    (folder / "corpus").mkdir(parents=True)
    size = 0
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("[a-z]*.py")):
        text = file.read_text(encoding="utf-8", errors="ignore")
        size += len(text)
        if size > CHARACTERS:
            (folder / "held-out.py").write_text(text[:20_000], encoding="utf-8")
            break
        (folder / "corpus" / file.name).write_text(text, encoding="utf-8")
    drawn = random.Random(0)
    (folder / "corpus" / "letters.txt").write_text(
        "".join(drawn.choices(LETTERS, k=150)), encoding="utf-8"
    )


def threefold(folder: Path, *arguments: str, stop_at: int | None = None) -> None:
    """Runs a command in `folder`; at a step, if one is given, it is asked to save and end."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, "-m", "threefold", *arguments], cwd=folder, env=environment
    ) as running:
        metrics = folder / "run" / "metrics.jsonl"
        while stop_at is not None and running.poll() is None:
            time.sleep(0.1)
            if metrics.exists() and f'"step": {stop_at},' in metrics.read_text(
                encoding="utf-8"
            ):
                running.send_signal(signal.SIGTERM)
                stop_at = None
        if running.wait() not in (0, 75):
            sys.exit(f"threefold {arguments[0]} failed")


def make_page(folder: Path) -> Path:
    """The page of a run that is trained in `folder`."""
    write_texts(folder)
    threefold(
        folder, "train", "--data.source", "corpus", "--mesh.dp", "2", "--mesh.cp", "1", "--mesh.tp", "2",
        "--log.dir", "run", "--log.every", "1", "--train.steps", str(STEPS),
        "--eval.source", "held-out.py", "--eval.every", "30", stop_at=STOPPED,
    )  # fmt: skip
    threefold(folder, "resume", "run", "--mesh.cp", "2", "--mesh.tp", "1")
    threefold(folder, "report", "run")
    return folder / "run" / "report.html"


def take(page: Path, picture: Path) -> None:
    """Writes some parts of a page, as Chromium shows them, to `picture`."""
    from playwright.sync_api import sync_playwright

    chromium = next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
    )
    if chromium is None:
        sys.exit("no Chromium on this machine (Debian: chromium)")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=chromium, args=["--headless", "--no-sandbox", "--disable-gpu"]
        )
        shown = browser.new_page(
            viewport={"width": 1280, "height": 560}, color_scheme="light", bypass_csp=True
        )
        shown.goto(page.as_uri())
        shown.wait_for_selector("html[data-ready=yes]", state="attached")
        shown.add_style_tag(content=SHOWN)
        picture.parent.mkdir(exist_ok=True)
        shown.screenshot(path=picture, full_page=True)
        browser.close()
    if picture.stat().st_size > MOST_BYTES:
        sys.exit(f"{picture} has {picture.stat().st_size:,} bytes, more than {MOST_BYTES:,}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--keep",
        type=Path,
        help="a folder for the texts and the run; if it has the run, only show it",
    )
    parser.add_argument("--to", type=Path, default=PICTURE)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        page = folder / "run" / "report.html"
        take(page if page.exists() else make_page(folder), options.to)


if __name__ == "__main__":
    main()
