"""How ranks find one another: one store, each rank's report of who and what it is, and one verdict for all.

Nothing here is a collective. Each rank puts its host, versions and settings in the store; rank 0 waits for all of them,
compares, and publishes a verdict that every rank reads. Missing ranks are named by those present, within the given
time. torch's own rendezvous waits up to twice its time, or forever on a port where another program listens, and reports
the host but not who is missing.
"""

import contextlib
import errno
import itertools
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from threefold.errors import Problem
from threefold.jsonl import Values
from threefold.mesh import rendezvous_auth
from threefold.mesh import rendezvous_errors as errors
from threefold.mesh.environment import LOOPBACK, namespace_here, stay_on_loopback
from threefold.mesh.exchange import leave_together
from threefold.mesh.launchers.info import LaunchInfo

# Rank 0 gives up first, so that the others learn of it before their own time is over.
_PATIENCE_OF_RANK_0 = 0.85
_FIRST_LOOK_S, _LOOK_S = 0.01, 0.25
_ONE_CONNECTION_S = 2.0
# A run that has just been killed may still be closing the port that its successor takes.
_PORT_FREE_WITHIN_S = 5.0

# Process groups one after another in one process use the same store; all ranks count in the same order.
_numbers = itertools.count()
# By port.
_served: dict[int, Any] = {}
# A program that listens where rank 0 should, and has not answered within this time, is asked whether it is a proxy.
_ANSWERS_WITHIN_S = 2.0


def join_group(
    info: LaunchInfo,
    device: torch.device,
    timeout_s: float,
    facts: Mapping[str, str],
    token: bytes | None,
    met: Callable[[dist.Store, Sequence[str]], None] | None,
) -> tuple[str, ...]:
    """Makes the default process group of all ranks; returns the host of each.

    Args:
        token: what every rank must know to use rank 0's store (`rendezvous_auth`).
        met: called before the ranks connect, with their store and hosts.

    Raises:
        RendezvousError: the ranks did not come together, or cannot connect to one another.
    """
    begun = time.monotonic()
    store, hosts, local = rendezvous(info, timeout_s=timeout_s, facts=facts, token=token)
    if local:
        stay_on_loopback(asked=True)
    if met is not None:
        met(store, hosts)
    left = max(1.0, timeout_s - (time.monotonic() - begun))
    failures: list[str] = []

    def make() -> None:
        if device.type == "cuda":
            torch.cuda.set_device(device)  # each thread has its own current device
        try:
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
                store=dist.PrefixStore("group", store),
                rank=info.rank,
                world_size=info.world_size,
                timeout=timedelta(seconds=left),
                device_id=device if device.type == "cuda" else None,
            )
        except RuntimeError as error:
            failures.append(str(error))

    # gloo retries for five times its limit if a peer has given up; the first rank to give up notifies the others.
    attempt = threading.Thread(target=make, name="connect", daemon=True)
    attempt.start()
    verdicts = store.clone()
    pauses = _pauses()
    own = str(info.rank)
    given_up = partial(verdicts.check, ["unconnected"])
    while (
        attempt.is_alive()
        and time.monotonic() < begun + timeout_s
        and not _answer(given_up, otherwise=True)
    ):
        attempt.join(next(pauses))
    if attempt.is_alive() or failures:
        reason = failures[0] if failures else f"no connection in {left:.0f} s"
        first = _answer(
            lambda: verdicts.compare_set("unconnected", "", own).decode() == own,
            otherwise=False,
        )
        raise _marked(errors.unconnected(info, reason, hosts), first=first)
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s))
    return hosts


def _answer(ask: Callable[[], Any], *, otherwise: bool) -> bool:
    """The store's answer; `otherwise` if rank 0, which keeps it, is gone."""
    try:
        return bool(ask())
    except RuntimeError:
        return otherwise


