"""`threefold doctor --burn`: what computes, keeps or sends wrong is named by host and device, and nothing else is."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from ranks.runs import command
from ranks.spawn import run_ranks
from threefold.doctor import burn
from threefold.doctor.burn import Burned

CPU = torch.device("cpu")


def flipped(values: torch.Tensor) -> torch.Tensor:
    """The tensor with the lowest bit of one number turned."""
    wrong = values.clone()
    bits = wrong.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[wrong.element_size()])
    bits[(7,) * bits.ndim] ^= 1
    return wrong


def test_machine_that_computes_rightly() -> None:
    found = burn.burn(CPU, 0.4, part=0, parts=1)
    assert [each.place for each in found] == [f"core {core}" for core in sorted(os.sched_getaffinity(0))]
    assert all(each.products >= 3 and each.words and not each.wrong for each in found)
    (finding,) = burn.judge([("here", each) for each in found])
    assert finding.level == "ok" and "all right" in finding.what
    # Processes of a host share its cores; more of them than cores have one each.
    cores = sorted(os.sched_getaffinity(0))
    assert [each.place for each in burn.burn(CPU, 0.1, part=len(cores), parts=len(cores) + 1)] == [f"core {cores[0]}"]
    assert sorted(os.sched_getaffinity(0)) == cores  # of this thread still


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_one_bit_of_one_product_is_found(dtype: torch.dtype) -> None:
    last = sorted(os.sched_getaffinity(0))[-1]
    calls = []

    def multiply(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        product = torch.mm(left, right)
        here = os.sched_getaffinity(0) == {last} and left.dtype == dtype and not calls
        if here and left.abs().max() >= 1 and threading.current_thread() is not threading.main_thread():
            calls.append(1)
            return flipped(product)
        return product

    found = burn.burn(CPU, 0.3, part=0, parts=1, multiply=multiply)
    stops = [each for each in burn.judge([("node-3", each) for each in found]) if each.level == "stop"]
    assert len(stops) == 1 and stops[0].what.startswith(f"core {last} of node-3: 1 of ")
    assert stops[0].what.endswith("products were wrong")


def test_one_bit_of_memory_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    pattern, made = burn._pattern, []

    def forgetful(*arguments: Any) -> torch.Tensor:
        made.append(1)
        words = pattern(*arguments)
        return flipped(words) if len(made) == 1 else words

    monkeypatch.setattr(burn, "_pattern", forgetful)
    monkeypatch.setattr(burn, "_PIECE", 1 << 12)
    wrong, words = burn._remembered(CPU, 4 * 8 << 12, 0, float("inf"))
    assert (wrong, words) == (1, 4 << 12)
    assert not torch.equal(pattern(CPU, 0, 0), pattern(CPU, 0, 1)) and pattern(CPU, 1, 0).unique().numel() == 1 << 12
    (finding,) = burn.judge([("node-3", Burned("cuda:1 H100", "H100", 5, words, "a", {"words of memory": wrong}))])
    assert finding.what == "cuda:1 H100 of node-3: 1 of 16,384 words of memory were wrong"


def test_core_that_fails_under_load_is_named() -> None:
    last = sorted(os.sched_getaffinity(0))[-1]

    def multiply(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        if os.sched_getaffinity(0) == {last}:
            raise RuntimeError("CUDA error: uncorrectable ECC error encountered\nmore")
        return torch.mm(left, right)

    found = burn.burn(CPU, 0.1, part=0, parts=1, multiply=multiply)
    (finding,) = burn.judge([("node-3", each) for each in found])
    assert finding.level == "stop"
    assert finding.what == f"core {last} of node-3 failed: CUDA error: uncorrectable ECC error encountered"


def test_device_with_other_bits_than_its_like_is_named() -> None:
    def device(number: int, digest: str, kind: str = "H100") -> Burned:
        return Burned(f"cuda:{number}", kind, 1, 1, digest)

    equal = [("a", device(number, "x")) for number in range(3)]
    assert [each.level for each in burn.judge([*equal, ("a", device(0, "z", "A100"))])] == ["ok"]
    (finding,) = burn.judge([*equal, ("b", device(3, "y"))])
    assert finding.what == "cuda:3 of b computed other bits than the other 3 of H100" and finding.level == "stop"
    (finding,) = burn.judge([("a", device(0, "x")), ("b", device(1, "y"))])
    assert "no side is larger" in finding.what
    (finding,) = burn.judge(equal, [(0, 9, 0), (1, 9, 2)])
    assert finding.what == "rank 1 received 2 of 9 sums wrong"


def _sums(wrong_on: int) -> list[str]:
    import torch.distributed as dist

    from threefold.doctor import ranks
    from threefold.mesh import environment
    from threefold.mesh.mesh import init_mesh

    mesh = init_mesh(dp=2, device="cpu")
    all_reduce, calls = dist.all_reduce, []

    class Wrong:
        """Work whose result has one wrong bit."""

        def __init__(self, work: Any, values: torch.Tensor) -> None:
            self.work, self.values = work, values

        def wait(self, *limit: Any) -> bool:
            done = self.work.wait(*limit)
            self.values.copy_(flipped(self.values))
            return bool(done)

    def broken(values: torch.Tensor, **named: Any) -> Any:
        work = all_reduce(values, **named)
        calls.append(1)
        return Wrong(work, values) if mesh.rank == wrong_on and len(calls) == 1 else work

    dist.all_reduce = broken  # type: ignore[assignment]
    report = ranks.burn_mesh(mesh, environment.current(), seconds=0.5, limit_s=20)
    return ["\n".join(each.lines()) for each in report.findings]


def test_links_under_load() -> None:
    for wrong_on in (0, 1):
        (told,) = run_ranks(_sums, 2, wrong_on)[0]
        assert told.startswith(f"STOP    burn: rank {wrong_on} received 1 of ") and "sums wrong" in told
    (told,) = run_ranks(_sums, 2, -1)[0]
    assert told.startswith("ok      burn: ") and "all-reduces under load, all right" in told


def test_command_burns_when_it_is_asked_to(tmp_path: Path) -> None:
    done = command(tmp_path, "doctor", "--burn", "--minutes", "0.02", "--mesh.device", "cpu")
    assert done.returncode == 0 and "ok      burn: " in done.stdout, done.stdout + done.stderr
    done = command(tmp_path, "doctor", "--minutes", "5")
    assert done.returncode == 2 and "--minutes without --burn" in done.stderr
