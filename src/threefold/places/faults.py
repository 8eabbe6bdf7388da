"""The meaning of a store's answer, as one sentence in three parts. Only the answer's code and status are shown.

A store's answer may hold a key id, a signature or a token, so its text is read and dropped.
"""

import re
from dataclasses import dataclass

from threefold.errors import ConfigError, ThreefoldError
from threefold.places.url import StoreUrl

_KEYS = "AWS_ACCESS_KEY_ID=... AWS_SECRET_ACCESS_KEY=...   (or AWS_PROFILE=NAME)"
_GS_KEYS = "export GOOGLE_APPLICATION_CREDENTIALS=FILE"
WHO_WRITES = "find who writes there: a store keeps what was written; check its lifecycle rules and its other users"
_PROVIDERS = (
    "credentials in the environment, in ~/.aws/credentials, from a web "
    "identity, or from the machine's own service"
)


class PlaceError(ThreefoldError):
    """A store failed, does not answer, or does not hold what it should."""


class MissingObject(PlaceError):
    """An object is not there, or is shorter than requested."""


@dataclass(frozen=True)
class _Meaning:
    """The texts for matching answers: `{url}`, `{bucket}` and `{said}` are filled in."""

    answers: str
    what: str
    expected: str
    fix: str
    kind: type[ThreefoldError] = ConfigError


# The first that matches S3's code, the status, or what took their place.
_MEANINGS = (
    _Meaning(
        "credentials",
        "there are no credentials for it, or not all of them",
        _PROVIDERS,
        f"export {_KEYS}; gs://: {_GS_KEYS}",
    ),
    _Meaning(
        "NoSuchBucket",
        "there is no bucket {bucket}",
        "an existing bucket: threefold creates none, because it costs money and its permissions are yours to set",
        "the right name, or create it: aws s3 mb s3://{bucket}; of another store: AWS_ENDPOINT_URL",
    ),
    _Meaning(
        "SignatureDoesNotMatch",
        "the secret does not belong to the access key ({said})",
        "both of the same credentials",
        f"export {_KEYS}",
    ),
    _Meaning(
        "InvalidAccessKeyId|401",
        "it does not know the access key ({said})",
        "an access key of this store",
        f"export {_KEYS}",
    ),
    _Meaning(
        "ExpiredToken|InvalidToken|TokenRefreshRequired",
        "the session's token has expired or is not one ({said})",
        "credentials that last as long as they are used",
        "log in again, or use credentials that renew themselves (a role, a web identity)",
    ),
    _Meaning(
        "RequestTimeTooSkewed",
        "this machine's clock differs too much from its own ({said})",
        "clocks that differ by less than a minute: signatures expire",
        "start an NTP client here: chronyd, or timedatectl set-ntp true",
    ),
    _Meaning(
        "redirect|301|307|PermanentRedirect|AuthorizationHeaderMalformed|IllegalLocationConstraintException",
        "the bucket {bucket} is in another region ({said})",
        "the bucket's own region, since requests elsewhere are not answered",
        "export AWS_REGION=REGION   (aws s3api get-bucket-location --bucket {bucket})",
    ),
    _Meaning(
        "403|AccessDenied|AllAccessDisabled|AccountProblem",
        "these credentials may not do that ({said})",
        "the rights to list, read, write and delete below {url}",
        "add s3:ListBucket, s3:GetObject, s3:PutObject and s3:DeleteObject to their policy; or another AWS_PROFILE",
    ),
    _Meaning(
        "501|NotImplemented",
        "it does not implement that ({said})",
        "S3's protocol with ranges, parts, If-None-Match and If-Match",
        "threefold doctor {url}   (what it does and what it does not)",
    ),
    _Meaning(
        "NoSuchKey|404",
        "it is not there ({said})",
        "the object as it was written",
        WHO_WRITES,
        MissingObject,
    ),
    _Meaning(
        "InvalidRange|416",
        "it is shorter than requested",
        "the object as it was written",
        WHO_WRITES,
        MissingObject,
    ),
    _Meaning(
        "SlowDown|503|429|RequestLimitExceeded",
        "it asks to slow down ({said})",
        "a store that answers within the time for retries",
        "retry later, or with fewer processes on one prefix",
        PlaceError,
    ),
    _Meaning(
        "4..|5..|[A-Z].*|out of protocol",
        "it answered {said}",
        "an answer in S3's protocol",
        "retry; if it persists: threefold doctor {url}",
        PlaceError,
    ),
    _Meaning(
        "",
        "it did not answer, or closed the connection",
        "a store that is reachable from this machine",
        "AWS_ENDPOINT_URL=https://ITS_ADDRESS, a proxy, or the network; then threefold doctor {url}",
        PlaceError,
    ),
)


def answer_of(error: Exception) -> tuple[str, str]:
    """(S3's code, status) of an error, empty if there is none; in words where it has neither."""
    text = str(error)
    # The machine's own service is asked for credentials last, where no other provider has any.
    if "http://169.254." in text or re.search(r"Missing \w*(AccessKey|ServiceAccount)", text):
        return "credentials", ""
    if "Received redirect without LOCATION" in text:
        return "redirect", ""
    code = re.search(r"<Code>(\w+)</Code>", text)
    status = re.search(r"status code: (\d{3})", text)
    if status is None and "HTTP error" not in text:
        return "out of protocol", ""
    return code[1] if code else "", status[1] if status else ""


def unanswered(error: Exception) -> bool:
    """Whether the connection failed, so that it is unknown whether the request was carried out."""
    return answer_of(error) == ("", "")


def explained(error: Exception, url: StoreUrl, doing: str) -> ThreefoldError:
    """The error in three parts, for what was being done: `its objects cannot be listed`."""
    code, status = answer_of(error)
    answer = " ".join(filter(None, (status, code)))
    matches = (
        each
        for each in _MEANINGS
        for one in (code, status)
        if one and re.fullmatch(each.answers, one)
    )
    meaning = next(matches, _MEANINGS[-1])
    retries = re.search(r"after (\d+) retries", str(error))
    times = f", also after {retries[1]} retries" if retries else ""
    named = {"url": url, "bucket": url.bucket, "said": answer}
    what, expected, fix = (
        text.format(**named) for text in (meaning.what, meaning.expected, meaning.fix)
    )
    return meaning.kind(f"{url}: {doing}: {what}{times}", expected=expected, fix=fix)
