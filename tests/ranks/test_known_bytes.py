"""Bytes that changed are named with their block and rows: between hosts, on a resume, while it runs, and afterwards."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest

from ranks import warm
from ranks.runs import command, environment, prepare, torchrun
from ranks.spawn import run_ranks

TRAIN = (
    "train",
    "config.yaml",
    "--data.source",
    "store",
    "--checkpoint.every",
    "3",
    "--audit.every",
    "3",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared store, and a run of six steps that has read it."""
    folder = tmp_path_factory.mktemp("bytes")
    prepare(folder)
    made = command(
        folder,
        "data",
        "prepare",
        "--data.source",
        "corpus",
        "--data.tokenizer",
        "bytes",
        "--to",
        "store",
    )
    assert made.returncode == 0, made.stderr
    done = command(folder, *TRAIN, "--mesh.dp", "2", "--train.steps", "6", "--log.dir", "run")
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    """All of it in a folder of its own."""
    return Path(shutil.copytree(folder, tmp_path / "copy", symlinks=True))


def change(path: Path, *, at: int, keep_times: bool = False) -> None:
    """Overwrites 2,000 bytes in place with `A` tokens."""
    stat = path.stat()
    with path.open("r+b") as file:
        file.seek(at)
        file.write(b"A\x00" * 1000)
    if keep_times:
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def lines_of(run: Path, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "audit.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


def test_run_records_its_bytes_and_checks_rows(folder: Path) -> None:
    (segment,) = lines_of(folder / "run", "segment")
    ((name, digest, prefix),) = segment["stores"]
    assert (name, prefix) == ("source", str(folder / "store/tokens"))
    assert (folder / "run/blocks" / f"{digest}.blocks").read_bytes() == (
        folder / "store/tokens.blocks"
    ).read_bytes()
    assert segment["tensors"] == ["input_ids", "labels", "position_ids"]
    steps = lines_of(folder / "run", "steps")
    assert len(steps) == 2 and all(2 <= line["checked"] <= 24 for line in steps)
    manifest = json.loads((folder / "run/checkpoints/step-00000006/manifest.json").read_text())
    assert manifest["blocks"] == {"source": digest}


def _files_read(folder: str) -> list[str]:
    """What this rank reads of text and stores while it opens the rows of a run, once it has been prepared."""
    from threefold.config.loading import validate
    from threefold.data.store import hash_cache as remembered
    from threefold.data.text.files import Digests
    from threefold.data.tokens import ByteTokenizer
    from threefold.mesh.mesh import init_mesh
    from threefold.run import assemble

    os.environ["XDG_CACHE_HOME"] = f"{folder}/cache-of-ranks"
    seen: list[str] = []
    of, sample = Digests.of, remembered.sample
    Digests.of = lambda self, path: (seen.append(path), of(self, path))[1]
    remembered.sample = lambda *args: (seen.append("blocks"), sample(*args))[1]
    mesh = init_mesh(dp=2, device="cpu")
    here = dataclasses.replace(mesh, host_leader=0)  # a bare process group knows of no hosts
    try:
        config = validate(
            {
                "data": {"source": f"{folder}/corpus", "seq_len": 32},
                "train": {"global_batch": 8},
            }
        )
        first = assemble.rows_of(config, ByteTokenizer(), here).fingerprint
        seen.clear()
        assert assemble.rows_of(config, ByteTokenizer(), here).fingerprint == first
    finally:
        mesh.close()
    return seen


def test_one_rank_of_a_host_looks_at_the_files(folder: Path) -> None:
    read = run_ranks(_files_read, 2, str(folder))
    assert read == [[f"part-{number}.txt" for number in range(4)] + ["blocks"], []]


def test_audit_proves_bytes_that_it_knows(copy: Path) -> None:
    """The record names the store where the run was, the fixture's folder; here it is made to name the copy's."""
    record = copy / "run/audit.jsonl"
    (segment,) = lines_of(copy / "run", "segment")
    record.write_text(
        record.read_text().replace(segment["stores"][0][2], str(copy / "store/tokens"))
    )

    def audit(*options: str) -> tuple[int, str]:
        done = command(copy, "data", "audit", "run", *options)
        assert "Traceback" not in done.stderr
        return done.returncode, done.stdout + done.stderr

    code, said = audit()
    assert code == 0, said
    assert (
        f"  source: {copy}/store/tokens.bin and .idx are the bytes that the run has read: 2 of 2 blocks read"
        in said
    )
    assert re.search(
        r"  rows whose blocks were compared while it ran: \d+, over all ranks\n", said
    )
    assert said.endswith(
        "exactly one step: samples and bytes (--contents also compares every token)\n"
    )
    assert audit("--contents")[1].endswith("samples and tokens\n")
    change(copy / "store/tokens.bin", at=20_000, keep_times=True)
    code, said = audit()
    assert code == 1 and "proved" not in said
    assert (
        f"{copy}/store/tokens.bin has changed since it was hashed: block 0 of 1 (bytes 0 to "
        in said
    )
    # Taken for right here, but the run knows what it read.
    for suffix in (".blocks", ".json"):
        (copy / f"store/tokens{suffix}").unlink()
    code, said = audit()
    assert code == 1
    assert (
        f"{copy}/store/tokens.bin is not what the run has read: block 0 of 1 (bytes 0 to "
        in said
    )
    assert ", read by rows 0, 1, 2, " in said
    shutil.rmtree(copy / "store")
    code, said = audit()
    assert code == 1
    assert (
        f"the samples are proved, but not their bytes: {copy}/store/tokens.bin and .idx are not on this"
        in said
    )


def _as_host_b() -> None:
    socket.gethostname = lambda: "host-b"


@pytest.mark.parametrize("known", [True, False], ids=["known", "of another maker"])
def test_hosts_with_different_copies_are_refused(copy: Path, known: bool) -> None:
    """Two ranks in two folders, as on two hosts: one copy has other tokens; without a .blocks only the other shows."""
    other = Path(shutil.copytree(copy, copy.parent / "other", symlinks=True))
    change(other / "store/tokens.bin", at=20_000)
    if not known:
        for place in (copy, other):
            for suffix in (".blocks", ".json"):
                (place / f"store/tokens{suffix}").unlink()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    env = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
    }
    arguments = (*TRAIN, "--mesh.dp", "2", "--log.dir", str(copy / "two"))
    with contextlib.ExitStack() as stack:
        ranks = [
            stack.enter_context(
                warm.Running(
                    warm.threefold,
                    place,
                    arguments,
                    {**environment(place), **env, "LOCAL_WORLD_SIZE": "1", "RANK": str(rank)},
                    first=_as_host_b if rank else None,
                )
            )
            for rank, place in enumerate((copy, other))
        ]
        assert [rank.wait(30) for rank in ranks] == [2, 2], [rank.err() for rank in ranks]
        said = "".join(rank.err() for rank in ranks)
    if known:
        assert (
            "store/tokens.bin has changed since it was hashed: block 0 of 1 (bytes 0 to "
            in said
        )
    else:
        assert "data.source: rank 1 (host host-b) and rank 0 (host " in said
        assert (
            "have different copies of store/tokens: tokens.bin, block 0 of 1 (bytes 0 to "
            in said
        )
    assert ", read by rows 0, 1, 2, 3, 4, 5 and 768 more\n" in said
    assert said.count("  fix: ") == 1 and "Traceback" not in said
    assert not (copy / "two/metrics.jsonl").exists()


