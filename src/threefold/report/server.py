"""The pages of runs in a browser, while they go: on this machine only, and only for who has the address.

A page is that of `threefold report`, with `values.live`. It asks for `events`, where the server sends what is new:
lines of steps, parts of the page that are made anew, all values after a rewind. Only the runs' files are read.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from threefold.errors import ConfigError
from threefold.report.document import body, curves_of, page, points_of, title_of, top_of
from threefold.report.gate import Gate
from threefold.report.markup import Html, tag
from threefold.report.run_list import listed, runs_in
from threefold.report.watched import WatchedRun

_LOOK_S, _LIST_S, _PING = 0.5, 2.0, 30
_MOST_COMPARED = 20
PORT, _MORE_PORTS = 8733, 20


class View:
    """The runs under a folder, and who looks at them.

    Attributes:
        ends: says whether the server is to end, so that no stream keeps it.
    """

    def __init__(self, root: Path) -> None:
        self.root, self._watched = root, dict[str, WatchedRun]()
        self.ends = asyncio.Event()

    def runs(self) -> dict[str, Path]:
        return runs_in(self.root)

    def watched(self, keys: Sequence[str]) -> list[WatchedRun]:
        """The runs of some keys, read up to now; KeyError for one that is not there."""
        if any(key not in self._watched for key in keys):
            found = self.runs()
            new = [key for key in keys if key not in self._watched]
            self._watched |= {key: WatchedRun(found[key], key if key != "." else None) for key in new}
        runs = [self._watched[key] for key in dict.fromkeys(keys)]
        for run in runs:
            run.refresh()
        return runs

    def values(self, keys: Sequence[str]) -> dict[str, Any]:
        """What the page's script draws, and the cursors from which events go on."""
        runs = self.watched(keys)
        values = points_of([run.facts for run in runs], [run.judged for run in runs])
        for key, run, drawn in zip(dict.fromkeys(keys), runs, values["runs"], strict=True):
            drawn |= {"key": key, "cursor": run.cursor}
        return {**values, "live": True, "list": "." not in keys}

    def parts(self, keys: Sequence[str]) -> dict[str, dict[str, Html]]:
        runs = self.watched(keys)
        return {"top": top_of([run.facts for run in runs]), **{str(n): run.parts() for n, run in enumerate(runs)}}

    def prove(self, keys: Sequence[str]) -> None:
        for run in self.watched(keys):
            run.prove()


def app_of(view: View, *, token: str, cookie: str = "threefold") -> Gate:
    """The application, behind its gate."""

    async def home(request: Request) -> Response:
        if "." in view.runs():
            return await _page(view, ["."])
        inside = tag("div", listed(view.runs()), class_="parts", data_box="list")
        return _html(page(f"runs in {view.root}", inside, {"live": True}, live=True))

    async def run(request: Request) -> Response:
        return await _page(view, _keys(request))

    async def values(request: Request) -> Response:
        keys, inside = _keys(request), [int(text) for text in request.query_params.getlist("step")]
        if inside:
            steps = range(inside[0], inside[-1] + 1)
            runs = await asyncio.to_thread(view.watched, keys)
            return JSONResponse(await asyncio.to_thread(curves_of, [run.facts for run in runs], steps))
        return JSONResponse(await asyncio.to_thread(view.values, keys))

    async def step(request: Request) -> Response:
        (run,) = await asyncio.to_thread(view.watched, _keys(request)[:1])
        return JSONResponse(await asyncio.to_thread(run.of_step, int(request.path_params["step"])))

    async def events(request: Request) -> Response:
        keys = _keys(request)
        await asyncio.to_thread(view.watched, keys)
        cursors = [[int(number) for number in text.split(".")][:2] for text in request.query_params.getlist("after")]
        if any(len(cursor) != 2 for cursor in cursors) or (keys and len(cursors) != len(keys)):
            raise ValueError("after")
        stream = _events(view, keys, cursors) if keys else _lists(view)
        return StreamingResponse(stream, media_type="text/event-stream")

    def gone(request: Request, error: Exception) -> Response:
        return PlainTextResponse("There is no such run.", 404)

    routes = [
        Route("/", home), Route("/run", run), Route("/values", values), Route("/step/{step:int}", step),
        Route("/events", events),
    ]  # fmt: skip
    handlers: Any = {KeyError: gone, ValueError: gone}
    return Gate(Starlette(routes=routes, exception_handlers=handlers), token=token, cookie=cookie)


