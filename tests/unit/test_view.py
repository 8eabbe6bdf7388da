"""Runs in the browser: only this machine and who has the token; what is new is sent, soon, and once."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient
from typer.testing import CliRunner

from report_runs import HOSTILE, eventful_run, make_run, step_line, write_lines
from threefold.commands import main
from threefold.commands import view as command
from threefold.report.run_list import runs_in, some_lines, spark
from threefold.report.server import View, _events, _lists, app_of, opened
from threefold.report.watched import WatchedRun

main._load(["view"])
TOKEN = "right-token"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_run(tmp_path / "runs" / "a", [step_line(step) for step in range(1, 21)])
    eventful_run(tmp_path / "runs" / "deep" / "b")
    return tmp_path / "runs"


@pytest.fixture
def client(folder: Path) -> TestClient:
    return TestClient(app_of(View(folder), token=TOKEN), base_url="http://127.0.0.1:1", follow_redirects=False)


def let_in(client: TestClient) -> TestClient:
    client.get(f"/?token={TOKEN}")
    return client


def test_nobody_is_let_in_without_the_token(client: TestClient) -> None:
    for path in ("/", "/run?run=a", "/values?run=a", "/events", "/step/1?run=a", "/nothing"):
        assert client.get(path).status_code == 403
        assert client.get(path, headers={"cookie": "threefold=wrong"}).status_code == 403
        assert client.get(f"{path}{'&' if '?' in path else '?'}token=wrong").status_code == 403
    assert client.get("/?token=").status_code == 403
    assert client.get("/?token=%C3%A9").status_code == 403


def test_the_token_becomes_a_cookie_and_leaves_the_address(client: TestClient) -> None:
    answer = client.get(f"/run?run=a&token={TOKEN}&x=%22%3E%3Cscript%3E")
    assert answer.status_code == 200 and TOKEN not in answer.text
    assert "url=./run?run=a" in answer.text and "<script" not in answer.text
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie and "SameSite=Strict" in cookie
    page = client.get("/run?run=a")
    assert page.status_code == 200 and "connect-src 'self'" in page.text


@pytest.mark.parametrize(
    "host",
    ["evil.example", "127.0.0.1.evil.example", "localhost.", "evil@127.0.0.1", "0.0.0.0", "127.0.0.1:x", "", "[::2]"],
)
def test_a_request_under_another_name_is_refused_even_with_the_token(client: TestClient, host: str) -> None:
    let_in(client)
    assert client.get("/", headers={"host": host}).status_code == 403
    assert client.get(f"/?token={TOKEN}", headers={"host": host}).status_code == 403


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost:9999", "[::1]:80", "LOCALHOST"])
def test_a_tunnel_may_have_another_port(client: TestClient, host: str) -> None:
    cookie = {"host": host, "cookie": f"threefold={TOKEN}"}
    assert client.get("/", headers=cookie).status_code == 200


def test_only_reading_is_possible_and_nothing_is_allowed_for_others(client: TestClient) -> None:
    let_in(client)
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "PATCH"):
        assert client.request(method, "/").status_code == 405
    headers = client.get("/", headers={"origin": "http://evil.example"}).headers
    assert not [name for name in headers if name.startswith("access-control")]
    assert headers["x-frame-options"] == "DENY" and headers["cache-control"] == "no-store"


def test_pages_of_a_folder(client: TestClient, folder: Path) -> None:
    let_in(client)
    page = client.get("/").text
    assert "run?run=deep%2Fb" in page and "<path d=" in page
    assert "<script>window.hacked" not in client.get("/run?run=deep/b").text
    both = client.get("/run?run=a&run=deep/b&run=a").text
    assert "Keys that differ" not in both and "Where each run stands" in both
    for path in (
        "/run",
        "/run?run=..",
        "/run?run=/etc",
        "/values?run=a/../a",
        "/events?run=a",
        "/events?run=a&after=x",
    ):
        assert client.get(path).status_code == 404, path
    values = client.get("/values?run=a").json()
    assert values["runs"][0]["cursor"] == [0, 20] and values["runs"][0]["key"] == "a"
    (inside,) = client.get("/values?run=a&step=5&step=7").json()
    assert inside["loss"]["x"] == [4, 5, 6, 7, 8] and client.get("/values?run=a&step=x").status_code == 404
    assert client.get("/values?run=a&step=500").json()[0]["loss"]["x"] == []
    assert client.get("/step/3?run=a").json() is None  # it has no record
    assert client.get("/step/x?run=a").status_code == 404


def heard(stream: Any, act: Callable[[], None], name: str) -> Any:
    """The first event of a name after `act`."""

    async def listen() -> Any:
        for _ in range(3):
            await anext(stream)  # what a page that has just been opened is sent first
        act()
        async for text in stream:
            if text.startswith(f"event: {name}\n"):
                return json.loads(text.partition("data: ")[2])

    return asyncio.run(asyncio.wait_for(listen(), 20))


def test_a_logged_step_is_sent_within_2_seconds_and_only_it(folder: Path) -> None:
    view = View(folder)
    stream = _events(view, ["a"], [view.values(["a"])["runs"][0]["cursor"]])
    new = step_line(21, loss=float("nan"), tokens=5)
    found = heard(stream, lambda: write_lines(folder / "a" / "metrics.jsonl", [new], append=True), "lines")
    (line,) = found["lines"]
    assert found["run"] == 0 and line["step"] == 21 and line["tokens"] == 5
    assert line["values"]["loss"] is None and line["values"]["lr"] == 1e-3


@pytest.mark.parametrize("change", ["rewind", "cut", "replaced"])
def test_after_a_rewind_or_another_file_all_values_are_asked_for(folder: Path, change: str) -> None:
    view, path = View(folder), folder / "a" / "metrics.jsonl"
    stream = _events(view, ["a"], [view.values(["a"])["runs"][0]["cursor"]])

    def act() -> None:
        if change == "rewind":
            write_lines(path, [step_line(5)], append=True)
        elif change == "cut":
            os.truncate(path, 0)
        else:
            write_lines(path.with_name("other"), [step_line(step, loss=1.0) for step in range(1, 41)])
            os.replace(path.with_name("other"), path)

    assert heard(stream, act, "values") == {}
    last = {"rewind": 5, "cut": None, "replaced": 40}[change]
    curve = view.values(["a"])["runs"][0]["curves"].get("loss", {"x": [None]})
    assert curve["x"][-1] == last


def test_a_reader_that_comes_late_gets_all_values(folder: Path) -> None:
    run = WatchedRun(folder / "a")
    assert run.since([0, 20]) == [] and len(run.since([0, 15]) or []) == 5
    for cursor in ([1, 0], [0, 21], [0, -1], [5, 5]):
        assert run.since(cursor) is None


def test_a_new_run_appears_in_the_list(folder: Path) -> None:
    view = View(folder)

    async def listen() -> str:
        async for text in (stream := _lists(view)):
            if "new-run" in text:
                view.ends.set()
                assert [each async for each in stream] == []
                return text
            if "deep/b" in text:
                make_run(folder / "new-run", [step_line(1), step_line(2)])
        return ""

    assert "running" in asyncio.run(asyncio.wait_for(listen(), 20))


def test_parts_are_sent_when_they_change_and_not_again(folder: Path) -> None:
    view = View(folder)

    async def listen() -> list[str]:
        stream, found = _events(view, ["deep/b"], [view.values(["deep/b"])["runs"][0]["cursor"]]), []
        async for text in stream:
            found.append(text)
            if "not proved" in text:  # the audit has answered
                break
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(each async for each in stream if each != ": \n\n"), 2)
        return found

    found = asyncio.run(asyncio.wait_for(listen(), 30))
    boxes = [json.loads(text.partition("data: ")[2]) for text in found if text.startswith("event: parts")]
    sent = [(box["box"], name) for box in boxes for name in box["changed"]]
    assert len(set(sent)) == len(sent) and {("top", "standing"), ("0", "data")} <= set(sent)
    assert HOSTILE not in json.dumps(boxes)


def test_where_ranks_are_is_read_from_their_memory(tmp_path: Path) -> None:
    from threefold.run.pulse import Pulse, place_of
    from threefold.training.progress import Phase

    pulse = Pulse.begin()
    if pulse is None:
        pytest.skip("no pulse here")
    log = tmp_path / "rank-0003.log"
    try:
        pulse.tell(Phase(7, 12, "backward"))
        assert place_of(os.getpid(), log) is None  # it does not write that log
        with log.open("w"):
            assert place_of(os.getpid(), log) == Phase(7, 12, "backward")
    finally:
        pulse.close()
    assert place_of(2**22 + 1, log) is None


def test_a_long_file_is_read_in_parts_for_the_list(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_lines(path, [step_line(step) for step in range(1, 20_001)])
    lines = some_lines(path)
    assert 100 < len(lines) < 2000 and lines[-1]["step"] == 20_000 and lines[0]["step"] < 10
    assert spark(lines).startswith("<svg") and spark([]) == "-" and spark([{"step": 1, "loss": float("nan")}]) == "-"


def test_a_link_out_of_the_folder_and_hidden_runs_do_not_break_the_list(folder: Path) -> None:
    (folder / "loop").symlink_to(folder)
    assert "a" in runs_in(folder)
    assert list(runs_in(folder / "a")) == ["."]
    assert runs_in(folder / "nothing") == {}


def test_a_port_that_is_taken(folder: Path) -> None:
    with opened(None) as taken:
        port = taken.getsockname()[1]
        refused = CliRunner().invoke(main.app, ["view", str(folder), "--port", str(port)])
        assert f"--port {port} cannot be used" in str(refused.exception)
        with opened(None) as another:
            assert another.getsockname()[1] != port


def test_without_the_extra_the_command_says_what_to_install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    refused = CliRunner().invoke(main.app, ["view", str(folder)])
    assert "pip install 'threefold[view]'" in str(refused.exception)
    monkeypatch.undo()
    assert CliRunner().invoke(main.app, ["view", str(folder / "nothing")]).exit_code != 0


def test_the_command_serves_and_ends_at_ctrl_c_with_a_stream_open(folder: Path) -> None:
    code = "import sys; sys.argv = ['threefold', 'view', sys.argv[1]]; from threefold.__main__ import main; main()"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        address = re.search(r"http://127\.0\.0\.1:\d+/\?token=\S+", process.stdout.readline())
        assert address is not None
        base = address[0].partition("?")[0]
        opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
        opener.open(address[0], timeout=20).read()
        assert b"deep/b" in opener.open(base, timeout=20).read()
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(base, timeout=20)
        stream = opener.open(f"{base}events?run=a&after=0.0", timeout=20)
        assert stream.readline() == b"event: lines\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
        assert process.stderr.read() == ""
