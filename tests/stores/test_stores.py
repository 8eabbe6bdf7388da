"""Places in real stores: what is promised of a place, what admits a store, and exports into it."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ranks.runs import command, environment, prepare
from stores.conftest import SECRET, Server
from threefold.errors import ConfigError
from threefold.places.object_store import open_store
from threefold.places.upload import CLAIM, MARK

pytestmark = [pytest.mark.stores, pytest.mark.usefixtures("_no_secret_is_printed")]


@pytest.fixture
def _no_secret_is_printed(capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    yield
    printed = capfd.readouterr()
    assert SECRET not in printed.out + printed.err


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of a small model."""
    folder = tmp_path_factory.mktemp("run")
    prepare(folder)
    arguments = ("--mesh.dp", "1", "--train.steps", "2", "--log.dir", "a")
    done = command(folder, "train", "config.yaml", *arguments)
    assert done.returncode == 0, done.stderr
    return folder / "a"


def objects(address: str) -> dict[str, bytes]:
    place = open_store(address, os.environ)
    return {each.key: place.read(each.key, start=0, length=each.size) for each in place.list()}


def test_protocol(server: Server, address: str, tmp_path: Path) -> None:
    place = open_store(address, os.environ)
    assert list(place.list()) == []
    big = os.urandom(20 * 2**20)
    (tmp_path / "big").write_bytes(big)
    place.write("folder/big", tmp_path / "big")
    place.write("one", b"12345")
    assert place.read("one", start=1, length=3) == b"234"
    for start, length in ((0, 1), (8 * 2**20 - 5, 10), (len(big) - 3, 3), (0, len(big))):
        assert (
            place.read("folder/big", start=start, length=length) == big[start : start + length]
        )
    assert {each.key: each.size for each in place.list()} == {"one": 5, "folder/big": len(big)}
    etag = place.create("seal", b"first")
    assert etag and place.create("seal", b"other") is None
    second = place.swap("seal", b"second", etag=etag)
    assert second and place.swap("seal", b"third", etag=etag) is None
    there = place.stat("seal")
    assert there and there.etag == second and abs(there.written_s - time.time()) < 60
    place.delete(["seal", "absent", "folder/big", "one"])
    assert list(place.list()) == [] and place.stat("seal") is None


def test_one_of_many_swaps_wins(server: Server, address: str) -> None:
    """Eight writers count to 40 by swaps alone: no count is lost."""
    place = open_store(address, os.environ)
    place.create("count", b"0 nobody")

    def add(writer: int) -> None:
        for _ in range(5):
            while True:
                there = place.stat("count")
                assert there
                text = place.read("count", start=0, length=there.size).decode()
                # Read after its etag: what is not of this etag is refused by the swap.
                count = int(text.split()[0])
                if place.swap(
                    "count", f"{count + 1} writer {writer}".encode(), etag=there.etag
                ):
                    break

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(add, range(8)))
    (text,) = objects(address).values()
    assert text.startswith(b"40 ")


