"""The pages of runs in a browser, while they train: on this machine only, and only for holders of the address.

A page is that of `threefold report`, with `values.live`: its script asks for `values` again and again, and is sent the
parts of the page as they are now, and the charts' points if they are new. Only the runs' files are read.

Every request must name this machine as its host, so that a page of another site cannot reach it under its own name
(DNS rebinding), and must carry the token: in the address once, then in a cookie that other sites cannot send.
"""

import contextlib
import json
import secrets
import signal
import threading
from collections.abc import Mapping, Sequence
from html import escape
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlencode, urlsplit

from threefold.errors import ConfigError
from threefold.jsonl import Values
from threefold.report.document import body, page, points_of, title_of, top_of
from threefold.report.live import LiveRun
from threefold.report.markup import Html, tag
from threefold.report.run_list import listed, runs_in

PORT, _MORE_PORTS = 8733, 20
_MOST_COMPARED = 20
_HOSTS = ("127.0.0.1", "localhost", "::1")
_HTML = "text/html; charset=utf-8"
_TEXT = "text/plain; charset=utf-8"
_JSON = "application/json"
_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}

Query = Mapping[str, list[str]]


class Reply(NamedTuple):
    """The answer to a request."""

    status: int
    content: bytes
    kind: str = _TEXT
    cookie: str | None = None


class View:
    """The runs under a folder, for holders of the token."""

    def __init__(self, root: Path, *, token: str, cookie: str = "threefold") -> None:
        self.root, self.token, self._cookie = root, token, cookie
        self._runs: dict[str, LiveRun] = {}
        self._opening = threading.Lock()

    def answer(self, target: str, *, hosts: Sequence[str], cookies: str) -> Reply:
        """The answer to a GET of a path with its query."""
        path, _, text = target.partition("?")
        query = parse_qs(text, keep_blank_values=True)
        if not _is_here(hosts):
            return Reply(403, b"This page is only there under 127.0.0.1 or localhost.")
        if "token" in query and self._is_right(query["token"][0]):
            return self._welcome(path, query)
        if not self._has_cookie(cookies):
            return Reply(
                403, b"Open the address that `threefold view` has printed: it ends in a token."
            )
        try:
            return self._routed(path, query)
        except (KeyError, ValueError, OverflowError):
            return Reply(404, b"There is no such run.")

    def _routed(self, path: str, query: Query) -> Reply:
        keys = list(dict.fromkeys(query.get("run", ())))[:_MOST_COMPARED]
        if path == "/":
            return self._page(["."]) if "." in runs_in(self.root) else self._list()
        if path == "/run":
            return self._page(keys)
        if path == "/values":
            return _json(self._news(keys, query))
        if path.startswith("/step/"):
            (run,) = self._live(keys[:1])
            return _json(run.of_step(int(path.removeprefix("/step/"))))
        raise KeyError(path)

    def _live(self, keys: Sequence[str]) -> list[LiveRun]:
        """The runs of some keys, read up to now; KeyError for a missing one."""
        with self._opening:
            if new := [key for key in keys if key not in self._runs]:
                paths = runs_in(self.root)
                self._runs |= {
                    key: LiveRun(paths[key], key if key != "." else None) for key in new
                }
        runs = [self._runs[key] for key in keys]
        for run in runs:
            run.refresh()
        return runs

    def _values(self, keys: Sequence[str], runs: Sequence[LiveRun]) -> Values:
        values = points_of([run.facts for run in runs], [run.judged for run in runs])
        for key, drawn in zip(keys, values["runs"], strict=True):
            drawn["key"] = key
        return {**values, "live": True, "list": "." not in keys}

    def _parts(self, runs: Sequence[LiveRun]) -> dict[str, dict[str, Html]]:
        top = top_of([run.facts for run in runs])
        return {"top": top, **{str(number): run.parts() for number, run in enumerate(runs)}}

    def _news(self, keys: Sequence[str], query: Query) -> Values:
        """The parts of a page, and its points, unless it has that version of them."""
        runs = self._live(keys)
        parts = self._parts(runs) if keys else {"list": {"list": listed(runs_in(self.root))}}
        version = " ".join(run.version for run in runs)
        values = (
            {"values": self._values(keys, runs)}
            if keys and query.get("version") != [version]
            else {}
        )
        return {"version": version, "parts": parts, **values}

    def _page(self, keys: Sequence[str]) -> Reply:
        runs = self._live(keys)
        if not runs:
            raise KeyError("run")
        facts = [run.facts for run in runs]
        content = page(
            title_of(facts), body(self._parts(runs), facts), self._values(keys, runs), live=True
        )
        return Reply(200, content, _HTML)

    def _list(self) -> Reply:
        inside = tag("div", listed(runs_in(self.root)), class_="parts", data_box="list")
        return Reply(
            200, page(f"runs in {self.root}", inside, {"live": True}, live=True), _HTML
        )

    def _is_right(self, token: str) -> bool:
        return secrets.compare_digest(token.encode(), self.token.encode())

    def _has_cookie(self, cookies: str) -> bool:
        try:
            morsel = SimpleCookie(cookies).get(self._cookie)
        except CookieError:
            return False
        return morsel is not None and self._is_right(morsel.value)

    def _welcome(self, path: str, query: Query) -> Reply:
        """Sets the cookie, and continues without the token in the address.

        By a page and not by a redirect: after a link on another site, a browser would not send the cookie to that.
        """
        rest = urlencode(
            [
                (key, value)
                for key, values in query.items()
                if key != "token"
                for value in values
            ]
        )
        target = f"./{path.rpartition('/')[2]}" + (f"?{rest}" if rest else "")
        text = f'<!doctype html><meta http-equiv="refresh" content="0;url={escape(target)}">'
        text += '<link rel="icon" href="data:,"><title>threefold</title>'
        return Reply(
            200,
            text.encode(),
            _HTML,
            f"{self._cookie}={self.token}; Path=/; HttpOnly; SameSite=Strict",
        )


