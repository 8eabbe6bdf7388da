"""`threefold.train` with objects of a program: rows, a tokenizer, a loss, callbacks; here and on ranks of its own."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from ranks import warm
from ranks.runs import command, environment, run, torchrun

pytestmark = pytest.mark.ranks

OBJECTS = """
import torch.nn.functional as F

class Watch:
    def __init__(self, stop_at=None, fail_at=None, mistake=KeyError("a mistake of mine")):
        self.stop_at, self.fail_at, self.mistake = stop_at, fail_at, mistake

    def note(self, name, facts):
        with open("hooks.txt", "a") as file:
            shown = facts.metrics.get("loss", facts.metrics.get("eval_loss", facts.reason))
            kept = facts.checkpoint.name if facts.checkpoint else ""
            print(name, facts.step, shown, kept, facts.run.name, file=file)

    def on_step(self, facts):
        self.note("step", facts)
        if facts.step == self.fail_at:
            raise self.mistake
        return facts.step == self.stop_at

    def on_eval(self, facts):
        self.note("eval", facts)

    def on_save(self, facts):
        assert (facts.checkpoint / "COMPLETE").exists()
        self.note("save", facts)

    def on_stop(self, facts):
        self.note("stop", facts)


def twice(logits, batch):
    labels = batch["labels"]
    return 2 * F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"), (labels != -100).sum()


def unless_told(logits, batch):
    import pathlib
    if not logits.requires_grad and pathlib.Path("fail").exists():
        raise ValueError("planted in an evaluation")
    return twice(logits, batch)


def stopped_once(logits, batch):
    import os, pathlib, signal
    if not logits.requires_grad and pathlib.Path("stop").exists():
        pathlib.Path("stop").unlink(missing_ok=True)
        os.kill(os.getpid(), signal.SIGTERM)
    return twice(logits, batch)


def momentum(model):
    import torch
    small = [each for each in model.parameters() if each.ndim < 2]
    large = [each for each in model.parameters() if each.ndim >= 2]
    return torch.optim.SGD([dict(params=large, lr=0.5), dict(params=small, lr=0.1, name="norms")], momentum=0.9)


ROWS = [{"text": f"row {n}: " + " ".join(f"word{(n * 7 + i * i) % 97}" for i in range(60))} for n in range(40)]
MODEL = dict(model_type="llama", hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, initializer_range=0.2)
def config(**sections):
    base = {"model": {"config": MODEL}, "data": {"seq_len": 32}, "train": {"steps": 6, "global_batch": 8},
            "mesh": {"dp": 1, "device": "cpu"}, "log": {"every": 1, "sample_tokens": 0, "dir": "run"}}
    for name, values in sections.items():
        base[name] = {**base.get(name, {}), **values}
    return base
"""


def program(folder: Path, body: str, *, ranks: int = 0) -> subprocess.CompletedProcess[str]:
    """Runs a script with these lines, by itself or by torchrun on `ranks` ranks; its outputs and exit code."""
    (folder / "objects.py").write_text(OBJECTS)
    lines = "\n".join(f"    {line}" for line in body.strip().splitlines())
    (folder / "program.py").write_text(
        "import sys\nsys.path.insert(0, '.')\nimport threefold\nfrom objects import *\n"
        f"if __name__ == '__main__':\n{lines}\n"
    )
    if ranks:
        return torchrun(folder, ranks, "program.py")
    return run(warm.script, folder, ("program.py",), environment(folder))


def noted(folder: Path) -> list[list[str]]:
    return [line.split() for line in (folder / "hooks.txt").read_text().splitlines()]


def lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def losses(folder: Path, run: str = "run") -> list[float]:
    return [line["loss"] for line in lines(folder / run) if "loss" in line]


HOOKED = """
threefold.train(config(mesh={mesh}, eval={{"every": 3}}, checkpoint={{"every": 3}}), dataset=ROWS[:36],
                eval_dataset=ROWS[36:], callbacks=[Watch()])
