"""--json of every command that prints results: the fields of its schema, and the exit code of its page."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from ranks.runs import command, prepare, torchrun
from threefold.commands import main

sys.path.insert(0, str(Path(__file__).parents[2] / "docs"))

import generate_schemas
from generate_schemas import ANSWERS

pytestmark = pytest.mark.ranks
SCHEMAS = Path(__file__).parents[2] / "docs" / "schemas"
# What other rooms add to an answer, by the facts that there are.
OPEN = {"doctor", "plan", "profile", "data show"}

_SAGEMAKER = (
    "--role arn:aws:iam::123456789012:role/a --image 123456789012.dkr.ecr.eu-west-1.amazonaws.com/a:1 "
    "--output s3://bucket/jobs --instance-type ml.m5.xlarge"
)
# Command, its words in a folder with `run` and `model`, exit code.
CASES = [
    ("data audit", "run", 0),
    ("data order", "run --step 2", 0),
    ("data order", "run --sample 3", 0),
    (
        "data overlap",
        "--data.source corpus/part-0.txt --eval.source other.txt --data.tokenizer bytes",
        0,
    ),
    (
        "data overlap",
        "--data.source corpus/part-0.txt --eval.source corpus/part-0.txt --data.tokenizer bytes",
        1,
    ),
    ("data show", "--data.source corpus/part-0.txt --data.tokenizer bytes --first 2", 0),
    ("doctor", "", 0),
    ("eval", "run --eval.source corpus/part-0.txt", 0),
    ("explain", "run", 0),
    ("explain", "train.log", 0),
    ("explain", "unknown.log", 1),
    ("export", "run --to exported", 0),
    ("hash", "run", 0),
    ("hash", "run model", 0),
    ("plan", "config.yaml --mesh.dp 2", 0),
    ("plan", "model --gpus 2 --gpu h100-80gb --data.seq_len 32", 0),
    ("profile", "run", 0),
    ("referee", "judge watched", 3),
    ("report", "run --to page.html", 0),
    ("sample", "run --prompt the --tokens 3", 0),
    (
        "submit kubernetes",
        "config.yaml --mesh.dp 2 --image a:1 --volume claim=/runs --log.dir /runs/a --dry-run",
        0,
    ),
    ("submit sagemaker", f"config.yaml --mesh.dp 2 {_SAGEMAKER} --dry-run", 0),
    ("submit slurm", "config.yaml --mesh.dp 2 --dry-run", 0),
    ("verify", "config.yaml --mesh.dp 2 --steps 1", 0),
    ("why", "run", 0),
    ("why", "run --step 2", 0),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a run of two ranks, and its model."""
    place = tmp_path_factory.mktemp("answers")
    prepare(place)
    keys = (
        "--mesh.dp",
        "2",
        "--train.steps",
        "4",
        "--audit.every",
        "1",
        "--log.profile",
        "[2, 3]",
        "--log.dir",
        "run",
    )
    trained = command(place, "train", "config.yaml", *keys)
    assert trained.returncode == 0, trained.stderr
    assert command(place, "export", "run", "--to", "model").returncode == 0
    (place / "train.log").write_text("RuntimeError: Expected all tensors on same device\n")
    (place / "other.txt").write_text(
        "nothing of this is read by the run, and none of it is in its corpus. " * 9
    )
    (place / "watched").mkdir()
    (place / "watched" / "command.json").write_text('{"command": ["true"], "exit_code": 0}')
    (place / "unknown.log").write_text("training was here\n")
    return place


def answers(printed: str) -> list[dict[str, Any]]:
    """The object on stdout, those of a list, or one of each line; nothing else may be there."""
    try:
        value = json.loads(printed, parse_constant=_refuse)
    except json.JSONDecodeError:
        return [json.loads(line, parse_constant=_refuse) for line in printed.splitlines()]
    return value if isinstance(value, list) else [value]


def _refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is no JSON")


def check(name: str, value: dict[str, Any]) -> None:
    adapter: TypeAdapter[Any] = TypeAdapter(ANSWERS[name])
    adapter.validate_json(json.dumps(value), strict=True)
    undeclared = set(value) - set(ANSWERS[name].__annotations__)
    assert name in OPEN or undeclared == set(), undeclared


@pytest.mark.parametrize(
    ("name", "words", "code"), CASES, ids=lambda value: str(value).replace(" ", "-")
)
def test_answer_has_the_fields_of_its_schema(
    folder: Path, name: str, words: str, code: int
) -> None:
    ended = command(folder, *name.split(), *shlex.split(words), "--json")
    assert ended.returncode == code, ended.stdout + ended.stderr
    values = answers(ended.stdout)
    assert values
    for value in values:
        check(name, value)