def _keys(request: Request) -> list[str]:
    return list(dict.fromkeys(request.query_params.getlist("run")))[:_MOST_COMPARED]


async def _page(view: View, keys: Sequence[str]) -> Response:
    if not keys:
        raise KeyError("run")

    def made() -> bytes:
        values, parts = view.values(keys), view.parts(keys)
        runs = [run.facts for run in view.watched(keys)]
        return page(title_of(runs), body(parts, runs), values, live=True)

    return _html(await asyncio.to_thread(made))


def _html(content: bytes) -> Response:
    return Response(content, media_type="text/html; charset=utf-8")


async def _events(view: View, keys: Sequence[str], cursors: list[list[int]]) -> AsyncIterator[str]:
    """What is new in some runs, until the server ends."""
    known: dict[tuple[str, str], str] = {}
    versions: list[Any] = []
    proving = asyncio.create_task(asyncio.to_thread(view.prove, keys))
    try:
        async for turn in _turns(view, _LOOK_S):
            if turn and proving.done():
                proving = asyncio.create_task(asyncio.to_thread(view.prove, keys))
            runs = await asyncio.to_thread(view.watched, keys)
            for number, run in enumerate(runs):
                lines = run.since(cursors[number])
                if lines is None:
                    yield _event("values", {})
                elif lines:
                    yield _event("lines", {"run": number, "lines": lines})
                cursors[number] = run.cursor
            if (now := [run.version for run in runs]) == versions:
                parts = {}
            else:
                versions, parts = now, await asyncio.to_thread(view.parts, keys)
            for box, inside in parts.items():
                changed = {name: html for name, html in inside.items() if known.get((box, name)) != html}
                if changed:
                    known |= {(box, name): html for name, html in changed.items()}
                    yield _event("parts", {"box": box, "order": list(inside), "changed": changed})
            if turn % _PING == 0:
                yield ": \n\n"
    finally:
        proving.cancel()


async def _lists(view: View) -> AsyncIterator[str]:
    """The list of the runs again, whenever it changes."""
    known = ""
    async for turn in _turns(view, _LIST_S):
        made = await asyncio.to_thread(lambda: listed(view.runs()))
        if made != known:
            known = made
            yield _event("parts", {"box": "list", "order": ["list"], "changed": {"list": made}})
        if turn % _PING == 0:
            yield ": \n\n"


async def _turns(view: View, seconds: float) -> AsyncIterator[int]:
    turn = 0
    while not view.ends.is_set():
        yield turn
        turn += 1
        try:
            await asyncio.wait_for(view.ends.wait(), seconds)
        except TimeoutError:
            continue


def _event(name: str, values: Any) -> str:
    return f"event: {name}\ndata: {json.dumps(values, allow_nan=False)}\n\n"


def opened(port: int | None) -> socket.socket:
    """A socket of 127.0.0.1 at a port; without one, at the first of some that is free.

    Raises:
        ConfigError: the port is taken, or may not be used.
    """
    wanted = [port] if port is not None else [*range(PORT, PORT + _MORE_PORTS), 0]
    for number in wanted:
        found = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            found.bind(("127.0.0.1", number))
            found.listen()
            return found
        except OSError as error:
            found.close()
            reason = error.strerror
    raise ConfigError(
        f"--port {port} cannot be used: {reason}",
        expected="a port that no other program of this machine listens at",
        fix="leave --port out: a free one is taken",
    )


class _Server(uvicorn.Server):
    """Ends at Ctrl-C with its streams."""

    def __init__(self, config: uvicorn.Config, view: View) -> None:
        super().__init__(config)
        self._view = view

    def handle_exit(self, sig: int, frame: Any) -> None:
        self._view.ends.set()
        super().handle_exit(sig, frame)


def serve(root: Path, listening: socket.socket, *, token: str) -> None:
    """Serves the runs of a folder until Ctrl-C or SIGTERM."""
    view = View(root)
    app = app_of(view, token=token, cookie=f"threefold-{listening.getsockname()[1]}")
    config = uvicorn.Config(
        app, log_config=None, access_log=False, lifespan="off", server_header=False, timeout_graceful_shutdown=1
    )
    try:
        _Server(config, view).run(sockets=[listening])
    except KeyboardInterrupt:
        return


def new_token() -> str:
    return secrets.token_urlsafe(24)
