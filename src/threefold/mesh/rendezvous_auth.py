"""The address of rank 0's store, and who can reach it.

The store serves any client that reaches it. It listens only on the interface by which the other ranks know rank 0's
host, which is the loopback interface if that is MASTER_ADDR. With a token, not even there: the store stays on
loopback, and a proxy listens at the known address, which lets a connection through after both sides have proved that
they know the token (HMAC-SHA256 over fresh random numbers; the token is never sent). The other ranks reach the proxy
through a second proxy on the loopback interface of their host, which proves it for them.

Not defended against: reading or changing packets between the hosts; the tensors' own connections (gloo, NCCL).
"""

import asyncio
import contextlib
import dataclasses
import errno
import hmac
import ipaddress
import os
import socket
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor

from threefold.mesh.environment import LOOPBACK
from threefold.mesh.launchers.info import LaunchInfo

Address = tuple[str, int]

_GREETING = b"threefold proxy 1\n"
_RANDOM_BYTES = 32
_PROOF_WITHIN_S = 10.0
_PIECE_BYTES = 1 << 16


class NoServerProxyError(Exception):
    """The listener is not a proxy: rank 0 has no token, or it is another program."""


class ProofRefusedError(Exception):
    """The other side has another token."""


def place_of(info: LaunchInfo) -> LaunchInfo:
    """The info with rank 0's address on loopback, if the launcher has started all ranks on one host."""
    started = info.generation is None and info.launcher not in (None, "environment")
    if started and info.local_world_size == info.world_size:
        return dataclasses.replace(info, master_addr=LOOPBACK)
    return info


def listen_for(info: LaunchInfo) -> tuple[socket.socket, str]:
    """A listening socket at MASTER_ADDR's interface, and the address through which this host reaches it.

    All interfaces if that name is not known here or belongs to no interface of this host (a service in front of it), or
    if it means loopback here while the other ranks may be elsewhere.

    Raises:
        OSError: the port cannot be taken.
    """
    assert info.master_addr is not None and info.master_port is not None
    for family, address in _addresses(info.master_addr):
        if ipaddress.ip_address(address).is_loopback and not _is_meant(info):
            break
        try:
            return _listening(family, address, info.master_port), address
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
    return _listening(
        socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET, "", info.master_port
    ), LOOPBACK


def listen_on_loopback() -> socket.socket:
    """A socket that listens on a free port of the loopback interface."""
    return _listening(socket.AF_INET, LOOPBACK, 0)


def _is_meant(info: LaunchInfo) -> bool:
    """Whether a MASTER_ADDR that is a loopback address on rank 0's host is one on every rank's host."""
    assert info.master_addr is not None
    if info.master_addr == "localhost":
        return True
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(info.master_addr).is_loopback
    return False  # many hosts know themselves by a loopback address, and others by a real one


def _addresses(name: str) -> list[tuple[int, str]]:
    try:
        infos = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except socket.gaierror:
        return []
    pairs = dict.fromkeys((int(family), str(address[0])) for family, _, _, _, address in infos)
    return sorted(pairs, key=lambda pair: pair[0] != socket.AF_INET)


def _listening(family: int, address: str, port: int) -> socket.socket:
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6 and not address:
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listening.bind((address, port))
        listening.listen(socket.SOMAXCONN)
    except OSError:
        listening.close()
        raise
    return listening


