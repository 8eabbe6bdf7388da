"""The pieces of `make gpu`: each is kept however it ends, what is done is not run again, and the page says what ran."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement

from ranks.faults import alive, wait_for
from threefold.run import local_rank_limit

ROOT = Path(__file__).resolve().parents[2]


def benchmark(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


gpu, rows = benchmark("gpu"), benchmark("gpu_rows")


def kept(
    folder: Path, name: str, ending: str = "done", build: str = "1", **values: Any
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    result = {
        "piece": name,
        "ending": ending,
        "versions": {"threefold": build, "torch": "2.11"},
        **values,
    }
    (folder / f"{name}.json").write_text(json.dumps(result))


def test_each_piece_has_something_to_run() -> None:
    names = [piece.name for piece in gpu.PIECES]
    assert len(set(names)) == len(names)
    for name in names:
        kind, _, rest = name.partition("-")
        if name in ("environment", "ceilings", "train", "bits", "bits-deterministic"):
            continue
        if kind == "test":
            file = "cuda_families" if rest.startswith("families") else rest
            assert (ROOT / "tests" / "gpu" / f"test_{file}.py").is_file(), name
        else:
            row = rows.ROWS[rest if kind == "trainer" else name]
            assert kind != "trainer" or row.peer is not None, name
    assert max(piece.limit_s for piece in gpu.PIECES) < 580  # each fits into a call


def test_what_is_done_or_cannot_fit_is_not_run_again_for_the_same_build(tmp_path: Path) -> None:
    pieces = gpu.PIECES[:6]
    for piece, ending in zip(pieces, ("done", "skipped", "failed", "late"), strict=False):
        kept(tmp_path, piece.name, ending)
    (tmp_path / f"{pieces[4].name}.json").write_text("{torn")
    left = [piece.name for piece in gpu.to_run(pieces, tmp_path, build="1")]
    assert left == [piece.name for piece in pieces[2:]]
    assert len(list(gpu.to_run(pieces, tmp_path, build="2"))) == 6


@pytest.mark.timing
def test_a_piece_that_is_late_or_dies_is_kept_and_nothing_of_it_lives_on(
    tmp_path: Path,
) -> None:
    started = tmp_path / "started"
    slow = tmp_path / "slow"
    slow.write_text(f"#!/bin/sh\necho $$ > {started}\nsleep 100\n")
    slow.chmod(0o755)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    # At the start of its interpreter: seconds of imports later it would be the same.
    (tmp_path / "sitecustomize.py").write_text(
        f"import subprocess\nsubprocess.run(['{slow}'])\n"
    )
    hangs = {**environment, "PYTHONPATH": str(tmp_path)}
    piece = gpu.Piece("environment", 60, "")
    result = gpu.run(piece, tmp_path / "kept", limit_s=5, tiny=True, environment=hangs)
    assert (result["ending"], result["error"]) == ("late", "it took longer than 5 s")
    assert json.loads((tmp_path / "kept" / "environment.json").read_text()) == result
    assert started.exists(), "the piece had not begun"
    # What is killed takes its time to go on a machine with much to do.
    wait_for(lambda: not alive(int(started.read_text())), "its end", within_s=20)
    gone = gpu.run(
        gpu.Piece("unheard-of", 60, ""),
        tmp_path / "kept",
        limit_s=60,
        tiny=True,
        environment=environment,
    )
    assert (
        gone["error"] == "its process ended with exit code 2" and "unheard-of" in gone["output"]
    )
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == [
        "environment.json",
        "unheard-of.json",
    ]


def test_an_error_is_kept_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str, *, tiny: bool) -> dict[str, Any]:
        raise RuntimeError("CUDA error: an illegal memory access\n" + "x" * 5000)

    monkeypatch.setattr(gpu, "figures_of", broken)
    gpu.alone("ceilings", tmp_path / "ceilings.json", tiny=False)
    result = json.loads((tmp_path / "ceilings.json").read_text())
    assert (
        result["ending"] == "failed"
        and result["error"].startswith("Traceback")
        and "x" * 5000 in result["error"]
    )
    assert result["versions"]["torch"] == torch.__version__


def test_a_row_that_its_host_cannot_hold_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=139 << 30)
    )
    name = "8b-row-32768"
    for gib, fits in ((400, True), (100, False)):
        monkeypatch.setattr(
            local_rank_limit, "room_here", lambda gib=gib: local_rank_limit.Room(16, gib << 30)
        )
        if fits:
            assert rows.fitting(rows.ROWS[name]).rows == 1
            continue
        with pytest.raises(
            rows.DoesNotFit,
            match=rf"[\d.]+ GiB of the host by the planner's estimate, of {gib}\.0 GiB",
        ):
            rows.fitting(rows.ROWS[name])


@pytest.mark.parametrize(
    ("name", "gib", "fits"),
    [
        ("1b-eager", 139, 8),
        ("1b-eager", 40, 2),
        ("8b-full", 79, None),
        ("8b-full", 200, 1),
        ("1b-eager", 8, None),
    ],
)
def test_rows_are_as_many_as_the_planner_says_that_the_device_holds(
    name: str, gib: int, fits: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=gib << 30)
    )
    if fits is not None:
        assert rows.fitting(rows.ROWS[name]).rows == fits
        return
    with pytest.raises(
        rows.DoesNotFit,
        match=rf"one row needs [\d.]+ GiB by the planner's estimate, of {gib}\.0 GiB",
    ):
        rows.fitting(rows.ROWS[name])

    def does_not_fit(name: str, *, tiny: bool) -> dict[str, Any]:
        raise rows.DoesNotFit("one row needs 100 GiB")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(gpu, "figures_of", does_not_fit)
    gpu.alone(name, tmp_path / "a.json", tiny=False)
    result = json.loads((tmp_path / "a.json").read_text())
    assert (result["ending"], result["error"]) == ("skipped", "one row needs 100 GiB")


def test_the_page_says_what_ran_what_did_not_and_why(tmp_path: Path) -> None:
    assert gpu.page_of(tmp_path) == gpu.NOT_RUN
    figures = {
        "tokens_per_s": 50_000.0, "step_ms": 655.0, "host_ms": 80.0, "peak_bytes": 40 << 30, "mfu": 0.456, "rows": 8,
        "seq_len": 4096, "goal": 54_800,
    }  # fmt: skip
    machine = tmp_path / "nvidia-h100"
    kept(machine, "1b-compiled", figures=figures)
    kept(machine, "trainer-1b-compiled", figures={"tokens_per_s": 40_000.0})
    kept(machine, "1b-float8", "failed", error="Traceback ...\nRuntimeError: no kernel")
    kept(
        machine,
        "bits",
        figures={"steps": 30, "same_in_a_second_run": 1, "same_when_resumed": 0},
    )
    (tmp_path / "empty").mkdir()
    page = gpu.page_of(tmp_path)
    assert (
        "| 1b-compiled, 8 x 4,096 | 50,000 | 45.6% | 40.0 | 80 of 655 | 1.25 x | 54,800 |"
        in page
    )
    assert (
        "- 1b-float8: failed: RuntimeError: no kernel" in page
        and "nvidia-h100: threefold 1, torch 2.11" in page
    )
    assert (
        "- bits: of 30 steps 1 are the same in a second run, 0 when it is resumed in the middle"
        in page
    )
    assert (
        gpu.with_page(f"a\n{gpu.BEGIN}\nold\n{gpu.END}\nb", page)
        == f"a\n{gpu.BEGIN}\n{page}\n{gpu.END}\nb"
    )


def test_the_page_in_the_documentation_is_that_of_the_kept_results() -> None:
    text = gpu.PAGE.read_text(encoding="utf-8")
    assert gpu.with_page(text, gpu.page_of(gpu.RESULTS)) == text, (
        "python benchmarks/gpu.py --pages"
    )


def test_without_a_device_nothing_is_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho NVIDIA H100 80GB HBM3\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu.machine_of(tiny=False) == "nvidia-h100-80gb-hbm3"
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    assert gpu.machine_of(tiny=False) is None
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--to", str(tmp_path / "results")])
    with pytest.raises(SystemExit, match="no CUDA device: nothing was measured"):
        gpu.main()
    assert not (tmp_path / "results").exists()


def test_wheels_are_those_of_the_constraints_and_all_that_is_needed() -> None:
    """What they lack the machine has: torch's build for CUDA, and what that and transformers of any version bring."""
    lines = (ROOT / "benchmarks" / "gpu-wheels.txt").read_text().splitlines()
    wheels = [Requirement(line) for line in lines if line[0] != "#"]
    pins = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        name, _, version = line.partition("==")
        pins[name.lower().replace("_", "-").replace(".", "-")] = version
    names = {}
    for wheel in wheels:
        name = wheel.name.lower().replace("_", "-").replace(".", "-")
        names[name] = str(wheel.specifier).removeprefix("==")
        assert pins.get(name, names[name]) == names[name], (
            f"{name}: constraints.txt has {pins.get(name)}"
        )
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {
        Requirement(each).name.lower().replace("_", "-").replace(".", "-")
        for each in project["dependencies"]
    }
    assert needed - names.keys() == {"torch", "numpy", "pyarrow"}