def test_store_changed_between_stop_and_resume_is_refused(copy: Path) -> None:
    change(copy / "store/tokens.bin", at=20_000)
    again = (*TRAIN, "--mesh.dp", "1", "--log.dir", "run", "--train.steps", "9")
    refused = command(copy, *again)
    assert refused.returncode == 2
    assert re.match(
        r"store/tokens.bin has changed since it was hashed: block 0 of 1 \(bytes 0 to .*\), read by rows 0, ",
        refused.stderr,
    ), refused.stderr
    # Hashed again on purpose: a new run takes it, this one knows better.
    for suffix in (".blocks", ".json"):
        (copy / f"store/tokens{suffix}").unlink()
    shutil.copy(copy / "run/config.yaml", copy / "config-of-run.yaml")
    other = command(copy, *again)
    assert (
        other.returncode == 2 and "fingerprint" in other.stderr
    ) or "data = " in other.stderr, other.stderr


def test_large_store_of_another_maker_is_refused_by_its_block(copy: Path) -> None:
    """Its fingerprint is of 16 samples: a change between them shows in the hashes that the run has kept."""
    for suffix in (".blocks", ".json"):
        (copy / f"store/tokens{suffix}").unlink()
    with (copy / "store/tokens.bin").open("r+b") as file:
        content = file.read()
        tokens = content * 720  # 34 MiB: samples of 1 MiB leave 18 MiB out
        file.seek(0)
        file.write(tokens)
    _index_of_one(copy / "store/tokens.idx", len(tokens) // 2)
    run = (*TRAIN, "--log.dir", "large", "--mesh.dp", "1", "--train.steps")
    done = command(copy, *run, "1")
    assert done.returncode == 0, done.stderr
    change(copy / "store/tokens.bin", at=(3 << 20) + (1 << 19))
    refused = command(copy, *run, "2")
    assert refused.returncode == 2 and "block 3 of 35" in refused.stderr, refused.stderr
    assert f"rm {copy}" in refused.stderr or "rm store/tokens.blocks" in refused.stderr
    (copy / "store/tokens.blocks").unlink()
    refused = command(copy, *run, "2")
    assert refused.returncode == 2
    assert re.match(
        r"store/tokens has changed since the checkpoint large/checkpoints/step-00000001: tokens.bin, "
        r"block 3 of 35 \(bytes 3,145,728 to 4,194,303\), read by rows 49151, 49152, 49153, ",
        refused.stderr,
    ), refused.stderr


def _index_of_one(path: Path, num_tokens: int) -> None:
    import numpy as np

    from threefold.data.store.index import write_index

    with path.open("wb") as file:
        write_index(file, np.array([num_tokens], np.int32), dtype=np.dtype("<u2"))


@pytest.mark.parametrize(
    ("act", "named"),
    [
        (
            "file.seek(20000); file.write(b'A\\0' * 8000)",
            "has changed since it was hashed: block 0 of 1",
        ),
        (
            "file.truncate(48000)",
            "was cut, to 48,000 bytes instead of 49,550: block 0 of 1 and all after it, read by",
        ),
    ],
    ids=["changed", "cut"],
)
def test_store_that_changes_while_it_is_read_ends_the_run(
    copy: Path, act: str, named: str
) -> None:
    code = (
        "import sys\n"
        "from threefold.data.sampling import loader\n"
        "plain = loader.TokenLoader.__iter__\n"
        "def damage(self):\n"
        "    for number, batch in enumerate(plain(self), start=1):\n"
        "        if number == 5 and self._dataset.dp_rank == 0:\n"
        "            with open('store/tokens.bin', 'r+b') as file:\n"
        f"                {act}\n"
        "        yield batch\n"
        "loader.TokenLoader.__iter__ = damage\n"
        "from threefold.__main__ import main\n"
        f"sys.argv = ['threefold', *{TRAIN!r}, '--mesh.dp', '2', '--log.dir', 'faulty']\n"
        "main()\n"
    )
    (copy / "faulty.py").write_text(code)
    done = torchrun(copy, 2, "faulty.py")
    assert done.returncode == 1
    assert (
        f"store/tokens.bin {named}" in done.stderr
        or "was truncated while being read" in done.stderr
    ), done.stderr
    assert "Bus error" not in done.stderr
    assert [path.name for path in (copy / "faulty/checkpoints").glob("step-*")] == [
        "step-00000003"
    ]
