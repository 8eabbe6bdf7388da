"""Parts made by tasks of a Ray cluster, one task a part, through Ray's public API.

The cluster is the one that `ray.init()` finds (RAY_ADDRESS, or one that runs here), else a new one on this machine. A
task whose process or host dies is begun again, a bounded number of times. The parts go where all tasks put them, and
are collected and compared there.
"""

import importlib
from collections.abc import Generator, Sequence

from threefold.data.store.parts import EncodedPart, PartDone, PartMaker
from threefold.data.store.shared_parts import SharedParts
from threefold.errors import ConfigError, RunError, ThreefoldError

_RETRIES = 10


def make_by_ray(
    shared: SharedParts, maker: PartMaker, missing: Sequence[EncodedPart]
) -> Generator[PartDone, None, None]:
    """Makes the parts that are missing on the cluster, and collects those that its folder lacks (`collect`).

    Raises:
        ConfigError: Ray is not installed. RunError: a part's process died again and again, or a host cannot make parts.
    """
    try:
        ray = importlib.import_module("ray")
    except ImportError as error:
        what, expected = (
            "--engine ray, but the package ray is not installed",
            "threefold with its extra ray",
        )
        raise ConfigError(
            what, expected=expected, fix="pip install 'threefold[ray]'"
        ) from error
    ray.init(ignore_reinit_error=True, log_to_driver=False)
    everywhere, task = ray.put(shared), ray.remote(max_retries=_RETRIES)(_make)
    parts = {task.remote(everywhere, part): part for part in shared.missing()}
    running = list(parts)
    while running:
        (ready,), running = ray.wait(running)
        try:
            done = ray.get(ready)
        except ray.exceptions.RayError as error:
            raise RunError(
                f"Ray could not make part {parts[ready].number}: {str(error).strip().splitlines()[-1]}",
                expected="hosts with threefold and the source under the same path, and memory for one part per process",
                fix="run the same command again once that is so: finished parts are reused",
            ) from error
        if isinstance(done, ThreefoldError):
            raise done
        if done.log.num_bad:
            yield done
    yield from shared.collect(maker, missing)


def _make(shared: SharedParts, part: EncodedPart) -> PartDone | ThreefoldError:
    """In a process of the cluster."""
    try:
        return shared.make(part)
    except ThreefoldError as error:
        return error