def test_wheels_that_were_carried_are_before_what_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import subprocess
    import zipfile

    (tmp_path / "wheels").mkdir()
    about = {
        "METADATA": "Metadata-Version: 2.1\nName: xxhash\nVersion: 99\n",
        "WHEEL": "Wheel-Version: 1.0\n",
    }
    with zipfile.ZipFile(tmp_path / "wheels" / "xxhash-99-py3-none-any.whl", "w") as wheel:
        wheel.writestr("xxhash.py", "VERSION = 'carried'\n")
        for name, text in {**about, "RECORD": ""}.items():
            tag = "Root-Is-Purelib: true\nTag: py3-none-any\n" if name == "WHEEL" else ""
            wheel.writestr(f"xxhash-99.dist-info/{name}", text + tag)
    monkeypatch.setattr(gpu, "WHEELS", tmp_path / "wheels")
    monkeypatch.setattr(gpu, "SITE", tmp_path / "site")
    environment = gpu.prepared()
    command = [sys.executable, "-c", "import xxhash; print(xxhash.VERSION)"]
    assert (
        subprocess.run(command, env=environment, capture_output=True, text=True).stdout
        == "carried\n"
    )
    installed = (tmp_path / "site" / "xxhash.py").stat().st_mtime_ns
    assert (
        gpu.prepared() == environment
        and (tmp_path / "site" / "xxhash.py").stat().st_mtime_ns == installed
    )
