"""Addresses of object stores, `s3://BUCKET/PREFIX`: their parts, or the error in them. No library."""

import re
from dataclasses import dataclass

from threefold.errors import ConfigError

_SCHEMES = ("s3", "gs")
_MARKS = frozenset("*?[{")
_BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,61}[a-z0-9]")
# What no store, shell or listing writes in another way.
_PART = re.compile(r"[A-Za-z0-9._=+@,-]+")
# A user, or the options of a signed address; a pattern has no name after its question mark.
_KEY = re.compile(r"[\w+.-]+:(/+[^/]*@|.*\?[A-Za-z][\w-]*=)")


@dataclass(frozen=True)
class StoreUrl:
    """A bucket and the prefix in it (may be empty) that all keys begin with."""

    scheme: str
    bucket: str
    prefix: str

    def __str__(self) -> str:
        return f"{self.scheme}://{self.bucket}/{self.prefix}".rstrip("/")


def refuse_key(address: str) -> None:
    """ConfigError, which does not show it, if an address of any kind may hold a key."""
    if _KEY.match(address):
        raise _secret(address.partition(":")[0])


def without_pattern(text: str) -> tuple[str, str]:
    """An address up to its first part with a mark of patterns (* ? [ {), and the rest; errors of `refuse_key`."""
    refuse_key(text)
    parts = text.split("/")
    marked = next((place for place, part in enumerate(parts) if _MARKS & {*part}), len(parts))
    return "/".join(parts[:marked]), "/".join(parts[marked:])


def parse(text: str) -> StoreUrl:
    """The parts of an address; ConfigError if it is none, or one of a kind of store that is not supported."""
    scheme, colon, rest = text.partition(":")
    bucket, _, path = rest.removeprefix("//").partition("/")
    if "@" in bucket or re.search("[:?#]", rest):
        raise _secret(scheme)
    if not colon or scheme not in _SCHEMES:
        what = f"{text} is not a store that threefold can use"
        expected = "s3://BUCKET/PREFIX (any store with S3's protocol) or gs://BUCKET/PREFIX"
        raise ConfigError(
            what,
            expected=expected,
            fix="s3://bucket/prefix   (yours; for another S3 store, AWS_ENDPOINT_URL=https://ITS_ADDRESS)",
        )
    if not rest.startswith("//"):
        what = f"{text} is not the address of a store"
        fixed = f"{scheme}://{rest.lstrip('/') or 'bucket/prefix'}"
        raise ConfigError(what, expected=f"two slashes: {scheme}://BUCKET/PREFIX", fix=fixed)
    if not _BUCKET.fullmatch(bucket):
        what = (
            f"{text} names no bucket"
            if not bucket
            else f"{text}: {bucket!r} is not a bucket's name"
        )
        expected = "a bucket of 3 to 63 lower-case letters, digits, dots and hyphens after the two slashes"
        raise ConfigError(what, expected=expected, fix=f"{scheme}://bucket/{path or 'prefix'}")
    path = path.rstrip("/")
    parts = path.split("/") if path else []
    if wrong := [part for part in parts if part in (".", "..") or not _PART.fullmatch(part)]:
        what = f"{text}: {wrong[0]!r} cannot be a part of a prefix"
        expected = "letters, digits and . _ = + @ , - between single slashes: support for others differs between stores"
        raise ConfigError(what, expected=expected, fix=f"{scheme}://{bucket}/another-prefix")
    return StoreUrl(scheme, bucket, path)


def _secret(scheme: str) -> ConfigError:
    """The error for an address that is not shown: it may hold a key."""
    return ConfigError(
        f"the address {scheme}://... holds more than a bucket and a prefix",
        expected="no key, secret or option in an address: they come from the environment, so that no log shows them",
        fix=f"{scheme}://bucket/prefix   (yours, and AWS_... in the environment)",
    )