def test_every_command_with_json_has_a_schema_and_a_case() -> None:
    import typer

    main._load(main._COMMANDS)

    def visit(command: Any, path: str) -> list[str]:
        inner = getattr(command, "commands", {})
        options = [option for parameter in command.params for option in parameter.opts]
        return [path] * ("--json" in options) + [
            found
            for name, each in inner.items()
            for found in visit(each, f"{path} {name}".strip())
        ]

    assert sorted(set(visit(typer.main.get_command(main.app), ""))) == sorted(ANSWERS)
    # Which has a test of its own.
    assert {name for name, *_ in CASES} | {"import"} == set(ANSWERS)


def test_schemas_are_current() -> None:
    written = {path.name: path.read_text() for path in SCHEMAS.glob("*.json")}
    assert written == generate_schemas.schemas(), "python docs/generate_schemas.py"


def test_facts_are_those_that_are_printed(folder: Path) -> None:
    (audit,) = answers(command(folder, "data", "audit", "run", "--json").stdout)
    printed = command(folder, "data", "audit", "run").stdout
    assert (
        audit["proved"].startswith("proved: 32 reads")
        and printed.splitlines()[-1] == audit["proved"]
    )
    assert [epoch["read"] for epoch in audit["epochs"]] == [32]
    (step,) = answers(command(folder, "data", "order", "run", "--step", "2", "--json").stdout)
    assert step["mesh"] == "dp=2 x cp=1 x tp=1" and [len(rows) for rows in step["rows"]] == [
        4,
        4,
    ]
    row = step["rows"][1][0]
    (read,) = answers(
        command(folder, "data", "order", "run", "--sample", str(row), "--json").stdout
    )
    assert [(each["step"], each["ranks"]) for each in read["read"]] == [(2, [1])]


def test_a_page_says_of_the_data_what_the_run_said(folder: Path) -> None:
    assert command(folder, "report", "run").returncode == 0
    page = (folder / "run" / "report.html").read_text()
    assert " tokens in " in page and "num_rows" not in page


def test_verify_of_ranks_of_a_launcher_prints_the_same_object(folder: Path) -> None:
    arguments = ["verify", "config.yaml", "--mesh.dp", "2", "--steps", "1", "--json"]
    (local,) = answers(command(folder, *arguments).stdout)
    (folder / "main.py").write_text("from threefold.__main__ import main\n\nmain()\n")
    launched = torchrun(folder, 2, "main.py", *arguments)
    assert launched.returncode == 0, launched.stderr
    (value,) = answers(launched.stdout)
    check("verify", value)
    assert (
        value["holds"] and value["losses"] == local["losses"] and value["mesh"] == local["mesh"]
    )


def test_import_answers_too(folder: Path) -> None:
    import torch.distributed.checkpoint as dcp
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder / "dcp", no_dist=True)
    imported = command(
        folder,
        "import",
        "dcp",
        "--to",
        "taken",
        "--weights",
        "config.yaml",
        "--json",
        "--data.tokenizer",
        "bytes",
    )
    assert imported.returncode == 0, imported.stderr
    (value,) = answers(imported.stdout)
    check("import", value)
    assert value["folder"] == "taken" and value["num_weights"] == len(model.state_dict())


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (
            "data order run --step 1 --show --json",
            "--show has no effect with --json\n  expected: rows as numbers\n  fix: leave out --show\n",
        ),
        (
            "data audit run --rows --json",
            "--rows has no effect with --json\n  expected: the proof as numbers\n  fix: leave out --rows\n",
        ),
        (
            "verify config.yaml --bits --json",
            "verify --json with --bits\n  expected: a mesh and one process, whose numbers are printed\n"
            "  fix: leave out --json\n",
        ),
    ],
)
def test_what_has_no_effect_is_refused(folder: Path, words: str, text: str) -> None:
    ended = command(folder, *shlex.split(words))
    assert (ended.returncode, ended.stderr, ended.stdout) == (2, text, "")


def test_a_refused_request_has_no_object(folder: Path) -> None:
    for words in (
        "export nothing --to other",
        "data audit nothing",
        "eval run",
        "verify --train.step 3",
    ):
        ended = command(folder, *shlex.split(words), "--json")
        assert ended.returncode == 2 and ended.stdout == "" and "\n  fix: " in ended.stderr, (
            words
        )


def test_a_mesh_that_is_wrong_answers_with_1() -> None:
    """What is not finite never holds, and is null for programs."""
    from threefold.jsonl import as_json
    from threefold.mesh.topology import Topology
    from threefold.verify.verdict import Verification, answer_of

    wrong = Verification(losses=[(float("nan"), 1.0)], norms=[(1.0, 1.0)])
    (value,) = answers(as_json(answer_of(wrong, Topology(1, 2, 1, 1))))
    check("verify", value)
    assert not value["holds"] and value["losses"] == [[None, 1.0]] and value["first_difference"]
