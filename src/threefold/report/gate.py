"""Who may see a run in the browser: whoever has the address that was printed, on this machine or through a tunnel.

Every request must name this machine as its host, so that a page of another site cannot reach it under a name of its own
(DNS rebinding), and must carry the token: in the address once, then in a cookie that other sites cannot send. Only
reading is possible, and nothing is allowed for other origins.
"""

from __future__ import annotations

import secrets
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

_HOSTS = {"127.0.0.1", "localhost", "::1"}
_HEADERS = [
    (b"cache-control", b"no-store"),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
]


class Gate:
    """An ASGI application around another one, which sees only requests that are let in."""

    def __init__(self, app: Any, *, token: str, cookie: str) -> None:
        self._app, self._token, self._cookie = app, token, cookie

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return

        async def guarded(message: Any) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], *_HEADERS]}
            await send(message)

        headers = [(name.lower(), value) for name, value in scope["headers"]]
        query = parse_qs(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        if not _is_here([value for name, value in headers if name == b"host"]):
            await _answer(guarded, 403, "This page is only there under 127.0.0.1 or localhost.")
        elif scope["method"] not in ("GET", "HEAD"):
            await _answer(guarded, 405, "Only reading is possible.")
        elif "token" in query and self._is_right(query["token"][0]):
            await self._welcome(guarded, scope["path"], query)
        elif not self._has_cookie(b"; ".join(value for name, value in headers if name == b"cookie")):
            await _answer(guarded, 403, "Open the address that `threefold view` has printed: it ends in a token.")
        else:
            await self._app(scope, receive, guarded)

    def _is_right(self, token: str) -> bool:
        return secrets.compare_digest(token.encode(), self._token.encode())

    def _has_cookie(self, text: bytes) -> bool:
        try:
            found = SimpleCookie(text.decode("latin-1")).get(self._cookie)
        except CookieError:
            return False
        return found is not None and self._is_right(found.value)

    async def _welcome(self, send: Any, path: str, query: dict[str, list[str]]) -> None:
        """Sets the cookie, and goes on without the token in the address.

        By a page and not by a redirect: after a link on another site, a browser would not send the cookie to that.
        """
        rest = urlencode([(key, value) for key, values in query.items() if key != "token" for value in values])
        name = path.rpartition("/")[2]
        target = f"./{name}?{rest}" if rest else f"./{name}"
        page = f'<!doctype html><meta http-equiv="refresh" content="0;url={_plain(target)}">'
        page += '<link rel="icon" href="data:,"><title>threefold</title>'
        cookie = f"{self._cookie}={self._token}; Path=/; HttpOnly; SameSite=Strict"
        await _answer(send, 200, page, (b"content-type", b"text/html; charset=utf-8"), (b"set-cookie", cookie.encode()))


def _plain(target: str) -> str:
    return "".join(f"&#{ord(sign)};" if sign in "<>&\"'" else sign for sign in target)


def _is_here(hosts: list[bytes]) -> bool:
    """Whether a request names this machine, at whatever port: a tunnel has its own."""
    if len(hosts) != 1:
        return False
    try:
        parts = urlsplit(f"//{hosts[0].decode('ascii')}")
        return parts.hostname in _HOSTS and "@" not in parts.netloc and (parts.port is None or parts.port > 0)
    except ValueError:
        return False


async def _answer(send: Any, status: int, text: str, *headers: tuple[bytes, bytes]) -> None:
    told = list(headers) or [(b"content-type", b"text/plain; charset=utf-8")]
    await send({"type": "http.response.start", "status": status, "headers": told})
    await send({"type": "http.response.body", "body": text.encode()})
