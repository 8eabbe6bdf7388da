"""The errors of a failed rendezvous: texts only, no torch."""

from collections.abc import Sequence
from typing import Literal

from threefold.errors import ConfigError, Problem, RunError
from threefold.jsonl import Values
from threefold.mesh.launchers.info import LaunchInfo

_NAMED = 8


class NoDeviceError(ConfigError):
    """A rank has no device on its host; `first`: this rank is the first of its host without one, and reports it."""

    first = True


class RendezvousError(RunError):
    """The ranks did not come together; `first`: this rank is the one to report it."""

    first = True


def ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > _NAMED:
        return f"{len(ranks)} ranks ({', '.join(map(str, ranks[:_NAMED]))}, ...)"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def differs(name: str, others: Sequence[Values], rank_0: Values) -> Problem:
    """A fact that `others` report differently from rank 0."""
    first = others[0]
    return Problem(
        f"{ranks([each['rank'] for each in others])} of host {first['host']}: {name} is {first['facts'].get(name)}, "
        f"on rank 0 of host {rank_0['host']} it is {rank_0['facts'][name]}",
        f"the same {name} on every rank: otherwise they would compute different things, or wait forever",
        "start every rank with the same command, files and environment; versions: pip install the same ones on every "
        "host, or run one container image",
    )


def _self(info: LaunchInfo) -> str:
    return f"rank {info.rank} of host {info.host}"


def _place(info: LaunchInfo) -> str:
    return f"{info.master_addr}:{info.master_port}"


def no_device(local_rank: int, *, visible: int, named: str | None) -> NoDeviceError:
    """More ranks on a host than devices; `named`: CUDA_VISIBLE_DEVICES, if it is set."""
    hidden = (
        f" (CUDA_VISIBLE_DEVICES = {named!r} hides the others)" if named is not None else ""
    )
    error = NoDeviceError(
        f"local rank {local_rank} has no device: {visible} CUDA devices are visible to this process",
        expected=f"one device for each local rank, so that no two ranks share one{hidden}",
        fix=f"start {visible} ranks on this machine, or --mesh.device cpu"
        if visible
        else "--mesh.device cpu",
    )
    error.first = local_rank == visible
    return error


def port_taken(info: LaunchInfo, reason: str) -> RendezvousError:
    if "EADDRINUSE" in reason:
        return RendezvousError(
            f"port {info.master_port} of host {info.host} is taken by another program, or another rank 0",
            expected="a free port on rank 0's host, where the ranks meet",
            fix="export MASTER_PORT=ANOTHER (torchrun --master-port, accelerate --main_process_port), or end the "
            f"program that holds it: ss -ltnp 'sport = :{info.master_port}'",
        )
    return RendezvousError(
        f"rank 0 cannot listen on port {info.master_port} of {info.host}: {reason.splitlines()[0]}",
        expected="a free port above 1023",
        fix="export MASTER_PORT=29500",
    )


def unreached(info: LaunchInfo, reason: str, timeout_s: float) -> RendezvousError:
    return RendezvousError(
        f"{_self(info)} has not reached rank 0 at {_place(info)} within mesh.timeout_s = {timeout_s:g} s: {reason}",
        expected="rank 0 at that address, started, and reachable from every host",
        fix="check that rank 0 started and still runs; MASTER_ADDR must be the name or address of its host that the "
        "others can resolve, with no firewall between them; more time: --mesh.timeout_s N",
    )


def no_store(info: LaunchInfo) -> RendezvousError:
    return RendezvousError(
        f"{_self(info)}: the program that listens at {_place(info)} is not this run's rank 0, or has ended",
        expected="the store of this run's rank 0 at that address",
        fix="export MASTER_PORT=ANOTHER: another program has that port; MASTER_ADDR must be rank 0's host",
    )


