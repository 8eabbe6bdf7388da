"""A small server in this process that can be told to do wrong what servers do wrong. It checks no signature.

It speaks S3's protocol, and Google Cloud Storage's of the same form, where a write is conditional on a generation.
"""

from __future__ import annotations

import hashlib
import re
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit


class StubStore:
    """The objects of one bucket, `runs`, and the faults that its server has.

    Attributes:
        ignored: headers of conditional writes that are not looked at.
        answers: method -> (status, S3's code, how often) instead of doing it.
        cut_after: so many writes are carried out, and then the connection is reset instead of an answer.
        wrong: `listing` leaves out the newest, `delete` keeps, `range` answers from the beginning, `header` says so,
            `clock` is late, `taken` refuses every new key, `parts` loses the last one.
    """

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.ignored: set[str] = set()
        self.answers: dict[str, tuple[int, str, int]] = {}
        self.cut_after = 0
        self.wrong: set[str] = set()
        self.requests: list[str] = []
        self.parts: dict[str, dict[int, bytes]] = {}
        self.lock = threading.Lock()


@contextmanager
def serving(store: StubStore, host: str = "127.0.0.1") -> Iterator[str]:
    """The address of a server of this store."""
    server = ThreadingHTTPServer((host, 0), type("Handler", (_Handler,), {"store": store}))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://{host}:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    store: StubStore
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # a body after its headers would wait for 40 ms

    def log_message(self, *_: Any) -> None:
        pass

    def _asked(self) -> None:
        address = urlsplit(self.path)
        self.query = parse_qs(address.query, keep_blank_values=True)
        self.key = unquote(address.path).removeprefix("/runs").removeprefix("/")
        self.data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        with self.store.lock:
            self.store.requests.append(f"{self.command} {self.key}")
            status, code, times = self.store.answers.get(self.command, (0, "", 0))
            if times:
                self.store.answers[self.command] = (status, code, times - 1)
                return self._say(status, _error(code))
            getattr(self, f"_{self.command.lower()}")()

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _asked

    def _get(self) -> None:
        if not self.key:
            return self._list()
        if (data := self.store.objects.get(self.key)) is None:
            return self._say(404, _error("NoSuchKey"))
        if asked := self.headers.get("Range"):
            first, last = map(int, asked.removeprefix("bytes=").split("-"))
            if first >= len(data):
                return self._say(416, _error("InvalidRange"))
            if "header" in self.store.wrong and first:
                first, last = 0, last - first
            part = data[first : last + 1]
            said = {"Content-Range": f"bytes {first}-{first + len(part) - 1}/{len(data)}"}
            return self._say(
                206, data[: len(part)] if "range" in self.store.wrong else part, said, data
            )
        return self._say(200, data, whole=data)

    _head = _get

    def _list(self) -> None:
        prefix = self.query.get("prefix", [""])[0]
        keys = [key for key in self.store.objects if key.startswith(prefix)]
        if "listing" in self.store.wrong:
            keys = keys[:-1]
        entries = "".join(
            f"<Contents><Key>{key}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified><ETag>{_etag(data)}</ETag>"
            f"<Size>{len(data)}</Size></Contents>"
            for key, data in ((key, self.store.objects[key]) for key in keys)
        )
        text = f"<ListBucketResult><Name>runs</Name><IsTruncated>false</IsTruncated>{entries}</ListBucketResult>"
        self._say(200, text.encode())

    def _put(self) -> None:
        if "uploadId" in self.query:
            number = int(self.query["partNumber"][0])
            self.store.parts[self.query["uploadId"][0]][number] = self.data
            return self._say(200, b"", whole=self.data)
        there = self.store.objects.get(self.key)
        ignored = self.store.ignored
        generation = self.headers.get("x-goog-if-generation-match")
        new = (
            "If-None-Match" in self.headers or generation == "0"
        ) and "If-None-Match" not in ignored
        if new and (there is not None or "taken" in self.store.wrong):
            return self._say(412, _error("PreconditionFailed"))
        wanted = self.headers.get("If-Match") or (generation if generation != "0" else None)
        if (
            wanted
            and "If-Match" not in ignored
            and (there is None or wanted not in (_etag(there), _generation(there)))
        ):
            return self._say(412, _error("PreconditionFailed"))
        self.store.objects[self.key] = self.data
        if self.store.cut_after:
            self.store.cut_after -= 1
            self.close_connection = True
            self.connection.setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
            )
            return self.connection.close()
        return self._say(200, b"", whole=self.data)

    def _post(self) -> None:
        if "uploads" in self.query:
            upload = str(len(self.store.parts))
            self.store.parts[upload] = {}
            text = f"<InitiateMultipartUploadResult><UploadId>{upload}</UploadId></InitiateMultipartUploadResult>"
            return self._say(200, text.encode())
        if "delete" in self.query:
            keys = re.findall(r"<Key>(?:runs/)?(.*?)</Key>", self.data.decode())
            for key in keys if "delete" not in self.store.wrong else ():
                self.store.objects.pop(key, None)
            deleted = "".join(f"<Deleted><Key>{key}</Key></Deleted>" for key in keys)
            return self._say(200, f"<DeleteResult>{deleted}</DeleteResult>".encode())
        parts = self.store.parts.pop(self.query["uploadId"][0])
        numbers = sorted(parts)[: -1 if "parts" in self.store.wrong else None]
        data = b"".join(parts[number] for number in numbers)
        self.store.objects[self.key] = data
        text = f"<CompleteMultipartUploadResult><ETag>{_etag(data)}</ETag></CompleteMultipartUploadResult>"
        return self._say(200, text.encode())

    def _delete(self) -> None:
        if "delete" not in self.store.wrong:
            self.store.objects.pop(self.key, None)
        self._say(204, b"")

    def _say(
        self,
        status: int,
        text: bytes,
        headers: dict[str, str] | None = None,
        whole: bytes | None = None,
    ) -> None:
        self.send_response(status)
        late = 3600 if "clock" in self.store.wrong else 0
        self.send_header("Last-Modified", formatdate(time.time() - late, usegmt=True))
        of_whole = (
            {"ETag": _etag(whole), "x-goog-generation": _generation(whole)}
            if whole is not None
            else {}
        )
        for name, value in {**(headers or {}), **of_whole}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(text)


def _etag(data: bytes) -> str:
    return f'"{hashlib.md5(data).hexdigest()}"'


def _generation(data: bytes) -> str:
    return str(int(hashlib.md5(data).hexdigest()[:12], 16))


def _error(code: str) -> bytes:
    # As servers do, with what nobody should see.
    return f"<Error><Code>{code}</Code><Message>AKIDOFTEST signature of it</Message></Error>".encode()


def main(host: str, folder: Path) -> None:
    """Serves at `folder/endpoint` until `folder/end` is there; then what was stored lies in `folder/objects`."""
    store = StubStore()
    with serving(store, host) as endpoint:
        (folder / "endpoint.part").write_text(endpoint)
        # Who waits for it reads all of it.
        (folder / "endpoint.part").rename(folder / "endpoint")
        while not (folder / "end").exists():
            time.sleep(0.1)
    for key, data in store.objects.items():
        path = folder / "objects" / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    (folder / "ended").touch()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
