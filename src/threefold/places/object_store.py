"""A prefix of a bucket as an ObjectPlace, by obstore, which this file alone imports, when one is opened.

Requests that fail on the way are tried again, with jitter, until their time is used up. A conditional write whose
answer is lost is asked again and recognised by its bytes, so that its writer knows whether it has won.
"""

import configparser
import functools
import importlib
import os
import random
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from threefold.errors import ConfigError, RunError
from threefold.places.faults import WHO_WRITES, MissingObject, explained, unanswered
from threefold.places.place import StoredObject
from threefold.places.url import StoreUrl, parse

RETRY_S = 20.0
_MAX_RETRIES, _MAX_CONFLICTS = 12, 4
_PART_BYTES = 8 * 2**20
_NUM_PARTS_AT_ONCE = 4
# Variables that obstore reads by itself, before a profile is looked at.
_PROVIDED = (
    "AWS_ACCESS_KEY_ID",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
)
# A host or an address in brackets, a port, a path; neither a user nor options, which may be a key.
_SERVER = re.compile(
    r"https?://([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:([0-6]?\d{1,4})?)?(/[^\s@?#]*)?"
)
_OF_PROFILE = {
    "aws_access_key_id": "access_key_id",
    "aws_secret_access_key": "secret_access_key",
    "aws_session_token": "session_token",
    "region": "region",
    "endpoint_url": "endpoint",
}


def open_store(
    address: str, environ: Mapping[str, str], *, retry_s: float = RETRY_S
) -> "ObjectStore":
    """The place of an address, not contacted yet; ConfigError if it is not one, or the library is not installed."""
    url = parse(address)
    try:
        library = importlib.import_module("obstore")
    except ImportError as error:
        raise ConfigError(
            f"{url} is in a store, but the package obstore is not installed",
            expected="threefold with its extra s3",
            fix="pip install 'threefold[s3]'",
        ) from error
    return ObjectStore(url, library, _settings(url, environ), retry_s=retry_s)


def server_of(address: str, environ: Mapping[str, str]) -> str:
    """Which bucket of which server an address is in."""
    url = parse(address)
    return f"{url.scheme}://{url.bucket} {_settings(url, environ).get('endpoint', '')}"


@functools.cache
def _first_process() -> int:
    """The process that has opened a store first: those that are forked from it later cannot open any."""
    return os.getpid()


def _settings(url: StoreUrl, environ: Mapping[str, str]) -> dict[str, Any]:
    """What obstore does not take from the environment by itself: a profile's values, and whether http:// is meant."""
    settings: dict[str, Any] = {}
    if url.scheme == "s3":
        provided = any(name in environ for name in _PROVIDED)
        settings = {} if provided else _profile(environ)
        settings |= (
            {"region": name}
            if (name := environ.get("AWS_REGION") or environ.get("AWS_DEFAULT_REGION"))
            else {}
        )
        endpoint = _endpoint(environ, settings.get("endpoint"))
        settings |= {"endpoint": endpoint} if endpoint else {}
        # The store compares what arrives with this, and keeps it.
        settings |= (
            {} if "AWS_CHECKSUM_ALGORITHM" in environ else {"checksum_algorithm": "SHA256"}
        )
        settings["client_options"] = {
            "allow_http": endpoint.startswith("http://"),
            "connect_timeout": timedelta(seconds=5),
            "timeout": timedelta(seconds=60),
        }
    return settings


def _endpoint(environ: Mapping[str, str], of_profile: str | None) -> str:
    """The address of a server other than Amazon's; empty if none is set. The library panics on an invalid one."""
    # The library reads the last by itself.
    names = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
    for name, endpoint in (
        *((name, environ.get(name)) for name in names),
        ("endpoint_url", of_profile),
    ):
        if endpoint is not None and not _SERVER.fullmatch(endpoint):
            shown = re.sub(r".*@|[?#].*", "...", endpoint)  # it may hold a key
            host = shown.rpartition("//")[2].strip(" .")
            raise ConfigError(
                f"{name} is {shown!r}, which is not a server address",
                expected="http:// or https://, a host, and its port: http://localhost:9000",
                fix=f"{name}=https://{host}   (http:// without TLS)"
                if host
                else f"leave {name} out",
            )
        if endpoint:
            return endpoint
    return ""