"""


def test_hooks_are_told_every_fact_once(tmp_path: Path) -> None:
    curves = {}
    for case, mesh, ranks in (
        ("one", {"dp": 1}, 0),
        ("local ranks", {"dp": 2}, 0),
        ("torchrun", {"tp": 2}, 2),
    ):
        folder = tmp_path / case
        folder.mkdir()
        done = program(folder, HOOKED.format(mesh={**mesh, "device": "cpu"}), ranks=ranks)
        assert done.returncode == 0, done.stderr
        found = noted(folder)
        assert [line[:2] for line in found if line[0] == "step"] == [
            ["step", str(n)] for n in range(1, 7)
        ]
        assert [line[:2] for line in found if line[0] == "eval"] == [
            ["eval", "3"],
            ["eval", "6"],
        ]
        saves = [(line[1], line[2]) for line in found if line[0] == "save"]
        assert saves == [("3", "step-00000003"), ("6", "step-00000006")]
        assert (
            [line for line in found if line[0] == "stop"]
            == [["stop", "6", "done", "run"]]
            == [found[-1]]
        )
        curves[case] = [float(line[2]) for line in found if line[0] == "step"]
        assert curves[case] == losses(folder)
    for case in ("local ranks", "torchrun"):
        assert curves[case] == pytest.approx(curves["one"], abs=1e-5)


def test_hook_stops_the_run_and_it_resumes(tmp_path: Path) -> None:
    body = (
        "print(threefold.train(config(mesh={'dp': 2, 'device': 'cpu'}), "
        "dataset=ROWS, callbacks=[Watch(stop_at=%s)]))"
    )
    done = program(tmp_path, body % 2)
    assert done.returncode == 0 and "stopped by a hook: " in done.stdout, done.stderr
    assert "exit_code=0" in done.stdout
    stopped = noted(tmp_path)[-1]
    assert stopped[0] == "stop" and stopped[2] == "hook" and 2 < int(stopped[1]) < 6
    assert program(tmp_path, body % None).returncode == 0
    (tmp_path / "whole").mkdir()
    assert program(tmp_path / "whole", body % None).returncode == 0
    assert losses(tmp_path) == losses(tmp_path / "whole")
    proved = command(tmp_path, "data", "audit", "run", "--contents")
    assert proved.returncode == 0, proved.stderr


def test_hook_that_raises_ends_the_run_once_and_clearly(tmp_path: Path) -> None:
    body = "threefold.train(config(mesh={'dp': 2, 'device': 'cpu'}), dataset=ROWS, callbacks=[Watch(fail_at=3)])"
    done = program(tmp_path, body)
    assert done.returncode == 1
    assert (
        done.stderr.count(
            "objects.Watch.on_step raised KeyError after step 3: 'a mistake of mine' ("
        )
        == 1
    )
    assert "objects.py, line 17" in done.stderr


@pytest.mark.parametrize(
    ("mistake", "how"),
    [
        ("OSError(28, 'No space left on device')", "disk"),
        ("MemoryError()", "memory"),
        ("OSError(5, 'Input/output error')", "error"),
    ],
)
def test_what_a_hook_lacks_is_in_the_journal(tmp_path: Path, mistake: str, how: str) -> None:
    body = f"threefold.train(config(), dataset=ROWS, callbacks=[Watch(fail_at=1, mistake={mistake})])"
    assert program(tmp_path, body).returncode == 1
    journal = (tmp_path / "run" / "journal.jsonl").read_text().splitlines()
    assert json.loads(journal[-1])["how"] == how


def test_loss_of_one_s_own_on_every_mesh_and_in_the_evaluation(tmp_path: Path) -> None:
    body = """
threefold.train(config(mesh=%s, train={"steps": 3, "grad_clip": 0}, optimizer={"lr": 1e-3}, eval={"every": 3}),
                dataset=ROWS, eval_dataset=ROWS[:4]%s)
