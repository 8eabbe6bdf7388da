"""The referee inside a watched process: it is not felt, survives its own faults, and lets the user's own files run."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ranks import runs, warm_referee
from referee_records import judge_data
from threefold.errors import ConfigError
from threefold.referee.judge.verdict import CommandVerdict, judge
from threefold.referee.watch import watch

REFEREE = (sys.executable, "-m", "threefold", "referee")

LOOP = """
import hashlib, os, torch, torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(torch.randn(24, 4), torch.randn(24, 1)), batch_size=4, shuffle=True)
os.chdir("/")
for epoch in range(2):
    for inputs, targets in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
print("weights", hashlib.sha256(b"".join(v.detach().numpy().tobytes() for v in model.parameters())).hexdigest())
"""


@pytest.fixture(autouse=True)
def _one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "PYTHONPATH"):
        monkeypatch.delenv(name, raising=False)


def watched_as_started(folder: Path, program: str) -> tuple[CommandVerdict, str]:
    """The verdict on a program of one process, and what it printed."""
    path, printed = folder / "program.py", folder / "printed.txt"
    path.write_text(program)
    command = ["sh", "-c", f'exec "{sys.executable}" "{path}" > "{printed}" 2>&1']
    assert (
        watch(command, folder / "record", num_whole=2, keep_bytes=1 << 20, to_stderr=False) == 0
    )
    return judge_data(folder / "record"), printed.read_text()


def watched(
    folder: Path, program: str, *, keep_bytes: int = 1 << 20
) -> tuple[CommandVerdict, str]:
    """As `watched_as_started`, of a program that is forked: without seconds of imports."""
    (folder / "program.py").write_text(program)
    ended = runs.run(_watch, folder, (str(keep_bytes),), dict(os.environ))
    assert ended.returncode == 0, ended.stderr
    return judge_data(folder / "record"), ended.stderr + ended.stdout


def _watch() -> None:
    warm_referee.fork_what_is_watched()
    command = [sys.executable, "program.py"]
    sys.exit(
        watch(
            command, Path("record"), num_whole=2, keep_bytes=int(sys.argv[1]), to_stderr=False
        )
    )


def weights_alone(program: Path) -> str:
    return runs.script(program.parent, program.name).stdout


def test_program_of_one_process_is_proved_and_unchanged(tmp_path: Path) -> None:
    verdict, printed = watched_as_started(tmp_path, LOOP)
    assert verdict.exit_code == 0, verdict.lines()
    assert printed == weights_alone(tmp_path / "program.py")
    from safetensors.numpy import load_file

    record = tmp_path / "record"
    whole = load_file(record / "rank-00000-step-00001-inputs.safetensors")
    assert whole.keys() == {"0.0", "0.!random"} and whole["0.0"].shape == (4, 4)
    assert not (record / "rank-00000-step-00003-inputs.safetensors").exists()
    step = json.loads((record / "rank-00000.jsonl").read_text().splitlines()[2])
    assert len(step["calls"][0]["rows"]) == 4
    path = record / "rank-00000-step-00002-inputs.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    assert "rank-00000-step-00002-inputs.safetensors was altered" in str(
        judge_data(record).parts[0]
    )


def test_program_that_counts_its_batches_has_epochs_too(tmp_path: Path) -> None:
    counted = LOOP.replace(
        "for inputs, targets in loader:",
        "for _, (inputs, targets) in zip(range(len(loader)), loader):",
    )
    verdict, _ = watched(tmp_path, counted)
    assert counted != LOOP and verdict.exit_code == 0, verdict.lines()
    assert "each of 24 rows was read once in each epoch, of 2" in "\n".join(verdict.lines())


STEP = """        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
"""


@pytest.mark.parametrize("how", ["closure", "closure=closure"])
def test_gradients_that_a_closure_computes_are_those_of_its_step(
    tmp_path: Path, how: str
) -> None:
    """As under Lightning's Trainer: the model is called inside of the optimizer's step."""
    closure = f"""        def closure():
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            return loss
        optimizer.step({how})