def rendezvous(
    info: LaunchInfo, *, timeout_s: float, facts: Mapping[str, str], token: bytes | None
) -> tuple[Any, tuple[str, ...], bool]:
    """Joins the other ranks of `info`; when all are present and agree on the `facts`: their store, the host of each,
    and whether they share one machine's loopback interface.

    Raises:
        RendezvousError: within `timeout_s`: the port is taken, no rank answers, ranks are missing, two have one number,
            facts differ, or a rank has another token.
    """
    deadline = time.monotonic() + timeout_s
    info = rendezvous_auth.place_of(info)
    serving = info.rank == 0 and info.generation is None
    if token is not None and info.generation is not None:
        if info.master_addr != LOOPBACK:
            raise _marked(errors.token_without_effect(info), first=info.local_rank == 0)
        token = None  # no other process can reach that store
    store = (
        _serve(info, deadline, token) if serving else _reach(info, deadline, timeout_s, token)
    )
    store.set_timeout(timedelta(seconds=timeout_s))
    store = dist.PrefixStore(
        f"threefold/{info.generation or 'rendezvous'}/{next(_numbers)}", store
    )
    facts = {"the number of ranks": str(info.world_size), **facts}
    report = {
        "host": info.host,
        "process": os.getpid(),
        "network": namespace_here("net"),
        "facts": facts,
    }
    try:
        verdict, mine = _verdict(store, info, report, deadline, timeout_s)
    except RuntimeError as error:
        raise _marked(
            errors.store_lost(info, str(error)), first=info.local_rank == 0
        ) from error
    if not verdict["problems"] and len(verdict["hosts"]) != info.world_size:
        raise _marked(errors.other_count(info, len(verdict["hosts"])), first=True)
    if verdict["problems"]:
        if serving or info.rank:
            leave_together(
                store, "read", min(verdict["present"], info.world_size), waits=serving
            )
        raise _marked(
            errors.RendezvousError.of(Problem(*each) for each in verdict["problems"]),
            first=mine,
        )
    return store, tuple(verdict["hosts"]), verdict["local"]


def _marked(error: Any, *, first: bool) -> Any:
    error.first = first
    return error


def _pauses() -> Iterator[float]:
    """Seconds between two looks at the store, growing."""
    pause = _FIRST_LOOK_S
    while True:
        yield pause
        pause = min(_LOOK_S, pause * 1.5)


def _serve(info: LaunchInfo, deadline: float, token: bytes | None) -> Any:
    assert info.master_port is not None
    if (served := _served.get(info.master_port)) is not None:
        return served.clone()
    until = min(deadline, time.monotonic() + _PORT_FREE_WITHIN_S)
    while True:
        try:
            listening, address = rendezvous_auth.listen_for(info)
            break
        except OSError as error:
            if time.monotonic() > until or error.errno != errno.EADDRINUSE:
                reason = f"{errno.errorcode.get(error.errno or 0, '')}: {error.strerror}"
                raise errors.port_taken(info, reason) from error
        time.sleep(_LOOK_S)
    if token is not None:
        inner = rendezvous_auth.listen_on_loopback()
        rendezvous_auth.open_server_proxy(listening, (LOOPBACK, inner.getsockname()[1]), token)
        listening, address = inner, LOOPBACK
    place = (address, listening.getsockname()[1])
    limit = timedelta(seconds=30)
    number = listening.detach()
    store = dist.TCPStore(
        *place, info.world_size, True, limit, wait_for_workers=False, master_listen_fd=number
    )
    _served[info.master_port] = store
    return store


def _reach(info: LaunchInfo, deadline: float, timeout_s: float, token: bytes | None) -> Any:
    assert info.master_addr is not None and info.master_port is not None
    address = (info.master_addr, info.master_port)
    speaks = info.local_rank == 0 or info.rank == 1
    while (reason := _refusal(address, deadline)) is not None:
        if time.monotonic() > deadline - _LOOK_S:
            raise _marked(errors.unreached(info, reason, timeout_s), first=speaks)
        time.sleep(_LOOK_S)
    if token is not None:
        try:
            address = (LOOPBACK, rendezvous_auth.open_client_proxy(address, token))
        except (OSError, EOFError, rendezvous_auth.NoServerProxyError) as error:
            raise _marked(errors.refused_token(info, "unasked"), first=speaks) from error
        except rendezvous_auth.ProofRefusedError as error:
            raise _marked(errors.refused_token(info, "another"), first=speaks) from error
    stores: list[Any] = []

    def connect() -> None:
        with contextlib.suppress(RuntimeError):
            left = timedelta(seconds=max(1.0, deadline - time.monotonic()))
            stores.append(
                dist.TCPStore(*address, info.world_size, False, left, wait_for_workers=False)
            )

    # It does not return if another program listens, whatever its time limit.
    attempt = threading.Thread(target=connect, name="rendezvous", daemon=True)
    attempt.start()
    attempt.join(min(_ANSWERS_WITHIN_S, max(_LOOK_S, deadline - time.monotonic() - _LOOK_S)))
    if not stores and rendezvous_auth.is_server_proxy(address, _ANSWERS_WITHIN_S):
        raise _marked(errors.refused_token(info, "none"), first=speaks)
    attempt.join(max(_LOOK_S, deadline - time.monotonic() - _LOOK_S))
    if not stores:
        raise _marked(errors.no_store(info), first=speaks)
    return stores[0]