def _json(values: Any) -> Reply:
    return Reply(200, json.dumps(values, allow_nan=False).encode(), _JSON)


def _is_here(hosts: Sequence[str]) -> bool:
    """Whether a request names this machine, at whatever port: a tunnel has its own."""
    try:
        (host,) = hosts
        parts = urlsplit(f"//{host}")
        return (
            parts.hostname in _HOSTS
            and "@" not in parts.netloc
            and (parts.port is None or parts.port > 0)
        )
    except ValueError:
        return False


class Server(ThreadingHTTPServer):
    """Listens at 127.0.0.1."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, root: Path, port: int, *, token: str) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.view = View(root, token=token, cookie=f"threefold-{self.server_port}")


class _Handler(BaseHTTPRequestHandler):
    server: Server
    server_version, sys_version = "threefold", ""
    timeout = 60

    def do_GET(self) -> None:
        hosts = self.headers.get_all("host") or []
        cookies = "; ".join(self.headers.get_all("cookie") or [])
        self._send(self.server.view.answer(self.path, hosts=hosts, cookies=cookies))

    def _refuse(self) -> None:
        self._send(Reply(405, b"Only reading is possible."))

    do_POST = do_PUT = do_DELETE = do_OPTIONS = do_PATCH = do_HEAD = _refuse

    def _send(self, answer: Reply) -> None:
        self.send_response(answer.status)
        cookie = {"Set-Cookie": answer.cookie} if answer.cookie is not None else {}
        length = {"Content-Type": answer.kind, "Content-Length": str(len(answer.content))}
        for name, value in {**_HEADERS, **length, **cookie}.items():
            self.send_header(name, value)
        with contextlib.suppress(ConnectionError):  # the page was closed
            self.end_headers()
            self.wfile.write(answer.content)

    def log_message(self, *arguments: Any) -> None:
        """Nothing: the terminal keeps the address in sight."""


def listen(root: Path, port: int | None) -> Server:
    """A server of a folder's runs at a port of 127.0.0.1; without one, at the first of some that is free.

    Raises:
        ConfigError: the port is taken, or may not be used.
    """
    reason: str | None = None
    for number in [port] if port is not None else [*range(PORT, PORT + _MORE_PORTS), 0]:
        try:
            return Server(root, number, token=secrets.token_urlsafe(24))
        except OSError as error:
            reason = error.strerror
    raise ConfigError(
        f"--port {port} cannot be used: {reason}",
        expected="a port that no other program on this machine listens on",
        fix="leave --port out: a free one is chosen",
    )


def serve(server: Server) -> None:
    """Serves until Ctrl-C or SIGTERM."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        return
    finally:
        server.server_close()