"""
    verdict, printed = watched(tmp_path, LOOP.replace(STEP, closure))
    assert STEP in LOOP and verdict.watched.ranks[0].num_steps == 12
    lines = judge(tmp_path / "record").lines()
    for line in (
        "proved      rows of an epoch: each of 24 rows was read once in each epoch, of 2",
        "proved      norm of gradients: gradients are clipped by the norm of all of them in 2 steps",
        "proved      updates: in step 1 each of 4 parameters moves as torch's AdamW says",
    ):
        assert line in lines, lines
    assert printed == weights_alone(tmp_path / "program.py")


def test_norm_over_modules_that_are_called_one_by_one_is_not_judged(tmp_path: Path) -> None:
    parts = STEP.replace("model(inputs)", "model[2](model[1](model[0](inputs)))").replace(
        "        optimizer.step()",
        "        nn.utils.clip_grad_norm_(model.parameters(), 0.1)\n        optimizer.step()",
    )
    watched(tmp_path, LOOP.replace(STEP, parts))
    verdict = judge(tmp_path / "record")
    what = "not judged  norm of gradients: gradients of other modules are clipped with those of the model"
    assert what in verdict.lines() and verdict.exit_code == 3, verdict.lines()


def test_record_as_large_as_allowed_ends_and_the_program_does_not(tmp_path: Path) -> None:
    verdict, printed = watched(tmp_path, LOOP, keep_bytes=2000)
    assert verdict.exit_code == 3
    what = "rank 0: the referee stopped recording (OSError: the record is as large as --keep allows)"
    assert what in str(verdict.parts[0])
    message, weights = printed.splitlines(keepends=True)
    assert message.startswith("threefold referee: rank 0 is no longer recorded (OSError: ")
    assert weights == weights_alone(tmp_path / "program.py")
    assert sum(path.stat().st_size for path in (tmp_path / "record").glob("rank-*")) < 4000


def test_input_that_the_referee_cannot_read_does_not_end_the_program(tmp_path: Path) -> None:
    program = LOOP.replace("model = nn.S", "class Dense(nn.Sequential):\n    def forward(self, x):\n"
                           "        return super().forward(x.to_dense())\nmodel = Dense(nn.S", 1)  # fmt: skip
    program = program.replace("nn.Linear(8, 1))", "nn.Linear(8, 1)))").replace(
        "model(inputs)", "model(inputs.to_sparse())"
    )
    verdict, printed = watched(tmp_path, program)
    assert "no process of" in str(verdict.parts[0]) and verdict.exit_code == 3
    assert "threefold referee: rank 0 is no longer recorded" in printed
    assert printed.splitlines()[-1] == weights_alone(tmp_path / "program.py").strip()


def test_users_own_sitecustomize_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (own := tmp_path / "own").mkdir()
    (own / "sitecustomize.py").write_text("import sys\nsys.mine = 'as I like it'\n")
    monkeypatch.setenv("PYTHONPATH", str(own))
    verdict, printed = watched_as_started(
        tmp_path,
        "import sys\nimport sitecustomize as own\nprint(sys.mine, own.__file__)" + LOOP,
    )
    assert verdict.exit_code == 0, verdict.lines()
    assert printed.splitlines()[0] == f"as I like it {own / 'sitecustomize.py'}"


@pytest.mark.parametrize(
    ("choice", "why"),
    [
        ("optimizer, other = other, optimizer", "rank 0 trains with 2 optimizers in turn"),
        ("optimizer = other if epoch else optimizer", "rank 0 trains 2 times, for 6, 6 steps"),
    ],
)
def test_steps_of_several_optimizers_are_not_judged(
    tmp_path: Path, choice: str, why: str
) -> None:
    turns = LOOP.replace(
        "        optimizer.zero_grad()\n", f"        {choice}\n        optimizer.zero_grad()\n"
    )
    other = "other = torch.optim.SGD(model.parameters(), lr=0.01)\nos.chdir"
    verdict, _ = watched(tmp_path, turns.replace("os.chdir", other))
    unknown = f"it is not known which ranks read separate rows ({why})"
    assert str(verdict.parts[1]) == f"not judged  rows of data ranks: {unknown}"
    assert verdict.exit_code == 3


def test_probes_are_no_part_of_the_training(tmp_path: Path) -> None:
    """A forward without a backward, and a trial of another model, whose optimizer is gone before the training."""
    trial = """
trial = nn.Linear(4, 1)
chosen = torch.optim.SGD(trial.parameters(), lr=0.01)
trial(torch.ones(3, 4)).sum().backward()
chosen.step()
del trial, chosen
model(torch.ones(2, 4))
os.chdir"""
    verdict, _ = watched(tmp_path, LOOP.replace("os.chdir", trial, 1))
    assert verdict.exit_code == 0, verdict.lines()
    assert "intact; steps of other optimizers left out: 1" in str(verdict.parts[0])


def test_optimizers_that_step_together_are_one(tmp_path: Path) -> None:
    both = LOOP.replace(
        "        optimizer.step()\n", "        optimizer.step()\n        other.step()\n"
    )
    other = "other = torch.optim.SGD(model.parameters(), lr=0.01)\nos.chdir"
    verdict, _ = watched(tmp_path, both.replace("os.chdir", other))
    assert verdict.exit_code == 0, verdict.lines()


def test_padding_is_no_part_of_a_row_and_labels_are(tmp_path: Path) -> None:
    program = """
import torch, torch.nn as nn
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(9, 4)
    def forward(self, input_ids, attention_mask, labels):
        return self.embed(input_ids).sum()
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
def step(ids, mask, labels):
    model(input_ids=torch.tensor(ids), attention_mask=torch.tensor(mask), labels=torch.tensor(labels)).backward()
    optimizer.step()
