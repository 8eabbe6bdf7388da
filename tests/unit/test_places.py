"""Places in stores, against a server that does wrong what it is told to: what is said, retried and refused."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import xxhash

from store_stub import StubStore, serving
from threefold.commands.arguments import is_address, on_this_machine
from threefold.commands.run_argument import only_here
from threefold.config.paths import literal_paths
from threefold.config.schema import Config
from threefold.errors import ConfigError, RunError, ThreefoldError
from threefold.places import object_store
from threefold.places.admission import PROBE, admit, require_admitted
from threefold.places.faults import MissingObject, PlaceError
from threefold.places.fetched import fetched
from threefold.places.object_store import ObjectStore, open_store
from threefold.places.text_files import text_files
from threefold.places.upload import CLAIM, MARK, send_files, sent_to
from threefold.places.url import StoreUrl, parse, without_pattern

SECRET = "5ecret/Of+The/Tests"
URL = "s3://runs/a/b"


@pytest.fixture
def store() -> StubStore:
    return StubStore()


@pytest.fixture(autouse=True)
def environ(store: StubStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """What leads to the stub, here and as the mapping that is passed on."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    with serving(store) as endpoint:
        values = {
            "AWS_ACCESS_KEY_ID": "AKIDOFTEST",
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": endpoint,
        }
        for name, value in values.items():
            monkeypatch.setenv(name, value)
        yield values


@pytest.fixture
def place(environ: dict[str, str]) -> ObjectStore:
    return open_store(URL, environ, retry_s=2)


@pytest.fixture(params=["s3", "gs"])
def url(
    request: pytest.FixtureRequest, environ: dict[str, str], monkeypatch: Any, tmp_path: Path
) -> str:
    """The prefix by S3's protocol and by Google's, whose client finds the stub by the file of a service account."""
    account = {"gcs_base_url": environ["AWS_ENDPOINT_URL"], "disable_oauth": True}
    account |= dict.fromkeys(("client_email", "private_key", "private_key_id"), "")
    (tmp_path / "account.json").write_text(json.dumps(account))
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", str(tmp_path / "account.json"))
    return URL.replace("s3://", f"{request.param}://")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("s3://bucket", ("s3", "bucket", "")),
        ("s3://bucket/", ("s3", "bucket", "")),
        ("s3://my.bucket-1/a/b_c=2/", ("s3", "my.bucket-1", "a/b_c=2")),
        ("gs://bucket/a", ("gs", "bucket", "a")),
    ],
)
def test_address(text: str, parts: tuple[str, str, str]) -> None:
    assert parse(text) == StoreUrl(*parts)
    assert parse(str(parse(text))) == parse(text)


@pytest.mark.parametrize(
    ("text", "what", "fix"),
    [
        ("s3:/x", "s3:/x is not the address of a store", "s3://x"),
        ("s3:x/y", "s3:x/y is not the address of a store", "s3://x/y"),
        ("s3://", "s3:// names no bucket", "s3://bucket/prefix"),
        ("s3:///x", "s3:///x names no bucket", "s3://bucket/x"),
        ("s3://Runs/x", "s3://Runs/x: 'Runs' is not a bucket's name", "s3://bucket/x"),
        (
            "s3://runs/a//b",
            "s3://runs/a//b: '' cannot be a part of a prefix",
            "s3://runs/another-prefix",
        ),
        (
            "s3://runs/../b",
            "s3://runs/../b: '..' cannot be a part of a prefix",
            "s3://runs/another-prefix",
        ),
        (
            "s3://runs/a b",
            "s3://runs/a b: 'a b' cannot be a part of a prefix",
            "s3://runs/another-prefix",
        ),
        (
            "hf://me/x",
            "hf://me/x is not a store that threefold can use",
            "s3://bucket/prefix   (yours; for another S3 store",
        ),
        (
            "https://h/x",
            "https://h/x is not a store that threefold can use",
            "s3://bucket/prefix   (yours; for another S3 store",
        ),
    ],
)
def test_address_that_is_none(text: str, what: str, fix: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text)
    (problem,) = caught.value.problems
    assert problem.what == what
    assert problem.expected
    assert problem.fix.startswith(fix)