def test_doctor_admits(server: Server, address: str) -> None:
    done = _threefold("doctor", address, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    values = json.loads(done.stdout)
    assert values["store"]["admitted"] is True and values["store"]["seconds"] < 8
    races = next(
        each["what"] for each in values["findings"] if each["check"] == "races of writers"
    )
    won, _, of = races.split()[:3]
    assert won == of
    assert objects(address) == {}
    assert SECRET not in done.stdout + done.stderr


REFUSED = {
    "read-only": (
        "reader",
        None,
        "runs",
        "first cannot be written: these credentials may not do that (403 AccessDenied)",
    ),
    "wrong secret": (
        "writer",
        f"{SECRET}-3",
        "runs",
        "the secret does not belong to the access key (403 Signature",
    ),
    "absent bucket": ("writer", None, "no-such-bucket", "there is no bucket no-such-bucket\n"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_doctor_refuses(seaweed: Server, use: Any, case: str) -> None:
    who, secret, bucket, what = REFUSED[case]
    use(seaweed.environ(who, secret))
    done = _threefold("doctor", f"s3://{bucket}/a")
    assert done.returncode == 2 and what in done.stderr, done.stderr
    lines = done.stderr.splitlines()
    assert [line.split(":")[0].strip() for line in lines[1:]] == ["expected", "fix"]
    assert SECRET not in done.stdout + done.stderr


def test_no_credentials(
    seaweed: Server, use: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    use(
        {
            "AWS_ENDPOINT_URL": seaweed.endpoint,
            "HOME": str(tmp_path),
            "AWS_ACCESS_KEY_ID": "AKIDWRITER",
        }
    )
    done = _threefold("doctor", "s3://runs/a")
    assert (
        done.returncode == 2
        and "there are no credentials for it, or not all of them" in done.stderr
    )


def test_export_is_the_folder_of_an_export_here(
    seaweed: Server, use: Any, address: str, run: Path, tmp_path: Path
) -> None:
    use(seaweed.environ())
    done = command(tmp_path, "export", str(run), "--to", address, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["folder"] == address
    assert json.loads(done.stdout)["verified"] == "reloaded: equal logits"
    assert command(tmp_path, "export", str(run), "--to", "here").returncode == 0
    sent = objects(address)
    mark = json.loads(sent.pop(MARK))
    here = {
        path.relative_to(tmp_path / "here").as_posix(): path.read_bytes()
        for path in (tmp_path / "here").rglob("*")
    }
    assert sent == here
    assert {name: file["bytes"] for name, file in mark["files"].items()} == {
        k: len(v) for k, v in here.items()
    }
    again = command(tmp_path, "export", str(run), "--to", address)
    assert again.returncode == 2
    assert (
        again.stderr.startswith(f"{address} holds ")
        and "\n  fix: --to ANOTHER_PREFIX" in again.stderr
    )
    assert {
        name: hashlib.md5(data).digest()
        for name, data in objects(address).items()
        if name != MARK
    } == {name: hashlib.md5(data).digest() for name, data in here.items()}
    assert SECRET not in done.stdout + done.stderr + again.stdout + again.stderr


KILLED_BEFORE_ITS_MARK = """
import os, signal
from threefold.__main__ import main
from threefold.places import upload
from threefold.places.object_store import ObjectStore

create = ObjectStore.create

def killed(place, key, data):
    if key == upload.MARK:
        os.kill(os.getpid(), signal.SIGKILL)
    return create(place, key, data)

ObjectStore.create = killed
main()
"""


def test_export_that_was_killed_is_gone_on_with(
    seaweed: Server, use: Any, address: str, run: Path, tmp_path: Path
) -> None:
    use(seaweed.environ())
    program = [
        sys.executable,
        "-c",
        KILLED_BEFORE_ITS_MARK,
        "export",
        str(run),
        "--to",
        address,
    ]
    process = subprocess.Popen(
        program, cwd=tmp_path, env=environment(tmp_path), stderr=subprocess.PIPE
    )
    # Everybody may see the arguments of a process.
    assert SECRET.encode() not in Path(f"/proc/{process.pid}/cmdline").read_bytes()
    _, err = process.communicate(timeout=120)
    assert process.returncode == -signal.SIGKILL, err
    assert CLAIM in objects(address) and MARK not in objects(address)
    done = command(tmp_path, "export", str(run), "--to", address)
    assert done.returncode == 0, done.stderr
    assert MARK in objects(address) and CLAIM not in objects(address)


def test_read_only_store_gets_no_export(
    seaweed: Server, use: Any, address: str, run: Path, tmp_path: Path
) -> None:
    use(seaweed.environ("reader"))
    done = command(tmp_path, "export", str(run), "--to", address)
    assert (
        done.returncode == 2
        and "these credentials may not do that (403 AccessDenied)" in done.stderr
    )
    with pytest.raises(ConfigError):
        open_store(address, os.environ).write("one", b"1")


def _threefold(*arguments: str) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-m", "threefold", *arguments]
    return subprocess.run(program, capture_output=True, text=True, timeout=90)
