"""What may be imported without torch, and that the public names are there."""

from __future__ import annotations

import ast
import importlib
import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import threefold
from ranks.spawn import PRELOAD as SERVER_PRELOAD
from threefold.run.start import PRELOAD as RANK_PRELOAD

TORCH_FREE = [
    "threefold",
    "threefold.__main__",
    "threefold.commands.data",
    "threefold.commands.doctor",
    "threefold.commands.explain",
    "threefold.run.folder",
    "threefold.checkpoint.lock",
    "threefold.run.sources",
    "threefold.commands.submit",
    "threefold.checkpoint.tensor_index",
    "threefold.checkpoint.seal",
    "threefold.checkpoint.checkpoint_folder",
    "threefold.commands.main",
    "threefold.config",
    "threefold.config.rules",
    "threefold.config.loading",
    "threefold.config.yaml_text",
    "threefold.audit.digest",
    "threefold.audit.offences",
    "threefold.audit.lookup",
    "threefold.audit.row_losses",
    "threefold.audit.proof",
    "threefold.audit.record",
    "threefold.data.order.order",
    "threefold.data.rows.best_fit",
    "threefold.data.order.mixture",
    "threefold.data.order.draws",
    "threefold.data.rows.concat",
    "threefold.data.order.partition",
    "threefold.data.order.permutation",
    "threefold.data.store.prepare",
    "threefold.data.rows.packing",
    "threefold.data.store.open_source",
    "threefold.data.store.store",
    "threefold.data.text.source",
    "threefold.data.text.listing",
    "threefold.data.text.source",
    "threefold.data.tokens",
    "threefold.doctor.gpu",
    "threefold.doctor.machine",
    "threefold.doctor.network",
    "threefold.doctor.packages",
    "threefold.doctor.ranks",
    "threefold.explain.answer",
    "threefold.explain.ask",
    "threefold.explain.evidence",
    "threefold.explain.explain",
    "threefold.explain.known",
    "threefold.doctor.findings",
    "threefold.run.watch.stall",
    "threefold.commands.report",
    "threefold.report.document",
    "threefold.report.verdict",
    "threefold.report.server",
    "threefold.records.logs",
    "threefold.referee.judge.verdict",
    "threefold.referee.watch",
    "threefold.commands.referee",
    "threefold.records.run",
    "threefold.run.head",
    "threefold.commands.view",
    "threefold.run.watch.pulse",
    "threefold.errors",
    "threefold.commands.plan",
    "threefold.plan.accelerators",
    "threefold.plan.advise",
    "threefold.plan.choices",
    "threefold.plan.duration",
    "threefold.plan.memory",
    "threefold.jobs.job",
    "threefold.jobs.entry",
    "threefold.jobs.kubernetes",
    "threefold.jobs.sagemaker",
    "threefold.jobs.slurm",
    "threefold.integrations.trackers",
    "threefold.mesh.environment",
    "threefold.mesh.launchers.info",
    "threefold.mesh.launchers.managed",
    "threefold.mesh.launchers.readers",
    "threefold.mesh.rendezvous_errors",
    "threefold.mesh.topology",
    "threefold.why.format",
    "threefold.commands.run_argument",
    "threefold.commands.init",
    "threefold.commands.why",
    "threefold.config.yaml_document",
    "threefold.plan.shown_choices",
    "threefold.places.admission",
    "threefold.places.upload",
    "threefold.places.lease",
    "threefold.places.mirror",
    "threefold.places.restore",
]


# A fork for each module: every one is imported into an interpreter that has imported none of the others, only the
# libraries that many of them use.
ALONE = """
import importlib, json, os, sys
import numpy.typing, pydantic, rich.console, ruamel.yaml, typer
found = {}
for module in sys.argv[1:]:
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.close(read)
        importlib.import_module(module)
        os.write(write, " ".join({"torch", "transformers"} & set(sys.modules)).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        loaded = pipe.read()
    found[module] = loaded if os.waitpid(child, 0)[1] == 0 else "it cannot be imported"
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def loaded() -> dict[str, str]:
    """What each module has loaded that it should not."""
    done = subprocess.run(
        [sys.executable, "-c", ALONE, *TORCH_FREE], timeout=180, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("module", TORCH_FREE)
def test_module_loads_no_torch(module: str, loaded: dict[str, str]) -> None:
    assert loaded[module] == ""


def test_help_loads_no_torch() -> None:
    code = (
        "import sys; sys.argv = ['threefold', '--help']\n"
        "from threefold.__main__ import main\n"
        "try:\n    main()\nexcept SystemExit as stop:\n    assert not stop.code\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], timeout=180, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "train" in done.stdout


def test_public_names_are_there() -> None:
    import threefold

    for name in threefold.__all__:
        assert getattr(threefold, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = threefold.nothing


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("threefold.data.order.permutation", "Permutation"),
        ("threefold.data.sampling.streaming", "StreamingLoader"),
        ("threefold.integrations.huggingface", "Trainer"),
    ],
)
def test_documented_paths(module: str, name: str) -> None:
    assert hasattr(importlib.import_module(module), name)


def test_preloaded_modules_are_there() -> None:
    """A server passes over a module that it cannot import; each rank would import it for itself."""
    ours = [name for name in (*SERVER_PRELOAD, *RANK_PRELOAD) if name.startswith("threefold.")]
    assert ours and [name for name in ours if find_spec(name) is None] == []


DESK = ("records", "report", "why", "explain", "doctor", "jobs", "verify", "convert", "places")


def test_a_run_loads_no_desk() -> None:
    code = "import sys; import threefold.run.start, threefold.run.rank, threefold.commands.train; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], timeout=180, capture_output=True, text=True, check=True
    )
    loaded = [
        name
        for name in done.stdout.split()
        if name.startswith(tuple(f"threefold.{room}" for room in DESK))
    ]
    assert "threefold.run.rank" in done.stdout.split() and loaded == []


# Foreign dumps and logs, a model's config.json, and a message between processes of one command.
OTHER_JSON = {
    "explain/prefixes.py",
    "explain/sources/dumps.py",
    "commands/model_config.py",
    "commands/verify.py",
}


def test_the_files_of_a_run_are_parsed_in_one_place() -> None:
    """The desk parses no JSON of a run itself: `jsonl.Lines` and `records` do, with one opinion about damage."""
    source = Path(threefold.__file__).parent
    calls = set()
    for room in ("records", "report", "why", "explain", "verify", "commands"):
        for path in (source / room).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Attribute | ast.Name) and ast.unparse(node) in (
                    "json.loads",
                    "json.load",
                    "from_json",
                ):
                    calls.add(path.relative_to(source).as_posix())
    assert calls == OTHER_JSON
    for name in ("metrics.jsonl", "journal.jsonl", "samples.jsonl"):
        owners = [path.name for path in source.rglob("*.py") if f'"{name}"' in path.read_text()]
        assert len(owners) <= 3, f"{name} is named in {owners}"