@pytest.mark.parametrize(
    "address",
    [
        f"s3://AKIDOFTEST:{SECRET}@runs/x",
        f"s3://runs:{SECRET}/x",
        f"s3://runs/me:{SECRET}@host",
        f"s3://runs/x?X-Amz-Signature={SECRET}",
        f"https://runs.s3.amazonaws.com/x?X-Amz-Signature={SECRET}",
        f"s3://runs/x#{SECRET}",
    ],
)
def test_address_with_a_secret_is_not_shown(address: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(address)
    assert SECRET not in str(caught.value) and "AKIDOFTEST" not in str(caught.value)
    assert (
        caught.value.problems[0].what
        == f"the address {address.partition(':')[0]}://... holds more than a bucket and a prefix"
    )


def test_signed_text_is_not_shown(environ: dict[str, str], tmp_path: Path) -> None:
    for address in (
        f"s3://runs/a.jsonl?X-Amz-Signature={SECRET}",
        f"s3://runs/*.txt?sig={SECRET}",
    ):
        with pytest.raises(
            ConfigError, match="holds more than a bucket and a prefix"
        ) as caught:
            text_files(
                address,
                environ,
                tmp_path,
                lambda key: key.endswith((".txt", ".jsonl")),
                kinds="",
            )
        assert SECRET not in str(caught.value)
    assert without_pattern("s3://runs/x-?.txt") == ("s3://runs", "x-?.txt")


@pytest.mark.parametrize(
    "address",
    [f"https://me:{SECRET[:6]}@host/x", f"s3://runs/x?X-Amz-Signature={SECRET[:6]}"],
)
@pytest.mark.parametrize(
    "key", ["log.dir", "data.source", "model.name_or_path", "checkpoint.resume"]
)
def test_no_key_of_a_config_shows_a_secret(key: str, address: str) -> None:
    section, name = key.split(".")
    config = Config().changed(**{section: {name: address}})
    with pytest.raises(ConfigError, match="holds more than a bucket and a prefix") as caught:
        list(literal_paths(config))
    assert SECRET[:6] not in str(caught.value)


def test_no_command_shows_a_secret() -> None:
    for address in (f"s3://runs/x?sig={SECRET[:6]}", f"s3://{SECRET[:6]}@runs/x"):
        for ask in (only_here, on_this_machine):
            with pytest.raises(ConfigError) as caught:
                ask(Path(address))
            assert SECRET[:6] not in str(caught.value)
    assert not is_address("runs/a@b?c=d") and is_address("hf:name@revision")


@pytest.mark.parametrize(
    ("given", "told", "fix"),
    [
        (f"https://me:{SECRET}@host:9000", "...host:9000", "https://host:9000"),
        (f"me:{SECRET}@host:9000", "...host:9000", "https://host:9000"),
        (f"https://host/?sig={SECRET}", "https://host/...", "https://host/"),
    ],
)
def test_servers_address_with_a_secret_is_not_shown(given: str, told: str, fix: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_store(URL, {"AWS_ENDPOINT_URL": given})
    assert str(caught.value).startswith(
        f"AWS_ENDPOINT_URL is {told!r}, which is not a server address\n"
    )
    assert caught.value.problems[0].fix == f"AWS_ENDPOINT_URL={fix}   (http:// without TLS)"


def test_library_that_is_not_installed(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str]
) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(ConfigError) as caught:
        open_store(URL, environ)
    assert str(caught.value) == (
        "s3://runs/a/b is in a store, but the package obstore is not installed\n"
        "  expected: threefold with its extra s3\n"
        "  fix: pip install 'threefold[s3]'"
    )


def test_protocol(url: str, environ: dict[str, str], tmp_path: Path, store: StubStore) -> None:
    place = open_store(url, environ, retry_s=2)
    big = os.urandom(20 * 2**20)
    (tmp_path / "big").write_bytes(big)
    place.write("one", b"12345")
    place.write("folder/big", tmp_path / "big")
    assert place.read("one", start=1, length=3) == b"234"
    assert place.read("one", start=1, length=0) == b""
    assert (
        place.read("folder/big", start=8 * 2**20 - 5, length=10)
        == big[8 * 2**20 - 5 : 8 * 2**20 + 5]
    )
    assert store.objects["a/b/folder/big"] == big
    assert {each.key: each.size for each in place.list()} == {"one": 5, "folder/big": len(big)}
    assert [each.key for each in place.list("folder")] == ["folder/big"]
    etag = place.create("seal", b"first")
    assert etag and place.create("seal", b"other") is None
    second = place.swap("seal", b"second", etag=etag)
    assert second and place.swap("seal", b"third", etag=etag) is None
    there = place.stat("seal")
    assert there and (there.size, there.etag) == (6, second)
    assert place.swap("absent", b"x", etag=etag) is None
    place.delete(["seal", "absent"])
    assert place.stat("seal") is None


@pytest.mark.parametrize(
    ("key", "start", "what"),
    [
        ("absent", 0, "s3://runs/a/b: absent cannot be read: it is not there (404 NoSuchKey)"),
        ("one", 3, "s3://runs/a/b/one ends 3 bytes before the 8 requested"),
    ],
)
def test_bytes_that_are_not_there(place: ObjectStore, key: str, start: int, what: str) -> None:
    place.write("one", b"12345")
    with pytest.raises(PlaceError) as caught:
        place.read(key, start=start, length=5)
    assert caught.value.problems[0].what == what


def test_hashes_that_are_listed_and_not_there(
    environ: dict[str, str], store: StubStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.objects["a/b/tokens.blocks"] = b"1"
    monkeypatch.setattr(ObjectStore, "get", lambda self, key: None)
    with pytest.raises(MissingObject, match=r"s3://runs/a/b/tokens\.blocks is gone"):
        fetched(URL, environ, tmp_path, lambda data, path: pytest.fail("none"))


def test_cache_that_cannot_be_written_is_named(
    environ: dict[str, str], store: StubStore, tmp_path: Path
) -> None:
    store.objects |= {"a/b/tokens.blocks": b"1", "a/b/text/a.txt": b"text"}
    (tmp_path / "file").touch()
    blocks = type("Blocks", (), {"files": {}, "block_bytes": 1})()
    for fetch in (
        lambda: fetched(URL, environ, tmp_path / "file", lambda data, path: blocks),
        lambda: text_files(
            f"{URL}/text",
            environ,
            tmp_path / "file/a",
            lambda key: key.endswith(".txt"),
            kinds="",
        ),
    ):
        with pytest.raises(
            RunError, match=r"^.*/file/.* cannot be written: Not a directory"
        ) as caught:
            fetch()
        assert caught.value.problems[0].fix.startswith("XDG_CACHE_HOME=FOLDER threefold ...")


ANSWERS = [
    (404, "NoSuchBucket", "there is no bucket runs", ConfigError),
    (
        403,
        "SignatureDoesNotMatch",
        "the secret does not belong to the access key (403 ",
        ConfigError,
    ),
    (
        403,
        "InvalidAccessKeyId",
        "it does not know the access key (403 InvalidAccessKeyId)",
        ConfigError,
    ),
    (
        400,
        "ExpiredToken",
        "the session's token has expired or is not one (400 ExpiredToken)",
        ConfigError,
    ),
    (
        403,
        "RequestTimeTooSkewed",
        "this machine's clock differs too much from its own (403 ",
        ConfigError,
    ),
    (301, "PermanentRedirect", "the bucket runs is in another region (redirect)", ConfigError),
    (
        400,
        "AuthorizationHeaderMalformed",
        "the bucket runs is in another region (400 ",
        ConfigError,
    ),
    (403, "AccessDenied", "these credentials may not do that (403 AccessDenied)", ConfigError),
    (405, "MethodNotAllowed", "it answered 405 MethodNotAllowed", PlaceError),
]


@pytest.mark.parametrize(("status", "code", "told", "kind"), ANSWERS)
def test_answer_is_one_sentence(
    place: ObjectStore,
    store: StubStore,
    status: int,
    code: str,
    told: str,
    kind: type[ThreefoldError],
) -> None:
    store.answers["PUT"] = (status, code, 100)
    with pytest.raises(kind) as caught:
        place.write("one", b"1")
    (problem,) = caught.value.problems
    assert problem.what.startswith(f"s3://runs/a/b: one cannot be written: {told}")
    assert problem.expected and problem.fix
    assert "AKIDOFTEST" not in str(caught.value) and "signature of it" not in str(caught.value)
    assert caught.value.__cause__ is None and caught.value.__suppress_context__
    assert len(store.requests) == 1, "what cannot get better is not asked again"


@pytest.mark.parametrize("times", [2, 1000])
def test_busy_store_is_asked_again_for_a_while(
    place: ObjectStore, store: StubStore, times: int
) -> None:
    store.answers["PUT"] = (503, "SlowDown", times)
    if times == 2:
        place.write("one", b"1")
        assert store.objects == {"a/b/one": b"1"} and len(store.requests) == 3
        return
    with pytest.raises(
        PlaceError,
        match=r"^s3://runs/a/b: one cannot be written: it asks to slow down \(503 SlowDown\)",
    ):
        place.write("one", b"1")
    assert 3 <= len(store.requests) <= 13


@pytest.mark.parametrize("write", ["create", "swap"])
def test_writer_whose_answer_is_lost_knows_that_it_has_won(
    place: ObjectStore, store: StubStore, write: str
) -> None:
    etag = place.create("pointer", b"0")
    store.cut_after = 1
    won = (
        place.create("seal", b"mine")
        if write == "create"
        else place.swap("pointer", b"mine", etag=etag or "")
    )
    assert won is not None
    assert place.create("seal", b"theirs") is None or write == "swap"


def test_writer_in_a_conflict_that_nobody_has_won_tries_again(
    place: ObjectStore, store: StubStore
) -> None:
    store.answers["PUT"] = (409, "ConditionalRequestConflict", 2)
    etag = place.create("seal", b"mine")
    store.answers["PUT"] = (409, "ConditionalRequestConflict", 1)
    assert etag and place.swap("seal", b"again", etag=etag)
    assert store.objects == {"a/b/seal": b"again"}


def test_store_that_is_not_there(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    place = open_store(URL, {**environ, "AWS_ENDPOINT_URL": "http://127.0.0.1:9"}, retry_s=0.5)
    for ask in (
        lambda: place.write("one", b"1"),
        lambda: place.create("one", b"1"),
        lambda: list(place.list()),
    ):
        with pytest.raises(PlaceError, match="it did not answer, or closed the connection"):
            ask()


@pytest.mark.parametrize(
    ("given", "fix"),
    [
        ("", "leave {} out"),
        ("http://", "leave {} out"),
        ("localhost:9000", "{}=https://localhost:9000   (http:// without TLS)"),
        ("ftp://host", "{}=https://host   (http:// without TLS)"),
        ("http://[::1", "{}=https://[::1   (http:// without TLS)"),
        ("http://host:90000", "{}=https://host:90000   (http:// without TLS)"),
        ("http://höst", "{}=https://höst   (http:// without TLS)"),
    ],
)
@pytest.mark.parametrize(
    "name", ["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT", "endpoint_url"]
)
def test_what_is_no_servers_address_is_refused(
    name: str, given: str, fix: str, environ: dict[str, str], tmp_path: Path
) -> None:
    """The library would panic at it, in the middle of a request."""
    del environ["AWS_ENDPOINT_URL"], environ["AWS_ACCESS_KEY_ID"]
    (tmp_path / "config").write_text(f"[default]\nendpoint_url = {given}\n")
    of_profile = (
        {"AWS_CONFIG_FILE": str(tmp_path / "config")}
        if name == "endpoint_url"
        else {name: given}
    )
    with pytest.raises(ConfigError) as error:
        open_store(URL, {"HOME": str(tmp_path), **environ, **of_profile})
    assert str(error.value).startswith(f"{name} is {given!r}, which is not a server address\n")
    assert str(error.value).endswith(f"fix: {fix.format(name)}")


def test_ctrl_c_is_heard_while_a_store_does_not_answer() -> None:
    code = (
        "import os; from threefold.places.object_store import open_store\n"
        "place = open_store('s3://runs/a', os.environ)\nprint('asks', flush=True)\nplace.read('one', start=0, length=1)"
    )
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"http://127.0.0.1:{server.getsockname()[1]}"
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            env={**os.environ, "AWS_ENDPOINT_URL": endpoint},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # What a shell starts in the background ignores Ctrl-C.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        server.settimeout(30)
        connection, _ = server.accept()
        process.send_signal(signal.SIGINT)
        try:
            process.communicate(timeout=20)
        finally:
            process.kill()
            connection.close()
    assert process.returncode == -signal.SIGINT


def test_ctrl_c_that_does_not_end_a_wait_is_heard() -> None:
    """As one that comes just before the wait begins; here another thread receives it."""
    code = (
        "import os, signal, threading, time; from threefold.places.object_store import open_store\n"
        "place = open_store('s3://runs/a', os.environ)\n"
        "def received():\n"
        "    time.sleep(0.2)\n"
        "    signal.pthread_kill(threading.get_ident(), signal.SIGINT)\n"
        "    time.sleep(60)\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "place._call(received)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], env=os.environ, capture_output=True, timeout=20
    )
    assert ended.returncode == -signal.SIGINT
    assert ended.stderr.endswith(b"KeyboardInterrupt\n")


def test_store_is_not_used_after_a_fork(
    place: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_store.os, "getpid", lambda: -1)
    with pytest.raises(RunError, match="was opened before this process was forked"):
        place.stat("one")


def test_no_store_is_opened_after_a_fork(place: ObjectStore, environ: dict[str, str]) -> None:
    """The library's threads are not in the child: a new place would wait for them forever."""
    assert place.stat("one") is None
    if (child := os.fork()) == 0:
        try:
            open_store(URL, environ)
        except RunError as error:
            os._exit(7 if "before this process was forked" in str(error) else 8)
        finally:
            os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_profile(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, store: StubStore
) -> None:
    """Keys and endpoint of a profile, where the environment has none; a file that cannot be parsed is not shown."""
    for name in environ:
        monkeypatch.delenv(name)
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws" / "config").write_text(
        f"[profile lab]\nregion = eu-west-1\nendpoint_url = {environ['AWS_ENDPOINT_URL']}\n"
    )
    (tmp_path / ".aws" / "credentials").write_text(
        f"[lab]\naws_access_key_id = K\naws_secret_access_key = {SECRET}\n"
    )
    variables = {"HOME": str(tmp_path), "AWS_PROFILE": "lab"}
    open_store(URL, variables, retry_s=1).write("one", b"1")
    assert store.objects == {"a/b/one": b"1"}
    (tmp_path / ".aws" / "credentials").write_text(f"aws_secret_access_key {SECRET}\n")
    with pytest.raises(ConfigError, match="profiles cannot be parsed") as caught:
        open_store(URL, variables)
    assert SECRET not in str(caught.value) and caught.value.__suppress_context__


FAULTS = {
    "put if absent": (
        "the second writer of a key is not refused (If-None-Match is ignored)",
        "If-None-Match",
    ),
    "races of writers": ("0 of ", "If-None-Match"),
    "swap by etag": (
        "a write with a stale etag is not refused (If-Match is ignored)",
        "If-Match",
    ),
    "parts and ranges": ("other bytes than were written", "range"),
    "listing after writing": ("7 of 8 are listed at once", "listing"),
    "delete": ("the deleted object is still there", "delete"),
    "clock": ("this machine's and the store's: 3", "clock"),
}


def test_store_that_keeps_all_is_admitted(
    url: str, environ: dict[str, str], store: StubStore
) -> None:
    told = admit(url, environ)
    assert [probe.name for probe in told.probes if not probe.holds] == []
    assert [probe.name for probe in told.probes] == [*FAULTS, "latency, bandwidth"]
    assert store.objects == {} and min(told.measured.values()) > 0


@pytest.mark.parametrize("probe", FAULTS)
def test_fault_is_refused_by_name(
    url: str, environ: dict[str, str], store: StubStore, probe: str
) -> None:
    what, fault = FAULTS[probe]
    (store.ignored if fault.startswith("If") else store.wrong).add(fault)
    told = {each.name: each for each in admit(url, environ).probes}
    assert not told[probe].holds and told[probe].what.startswith(what), told[probe]
    assert told[probe].expected and told[probe].fix
    with_it = {
        "put if absent": {"races of writers", "swap by etag"},
        "races of writers": {"put if absent"},
    }
    others = {each.name for each in told.values() if not each.holds} - {probe}
    assert others <= with_it.get(probe, set())


@pytest.mark.parametrize(
    ("fault", "probe", "what"),
    [
        ("taken", "put if absent", "a new key is refused"),
        ("parts", "parts and ranges", "s3://runs/a/b/.threefold-probe-"),
        ("header", "parts and ranges", "s3://runs/a/b: .threefold-probe-"),
    ],
)
def test_other_faults_of_a_store(
    environ: dict[str, str], store: StubStore, fault: str, probe: str, what: str
) -> None:
    store.wrong.add(fault)
    failed = {each.name: each.what for each in admit(URL, environ).probes if not each.holds}
    assert failed[probe].startswith(what)
    assert fault != "header" or "it answered out of protocol" in failed[probe]


def test_a_run_that_cannot_remember_what_it_asked_goes_on(
    environ: dict[str, str], store: StubStore, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    said = list[str]()
    for _ in range(2):
        require_admitted(URL, environ, tmp_path / "file/kept", said.append)
    assert len(said) == 2 and store.objects == {}


def test_a_run_asks_a_bucket_once(
    url: str, environ: dict[str, str], store: StubStore, tmp_path: Path
) -> None:
    said = list[str]()
    store.wrong.add("range")
    for _ in range(2):
        with pytest.raises(
            ThreefoldError, match="a/b: parts and ranges: other bytes than were written"
        ):
            require_admitted(url, environ, tmp_path / "kept", said.append)
    store.wrong.clear()
    require_admitted(url, environ, tmp_path / "kept", said.append)
    assert len(said) == 1 and "8 probes hold" in said[0]
    num_requests = len(store.requests)
    require_admitted(f"{url}/other", environ, tmp_path / "kept", said.append)
    assert len(said) == 1 and len(store.requests) == num_requests
    require_admitted(
        url,
        {**environ, "AWS_ENDPOINT_URL": environ["AWS_ENDPOINT_URL"] + "/"},
        tmp_path,
        said.append,
    )
    assert len(store.requests) > num_requests and store.objects == {}


def test_folder_is_sent_with_its_mark_last(environ: dict[str, str], store: StubStore) -> None:
    files = {
        "model.safetensors": b"w" * 100,
        "config.json": b"{}",
        "model.safetensors.index.json": b"[]",
        "a/b": b"x",
    }
    with sent_to(URL, environ) as folder:
        for name, data in files.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(data)
    assert not folder.exists()
    mark = json.loads(store.objects.pop(f"a/b/{MARK}"))
    assert store.objects == {f"a/b/{name}": data for name, data in files.items()}
    assert {name: file["bytes"] for name, file in mark["files"].items()} == {
        k: len(v) for k, v in files.items()
    }
    for name, data in files.items():
        assert mark["files"][name]["xxh3_128"] == xxhash.xxh3_128_hexdigest(data)
    written = [
        line.removeprefix("PUT a/b/") for line in store.requests if line.startswith("PUT")
    ]
    assert next(name for name in written if PROBE not in name) == CLAIM
    assert written[-3:] == ["config.json", "model.safetensors.index.json", MARK]


@pytest.mark.parametrize("there", ["a/b/other", f"a/b/{CLAIM}", "a/b"])
def test_prefix_that_holds_something_is_refused(
    environ: dict[str, str], store: StubStore, there: str
) -> None:
    store.objects[there] = b"of somebody"
    with pytest.raises(ConfigError) as caught, sent_to(URL, environ):
        pytest.fail("nothing is made")
    held = {"a/b/other": "other", "a/b": "an object of its own name", f"a/b/{CLAIM}": CLAIM}
    assert caught.value.problems[0].what == f"s3://runs/a/b holds {held[there]}"
    assert store.objects == {there: b"of somebody"}


def test_export_is_not_sent_over_another_one_that_is_not_listed_yet(
    environ: dict[str, str], store: StubStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with sent_to(URL, environ) as folder:
        (folder / "model.safetensors").write_bytes(b"first")
    monkeypatch.setattr(ObjectStore, "list", lambda self, folder="": iter(()))
    there = dict(store.objects)
    with (
        pytest.raises(ConfigError, match=f"holds the {MARK} of other files"),
        sent_to(URL, environ) as folder,
    ):
        (folder / "model.safetensors").write_bytes(b"other")
    assert store.objects == there


def prepared(folder: Path, text: bytes = b"1") -> dict[str, Path]:
    files = {name: folder / name for name in ("tokens.bin", "tokens.idx", "tokens.json")}
    for path in files.values():
        path.write_bytes(text)
    return files


@pytest.mark.parametrize("killed_at", [1, 2, 3, 4])
def test_prepared_files_go_on_where_a_sender_was_killed(
    environ: dict[str, str],
    store: StubStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    killed_at: int,
) -> None:
    written, write = list[str](), ObjectStore.write

    class Killed(BaseException):
        """As a kill: nothing of the sender's runs after it."""

    def write_some(place: ObjectStore, key: str, data: bytes | Path, **how: Any) -> None:
        if len(written) + 1 == killed_at:
            raise Killed
        written.append(key)
        write(place, key, data, **how)

    def create(place: ObjectStore, key: str, data: bytes) -> str | None:
        if key == MARK and killed_at == 4:
            raise Killed
        return place._written_if(key, data, None)

    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(ObjectStore, "write", write_some)
        patched.setattr(ObjectStore, "create", create)
        send_files(prepared(tmp_path), URL, environ)
    assert f"a/b/{CLAIM}" in store.objects and f"a/b/{MARK}" not in store.objects
    (tmp_path / "other").mkdir()
    there = dict(store.objects)
    with pytest.raises(
        ConfigError,
        match="something else is being written to s3://runs/a/b, or its writer was killed",
    ):
        send_files(prepared(tmp_path / "other", b"2"), URL, environ)
    with (
        pytest.raises(ConfigError, match="something else is being"),
        sent_to(URL, environ) as folder,
    ):
        (folder / "one").write_bytes(b"1")
    assert store.objects == there
    store.objects["a/b/strange"] = b"of somebody"
    with pytest.raises(ConfigError, match="s3://runs/a/b holds strange"):
        send_files(prepared(tmp_path), URL, environ)
    del store.objects["a/b/strange"]
    send_files(prepared(tmp_path), URL, environ)
    assert set(store.objects) == {
        f"a/b/{name}" for name in ("tokens.bin", "tokens.idx", "tokens.json", MARK)
    }
    assert json.loads(store.objects[f"a/b/{MARK}"])["files"]["tokens.bin"]["bytes"] == 1


def test_prepared_files_are_sent_by_two_at_once(
    environ: dict[str, str], store: StubStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, begun = ObjectStore.write, list[str]()

    def with_another(place: ObjectStore, key: str, data: bytes | Path, **how: Any) -> None:
        write(place, key, data, **how)
        if not begun:
            begun.append(key)
            send_files(prepared(tmp_path), URL, environ)

    monkeypatch.setattr(ObjectStore, "write", with_another)
    send_files(prepared(tmp_path), URL, environ)
    assert set(store.objects) == {
        f"a/b/{name}" for name in ("tokens.bin", "tokens.idx", "tokens.json", MARK)
    }


def test_neighbours_of_a_prefix_are_no_part_of_it(
    environ: dict[str, str], store: StubStore
) -> None:
    store.objects["a/bc/other"] = b"of somebody"
    with sent_to(URL, environ) as folder:
        (folder / "one").write_bytes(b"1")
    assert set(store.objects) == {"a/bc/other", "a/b/one", f"a/b/{MARK}"}


def test_of_two_exports_one_is_refused(environ: dict[str, str], store: StubStore) -> None:
    with (
        pytest.raises(ConfigError, match="s3://runs/a/b holds "),
        sent_to(URL, environ) as folder,
    ):
        (folder / "one").write_bytes(b"1")
        with sent_to(URL, environ) as other:
            (other / "one").write_bytes(b"2")
    assert store.objects["a/b/one"] == b"2"
    with pytest.raises(ConfigError, match="s3://runs/a/b holds "), sent_to(URL, environ):
        pytest.fail("nothing is made")
    assert set(store.objects) == {"a/b/one", f"a/b/{MARK}"}


def test_store_without_put_if_absent_gets_no_export(
    environ: dict[str, str], store: StubStore
) -> None:
    store.ignored.add("If-None-Match")
    with pytest.raises(ThreefoldError, match="it ignores If-None-Match"), sent_to(URL, environ):
        pytest.fail("nothing is made")
    assert store.objects == {}


@pytest.mark.parametrize("fault", ["of the caller", "of the store"])
def test_what_was_sent_before_a_failure_is_gone_on_with(
    environ: dict[str, str], store: StubStore, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = ObjectStore.write

    def refused_from_b_on(place: ObjectStore, key: str, data: bytes | Path, **how: Any) -> None:
        store.answers["PUT"] = (403, "AccessDenied", int(key == "b"))
        write(place, key, data, **how)

    with (
        monkeypatch.context() as patched,
        pytest.raises((ZeroDivisionError, ConfigError)) as caught,
    ):
        patched.setattr(ObjectStore, "write", refused_from_b_on)
        with sent_to(URL, environ) as folder:
            (folder / "a").write_bytes(b"1")
            (folder / "b").write_bytes(b"1")
            if fault == "of the caller":
                _ = 1 / 0
    assert caught.type is (ZeroDivisionError if fault == "of the caller" else ConfigError)
    left = set() if fault == "of the caller" else {f"a/b/{CLAIM}", "a/b/a"}
    assert set(store.objects) == left and not folder.exists()
    with sent_to(URL, environ) as folder:
        (folder / "a").write_bytes(b"1")
        (folder / "b").write_bytes(b"1")
    assert set(store.objects) == {"a/b/a", "a/b/b", f"a/b/{MARK}"}


def _threefold(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "threefold", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_doctor_looks_at_a_store(store: StubStore) -> None:
    done = _threefold("doctor", URL, "--json")
    assert done.returncode == 0, done.stderr
    values = json.loads(done.stdout)
    assert values["stop"] is False and values["store"]["admitted"] is True
    assert values["store"]["address"] == URL and values["store"]["latency_s"] > 0
    assert [each["check"] for each in values["findings"]] == [*FAULTS, "latency, bandwidth"]
    store.ignored.add("If-None-Match")
    done = _threefold("doctor", URL)
    assert done.returncode == 1
    assert (
        "STOP    put if absent: the second writer of a key is not refused (If-None-Match is ignored)\n"
        "          expected: the second writer is refused: a run's lock and "
        "a checkpoint's seal depend on this\n          fix: another store for this"
    ) in done.stdout
    assert SECRET not in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (("doctor", "s3:/runs"), "s3:/runs is not the address of a store\n"),
        (("doctor", "hf://me/x"), "hf://me/x is not a store that threefold can use\n"),
    ],
)
def test_command_refuses_an_address(arguments: tuple[str, ...], what: str) -> None:
    done = _threefold(*arguments)
    assert done.returncode == 2 and done.stderr.startswith(what), done.stderr


def test_local_paths_load_nothing_of_it(tmp_path: Path) -> None:
    code = (
        "import sys, threefold.commands.export, threefold.commands.doctor\n"
        "sys.exit([name for name in sys.modules if name.startswith(('threefold.places', 'obstore'))] or 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


# --- where stores are not used yet -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (
            "train --log.dir s3://bucket/a",
            "log.dir = 's3://bucket/a' is an address of a store\n"
            "  expected: a folder on this machine or on a shared disk\n"
            "  fix: --log.dir runs/NAME --checkpoint.store s3://bucket/a\n",
        ),
        (
            "train --checkpoint.resume https://bucket/a",
            "https://bucket/a is not a store that threefold can use",
        ),
        ("train --checkpoint.store runs/a", "runs/a is not a store that threefold can use"),
        (
            "train --checkpoint.store s3://key:secret@bucket/a",
            "the address s3://... holds more than a bucket",
        ),
        ("import a --to s3://bucket/a", "--to s3:/bucket/a is an address of a store"),
        ("report a --to s3://bucket/a.html", "--to s3:/bucket/a.html is an address of a store"),
    ],
)
def test_address_is_no_folder_of_that_name(tmp_path: Path, words: str, what: str) -> None:
    command = [sys.executable, "-m", "threefold", *words.split()]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 2 and ended.stderr.startswith(what), ended.stderr
    assert not list(tmp_path.iterdir())
