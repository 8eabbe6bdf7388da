"""Runs in the browser: only this machine and who has the token; parts as they are, and points that are new."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from report_runs import HOSTILE, eventful_run, make_run, step_line, write_lines
from threefold.commands import main
from threefold.config.paths import LOG_START
from threefold.records.logs import process_of
from threefold.report.live import LiveRun
from threefold.report.run_list import listed, runs_in
from threefold.report.server import Reply, Server, View, listen

main._load(["view"])
TOKEN = "right-token"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_run(tmp_path / "runs" / "a", [step_line(step) for step in range(1, 21)])
    eventful_run(tmp_path / "runs" / "deep" / "b")
    return tmp_path / "runs"


class Client:
    """Asks a view as a browser would."""

    def __init__(self, folder: Path) -> None:
        self.view, self.cookies = View(folder, token=TOKEN), ""

    def get(
        self, target: str, *, host: str = "127.0.0.1:1", cookies: str | None = None
    ) -> Reply:
        return self.view.answer(
            target, hosts=[host], cookies=self.cookies if cookies is None else cookies
        )

    def json(self, target: str) -> Any:
        answer = self.get(target)
        assert answer.status == 200, answer.content
        return json.loads(answer.content)

    def news(self, key: str, before: Any = None) -> Any:
        """What a page of a run is sent that has the points of `before`."""
        version = urllib.parse.quote(before["version"]) if before else ""
        return self.json(f"/values?run={key}&version={version}")


@pytest.fixture
def client(folder: Path) -> Client:
    return Client(folder)


def let_in(client: Client) -> Client:
    client.cookies = client.get(f"/?token={TOKEN}").cookie.partition(";")[0]
    return client


@pytest.fixture
def address(folder: Path) -> Iterator[str]:
    """Of a server that listens."""
    server = Server(folder, 0, token=TOKEN)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_nobody_is_let_in_without_the_token(client: Client) -> None:
    for path in ("/", "/run?run=a", "/values?run=a", "/values", "/step/1?run=a", "/nothing"):
        assert client.get(path).status == 403
        assert client.get(path, cookies="threefold=wrong").status == 403
        assert client.get(f"{path}{'&' if '?' in path else '?'}token=wrong").status == 403
    assert client.get("/?token=").status == 403
    assert client.get("/?token=%C3%A9").status == 403


def test_the_token_becomes_a_cookie_and_leaves_the_address(client: Client) -> None:
    answer = client.get(f"/run?run=a&token={TOKEN}&x=%22%3E%3Cscript%3E")
    assert answer.status == 200 and TOKEN.encode() not in answer.content
    assert b"url=./run?run=a" in answer.content and b"<script" not in answer.content
    assert "HttpOnly" in answer.cookie and "SameSite=Strict" in answer.cookie
    page = let_in(client).get("/run?run=a")
    assert page.status == 200 and b"connect-src 'self'" in page.content


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "127.0.0.1.evil.example",
        "localhost.",
        "evil@127.0.0.1",
        "0.0.0.0",
        "127.0.0.1:x",
        "",
        "[::2]",
    ],
)
def test_a_request_under_another_name_is_refused_even_with_the_token(
    client: Client, host: str
) -> None:
    let_in(client)
    assert client.get("/", host=host).status == 403
    assert client.get(f"/?token={TOKEN}", host=host).status == 403
    assert (
        client.view.answer("/", hosts=["127.0.0.1", "127.0.0.1"], cookies=client.cookies).status
        == 403
    )


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost:9999", "[::1]:80", "LOCALHOST"])
def test_a_tunnel_may_have_another_port(client: Client, host: str) -> None:
    assert let_in(client).get("/", host=host).status == 200


def test_only_reading_is_possible_and_nothing_is_allowed_for_others(address: str) -> None:
    cookies = urllib.request.HTTPCookieProcessor()
    opener = urllib.request.build_opener(cookies)
    opener.open(f"{address}/?token={TOKEN}", timeout=20).read()
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "PATCH"):
        with pytest.raises(urllib.error.HTTPError, match="405"):
            opener.open(urllib.request.Request(f"{address}/", method=method), timeout=20)
    headers = opener.open(
        urllib.request.Request(f"{address}/", headers={"origin": "http://evil.example"})
    ).headers
    assert not [name for name in headers if name.lower().startswith("access-control")]
    assert headers["x-frame-options"] == "DENY" and headers["cache-control"] == "no-store"


def test_pages_of_a_folder(client: Client, folder: Path) -> None:
    let_in(client)
    page = client.get("/").content.decode()
    assert "run?run=deep%2Fb" in page
    assert b"<script>window.hacked" not in client.get("/run?run=deep/b").content
    both = client.get("/run?run=a&run=deep/b&run=a").content.decode()
    assert "Keys that differ" not in both and "Where each run stands" in both
    for path in ("/run", "/run?run=..", "/run?run=/etc", "/values?run=a/../a", "/step/x?run=a"):
        assert client.get(path).status == 404, path
    values = client.news("a")["values"]
    assert (
        values["runs"][0]["key"] == "a" and values["runs"][0]["curves"]["loss"]["x"][-1] == 20
    )
    assert client.json("/step/3?run=a") is None  # it has no record


def settled(client: Client, key: str) -> Any:
    """What a page has when the audit has answered and nothing changes any more."""
    found = client.news(key)
    until = time.monotonic() + 30
    while time.monotonic() < until:
        time.sleep(0.4)  # files are looked at no more often
        newer = client.news(key, found)
        unchanged = "values" not in newer and newer["parts"] == found["parts"]
        if unchanged and "data" in newer["parts"]["0"]:
            return newer
        found = newer
    raise AssertionError("it never settles")


@pytest.mark.timing
@pytest.mark.parametrize("change", ["a step", "a rewind", "cut", "replaced"])
def test_what_has_changed_is_sent(client: Client, folder: Path, change: str) -> None:
    before, path = settled(let_in(client), "a"), folder / "a" / "metrics.jsonl"
    if change == "a step":
        write_lines(path, [step_line(21, loss=float("nan"))], append=True)
    elif change == "a rewind":
        write_lines(path, [step_line(5)], append=True)
    elif change == "cut":
        os.truncate(path, 0)
    else:
        write_lines(
            path.with_name("other"), [step_line(step, loss=1.0) for step in range(1, 41)]
        )
        os.replace(path.with_name("other"), path)
    time.sleep(0.4)
    after = client.news("a", before)
    assert after["version"] != before["version"]
    curve = after["values"]["runs"][0]["curves"].get("loss", {"x": [None], "y": [None]})
    assert curve["x"][-1] == {"a step": 21, "a rewind": 5, "cut": None, "replaced": 40}[change]
    assert change != "a step" or curve["y"][-1] is None
    assert after["parts"]["top"]["standing"] != before["parts"]["top"]["standing"]
    assert after["parts"]["0"]["config"] == before["parts"]["0"]["config"]
    assert list(after["parts"]["0"]) == list(before["parts"]["0"]) or change == "cut"


def test_parts_are_only_ever_text(client: Client) -> None:
    found = settled(let_in(client), "deep/b")
    assert HOSTILE not in json.dumps(client.news("deep/b")) and "not proved" in json.dumps(
        client.news("deep/b")
    )
    assert {*found["parts"]} == {"top", "0"}


def test_a_new_run_appears_in_the_list(client: Client, folder: Path) -> None:
    before = let_in(client).json("/values")
    assert "deep/b" in before["parts"]["list"]["list"] and "values" not in before
    make_run(folder / "new-run", [step_line(1), step_line(2)])
    assert "new-run" in client.json("/values")["parts"]["list"]["list"]


def test_a_page_of_a_run_is_proved_in_the_background(folder: Path) -> None:
    run = LiveRun(folder / "deep" / "b")
    run.prove()
    assert run.judged is not None and "data" in run.parts() and run.of_step(10**9) is None


def test_where_ranks_are_is_read_from_their_memory(tmp_path: Path) -> None:
    from threefold.run.watch.pulse import Pulse, place_of
    from threefold.training.progress import Phase

    pulse = Pulse.begin()
    if pulse is None:
        pytest.skip("no pulse here")
    log = tmp_path / "rank-0003.log"
    try:
        pulse.tell(Phase(7, 12, "backward"))
        assert place_of(os.getpid(), log) is None  # it does not write that log
        with log.open("w") as file:
            file.write(
                f'2026-01-01 00:00:00,000 INFO {LOG_START}: {{"process": {os.getpid()}}}\nlater\n'
            )
            file.flush()
            assert process_of(log) == os.getpid()
            assert place_of(os.getpid(), log) == Phase(7, 12, "backward")
    finally:
        pulse.close()
    assert place_of(2**22 + 1, log) is None


def test_of_a_long_file_the_list_reads_the_end(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", [step_line(step) for step in range(1, 20_001)])
    row = listed({"run": path})
    assert "20,000" in row and f"{step_line(20_000)['loss']:.6g}" in row
    write_lines(
        path / "metrics.jsonl", [{"step": 20_000, "eval_loss": 1.0}, {"loss": "x"}], append=True
    )
    assert "<td>-</td>" in listed({"run": path})


def test_a_link_out_of_the_folder_and_hidden_runs_do_not_break_the_list(folder: Path) -> None:
    (folder / "loop").symlink_to(folder)
    assert "a" in runs_in(folder)
    assert list(runs_in(folder / "a")) == ["."]
    assert runs_in(folder / "nothing") == {}


def test_a_port_that_is_taken(folder: Path) -> None:
    with listen(folder, None) as taken:
        port = taken.server_port
        refused = CliRunner().invoke(main.app, ["view", str(folder), "--port", str(port)])
        assert f"--port {port} cannot be used" in str(refused.exception)
        with listen(folder, None) as another:
            assert another.server_port != port and another.view.token != taken.view.token


def test_what_is_no_run_is_refused(folder: Path) -> None:
    assert CliRunner().invoke(main.app, ["view", str(folder / "nothing")]).exit_code != 0


def test_the_command_serves_and_ends_at_ctrl_c(folder: Path) -> None:
    code = "import sys; sys.argv = ['threefold', 'view', sys.argv[1]]; from threefold.__main__ import main; main()"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
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
        assert b'"version"' in opener.open(f"{base}values?run=a", timeout=20).read()
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
        assert process.stderr.read() == ""
