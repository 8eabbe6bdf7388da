"""Real servers of object stores on this machine: SeaweedFS and moto. One that is not installed is skipped by name.

SeaweedFS needs minutes to end by itself, so that it is killed. Both listen on 127.0.0.1 only.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

PROGRAMS = Path(__file__).parents[2] / ".venv-stores" / "bin"
BUCKET = "runs"
SECRET = "5ecret-of-the-tests"
# Name -> access key, secret, and what SeaweedFS lets it do.
IDENTITIES = {
    "writer": ("AKIDWRITER", SECRET, ["Admin", "Read", "Write", "List", "Tagging"]),
    "reader": ("AKIDREADER", f"{SECRET}-2", ["Read", "List"]),
}


@dataclass(frozen=True)
class Server:
    """A server that runs: its kind, address and process."""

    kind: str
    endpoint: str
    pid: int = 0

    def environ(self, who: str = "writer", secret: str | None = None) -> dict[str, str]:
        key, its_secret, _ = IDENTITIES[who]
        return {
            "AWS_ACCESS_KEY_ID": key,
            "AWS_SECRET_ACCESS_KEY": secret or its_secret,
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": self.endpoint,
        }


def _program(name: str) -> str:
    found = shutil.which(name, path=f"{PROGRAMS}:{os.environ['PATH']}")
    if found is None:
        pytest.skip(
            f"{name} is not installed (tests/stores/requirements.txt, make test-stores)"
        )
    return found


def free_ports(count: int) -> int:
    """The first of so many free ports in a row, that are also free 10,000 above."""
    while True:
        first = random.randrange(11000, 20000)
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            for port in range(first, first + count):
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
                stack.enter_context(socket.create_server(("127.0.0.1", port + 10000)))
            return first


def _answers(endpoint: str, path: str = "", method: str = "GET") -> bool:
    try:
        urllib.request.urlopen(
            urllib.request.Request(endpoint + path, method=method), timeout=2
        )
    except urllib.error.HTTPError as error:
        return error.code < 500
    except OSError:
        return False
    return True


@contextlib.contextmanager
def _running(command: list[str], server: Server, log: Path) -> Iterator[Server]:
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, stdin=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 60
        while not _answers(server.endpoint):
            if process.poll() is not None or time.monotonic() > until:
                pytest.fail(f"{server.kind} does not start: {log.read_text()[-2000:]}")
            time.sleep(0.1)
        _make_bucket(server)
        yield replace(server, pid=process.pid)
    finally:
        process.kill()
        process.wait()


def _make_bucket(server: Server) -> None:
    """Makes the bucket; SeaweedFS does so at the first write, for which it takes some seconds."""
    if server.kind == "moto":
        assert _answers(server.endpoint, f"/{BUCKET}", "PUT")
        return
    import obstore
    from obstore.store import S3Store

    key, secret, _ = IDENTITIES["writer"]
    options: dict[str, Any] = {
        "access_key_id": key,
        "secret_access_key": secret,
        "region": "us-east-1",
    }
    retries: dict[str, Any] = {"max_retries": 0}
    store = S3Store(
        BUCKET,
        endpoint=server.endpoint,
        client_options={"allow_http": True},
        retry_config=retries,
        **options,
    )
    until = time.monotonic() + 60
    while True:
        try:
            obstore.put(store, "first", b"1")
            return obstore.delete(store, "first")
        except Exception:
            if time.monotonic() > until:
                raise
            time.sleep(0.2)


@contextlib.contextmanager
def weed_server(folder: Path, first: int) -> Iterator[Server]:
    """SeaweedFS on four ports from the first on, with what a server that was killed has left in the folder."""
    identities = [
        {
            "name": name,
            "credentials": [{"accessKey": key, "secretKey": secret}],
            "actions": actions,
        }
        for name, (key, secret, actions) in IDENTITIES.items()
    ]
    rights = folder / "rights.json"
    rights.write_text(json.dumps({"identities": identities}))
    command = [
        _program("weed"),
        "server",
        f"-dir={folder}",
        "-ip=127.0.0.1",
        "-ip.bind=127.0.0.1",
        "-s3",
    ]
    command += [
        f"-s3.port={first}",
        f"-s3.config={rights}",
        f"-master.port={first + 1}",
        f"-volume.port={first + 2}",
    ]
    command += [f"-filer.port={first + 3}", "-volume.max=10", "-master.volumeSizeLimitMB=64"]
    # Ports that it would have besides, and words home.
    command += ["-s3.port.iceberg=0", "-s3.port.lance=0", "-master.telemetry=false"]
    with _running(
        command, Server("seaweed", f"http://127.0.0.1:{first}"), folder / "log"
    ) as server:
        yield server
    for port in (*range(first, first + 4), *range(first + 10000, first + 10004)):
        for left in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
            left.unlink()


@pytest.fixture(scope="session")
def seaweed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("seaweed")
    with weed_server(folder, free_ports(4)) as server:
        yield server
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    program, port = _program("moto_server"), free_ports(1)
    command = [program, "-H", "127.0.0.1", "-p", str(port)]
    log = tmp_path_factory.mktemp("moto") / "log"
    with _running(command, Server("moto", f"http://127.0.0.1:{port}"), log) as server:
        yield server


@pytest.fixture(params=["seaweed", "moto"])
def server(request: pytest.FixtureRequest, use: Any) -> Server:
    """Each kind of server, with its variables set."""
    server: Server = request.getfixturevalue(request.param)
    use(server.environ())
    return server


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets variables in place of all that AWS' tools read."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)

    def use(variables: dict[str, str]) -> None:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return use


@pytest.fixture
def address() -> str:
    """A prefix that no other test uses."""
    return f"s3://{BUCKET}/tests/{uuid.uuid4().hex[:12]}"
