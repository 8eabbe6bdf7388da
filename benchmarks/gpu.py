"""All that a GPU is asked, in order of value: `make gpu`, on a machine with a device and perhaps without a network.

    make gpu-wheels                  here, where there is a network: what the other machine lacks, into gpu-wheels/
    make gpu                         there: pieces until the time is over; again: those that are left
    make gpu ONLY="1b-eager bits"    some of them, done or not; TO=FOLDER: results in another folder
    python benchmarks/gpu.py --list  the pieces, their limits, and what is known of each
    python benchmarks/gpu.py --pages docs/plan.md, from the results that are kept
    python benchmarks/gpu.py --tiny  tries all of it on a CPU; its figures mean nothing

Each piece runs in a process of its own with a limit, and leaves RESULTS/MACHINE/PIECE.json, whatever happens to it: how
it ended (done, failed, late, skipped), its figures, its error whole, the end of what it printed, versions and time. A
call takes `--seconds` at most: a piece begins only if its limit is left. A piece that is done is not run again for the
same build of Threefold. Of the pieces only their processes load torch.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
RESULTS, WHEELS, SITE = ROOT / "benchmarks" / "results", ROOT / "gpu-wheels", ROOT / ".gpu-site"
PAGE, BEGIN, END = ROOT / "docs" / "plan.md", "<!-- benchmarks/gpu.py -->", "<!-- end -->"
NOT_RUN = "Neither has run: there was no GPU."
_KEPT_OUTPUT = 1 << 16
_STARTING_S = 15  # of a process until its piece begins


class Piece(NamedTuple):
    """What a process of its own finds out, in `limit_s` seconds at most, and why it is worth that."""

    name: str
    limit_s: int
    why: str


FAMILIES = ("llama", "qwen3", "gemma2", "mixtral")
LENGTHS = (65_536, 32_768, 131_072, 262_144, 300_032)
PIECES = [
    Piece("environment", 60, "driver, clocks, errors of memory, and what doctor says"),
    Piece(
        "ceilings",
        180,
        "what the device reaches; which attention is first; whether its bits repeat",
    ),
    Piece("train", 150, "whether the command trains, with documents kept apart"),
    Piece("1b-compiled", 150, "the first goal"),
    Piece("test-step", 200, "a step waits for nothing that it need not wait for"),
    Piece("test-fused_attention", 100, "gradients of the kernels"),
    Piece("test-cuda_loss", 100, "the kernels of the loss against its operations"),
    Piece("bits", 150, "whether a second run and a resume give the same bits"),
    Piece("bits-deterministic", 150, "the same with train.deterministic"),
    Piece("1b-documents", 120, "what documents that do not see one another cost"),
    Piece("1b-eager", 100, "a goal, without compilation"),
    Piece("trainer-1b-eager", 110, "transformers.Trainer with the same"),
    Piece("trainer-1b-compiled", 150, "transformers.Trainer with the same, compiled"),
    Piece("1b-float8", 150, "float8 against the compiled row"),
    Piece("8b-quarter-compiled", 120, "8B by a quarter of its layers"),
    Piece("8b-quarter-selective", 120, "what selective checkpointing costs"),
    Piece("8b-quarter-full", 120, "what full checkpointing costs"),
    Piece("8b-quarter-narrow", 120, "what moments in bfloat16 cost"),
    Piece("8b-lora", 120, "a goal: adapters of 8B"),
    Piece("trainer-8b-lora", 150, "transformers.Trainer with the same adapters"),
    Piece("trainer-8b-quarter-compiled", 150, "transformers.Trainer with a quarter of 8B"),
    Piece("test-cuda", 200, "a device against the CPU"),
    Piece("test-estimated", 200, "the estimate of memory against what is allocated"),
    *(Piece(f"test-families-{name}", 150, "a family against the CPU") for name in FAMILIES),
    Piece("8b-full", 150, "8B whole, full checkpointing"),
    Piece("8b-selective", 150, "8B whole, selective checkpointing, moments in bfloat16"),
    *(
        Piece(f"8b-row-{length}", 200, "how long a row may be with offload")
        for length in LENGTHS
    ),
]


def figures_of(name: str, *, tiny: bool) -> dict[str, Any]:
    """Runs a piece in this process."""
    kind, _, rest = name.partition("-")
    if name == "environment":
        return _environment()
    if name == "train":
        return _train(tiny=tiny)
    if kind == "test":
        return _tests(rest)
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import gpu_rows as rows

    if name == "ceilings":
        return rows.ceilings(tiny=tiny)
    if kind == "bits":
        return rows.bits(deterministic=bool(rest), tiny=tiny)
    row = rows.ROWS[rest if kind == "trainer" else name]
    steps = rows.TINY_STEPS if tiny else rows.STEPS
    measure = rows.measure_trainer if kind == "trainer" else rows.measure
    return measure(row.tiny() if tiny else row, steps=steps)


def _environment() -> dict[str, Any]:
    texts = {}
    for name, command in {
        "nvidia-smi": ["nvidia-smi", "-q", "-d", "CLOCK,PERFORMANCE,ECC,MEMORY"],
        "doctor": [sys.executable, "-m", "threefold", "doctor"],
    }.items():
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=50)
            texts[name] = done.stdout + done.stderr
        except (OSError, subprocess.TimeoutExpired) as error:
            texts[name] = repr(error)
    return texts


def _train(*, tiny: bool) -> dict[str, Any]:
    """20 steps of the command's default model on documents: its last logged step."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        keys = [
            "--train.steps",
            "3" if tiny else "20",
            "--model.dtype",
            "bfloat16",
            "--data.document_mask",
            "true",
        ]
        keys += [
            "--mesh.dp",
            "1",
            "--mesh.cp",
            "1",
            "--mesh.tp",
            "1",
            "--log.dir",
            f"{folder}/run",
        ]
        subprocess.run([sys.executable, "-m", "threefold", "train", *keys], check=True)
        lines = [
            json.loads(line)
            for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()
        ]
    return next(line for line in reversed(lines) if "loss" in line)


