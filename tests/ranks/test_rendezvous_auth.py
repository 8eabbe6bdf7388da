"""Rank 0's store over a network: on one interface only, and behind a proxy if the ranks have a token."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from ranks import warm
from ranks.faults import last_step, wait_for
from ranks.runs import environment, prepare
from ranks.test_local_ranks import listeners, other_addresses, tree
from threefold.errors import ConfigError
from threefold.mesh import environment as this_process
from threefold.mesh import rendezvous_auth
from threefold.mesh.launchers.info import LaunchInfo

pytestmark = pytest.mark.ranks

TOKEN = b"a token that nobody guesses"


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous_auth, "_PROOF_WITHIN_S", 1.0)


class Echo:
    """What a proxy leads to: sends back what it gets, and counts who comes."""

    def __init__(self) -> None:
        self.listening = rendezvous_auth.listen_on_loopback()
        self.address: tuple[str, int] = self.listening.getsockname()
        self.visitors = 0
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                visitor, _ = self.listening.accept()
            except OSError:
                return
            self.visitors += 1
            threading.Thread(target=self._echo, args=(visitor,), daemon=True).start()

    def _echo(self, visitor: socket.socket) -> None:
        with visitor:
            while piece := visitor.recv(1 << 16):
                visitor.sendall(piece)


@pytest.fixture
def echo() -> Iterator[Echo]:
    found = Echo()
    with closing(found.listening):
        yield found


@pytest.fixture
def address(echo: Echo) -> tuple[str, int]:
    """Where a proxy to it is."""
    listening = rendezvous_auth.listen_on_loopback()
    address: tuple[str, int] = listening.getsockname()
    rendezvous_auth.open_server_proxy(listening, echo.address, TOKEN)
    return address


def said_back(address: tuple[str, int], data: bytes) -> bytes:
    found = b""
    with socket.create_connection(address, timeout=10) as connected:
        sender = threading.Thread(target=connected.sendall, args=(data,))
        sender.start()
        while len(found) < len(data) and (piece := connected.recv(1 << 16)):
            found += piece
        sender.join()
    return found


def test_who_knows_the_token_is_let_through(echo: Echo, address: tuple[str, int]) -> None:
    proxy = (this_process.LOOPBACK, rendezvous_auth.open_client_proxy(address, TOKEN))
    data = os.urandom(1 << 20)
    assert [said_back(proxy, data[:9]), said_back(proxy, data)] == [data[:9], data]


def test_rank_in_a_notebook_is_let_through(address: tuple[str, int]) -> None:
    async def cell() -> int:
        return rendezvous_auth.open_client_proxy(address, TOKEN)

    assert said_back((this_process.LOOPBACK, asyncio.run(cell())), b"hello") == b"hello"


def test_who_does_not_know_it_is_refused(echo: Echo, address: tuple[str, int]) -> None:
    with pytest.raises(rendezvous_auth.ProofRefusedError):
        rendezvous_auth.open_client_proxy(address, TOKEN + b"!")
    for words in (b"", b"x" * 7, b"x" * 64, b"\x00" * 4096):
        assert not said_back(address, words).startswith(b"\x01")
    assert echo.visitors == 0


def test_what_is_no_server_proxy_gets_no_token(echo: Echo) -> None:
    """Neither a program that says nothing nor one that repeats what it hears."""
    with pytest.raises(rendezvous_auth.NoServerProxyError):
        rendezvous_auth.open_client_proxy(echo.address, TOKEN)
    assert not rendezvous_auth.is_server_proxy(echo.address, 0.3)
    with (
        closing(rendezvous_auth.listen_on_loopback()) as silent,
        pytest.raises(rendezvous_auth.NoServerProxyError),
    ):
        rendezvous_auth.open_client_proxy(silent.getsockname(), TOKEN)


def test_token_itself_is_never_sent(address: tuple[str, int]) -> None:
    heard = b""
    with closing(rendezvous_auth.listen_on_loopback()) as listening:

        def overhear() -> None:
            nonlocal heard
            rank, _ = listening.accept()
            with rank, socket.create_connection(address) as there:
                for source, to in ((there, rank), (rank, there), (there, rank)):
                    piece = source.recv(4096)
                    heard += piece
                    to.sendall(piece)

        between = threading.Thread(target=overhear)
        between.start()
        rendezvous_auth.open_client_proxy(listening.getsockname(), TOKEN)
        between.join()
    assert len(heard) > 100 and TOKEN not in heard
    assert rendezvous_auth.is_server_proxy(address, 1.0)


# --- the interface -----------------------------------------------------------------------------------------------


def bound(name: str, *, launcher: str = "environment", local: int = 1) -> str:
    """The address on which rank 0 listens if the ranks know its host by this name."""
    with closing(rendezvous_auth.listen_on_loopback()) as free:
        port = free.getsockname()[1]
    info = rendezvous_auth.place_of(LaunchInfo(0, 2, 0, local, name, port, launcher))
    listening, own = rendezvous_auth.listen_for(info)
    with closing(listening):
        socket.create_connection((own, port), timeout=1).close()  # as rank 0 itself does
        return str(listening.getsockname()[0]).removeprefix("::ffff:")


def test_store_listens_on_the_interface_that_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("127.0.0.1", "localhost", *other_addresses()):
        assert bound(name) == ("127.0.0.1" if name == "localhost" else name)
    everywhere = ("::", "0.0.0.0")
    assert bound("203.0.113.7") in everywhere  # a service in front of this host
    assert bound("no-such-host.invalid") in everywhere
    # As on many hosts: its own name is a loopback address here, and another one for the others.
    known = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
    asked = socket.getaddrinfo
    monkeypatch.setattr(
        socket,
        "getaddrinfo",
        lambda name, *a, **k: known if name == "self" else asked(name, *a, **k),
    )
    assert bound("self") in everywhere
    assert bound("self", launcher="Open MPI") in everywhere
    assert bound("self", local=2) in everywhere  # that number is a guess if nobody has said it
    assert bound("self", launcher="Open MPI", local=2) == "127.0.0.1"


# --- runs --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("proxy")
    prepare(folder)
    return folder


def launched(
    folder: Path, name: str, *tokens: str | None, **variables: str
) -> list[warm.Running]:
    """A run of a rank for each token, as a launcher starts them, at an address of this machine that is not loopback."""
    with closing(rendezvous_auth.listen_on_loopback()) as free:
        port = free.getsockname()[1]
    place = {
        "MASTER_ADDR": other_addresses()[-1],
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(len(tokens)),
    }
    arguments = (
        "train",
        "config.yaml",
        "--log.dir",
        name,
        "--mesh.timeout_s",
        "20",
        "--mesh.device",
        "cpu",
    )
    ranks = []
    for rank, token in enumerate(tokens):
        own = {
            "RANK": str(rank),
            "OMP_NUM_THREADS": "1",
            **({"THREEFOLD_TOKEN": token} if token is not None else {}),
        }
        environ = {**environment(folder), **place, **own, **variables}
        ranks.append(
            warm.Running(warm.threefold, folder, (*arguments, "--train.steps", "400"), environ)
        )
    return ranks


@pytest.mark.parametrize("token", [None, TOKEN.decode()], ids=["open", "token"])
def test_ranks_of_a_launcher_listen_where_they_were_told_to(
    folder: Path, token: str | None
) -> None:
    name = f"launched-{token is None}"
    with ExitStack() as stack:
        ranks = [stack.enter_context(rank) for rank in launched(folder, name, token, token)]
        wait_for(
            lambda: last_step(folder / name) >= 3, f"step 3: {[rank.err() for rank in ranks]}"
        )
        found = {
            address
            for address, _ in listeners([each for rank in ranks for each in tree(rank.process)])
        }
        # The store or its proxy at MASTER_ADDR; gloo, the store behind a proxy and the ranks' proxies on loopback.
        assert found == {other_addresses()[-1], "127.0.0.1"}


REFUSALS = {
    "another": (TOKEN.decode(), "x" * 20, "has another token than rank 0 at"),
    "none": (TOKEN.decode(), None, "has no token, but rank 0 at"),
    "not asked": (None, TOKEN.decode(), "has a token, but what listens at"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_rank_with_another_token_is_refused(folder: Path, case: str) -> None:
    first, second, why = REFUSALS[case]
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(rank)
            for rank in launched(folder, f"refused-{case}", first, second)
        ]
        assert ranks[1].wait(20) == 1
        what, expected, fix = ranks[1].err().splitlines()
        assert what.startswith("rank 1 of host ") and why in what
        assert expected.startswith("  expected: ")
        assert fix == (
            "  fix: the same THREEFOLD_TOKEN (or THREEFOLD_TOKEN_FILE) on every host; new: openssl rand -hex 32"
        )


def test_token_under_torchrun_is_refused(folder: Path) -> None:
    agent = {
        "TORCHELASTIC_RUN_ID": "x",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "GROUP_WORLD_SIZE": "1",
    }
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(rank)
            for rank in launched(folder, "agent", *[TOKEN.decode()] * 2, **agent)
        ]
        assert ranks[0].wait(20) == 1
        assert (
            "THREEFOLD_TOKEN is set, but torchrun's agent keeps the store at" in ranks[0].err()
        )


# --- the token ---------------------------------------------------------------------------------------------------


def test_token_is_read_from_the_environment_or_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("THREEFOLD_TOKEN", raising=False)
    assert this_process.token() is None
    file = tmp_path / "token"
    monkeypatch.setenv("THREEFOLD_TOKEN_FILE", str(file))
    problems = []

    def refused() -> None:
        with pytest.raises(ConfigError) as caught:
            this_process.token()
        problems.append(str(caught.value).splitlines())

    refused()
    file.write_text("x" * 32 + "\n")
    file.chmod(0o644)
    refused()
    file.chmod(0o600)
    assert this_process.token() == b"x" * 32
    monkeypatch.setenv("THREEFOLD_TOKEN", "short")
    refused()
    assert problems == [
        [
            f"THREEFOLD_TOKEN_FILE = {file}: No such file or directory",
            "  expected: a file with the token",
            f"  fix: (umask 077; openssl rand -hex 32 > {file})",
        ],
        [
            f"THREEFOLD_TOKEN_FILE = {file} can be read by others",
            "  expected: a file that only its owner can read: anyone who knows the token can join the run",
            f"  fix: chmod 600 {file}",
        ],
        [
            "THREEFOLD_TOKEN has 5 characters",
            "  expected: at least 16 random ones",
            "  fix: export THREEFOLD_TOKEN=$(openssl rand -hex 32)   (the same on every host)",
        ],
    ]
    monkeypatch.setenv("THREEFOLD_TOKEN", "y" * 16)
    assert this_process.token() == b"y" * 16