def _refusal(address: tuple[str, int], deadline: float) -> str | None:
    """Why no connection can be made, or None if one can."""
    try:
        patience = max(_LOOK_S, min(_ONE_CONNECTION_S, deadline - time.monotonic()))
        socket.create_connection(address, timeout=patience).close()
    except socket.gaierror as error:
        return f"the name {address[0]} cannot be resolved here ({error.strerror})"
    except TimeoutError:
        return "no answer"
    except OSError as error:
        return error.strerror or str(error)
    return None


def _verdict(
    store: Any, info: LaunchInfo, report: Values, deadline: float, timeout_s: float
) -> tuple[Values, bool]:
    """The verdict of the rank that found it first, and whether that is this rank."""

    def publish(verdict: Values) -> tuple[Values, bool]:
        by = [info.host, os.getpid()]
        own = json.dumps({**verdict, "by": by})
        accepted = json.loads(store.compare_set("verdict", "", own))
        return accepted, accepted["by"] == by

    before = json.loads(store.compare_set(f"here/{info.rank}", "", json.dumps(report)))
    if (before["host"], before["process"]) != (report["host"], report["process"]):
        return publish(_failed([errors.twice(info, before, report)], present=info.world_size))
    keys = [f"here/{rank}" for rank in range(info.world_size)]
    until = deadline - _LOOK_S
    if info.rank == 0:
        until = time.monotonic() + (until - time.monotonic()) * _PATIENCE_OF_RANK_0
    pauses = _pauses()
    # Asking again costs a message; torch's wait would warn each time it asks in vain.
    while not store.check(["verdict"]):
        if info.rank == 0 and store.check(keys):
            return publish(_compared(_reports(store, keys)))
        if time.monotonic() > until:
            return publish(_given_up(store, info, keys, timeout_s))
        time.sleep(next(pauses))
    return json.loads(store.get("verdict")), False


def _given_up(store: Any, info: LaunchInfo, keys: Sequence[str], timeout_s: float) -> Values:
    """The verdict when the time is over: who is missing, or who expects another number of ranks."""
    absent = [rank for rank in range(info.world_size) if not store.check([keys[rank]])]
    present = [key for rank, key in enumerate(keys) if rank not in absent]
    compared = _compared(_reports(store, present)) if 0 not in absent else _failed([])
    if compared["problems"]:
        return compared
    missing = errors.missing(info, absent, timeout_s=timeout_s, unreachable=_self_refusal(info))
    return _failed([missing], present=len(present))


def _reports(store: Any, keys: Sequence[str]) -> list[Values]:
    return [
        {"rank": int(key.rpartition("/")[2]), **json.loads(text)}
        for key, text in zip(keys, store.multi_get(list(keys)), strict=True)
    ]


def _self_refusal(info: LaunchInfo) -> str | None:
    """Why rank 0 does not reach itself at the address that the others use."""
    if info.rank or info.master_addr is None or info.master_port is None:
        return None
    return _refusal((info.master_addr, info.master_port), time.monotonic() + _ONE_CONNECTION_S)


def _failed(problems: Sequence[Problem], present: int = 1) -> Values:
    texts = [[each.what, each.expected, each.fix] for each in problems]
    return {"problems": texts, "present": present, "hosts": [], "local": False}


def _compared(reports: Sequence[Values]) -> Values:
    problems = [
        errors.differs(name, others, reports[0])
        for name, expected in reports[0]["facts"].items()
        if (others := [each for each in reports if each["facts"].get(name) != expected])
    ]
    hosts = [] if problems else [each["host"] for each in reports]
    networks = {each["network"] for each in reports}
    return {
        **_failed(problems, len(reports)),
        "hosts": hosts,
        "local": len(networks) == 1 and None not in networks,
    }