"""
    plain = tmp_path / "plain"
    plain.mkdir()
    assert program(plain, body % ({"dp": 1, "device": "cpu"}, "")).returncode == 0
    found = {}
    for case, mesh in (
        ("one", {"dp": 1}),
        ("two", {"dp": 2}),
        ("eight", {"dp": 2, "cp": 2, "tp": 2}),
    ):
        (folder := tmp_path / case).mkdir()
        done = program(folder, body % ({**mesh, "device": "cpu"}, ", loss=twice"))
        assert done.returncode == 0, done.stderr
        found[case] = losses(folder)
        evaluated = json.loads((folder / "run" / "metrics.jsonl").read_text().splitlines()[-1])
        assert evaluated["eval_loss"] == pytest.approx(2 * json.loads(
            (plain / "run" / "metrics.jsonl").read_text().splitlines()[-1])["eval_loss"], rel=1e-3)  # fmt: skip
        assert found[case] == pytest.approx(found["one"], abs=1e-5)
    assert found["one"][0] == pytest.approx(2 * losses(plain)[0], rel=1e-6)
    rows = ("--eval.source", "rows.txt")
    for folder, note in (
        (plain, ""),
        (tmp_path / "one", "cross entropy, not objects.twice, which "),
    ):
        (folder / "rows.txt").write_text("word " * 200)
        evaluated = command(folder, "eval", "run", *rows)
        assert evaluated.returncode == 0 and evaluated.stderr.startswith(note), evaluated.stderr
        assert "cross entropy" not in evaluated.stderr or note
    refused = command(tmp_path / "one", "resume", "run", "--train.steps", "5")
    assert refused.returncode == 2
    assert (
        "was trained with the loss objects.twice, and would continue with the cross entropy"
        in refused.stderr
    )
    made = "threefold.config.schema.Config.model_validate(config(train={'steps': 3, 'grad_clip': 0}))"
    again = f"import threefold.config.schema\nthreefold.train({made}, dataset=ROWS, loss=twice)"
    as_object = program(tmp_path / "one", again)
    assert as_object.returncode == 0 and "nothing to do" in as_object.stdout, as_object.stderr
    more = program(tmp_path / "one", "threefold.train('run/config.yaml', loss=twice)")
    assert more.returncode == 0 and "nothing to do" in more.stdout, more.stderr


@pytest.mark.parametrize(
    ("mesh", "every", "step"),
    [({"dp": 1}, 3, 3), ({"dp": 2, "dp_shard": 2}, 3, 3), ({"tp": 2}, 0, 6)],
    ids=str,
)
def test_a_stop_signal_leaves_an_evaluation_which_the_next_start_makes(
    mesh: dict[str, int], every: int, step: int, tmp_path: Path
) -> None:
    """The whole evaluation may take longer than what a scheduler waits for."""
    body = f"""
asked = config(mesh={mesh | {"device": "cpu"}}, eval={{"every": {every}}}, log={{"dir": %r}})
print(threefold.train(asked, dataset=ROWS, eval_dataset=ROWS, loss=stopped_once))
"""
    assert program(tmp_path, body % "whole").returncode == 0
    for _ in range(2):  # the second one in the evaluation that it makes first
        (tmp_path / "stop").touch()
        stopped = program(tmp_path, body % "run")
        said = f"stopped by a signal after step {step}, in its evaluation, which the next start makes"
        assert said in stopped.stdout and "exit_code=75" in stopped.stdout, stopped.stderr
        saved = [path.name for path in (tmp_path / "run").glob("checkpoints/step-*")]
        assert saved == [f"step-{step:08d}"]
    done = program(tmp_path, body % "run")
    assert "done: 6 steps, " in done.stdout and "exit_code=0" in done.stdout, done.stderr
    kept = ("step", "loss", "grad_norm", "eval_loss", "eval_count")
    found, expected = (
        [{key: line.get(key) for key in kept} for line in lines(tmp_path / each)]
        for each in ("run", "whole")
    )
    assert found == expected
    best = [
        (tmp_path / each / "checkpoints" / "best.json").read_text() for each in ("run", "whole")
    ]
    assert best[0] == best[1]
    again = program(tmp_path, body % "run")
    assert again.returncode == 0 and "nothing to do" in again.stdout, again.stderr


def test_an_error_in_the_last_evaluation_loses_no_step_and_the_next_start_evaluates(
    tmp_path: Path,
) -> None:
    body = """
threefold.train(config(mesh={"dp": 2, "device": "cpu"}), dataset=ROWS, eval_dataset=ROWS[:4], loss=unless_told)
"""
    run = tmp_path / "run"
    (tmp_path / "fail").touch()
    failed = program(tmp_path, body)
    assert failed.returncode == 1 and "planted in an evaluation" in failed.stderr
    assert [path.name for path in run.glob("checkpoints/step-*")] == ["step-00000006"]
    (tmp_path / "fail").unlink()
    evaluated = program(tmp_path, body)
    assert evaluated.returncode == 0, evaluated.stderr
    assert (
        "evaluation after step 6: loss " in evaluated.stdout
        and "done: 6 steps, in " in evaluated.stdout
    )
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    best = json.loads((run / "checkpoints" / "best.json").read_text())
    assert last["step"] == best["step"] == 6 and last["eval_loss"] == best["eval_loss"]
    again = program(tmp_path, body)
    assert again.returncode == 0 and "nothing to do" in again.stdout, again.stderr


def test_optimizer_of_one_s_own_follows_the_schedule_on_every_mesh_and_resumes(
    tmp_path: Path,
) -> None:
    body = """