def open_server_proxy(listening: socket.socket, to: Address, token: bytes) -> None:
    """Lets connections to `listening` through to `to`, as long as this process lives, if they prove the token."""

    async def admit(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.wait_for(_admitted(reader, writer, token), _PROOF_WITHIN_S)
        await _join(reader, writer, *await asyncio.open_connection(*to))

    _serve(listening, admit, name="proxy")


def open_client_proxy(to: Address, token: bytes) -> int:
    """The port of this host's loopback interface from which connections go through the proxy at `to`.

    Raises:
        OSError: nothing listens there.
        NoServerProxyError, ProofRefusedError: what listens there does not let this rank through.
    """

    async def try_it() -> None:
        _, writer = await asyncio.wait_for(_through(to, token), _PROOF_WITHIN_S)
        writer.close()

    with ThreadPoolExecutor(1) as other:  # a notebook's own thread has a loop already
        other.submit(asyncio.run, try_it()).result()
    listening = listen_on_loopback()
    port: int = listening.getsockname()[1]

    async def lead(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await _join(
            reader, writer, *await asyncio.wait_for(_through(to, token), _PROOF_WITHIN_S)
        )

    _serve(listening, lead, name="client proxy")
    return port


def is_server_proxy(address: Address, within_s: float) -> bool:
    """Whether a proxy listens at an address."""
    with (
        contextlib.suppress(OSError),
        socket.create_connection(address, timeout=within_s) as connected,
    ):
        return connected.recv(len(_GREETING)) == _GREETING
    return False


def _serve(
    listening: socket.socket,
    handle: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
    *,
    name: str,
) -> None:
    async def handled(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await handle(reader, writer)
        except (OSError, EOFError, TimeoutError, NoServerProxyError, ProofRefusedError):
            pass  # a stranger, or one that has gone: the other ranks need not know
        finally:
            writer.close()

    async def serve() -> None:
        async with await asyncio.start_server(handled, sock=listening) as server:
            await server.serve_forever()

    threading.Thread(target=lambda: asyncio.run(serve()), name=name, daemon=True).start()


async def _admitted(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, token: bytes
) -> None:
    """Proves the token to the other side and lets it prove it; raises ProofRefusedError if it cannot."""
    own = os.urandom(_RANDOM_BYTES)
    writer.write(_GREETING + own)
    theirs = await reader.readexactly(_RANDOM_BYTES)
    proof = await reader.readexactly(_RANDOM_BYTES)
    if not hmac.compare_digest(proof, _proof(token, b"rank", own, theirs)):
        writer.write(b"\0")
        await writer.drain()
        raise ProofRefusedError
    writer.write(b"\1" + _proof(token, b"server", own, theirs))
    await writer.drain()


async def _through(
    to: Address, token: bytes
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection through the proxy at `to`."""
    reader, writer = await asyncio.open_connection(*to)
    try:
        with contextlib.suppress(asyncio.IncompleteReadError, TimeoutError):
            if (
                await asyncio.wait_for(reader.readexactly(len(_GREETING)), _PROOF_WITHIN_S / 2)
                == _GREETING
            ):
                theirs, own = await reader.readexactly(_RANDOM_BYTES), os.urandom(_RANDOM_BYTES)
                writer.write(own + _proof(token, b"rank", theirs, own))
                if await reader.readexactly(1) == b"\1":
                    proof = await reader.readexactly(_RANDOM_BYTES)
                    if hmac.compare_digest(proof, _proof(token, b"server", theirs, own)):
                        return reader, writer
                raise ProofRefusedError
        raise NoServerProxyError
    except BaseException:
        writer.close()
        raise


def _proof(token: bytes, side: bytes, of_server: bytes, of_rank: bytes) -> bytes:
    return hmac.digest(token, side + of_server + of_rank, "sha256")


async def _join(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    other_reader: asyncio.StreamReader,
    other_writer: asyncio.StreamWriter,
) -> None:
    """Passes on what either side sends until one of them is done."""

    async def copy(source: asyncio.StreamReader, to: asyncio.StreamWriter) -> None:
        while piece := await source.read(_PIECE_BYTES):
            to.write(piece)
            await to.drain()

    copies = [
        asyncio.ensure_future(copy(reader, other_writer)),
        asyncio.ensure_future(copy(other_reader, writer)),
    ]
    try:
        await asyncio.wait(copies, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for each in copies:
            each.cancel()
        other_writer.close()