def _tests(name: str) -> dict[str, Any]:
    """A file of tests/gpu, or of its families one; what pytest says last."""
    file, _, family = name.partition("-")
    words = [
        f"tests/gpu/test_{'cuda_families' if file == 'families' else file}.py",
        *(["-k", family] if family else []),
    ]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-rfs",
        "-p",
        "no:cacheprovider",
        "-m",
        "gpu",
        *words,
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    print(done.stdout, done.stderr, flush=True)
    if done.returncode:
        raise RuntimeError(
            f"pytest exits with {done.returncode}: {' '.join(words)}\n{done.stdout}"
        )
    return {"said": done.stdout.strip().splitlines()[-1]}


# --- one piece in a process of its own


def alone(name: str, to: Path, *, tiny: bool) -> None:
    """Runs a piece and writes its figures, or why there are none."""
    result: dict[str, Any] = {}
    try:
        result |= {"ending": "done", "figures": figures_of(name, tiny=tiny)}
    except Exception as error:  # whatever a device or a library raises is the result
        skipped = type(error).__name__ == "DoesNotFit"
        result |= {"ending": "skipped" if skipped else "failed"}
        result["error"] = str(error) if skipped else traceback.format_exc()
    _write(to, result | {"versions": versions()})


def versions() -> dict[str, str]:
    """Of what decides the figures, as far as it is there."""
    import torch
    import transformers

    from threefold.build_id import build_id

    found = {
        "threefold": build_id(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    if torch.cuda.is_available():
        found |= {"cuda": str(torch.version.cuda), "device": torch.cuda.get_device_name()}
    return found | {"python": platform.python_version()}


def _write(path: Path, values: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def run(
    piece: Piece, folder: Path, *, limit_s: float, tiny: bool, environment: dict[str, str]
) -> dict[str, Any]:
    """Runs a piece in a process of its own, ends it and all that it has started, and keeps what is known of it."""
    to, log = folder / f"{piece.name}.json", folder / f".{piece.name}.txt"
    to.unlink(missing_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    command = [
        sys.executable,
        __file__,
        "--one",
        piece.name,
        "--result",
        str(to),
        *(["--tiny"] if tiny else []),
    ]
    began, when = time.monotonic(), datetime.now(UTC).isoformat(timespec="seconds")
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=environment,
        )
        late = False
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            late = True
        finally:
            with contextlib.suppress(ProcessLookupError):
                # With what it has started: that would keep the device.
                os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
    result: dict[str, Any] = json.loads(to.read_text(encoding="utf-8")) if to.exists() else {}
    if not result:
        how = (
            f"it took longer than {limit_s:.0f} s"
            if late
            else f"its process ended with exit code {code}"
        )
        result = {"ending": "late" if late else "failed", "error": how}
    said = log.read_bytes()[-_KEPT_OUTPUT:].decode(errors="replace")
    log.unlink()
    result = {
        "piece": piece.name,
        "when": when,
        "seconds": round(time.monotonic() - began, 1),
        **result,
        "output": said,
    }
    _write(to, result)
    return result


# --- all pieces


def machine_of(*, tiny: bool) -> str | None:
    """The device's name as a folder; None without one."""
    if tiny:
        return "tiny"
    try:
        query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        names = subprocess.run(
            query, capture_output=True, text=True, timeout=30
        ).stdout.splitlines()
    except (OSError, subprocess.TimeoutExpired):
        return None
    return (
        re.sub(r"[^a-z0-9]+", "-", names[0].lower()).strip("-")
        if names and names[0].strip()
        else None
    )


def prepared() -> dict[str, str]:
    """The environment of the pieces: the sources, and before what is installed the wheels that were carried, if any."""
    paths = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    wheels = sorted(map(str, WHEELS.glob("*.whl")))
    if wheels:
        marker = SITE / ".installed"
        if not marker.exists() or marker.read_text() != "\n".join(wheels):
            install = [
                sys.executable,
                "-m",
                "pip",
                "install",
                "-q",
                "--no-index",
                "--no-deps",
                "--upgrade",
            ]
            if subprocess.run([*install, "--target", str(SITE), *wheels]).returncode:
                sys.exit(
                    f"{WHEELS} has wheels for another machine: they are for Python 3.12 on Linux (x86_64)"
                )
            marker.write_text("\n".join(wheels))
        paths.insert(1, str(SITE))
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
    }


def to_run(pieces: Sequence[Piece], folder: Path, *, build: str) -> Iterator[Piece]:
    """The pieces of which this build has no result: neither done nor skipped."""
    for piece in pieces:
        known = _known(folder / f"{piece.name}.json")
        same = known.get("versions", {}).get("threefold") == build
        if not (same and known.get("ending") in ("done", "skipped")):
            yield piece


def _known(path: Path) -> dict[str, Any]:
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return result if isinstance(result, dict) else {}


def line_of(result: dict[str, Any]) -> str:
    """A result in a line: how it ended, and the figures that matter, or the end of its error."""
    figures = result.get("figures") or {}
    shown = [
        f"{key} {value:,.4g}"
        for key, value in figures.items()
        if isinstance(value, int | float) and value
    ]
    error = (result.get("error") or "").strip().splitlines()[-1:]
    text = ", ".join(shown[:8]) or "".join(error)[:300]
    return f"{result['piece']}: {result['ending']} in {result['seconds']} s  {text}"


# --- pages


def table_of(results: dict[str, dict[str, Any]]) -> list[str]:
    """The rows of a machine that were measured, as a table; those that were not, by name."""
    columns = (
        "run",
        "tokens/s",
        "of the peak",
        "memory, GiB",
        "host, ms of a step's",
        "of the Trainer",
        "goal",
    )
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for name, result in results.items():
        figures = result.get("figures", {})
        if result.get("ending") != "done" or "step_ms" not in figures:
            continue
        peer = results.get(f"trainer-{name}", {}).get("figures", {}).get("tokens_per_s")
        cells = [
            f"{name}, {figures['rows']} x {figures['seq_len']:,}",
            f"{figures['tokens_per_s']:,.0f}",
            f"{figures['mfu']:.1%}" if figures["mfu"] else "",
            f"{figures['peak_bytes'] / 2**30:.1f}",
            f"{figures['host_ms']:.0f} of {figures['step_ms']:.0f}",
            f"{figures['tokens_per_s'] / peer:.2f} x" if peer else "",
            f"{figures['goal']:,.0f}" if figures["goal"] else "",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    others = {
        name: result for name, result in results.items() if result.get("ending") != "done"
    }
    lines += [""] + [
        f"- {name}: {result.get('ending')}: {_cause(result)}" for name, result in others.items()
    ]
    for name in ("bits", "bits-deterministic"):
        if figures := results.get(name, {}).get("figures"):
            lines.append(
                f"- {name}: of {figures['steps']} steps {figures['same_in_a_second_run']} are the same in a second "
                f"run, {figures['same_when_resumed']} when it is resumed in the middle"
            )
    return lines


def _cause(result: dict[str, Any]) -> str:
    lines = [line for line in str(result.get("error", "")).splitlines() if line.strip()]
    return lines[-1].strip()[:160] if lines else "no message"


def page_of(results: Path) -> str:
    """What the page says of GPUs: the kept results of each machine, or that nothing has run."""
    parts = []
    for folder in sorted(path for path in results.glob("*") if path.is_dir()):
        known = {
            piece.name: result
            for piece in PIECES
            if (result := _known(folder / f"{piece.name}.json"))
        }
        if not known:
            continue
        last = max(known.values(), key=lambda result: str(result.get("when")))
        about = ", ".join(
            f"{name} {version}" for name, version in last.get("versions", {}).items()
        )
        parts.append("\n".join([f"{folder.name}: {about}; `make gpu`", "", *table_of(known)]))
    return "\n\n".join(parts) if parts else NOT_RUN


def with_page(text: str, inside: str) -> str:
    """A page with what is between its marks replaced."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{inside}\n{END}{after}"


def main() -> None:
    """Runs the pieces that are left, or some, or writes the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [piece.name for piece in PIECES]
    parser.add_argument("--only", nargs="*", default=[], metavar="PIECE", choices=names)
    parser.add_argument("--to", type=Path, default=RESULTS, help="default: benchmarks/results")
    parser.add_argument("--seconds", type=float, default=580, help="of this call at most")
    parser.add_argument(
        "--limit", type=float, help="seconds of each piece, in place of its own"
    )
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--pages", action="store_true")
    parser.add_argument("--one", choices=names, help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one:
        return alone(asked.one, asked.result, tiny=asked.tiny)
    if asked.pages:
        PAGE.write_text(
            with_page(PAGE.read_text(encoding="utf-8"), page_of(asked.to)), encoding="utf-8"
        )
        return None
    began = time.monotonic()
    machine = machine_of(tiny=asked.tiny)
    if asked.list:
        for piece in PIECES:
            known = _known(asked.to / (machine or "") / f"{piece.name}.json")
            print(
                f"{piece.name:30} {piece.limit_s:4} s  {known.get('ending', 'not run'):8} {piece.why}"
            )
        return None
    if machine is None:
        sys.exit(
            "no CUDA device: nothing was measured (python benchmarks/gpu.py --tiny tries the pieces on a CPU)"
        )
    folder, environment = asked.to / machine, prepared()
    sys.path.insert(0, str(ROOT / "src"))
    from threefold.build_id import build_id

    chosen = [piece for piece in PIECES if piece.name in asked.only]
    for piece in chosen or to_run(PIECES, folder, build=build_id()):
        limit_s = asked.limit or piece.limit_s
        left = asked.seconds - (time.monotonic() - began)
        if left < min(limit_s, _STARTING_S):
            print("the time of this call is over: again, for what is left")
            return None
        if left < limit_s:
            print(
                f"{piece.name}: not begun: its limit is {limit_s:.0f} s, and {left:.0f} s are left"
            )
            continue
        result = run(piece, folder, limit_s=limit_s, tiny=asked.tiny, environment=environment)
        print(line_of(result), flush=True)
    return None


if __name__ == "__main__":
    main()