threefold.train(config(mesh=%s, optimizer={"schedule": "linear", "warmup_steps": 2}), dataset=ROWS%s, optimizer=%s)
"""
    found = {}
    for case, mesh in (("one", {"dp": 1}), ("four", {"dp": 2, "dp_shard": 2, "tp": 2})):
        (folder := tmp_path / case).mkdir()
        done = program(folder, body % ({**mesh, "device": "cpu"}, "", "momentum"))
        assert done.returncode == 0, done.stderr
        lines = [
            json.loads(line)
            for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()
        ]
        assert [line["lr"] for line in lines] == pytest.approx(
            [0.25, 0.5, 0.375, 0.25, 0.125, 0.0]
        )
        assert [line["lr_norms"] for line in lines] == pytest.approx(
            [0.05, 0.1, 0.075, 0.05, 0.025, 0.0]
        )
        found[case] = losses(folder)
    assert found["four"] == pytest.approx(found["one"], abs=1e-4)
    (part := tmp_path / "part").mkdir()
    stop = ", callbacks=[Watch(stop_at=2)]"
    assert program(part, body % ({"dp": 1, "device": "cpu"}, stop, "momentum")).returncode == 0
    refused = command(part, "resume", "run")
    assert (
        refused.returncode == 2
        and "was trained with the optimizer objects.momentum" in refused.stderr
    )
    assert program(part, body % ({"dp": 1, "device": "cpu"}, "", "momentum")).returncode == 0
    assert losses(part) == found["one"]


TOKENS = """
from threefold.data.tokens import byte_backend
from transformers import PreTrainedTokenizerFast
own = PreTrainedTokenizerFast(tokenizer_object=byte_backend(), eos_token="<|end|>")
ids = [own(row["text"])["input_ids"] for row in ROWS]
rows = [{"input_ids": each, "labels": [-100] * 8 + each[8:]} for each in ids]
threefold.train(config(), dataset=%s, tokenizer=own)
"""


def test_rows_of_tokens_are_a_store_with_targets(tmp_path: Path) -> None:
    done = program(tmp_path, TOKENS % "rows")
    assert done.returncode == 0, done.stderr
    assert "tokens (input_ids, labels), trained on: labels" in done.stdout
    shown = command(tmp_path, "data", "show", "run", "--row", "0", "--json")
    assert shown.returncode == 0, shown.stderr
    row = json.loads(shown.stdout.splitlines()[0])
    first = row["documents"].count(0)
    assert row["loss_mask"][:first] == [False] * 8 + [True] * (first - 8)
    # The same rows are the same source.
    assert program(tmp_path, TOKENS % "rows").returncode == 0
    other = program(tmp_path, TOKENS % "rows[1:]")
    assert other.returncode == 1 and "the saved state has data" in other.stderr


WRONG = {
    "a stream": ("dataset=iter(ROWS)", "dataset is a list_iterator"),
    "no rows": ("dataset=[]", "dataset has no rows"),
    "texts": ("dataset=['a', 'b']", "row 0 of dataset is a str"),
    "a date": (
        "dataset=[{'text': 'a'}, {'text': __import__('datetime').date.today()}]",
        "row 1 of dataset cannot be",
    ),
    "shifted labels": (
        "dataset=[{'input_ids': [1, 2, 3], 'labels': [2, 3, -100]}]",
        "row 0 of dataset has labels that are not its input_ids",
    ),
    "padding": (
        "dataset=[{'input_ids': [1, 2, 3], 'attention_mask': [1, 1, 0]}]",
        "row 0 of dataset has padding",
    ),
    "ids": (
        "dataset=[{'input_ids': [1, 2, 300]}]",
        "row 0 of dataset has ids from 1 to 300; bytes has 257",
    ),
    "lengths": (
        "dataset=[{'input_ids': [1, 2], 'labels': [1]}]",
        "row 0 of dataset has input_ids [2] and labels [1]",
    ),
    "a column": (
        "dataset=[{'input_ids': [1, 2], 'weight': 1}]",
        "row 0 of dataset has a column 'weight'",
    ),
    "nothing learnt": (
        "dataset=[{'input_ids': [1, 2], 'labels': [-100, -100]}]",
        "dataset has only labels of -100",
    ),
    "a class": ("dataset=ROWS, callbacks=[Watch]", "the callback objects.Watch is a class"),
    "misspelt": (
        "dataset=ROWS, callbacks=[type('Mine', (), {'on_steps': print})()]",
        "the callback __main__.Mine has on_steps, which nothing calls",
    ),
    "no hook": ("dataset=ROWS, callbacks=[3]", "the callback builtins.int has no hook"),
    "no loss": (
        "dataset=ROWS, loss_on='hidden_states'",
        "loss_on = 'hidden_states' without a loss",
    ),
    "an optimizer": ("dataset=ROWS, optimizer='sgd'", "optimizer is a str"),
    "a tokenizer": ("dataset=ROWS, tokenizer='bytes'", "tokenizer is a str"),
}


def test_wrong_objects_are_refused_by_name(tmp_path: Path) -> None:
    cases = "\n".join(
        f"try:\n    threefold.train(config(), {given})\nexcept threefold.errors.ThreefoldError as error:\n"
        f"    print({name!r}, '->', error.problems[0].what)"
        for name, (given, _) in WRONG.items()
    )
    both = (
        "try:\n    threefold.train(config(data={'source': 'x', 'seq_len': 32}), "
        "dataset=ROWS)\nexcept Exception as e:\n"
    )
    file = "open('c.yaml', 'w').write('eval: {source: held-out}')\n" + both.replace(
        "both", "file"
    ).replace(
        "config(data={'source': 'x', 'seq_len': 32}), dataset=ROWS",
        "'c.yaml', dataset=ROWS, eval_dataset=ROWS",
    )
    both, file = (
        f"{each}    print('{name} ->', e)" for each, name in ((both, "both"), (file, "file"))
    )
    done = program(tmp_path, f"import threefold.errors\n{cases}\n{both}\n{file}")
    assert done.returncode == 0, done.stderr
    found = dict(line.split(" -> ", 1) for line in done.stdout.splitlines() if " -> " in line)
    for name, (_, reason) in WRONG.items():
        assert reason in found[name], (name, found[name])
    assert "dataset= and data.source are both given" in found["both"]
    assert "eval_dataset= and eval.source are both given" in found["file"]
    assert not (tmp_path / "run").exists()


def test_objects_of_the_script_cannot_reach_ranks_and_are_refused_before_any_starts(
    tmp_path: Path,
) -> None:
    body = """