def _profile(environ: Mapping[str, str]) -> dict[str, Any]:
    """The values of AWS_PROFILE in the files of AWS' tools, which obstore does not read."""
    name, home = environ.get("AWS_PROFILE", "default"), Path(environ.get("HOME", "/"), ".aws")
    files = configparser.ConfigParser(interpolation=None)
    try:
        files.read([environ.get("AWS_CONFIG_FILE", home / "config")])
        files.read([environ.get("AWS_SHARED_CREDENTIALS_FILE", home / "credentials")])
    except configparser.Error:
        what = "the files of AWS' profiles cannot be parsed"  # a parser's own message shows the line
        raise ConfigError(
            what, expected="sections [NAME] with NAME = VALUE", fix="aws configure"
        ) from None
    values: dict[str, str] = {}
    for section in (f"profile {name}", name):
        values |= files[section] if files.has_section(section) else {}
    return {ours: values[theirs] for theirs, ours in _OF_PROFILE.items() if theirs in values}


class ObjectStore:
    """A prefix of a bucket of S3, of a store with its protocol, or of Google Cloud Storage.

    Belongs to the process that opened it: the library's threads do not follow a fork.
    """

    def __init__(
        self, url: StoreUrl, library: Any, settings: dict[str, Any], *, retry_s: float
    ) -> None:
        self.url = url
        self._library = library
        self._errors = importlib.import_module("obstore.exceptions")
        self._retry_s = retry_s
        self._pid = _first_process()
        backoff = {
            "init_backoff": timedelta(seconds=0.1),
            "max_backoff": timedelta(seconds=4),
            "base": 2,
        }
        retries = {
            "max_retries": _MAX_RETRIES,
            "retry_timeout": timedelta(seconds=retry_s),
            "backoff": backoff,
        }
        stores = importlib.import_module("obstore.store")
        kind = stores.GCSStore if url.scheme == "gs" else stores.S3Store
        with self._asking("it cannot be opened"):
            self._store = kind(
                url.bucket, prefix=url.prefix or None, retry_config=retries, **settings
            )

    def read(self, key: str, *, start: int, length: int) -> bytes:
        """Exactly these bytes of an object; MissingObject if it is absent or shorter."""
        if not length:
            return b""
        with self._asking(f"{key} cannot be read"):
            data = bytes(
                self._call(
                    self._library.get_range, self._store, key, start=start, length=length
                )
            )
        if len(data) != length:
            what = f"{self.url}/{key} ends {length - len(data)} bytes before the {start + length} requested"
            raise MissingObject(what, expected="the object as it was written", fix=WHO_WRITES)
        return data

    def get(self, key: str) -> tuple[bytes, str] | None:
        """A small object and the etag of these very bytes, None if there is none."""
        with self._asking(f"{key} cannot be read"):
            try:
                result = self._call(self._library.get, self._store, key)
            except FileNotFoundError:
                return None
            return bytes(self._call(result.bytes)), self._stamp(result.meta)

    def stat(self, key: str) -> StoredObject | None:
        """The object of a key, None if there is none."""
        with self._asking(f"{key} cannot be looked up"):
            try:
                return self._described(self._call(self._library.head, self._store, key))
            except FileNotFoundError:
                return None

    def _described(self, meta: Mapping[str, Any]) -> StoredObject:
        return StoredObject(
            meta["path"], meta["size"], self._stamp(meta), meta["last_modified"].timestamp()
        )

    def _stamp(self, meta: Mapping[str, Any]) -> str:
        """What a swap is conditional on: at Google that is an object's generation, not its etag."""
        return str(meta["version" if self.url.scheme == "gs" else "e_tag"])

    def write(self, key: str, data: bytes | Path, *, in_parts: bool = True) -> None:
        """Writes an object whole, replacing any existing one; in parts if it is large, which appear together.

        Args:
            in_parts: False: by one request. A killed writer then leaves no parts behind, which no listing shows.
        """
        limits: dict[str, Any] = {
            "chunk_size": _PART_BYTES,
            "max_concurrency": _NUM_PARTS_AT_ONCE,
        }
        limits |= {} if in_parts else {"use_multipart": False}
        with self._asking(f"{key} cannot be written"):
            self._call(self._library.put, self._store, key, data, **limits)

    def create(self, key: str, data: bytes) -> str | None:
        """The etag of a new object; None if another one has this key. No other writer may write the same `data`."""
        return self._written_if(key, data, None)

    def swap(self, key: str, data: bytes, *, etag: str) -> str | None:
        """The etag of what replaces the object with `etag`; None if that is no longer there. `data` as in `create`."""
        return self._written_if(key, data, etag)

    def _written_if(self, key: str, data: bytes, etag: str | None) -> str | None:
        mode = (
            "create"
            if etag is None
            else {"version" if self.url.scheme == "gs" else "e_tag": etag}
        )
        until = time.monotonic() + self._retry_s
        for tries in range(1, _MAX_RETRIES + 1):
            with self._asking(f"{key} cannot be written"):
                try:
                    return self._stamp(
                        self._call(
                            self._library.put,
                            self._store,
                            key,
                            data,
                            mode=mode,
                            use_multipart=False,
                        )
                    )
                except (
                    self._errors.AlreadyExistsError,
                    self._errors.PreconditionError,
                    FileNotFoundError,
                ) as error:
                    if "NoSuchBucket" in str(error):
                        raise
                except self._errors.GenericError as error:
                    # The library does not repeat such a request, since it may have been carried out.
                    if (
                        not unanswered(error)
                        or time.monotonic() > until
                        or tries == _MAX_RETRIES
                    ):
                        raise
            stored = self.stat(key)
            if (
                stored
                and stored.size == len(data)
                and self.read(key, start=0, length=len(data)) == data
            ):
                return stored.etag
            # Some stores refuse all concurrent writers (409): no one has won yet.
            if (stored.etag if stored else None) != etag or tries >= _MAX_CONFLICTS:
                return None
            time.sleep(random.uniform(0.05, 0.1 * 2 ** min(tries, 5)))
        return None

    def list(self, folder: str = "") -> Iterator[StoredObject]:
        """All objects below a folder, in no order."""
        with self._asking("its objects cannot be listed"):
            stream = self._library.list(self._store, folder or None)
            while chunk := self._call(next, stream, None):
                yield from map(self._described, chunk)

    def delete(self, keys: Sequence[str]) -> None:
        """Removes objects; those that are absent already are no error."""
        with self._asking("objects cannot be deleted"):
            if keys:
                self._call(self._library.delete, self._store, list(keys))

    def _call(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """The result of a library function, called in a thread: in the main thread its waits would block Ctrl-C."""
        if threading.current_thread() is not threading.main_thread():
            return function(*arguments, **options)
        future: Future[Any] = Future()

        def work() -> None:
            try:
                future.set_result(function(*arguments, **options))
            except BaseException as error:
                future.set_exception(error)

        # One that still waits does not keep the process from ending.
        threading.Thread(target=work, daemon=True).start()
        # A signal that comes just before a wait does not end it.
        while not future.done():
            wait([future], timeout=1)
        return future.result()

    @contextmanager
    def _asking(self, doing: str) -> Iterator[None]:
        """Errors of the library in three parts, without its text and without itself: both may show credentials."""
        if os.getpid() != self._pid:
            raise RunError(
                f"{self.url}: a store was opened before this process was forked",
                expected="a store opened by this process itself: its connections do not survive a fork",
                fix="open it in the process that uses it, and start processes with spawn",
            )
        try:
            yield
        except (OSError, ValueError, self._errors.BaseError) as error:
            raise explained(error, self.url, doing) from None