step([[1, 2, 0]], [[1, 1, 0]], [[1, 2, -100]])
step([[0, 0, 1, 2]], [[0, 0, 1, 1]], [[-100, -100, 1, 2]])
step([[1, 2, 0]], [[1, 1, 0]], [[-100, 2, -100]])
step([[1, 3, 0], [0, 0, 0]], [[1, 1, 0], [0, 0, 0]], [[-100] * 3, [-100] * 3])
"""
    verdict, _ = watched(tmp_path, program)
    lines = (tmp_path / "record" / "rank-00000.jsonl").read_text().splitlines()
    calls = [json.loads(line)["calls"][0] for line in lines if '"step"' in line[:20]]
    first, padded_left, other_labels, ignored = (call["rows"] for call in calls)
    assert first == padded_left != other_labels
    assert len(ignored) == 2 and [call["ignored"] for call in calls] == [[], [], [], [0]]
    assert (
        "all labels are ignored (-100) in 1 of 5 rows: the first is row 0 of rank 0 in step 4"
        in str(next(part for part in verdict.parts if part.name == "labels"))
    )


def test_interrupted_program_is_judged_by_what_it_did(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        LOOP.replace(
            "print(", "print('ready', flush=True)\nimport signal\nsignal.pause()\nprint("
        )
    )
    command = (*REFEREE, "--", sys.executable, str(program))
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        os.killpg(process.pid, signal.SIGINT)
        printed, errors = process.communicate(timeout=100)
    assert process.returncode == 3, errors
    assert re.search(
        r"^not judged  record: the command ended with exit code \d+$", printed, re.M
    ), printed
    assert (
        "proved      rows of an epoch: each of 24 rows was read once in each epoch, of 2"
        in printed
    )
    assert errors.count("Traceback") == 1 and "threefold" not in errors


def refused(*words: str) -> str:
    ended = subprocess.run([*REFEREE, *words], capture_output=True, text=True, timeout=100)
    assert ended.returncode == 2, ended.stdout
    return ended.stderr


def test_requests_that_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        watch(["no-such-program", "a b"], tmp_path, num_whole=1, keep_bytes=1, to_stderr=False)
    assert str(error.value) == (
        "there is no program 'no-such-program' to watch\n"
        "  expected: the command that starts your training, after --\n"
        f"  fix: threefold referee -- {sys.executable} no-such-program 'a b'"
    )
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError) as error:
        watch(["true"], tmp_path, num_whole=1, keep_bytes=1, to_stderr=False)
    assert str(error.value) == (
        f"--record {tmp_path} is not empty\n  expected: a new folder, or an empty one\n  fix: --record {tmp_path}-2"
    )
    assert (
        watch(["true"], Path(f"{tmp_path}-2"), num_whole=1, keep_bytes=1, to_stderr=False) == 0
    )
    with pytest.raises(ConfigError) as error:
        watch(["true"], tmp_path / "file", num_whole=1, keep_bytes=1, to_stderr=False)
    assert str(error.value) == (
        f"--record {tmp_path / 'file'} cannot be made (File exists)\n"
        "  expected: a new folder, or an empty one\n"
        "  fix: --record referee-record"
    )
    assert refused() == (
        "no command to watch is given\n"
        "  expected: what starts the training, after --\n"
        "  fix: threefold referee -- torchrun --nproc-per-node 2 train.py\n"
    )
    assert refused("judge", "a", "b") == (
        "`judge` takes one folder, not a b\n  expected: the folder of --record\n  fix: threefold referee judge DIR\n"
    )


def test_command_that_is_not_python_is_not_judged(tmp_path: Path) -> None:
    assert (
        watch(["sh", "-c", "exit 5"], tmp_path, num_whole=1, keep_bytes=1, to_stderr=False) == 5
    )
    verdict = judge_data(tmp_path)
    assert verdict.exit_code == 3
    what = "record: `sh -c 'exit 5'` ended with exit code 5 before its first optimizer step"
    assert what in verdict.lines()[1]
    with pytest.raises(ConfigError, match="is not empty"):
        watch(["true"], tmp_path, num_whole=1, keep_bytes=1, to_stderr=False)


@pytest.mark.parametrize("damage", ["cut", "changed", "gone", "of no form"])
def test_changed_weights_prove_and_refute_nothing(tmp_path: Path, damage: str) -> None:
    watched(tmp_path, LOOP)
    path = tmp_path / "record" / "rank-00000-step-00001-curve.safetensors"
    content = path.read_bytes()
    changed = {"cut": content[:-9], "changed": content[:-1] + b"x", "of no form": b"{}"}
    path.write_bytes(changed[damage]) if damage in changed else path.unlink()
    verdict = judge(tmp_path / "record")
    parts = {part.name: part for part in verdict.parts}
    assert verdict.exit_code == 3
    assert parts["record"].what.startswith("rank-00000-step-00001-curve.safetensors ")
    assert {parts[name].what for name in ("gradients", "updates")} == {"the record was altered"}