class Own:
    def on_step(self, facts): pass
for given in (dict(loss=lambda a, b: (a.sum(), 1)), dict(callbacks=[Own()])):
    try:
        threefold.train(config(mesh={'dp': 2, 'device': 'cpu'}), dataset=ROWS, **given)
    except threefold.errors.ThreefoldError as error:
        print(error)
"""
    done = program(tmp_path, f"import threefold.errors\n{body}")
    assert done.returncode == 0, done.stderr
    assert "loss: __main__.<lambda> cannot reach 2 ranks: " in done.stdout
    assert (
        "callbacks: __main__.Own cannot reach 2 ranks: it is defined in the script"
        in done.stdout
    )
    assert "torchrun --nproc-per-node 2 SCRIPT.py" in done.stdout
    assert not (tmp_path / "run").exists()


def test_ranks_of_a_launcher_that_have_other_rows_are_refused(tmp_path: Path) -> None:
    body = "import os; threefold.train(config(mesh={'dp': 2, 'device': 'cpu'}), dataset=ROWS[int(os.environ['RANK']):])"
    done = program(tmp_path, body, ranks=2)
    assert done.returncode and "the config's section 'data'" in done.stderr, done.stderr[-2000:]


def test_a_program_is_told_why_and_where(tmp_path: Path) -> None:
    for case, mesh, ranks in (
        ("one", {"dp": 1}, 0),
        ("local ranks", {"dp": 2}, 0),
        ("torchrun", {"dp": 2}, 2),
    ):
        folder = tmp_path / case
        folder.mkdir()
        body = f"""
asked = config(mesh={ {**mesh, "device": "cpu"} }, train={{"steps": 1}})
import json
del asked["log"]["dir"]
done = threefold.train(asked, dataset=ROWS)
if {ranks} == 0:
    (logged,) = [line for line in map(json.loads, open(done.folder / "metrics.jsonl")) if "loss" in line]
    assert done.metrics == logged and logged["step"] == 1, done.metrics
    assert done.checkpoint == done.folder / "checkpoints/step-00000001", done.checkpoint
else:
    assert (done.folder, done.metrics, done.checkpoint) == (None, {{}}, None)
asked["log"]["dir"] = "files"
open("files", "w").close()
try:
    threefold.train(asked, dataset=ROWS)
except threefold.errors.ConfigError as error:
    open("told" + threefold.mesh.environment.variables().get("RANK", ""), "w").write(error.problems[0].what)
"""
        done = program(folder, body, ranks=ranks)
        assert done.returncode == 0, done.stderr
        told = [path.read_text() for path in folder.glob("told*")]
        assert len(told) == max(ranks, 1) and set(told) == {
            "log.dir = files cannot be written: Not a directory"
        }
