"""The logs of field/: where each is from, its cause, and its half.

`python tests/logs/field.py` prints the figures of the half to write from, bare and behind each prefix, and what is not
right in it; `python tests/logs/field.py judge late` those of the judged logs, and no name. README.md counts how
often that was done.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

FIELD = Path(__file__).with_name("field")
# What passes a log on puts this before its lines. Each name says "training" of a program that may not train.
PREFIXES: dict[str, Callable[[str], str]] = {
    "srun -l": "3: {}".format,
    "kubectl --prefix": "[pod/llama-sft-worker-0/pytorch] {}".format,
    "kubectl --timestamps": "2026-02-01T10:00:00.123456789Z {}".format,
    "docker compose": "trainer-1  | {}".format,
    "journalctl": "Feb 01 10:00:00 n4 llama-sft[812]: {}".format,
    "Ray": "(RayTrainWorker pid=77, ip=10.0.0.4) {}".format,
    "JSON": lambda line: json.dumps(
        {"log": line + "\n", "stream": "stderr", "time": "2026-02-01T10:00:00.0Z"}
    ),
    "srun -l in a Pod": "[pod/llama-sft-worker-0/pytorch] 3: {}".format,
}


@dataclass(frozen=True)
class FieldLog:
    """One log; `cause` is the name of a page, None for a log without a failure of a training job, or `other`.

    `other` is a failure of a training job that no page covers: right would be to say unknown, so it never counts as
    right, and any page named as sure or likely is wrong.

    Attributes:
        stays_unknown: nothing in it shows that a training job wrote the error, or that a warning ended anything, or
            that a log that ends hangs.
    """

    name: str
    source: str
    cause: str | None
    text: str
    stays_unknown: bool = False

    @property
    def may_be_judged(self) -> bool:
        """Whether the log was ever of the judged half: that follows from its name alone."""
        return hashlib.sha256(self.name.encode()).digest()[0] % 2 == 1


def logs(half: str) -> Iterator[FieldLog]:
    """The logs of `write`, `judge` or `late`, by cause: `HALF/CAUSE.log` has each after a line `@@@@ NAME`."""
    for path in sorted((FIELD / half).glob("*.log")):
        cause = None if path.stem == "none" else path.stem
        table = "\n" + path.read_text(encoding="utf-8").removesuffix("\n")
        for part in table.split("\n@@@@ ")[1:]:
            head, _, text = part.partition("\n\n")
            name, source, *unknown = head.splitlines()
            yield FieldLog(
                name, source.removeprefix("source: "), cause, text, unknown == ["stays unknown"]
            )


def behind(prefix: str, text: str) -> str:
    """The text with a prefix before each of its lines."""
    return "\n".join(map(PREFIXES[prefix], text.splitlines()))


def judged(log: FieldLog, text: str | None = None) -> tuple[str, str | None]:
    """(right, wrong, symptom, unknown, quiet or false alarm, the name that `explain` gives).

    `symptom`: another name than the log's cause, told as only a symptom. It claims no cause, so it is not wrong, and it
    finds none, so it is not right: `main` counts it as unknown, and says how many. On a log without a failure it is a
    false alarm like any other. `text` is what is explained in place of the log's own.
    """
    from threefold.explain.explain import Confidence, explain

    found = explain(log.text if text is None else text)
    name = found.known.name if found is not None else None
    if log.cause is None:
        return ("quiet" if name is None else "false alarm"), name
    if found is None or name == log.cause:
        return ("unknown" if name is None else "right"), name
    return ("symptom" if found.confidence is Confidence.SYMPTOM else "wrong"), name


def figures(half: str, prefix: str | None = None) -> Counter[str]:
    """How many logs of a half are right, wrong, symptom, unknown, quiet, false alarms."""
    return Counter(
        judged(log, behind(prefix, log.text) if prefix else None)[0] for log in logs(half)
    )


def retries(half: str) -> Counter[bool]:
    """In how many failures the advice to start the job again is that of their cause, which is a page's."""
    from threefold.explain.explain import explain
    from threefold.explain.known import KnownError, Retry, known_errors

    known: Mapping[str | None, KnownError] = {**known_errors()}
    right = Counter[bool]()
    for log in logs(half):
        if log.cause in known:
            told = explain(log.text)
            advice = told.known.retry if told is not None else Retry.NO
            right[advice is known[log.cause].retry] += 1
    return right


def main() -> None:
    for half in sys.argv[1:] or ["write"]:
        for prefix in (None, *PREFIXES):
            count = figures(half, prefix)
            unknown = count["unknown"] + count["symptom"]
            failures = count["right"] + count["wrong"] + unknown
            print(
                f"{half}, {prefix or 'bare'}: {count['right']} of {failures} right ({count['right'] / failures:.0%}), "
                f"{count['wrong']} wrong, {unknown} unknown ({count['symptom']} of them told as only a symptom); "
                f"{count['false alarm']} false alarms in {count['false alarm'] + count['quiet']}"
            )
        right = retries(half)
        print(
            f"{half}: retry right in {right[True]} of {right.total()} ({right[True] / right.total():.1%})"
        )
        for log in logs(half) if half == "write" else ():  # a judged log stays unread
            verdict, name = judged(log)
            if verdict not in ("right", "quiet"):
                print(f"  {log.name}: {verdict}, {name} for {log.cause}")


if __name__ == "__main__":
    main()