# What is wrong with the token of a rank that rank 0 does not let through; expected.
_TOKENS = {
    "none": (
        "has no token, but rank 0 at {} asks for one",
        "a rank that knows the run's token",
    ),
    "another": (
        "has another token than rank 0 at {}",
        "the run's token; what listens there may also belong to another run",
    ),
    "unasked": (
        "has a token, but what listens at {} asks for none",
        "rank 0 of the same run, with the same token",
    ),
}


def refused_token(
    info: LaunchInfo, which: Literal["none", "another", "unasked"]
) -> RendezvousError:
    what, expected = _TOKENS[which]
    return RendezvousError(
        f"{_self(info)} {what.format(_place(info))}",
        expected=expected,
        fix="the same THREEFOLD_TOKEN (or THREEFOLD_TOKEN_FILE) on every host; new: openssl rand -hex 32",
    )


def token_without_effect(info: LaunchInfo) -> RendezvousError:
    return RendezvousError(
        f"THREEFOLD_TOKEN is set, but torchrun's agent keeps the store at {_place(info)}, which asks for none",
        expected="a token that protects the run",
        fix="srun, mpirun, or RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT for each rank; or unset THREEFOLD_TOKEN "
        "THREEFOLD_TOKEN_FILE, if every host that reaches this one is trusted",
    )


def store_lost(info: LaunchInfo, reason: str) -> RendezvousError:
    return RendezvousError(
        f"{_self(info)} lost rank 0 at {_place(info)} while ranks were still joining: {reason.splitlines()[0]}",
        expected="rank 0 (or the launcher's agent) to keep running",
        fix="look at rank 0's output: it has ended or was killed",
    )


def other_count(info: LaunchInfo, others: int) -> RendezvousError:
    return RendezvousError(
        f"{_self(info)} was started as one of {info.world_size} ranks, rank 0 as one of {others}",
        expected="the same number of ranks on every host",
        fix="give every host the same number of hosts and of ranks on each: --nnodes, --nproc-per-node, WORLD_SIZE",
    )


def twice(info: LaunchInfo, before: Values, now: Values) -> Problem:
    processes = " and ".join(
        f"{each['process']} of host {each['host']}" for each in (before, now)
    )
    return Problem(
        f"two processes claim to be rank {info.rank} of {info.world_size}: {processes}",
        "every rank once",
        "let the launcher set RANK: give each host its own --node-rank, and do not export RANK yourself; or another "
        "MASTER_PORT, if two runs meet at one",
    )


def missing(
    info: LaunchInfo, absent: Sequence[int], *, timeout_s: float, unreachable: str | None
) -> Problem:
    """Ranks that did not join; `unreachable`: why rank 0 cannot reach itself at the address that all use."""
    present = info.world_size - len(absent)
    reached = f"; and rank 0, on host {info.host}, cannot reach itself at {_place(info)}: {unreachable}"
    return Problem(
        f"{ranks(absent)} of {info.world_size} did not join within mesh.timeout_s = {timeout_s:g} s"
        f" ({present} {'is' if present == 1 else 'are'} there){reached if unreachable is not None else ''}",
        "all ranks started within that time, on hosts that can reach one another",
        "look at the missing ranks' output: they have ended or were never started; MASTER_ADDR must be a name of rank "
        "0's host that all hosts can resolve; more time: --mesh.timeout_s N",
    )


def unconnected(info: LaunchInfo, reason: str, hosts: Sequence[str]) -> RendezvousError:
    """The ranks have met at the store, but the backend cannot connect them."""
    return RendezvousError(
        f"the ranks have met, but rank {info.rank} of host {info.host} cannot connect to the others: "
        f"{reason.strip().splitlines()[0]}",
        expected=f"a network between the hosts ({' and '.join(dict.fromkeys(hosts))}) on the interface that the "
        "backend uses",
        fix="export GLOO_SOCKET_IFNAME=NAME NCCL_SOCKET_IFNAME=NAME   (`ip -br addr` lists them; that of MASTER_ADDR)",
    )
