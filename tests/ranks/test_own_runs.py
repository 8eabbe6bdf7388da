"""A loop of one's own in a run: the same numbers as without, and every guarantee of a run of the command."""

from __future__ import annotations

import io
import json
import math
import re
import shutil
import signal
from collections.abc import Iterator
from contextlib import redirect_stdout
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.utils.data import DataLoader, WeightedRandomSampler

from ranks import own_runs, runs
from ranks.own_runs import by_hand, in_a_run, signal_in
from ranks.spawn import run_ranks
from threefold.audit import record
from threefold.checkpoint.checkpoint_folder import CheckpointFolder
from threefold.checkpoint.lineage import Identity, Journal
from threefold.data.sampling.distribute import distribute
from threefold.errors import ThreefoldError
from threefold.report.facts import gather
from threefold.report.verdict import proof_lines
from threefold.run.run import Run, _order_of

pytestmark = pytest.mark.ranks

MESHES: list[dict[str, int]] = [{}, {"dp": 2}, {"tp": 2}]
UNTIL = 14


def events(run: Path) -> list[tuple[str, int]]:
    return [(line["event"], line["step"]) for line in Journal(run).lines()]


def _ranks(sizes: dict[str, int], *args: Any, **options: Any) -> list[Any]:
    return run_ranks(partial(in_a_run, **options), math.prod(sizes.values()), sizes, *args)


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_loop_in_a_run_is_the_loop_and_goes_on_after_a_signal_to_any_rank(
    sizes: dict[str, int], tmp_path: Path
) -> None:
    whole = run_ranks(by_hand, math.prod(sizes.values()), sizes, UNTIL)[0]
    begun = _ranks(sizes, str(tmp_path / "run"), UNTIL, signal_in(6))
    assert {ended for _, ended in begun} == {75} and len(
        {len(numbers) for numbers, _ in begun}
    ) == 1
    done = len(begun[0][0])
    assert 6 <= done <= 8  # a rank that is not signalled hears of it within two steps
    rest = _ranks(sizes, str(tmp_path / "run"), UNTIL)
    assert {ended for _, ended in rest} == {0}
    assert all(
        [*first, *then] == whole for (first, _), (then, _) in zip(begun, rest, strict=True)
    )

    run = tmp_path / "run"
    logged = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [(line["loss"], line["grad_norm"]) for line in logged] == whole
    assert all(("slowest_rank" in line) == bool(sizes) for line in logged)
    assert [line["lr"] for line in logged] == pytest.approx(
        [1e-2 * 0.9**step for step in range(UNTIL)]
    )
    saved = [("save", step) for step in dict.fromkeys((4, done))]
    assert events(run)[: 2 + len(saved)] == [("start", 0), *saved, ("stop", done)]
    assert events(run)[-1] == ("done", UNTIL)
    proved = list(proof_lines(run))
    assert proved[-1].startswith(f"proved: {8 * UNTIL} reads, each by exactly one dp rank"), (
        proved
    )
    assert any(
        "chain: 2 starts, each after the one before; checkpoints of them: 2" in line
        for line in proved
    )


@pytest.mark.parametrize("sizes", MESHES[:2], ids=str)
def test_loop_goes_on_where_an_epoch_has_ended(sizes: dict[str, int], tmp_path: Path) -> None:
    """Of the epoch in which it was saved nothing is left."""
    epoch, until = own_runs.ROWS // 8, 2 * (own_runs.ROWS // 8) + 1
    whole = run_ranks(by_hand, math.prod(sizes.values()), sizes, until)[0]
    parts = [
        _ranks(sizes, str(tmp_path / "run"), stop)[0] for stop in (epoch, 2 * epoch, until)
    ]
    assert [numbers for part, _ in parts for numbers in part] == whole
    assert {ended for _, ended in parts} == {0}
    assert list(proof_lines(tmp_path / "run"))[-1].startswith(f"proved: {8 * until} reads")


def test_run_that_is_killed_goes_on_as_the_unbroken_one(tmp_path: Path) -> None:
    script = Path(own_runs.__file__)
    shutil.copy(script, tmp_path / "own_runs.py")
    killed = runs.script(tmp_path, "own_runs.py", "run", "7")
    assert killed.returncode == -signal.SIGKILL
    done = runs.script(tmp_path, "own_runs.py", "run", "0")
    assert done.returncode == 0, done.stdout + done.stderr
    # Steps 5 to 7 are made again: the newest checkpoint is of step 4.
    found = eval(done.stdout.splitlines()[-1])
    assert found == run_ranks(by_hand, 1, {}, UNTIL)[0][4:]
    logged = [
        json.loads(line)["step"]
        for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    ]
    assert logged == [*range(1, 8), *range(5, UNTIL + 1)]
    assert list(proof_lines(tmp_path / "run"))[-1].startswith(f"proved: {8 * UNTIL} reads")
    told = runs.command(tmp_path, "explain", "run")
    assert told.returncode == 0 and "the job finished" in told.stdout
    assert "run: steps 1 to 14" in runs.command(tmp_path, "why", "run").stdout
    assert runs.command(tmp_path, "report", "run", "--to", "run.html").returncode == 0
    facts = gather(tmp_path / "run")
    assert facts.state == "done" and not facts.notes and not facts.damaged
    asked = [command.split()[1] for command, _ in facts.commands()]
    assert asked == ["export", "data", "why", "data"] and "--" not in facts.commands()[1][0]
    # It is no run of the command.
    for words in (
        ("resume", "run"),
        ("sample", "run", "--prompt", "x"),
        ("data", "audit", "run", "--contents"),
    ):
        refused = runs.command(tmp_path, *words)
        assert refused.returncode == 2 and "a program with a custom loop" in refused.stderr, (
            words
        )
        assert "threefold export run --to DIR" in refused.stderr
    runs.prepare(tmp_path)
    refused = runs.command(
        tmp_path, "train", "config.yaml", "--mesh.dp", "1", "--log.dir", "run"
    )
    assert (
        refused.returncode == 2 and "log.dir = run holds a run of a program" in refused.stderr
    )


def test_run_that_goes_on_while_it_is_proved_is_proved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is logged and saved after its record was read is not missed in that."""
    run, whole = tmp_path / "run", tmp_path / "whole"
    _ranks({}, str(whole), UNTIL)
    shutil.copytree(whole, run)
    until = json.loads((whole / "audit.jsonl").read_text().splitlines()[-1])["first"] - 1
    logged = (whole / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(logged[:until]))
    newest = CheckpointFolder(run).newest()
    assert newest is not None and newest.step == UNTIL > until > 0
    shutil.rmtree(newest.path)
    read = record.read_lines

    def going_on(path: Path) -> list[record.Line]:
        lines = read(path)
        shutil.rmtree(run / "checkpoints")  # pruned
        shutil.copytree(whole, run, dirs_exist_ok=True)
        return lines[:-1]

    monkeypatch.setattr(record, "read_lines", going_on)
    first, *_ = proof_lines(run)
    assert f"steps 1 to {until}" in first


def test_run_goes_back_and_sets_aside_what_was_later(tmp_path: Path) -> None:
    folder, back = (
        tmp_path / "run",
        {"checkpoint.resume": str(tmp_path / "run/checkpoints/step-00000004")},
    )
    whole, _ = _ranks({}, str(folder), 9, config={"checkpoint.keep": 5})[0]
    again, ended = _ranks({}, str(folder), 6, config=back)[0]
    assert ended == 0 and again == whole[4:6]
    names = sorted(path.name for path in folder.glob("checkpoints/*"))
    assert names == [
        "aside-1-step-00000008",
        "aside-1-step-00000009",
        "step-00000004",
        "step-00000006",
    ]
    assert ("rewind", 4) in events(folder)
    assert list(proof_lines(folder))[-1].startswith("proved: 48 reads")


def _nan(logits: Any, batch: Any) -> tuple[Any, Any]:
    """Not a number in the step of row 0, which step 3 reads."""
    import torch
    import torch.nn.functional as F

    losses = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")
    marked = (batch["input_ids"] == own_runs.Windows()[_marked()]["input_ids"]).all(-1).any()
    return losses * torch.where(marked, float("nan"), 1.0), batch["labels"].numel()


def _marked() -> int:
    """A row of step 3, on the second of two dp ranks."""
    from threefold.data.order.order import Order, Place

    return int(Order(own_runs.ROWS, 8, 0, True).rows(Place(0, 16), 1)[0, 1])


@pytest.mark.parametrize("policy", ["error", "skip"])
def test_number_that_is_not_finite_ends_the_run_or_is_left_out(
    policy: str, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    found = _ranks({"dp": 2}, str(folder), 5, loss=_nan, config={"train.nonfinite": policy})
    first, row = found[0], _marked()
    assert found[0][1] == found[1][1]
    if policy == "error":
        assert len(
            first[0]
        ) == 2 and f"step 3: the loss is not finite on rank 1: rows {row}, " in str(first[1])
        assert f"threefold data order {folder} --step 3; or threefold.Run(..., config=" in str(
            first[1]
        )
        assert [line.last for line in record.read_lines(folder / "audit.jsonl")[1:]] == [3]
        assert CheckpointFolder(folder).all() == []
    else:
        assert first[1] == 0 and [math.isfinite(loss) for loss, _ in first[0]] == [
            True,
            True,
            False,
            True,
            True,
        ]
        logged = [
            json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()
        ]
        (skipped,) = (line for line in logged if "skipped" in line)
        assert skipped["step"] == 3 and "not finite on rank 1" in skipped["skipped"]
        assert logged[-1]["skipped_steps"] == 1


def _wrong_rows(sizes: dict[str, int], folder: str) -> Any:
    """A loop whose last dp rank reads other rows in its second step."""
    import threefold

    mesh, step, loader, _ = own_runs.parts(sizes)
    blocks = loader.sampler._indices_at

    def other(epoch: int, seed: int) -> Any:
        at = blocks(epoch, seed)
        return lambda wanted: at(wanted + 2 * (wanted == 9)) if mesh.dp_rank else at(wanted)

    loader.sampler._indices_at = other
    try:
        with threefold.Run(folder, mesh=mesh, config={"audit.every": 2}) as run:
            run.load(step, loader)
            for batch in run.steps(loader, until=4):
                step(batch)
    except threefold.errors.RunError as error:
        return str(error)
    return None


def test_rank_that_reads_other_rows_is_named(tmp_path: Path) -> None:
    found = run_ranks(_wrong_rows, 2, {"dp": 2}, str(tmp_path / "run"))
    assert found[0] == found[1] and found[0] is not None and "rank 1" in found[0]


def _two(folder: str) -> list[str]:
    """What a second run in the folder is told, by another process, and what a save of nobody's is."""
    import subprocess
    import sys

    import threefold

    mesh, step, loader, _ = own_runs.parts({})
    told = []
    with threefold.Run(folder, mesh=mesh) as run:
        run.load(step, loader)
        for batch in run.steps(loader, until=1):
            step(batch)
            take = f"from threefold.checkpoint.lock import RunLock as R; R().take(Path({folder!r}), fresh=False)"
            code = f"from pathlib import Path; {take}"
            told.append(
                subprocess.run(
                    [sys.executable, "-c", code], capture_output=True, text=True
                ).stderr
            )
    try:
        threefold.save(folder, model=step.model, step=2)
    except threefold.errors.ConfigError as error:
        told.append(str(error))
    for word in ("steps", "loader", "again"):
        try:
            with threefold.Run(folder, mesh=mesh) as run:
                if word != "steps":
                    run.load(step, *([loader] if word == "again" else []))
                if word == "again":
                    run.save()
                next(run.steps(loader, until=3))
        except threefold.errors.ConfigError as error:
            told.append(str(error))
    mesh.close()
    return told


def test_folder_of_a_run_is_that_of_one_process_and_of_the_run_alone(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    second, saved, unloaded, other, early = run_ranks(_two, 1, str(folder))[0]
    assert f"{folder} is in use by another run: process" in second
    assert "this is the folder of a run" in saved and f"with threefold.Run('{folder}')" in saved
    assert "run.steps(...) before run.load(...)" in unloaded
    assert "run.steps(...) is given a DistributedLoader that run.load(...) was not" in other
    assert "run.save() before run.steps(...)" in early


@pytest.mark.parametrize(
    "settings",
    [{"drop_last": False}, {"drop_last": False, "batch_size": 5}],
    ids=["usual batch", "another batch"],
)
def test_rows_of_an_uneven_last_batch_are_proved(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    _, ended = _ranks({}, str(tmp_path / "run"), UNTIL, **settings)[0]
    assert ended == 0
    proved = list(proof_lines(tmp_path / "run"))
    assert any("epoch 0: 42 of 42 rows, each exactly once" in line for line in proved), proved


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Any]:
    import torch

    from threefold.mesh.mesh import Mesh
    from threefold.mesh.topology import Topology

    yield partial(Run, tmp_path / "run", mesh=Mesh(Topology(), 0, torch.device("cpu")))


@pytest.mark.parametrize(
    ("config", "what", "fix"),
    [
        (
            {"data.source": "x"},
            "config has 'data.source'",
            "leave data.source out: the program decides it",
        ),
        (
            {"train.nonfinite": "maybe"},
            "train.nonfinite = maybe is not accepted",
            r"config=\{'train.nonfinite': 'error'\}",
        ),
        (
            {"log.trackers": ["nix"]},
            "nix in log.trackers",
            r"config=\{'log.trackers': \['tensorboard'\]\}",
        ),
        (
            {"checkpoint.resume": "/nix"},
            "checkpoint.resume = /nix does not exist",
            "check the path",
        ),
    ],
    ids=["key", "value", "tracker", "checkpoint"],
)
def test_what_a_run_cannot_be_asked_is_refused_in_the_words_of_a_program(
    config: dict[str, Any], what: str, fix: str, alone: Any, tmp_path: Path
) -> None:
    with pytest.raises(ThreefoldError, match=re.escape(what)) as refused, alone(config=config):
        pass
    assert re.search(f"fix: {fix}", str(refused.value)) and " --" not in str(refused.value)
    assert not (tmp_path / "run").exists()


def test_run_in_which_no_step_is_made_leaves_nothing(alone: Any, tmp_path: Path) -> None:
    with alone() as run:
        assert (tmp_path / "run/run.lock").exists() and run.folder.resume is None
    assert not (tmp_path / "run").exists()


def test_run_whose_steps_are_not_its_own_says_that_nothing_was_audited(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mesh, step, loader, _ = own_runs.parts({})
    with Run(tmp_path / "run"):
        step(next(iter(loader)))
    mesh.close()
    line = "nothing was audited or saved; for batch in run.steps(loader, until=...)"
    assert capsys.readouterr().out.splitlines()[-1] == f"{tmp_path}/run: {line}"


def test_run_that_is_done_ends_at_once_when_it_is_started_again(tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    numbers, ended = run_ranks(own_runs.in_a_run, 1, {}, folder, 5)[0]
    assert (len(numbers), ended) == (5, 0)
    before = _files(tmp_path / "run")
    assert run_ranks(own_runs.in_a_run, 1, {}, folder, 5)[0] == ([], 0)
    assert _files(tmp_path / "run") == before and len(before) > 5
    assert run_ranks(_logged_afterwards, 1, folder)[0] == ["start", "done"]


def _files(folder: Path) -> dict[str, Any]:
    """Contents and times of what lies in a run's folder, but for its lock and the logs of its processes."""
    files = [
        each for each in folder.rglob("*") if each.is_file() and each.parent.name != "logs"
    ]
    return {
        str(each): (each.stat().st_mtime_ns, each.read_bytes())
        for each in files
        if each.name != "run.lock"
    }


def _logged_afterwards(folder: str) -> list[str]:
    """The events that a program adds which has no step left, and logs an evaluation."""
    import threefold

    mesh, step, loader, scheduler = own_runs.parts({})
    before = len(Journal(Path(folder)).lines())
    with threefold.Run(folder, mesh=mesh) as run:
        run.load(step, loader, scheduler=scheduler)
        assert not list(run.steps(loader, until=5))
        run.save()
        assert len(Journal(Path(folder)).lines()) == before
        run.log(accuracy=0.5)
    mesh.close()
    assert (
        json.loads((Path(folder) / "metrics.jsonl").read_text().splitlines()[-1])["accuracy"]
        == 0.5
    )
    return [line["event"] for line in Journal(Path(folder)).lines()[before:]]


def test_identity_says_whose_loop_it_is(tmp_path: Path) -> None:
    Identity.new(program=True).write(tmp_path)
    read = Identity.read(tmp_path)
    assert read is not None and read.program


def _over_a_list(folder: str) -> list[Any]:
    """Losses of an unbroken run over a list of batches; of one that is continued; what is refused on the way."""
    import itertools

    import threefold

    def trained(name: str, until: int, *, again: bool = False) -> list[Any]:
        mesh, step, loader, _ = own_runs.parts({})
        batches, found = list(loader)[:4], list[Any]()
        try:
            with threefold.Run(name, mesh=mesh) as run:
                run.load(step)
                left = (
                    batches
                    if again or not run.step
                    else itertools.islice(itertools.cycle(batches), run.step, None)
                )
                for batch in run.steps(left, until=until):
                    found.append(step(batch).loss)
                    if run.step == until:
                        break
        except threefold.errors.ConfigError as error:
            found.append(str(error))
        mesh.close()
        return found

    def before() -> list[Any]:
        mesh, step, loader, _ = own_runs.parts({})
        try:
            with threefold.Run(f"{folder}-early", mesh=mesh) as run:
                run.load(step)
                step(next(iter(loader)))
        except threefold.errors.ConfigError as error:
            return [str(error)]
        return []

    return [
        trained(f"{folder}-whole", 5),
        trained(folder, 3),
        trained(folder, 5, again=True),
        trained(folder, 5),
        before(),
    ]


def test_run_over_a_list_continues_where_it_is_told(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    whole, begun, again, rest, before = run_ranks(_over_a_list, 1, str(folder))[0]
    assert again[0].startswith(
        "the run resumes after step 3, but run.steps(...) is given list, which starts over"
    )
    assert (
        "fix: run.steps(itertools.islice(itertools.cycle(batches), run.step, None), until=...)"
        in again[0]
    )
    assert [*begun, *rest] == whole and len(whole) == 5
    assert before[0].startswith("step(batch) before run.steps(...)")
    # Nothing of a list is known by number: the folder says so, and what helps.
    told = runs.command(tmp_path, "data", "audit", "run")
    assert (
        told.returncode == 2
        and "run was not audited: islice does not say which rows it reads" in told.stderr
    )
    assert (
        "fix: for the next run: loader = threefold.distribute(DataLoader(...))" in told.stderr
    )


def _in_phases(folder: str, of: str, until: tuple[int, ...]) -> list[float]:
    """The losses of one run, whose steps are asked for several times; in the second step its program breaks."""
    import torch

    import threefold

    mesh, step, loader, _ = own_runs.parts({})
    batches = loader if of == "loader" else list(loader)
    losses = []
    with threefold.Run(folder, mesh=mesh) as run:
        run.load(step, loader if of == "loader" else None)
        for last in until:
            for batch in run.steps(batches, until=last):
                losses.append(step(batch).loss)
                run.log(seen=torch.tensor(len(losses)))
                if len(until) > 1 and run.step == 2:
                    break
    mesh.close()
    return losses


@pytest.mark.parametrize("of", ["loader", "list"])
def test_steps_that_are_asked_for_again_go_on(of: str, tmp_path: Path) -> None:
    whole = run_ranks(_in_phases, 1, str(tmp_path / "whole"), of, (7,))[0]
    parts = run_ranks(_in_phases, 1, str(tmp_path / "parts"), of, (3, 4, 7))[0]
    assert parts == whole and len(whole) == 7
    lines = [json.loads(line) for line in (tmp_path / "parts/metrics.jsonl").open()]
    assert [line["seen"] for line in lines] == [1, 2, 3, 4, 5, 6, 7]


class _FailsOnce(list[Any]):
    def __iter__(self) -> Iterator[Any]:
        if self:
            yield self.pop()
            raise OSError("a disk that is away for a moment")
        yield from self.again

    again: tuple[Any, ...] = ()


def _read_again(folder: str) -> int:
    import threefold

    mesh, step, loader, _ = own_runs.parts({})
    first = next(iter(loader))
    batches = _FailsOnce([first])
    batches.again = (first,)
    with threefold.Run(folder, mesh=mesh) as run:
        run.load(step)
        with pytest.raises(OSError, match="away"):
            for batch in run.steps(batches, until=4):
                step(batch)
        for batch in run.steps(batches, until=4):
            step(batch)
    mesh.close()
    return run.step


def test_batches_that_could_not_be_read_are_read_anew(tmp_path: Path) -> None:
    """And not taken to be over, which would end the run before its last step without a word."""
    assert run_ranks(_read_again, 1, str(tmp_path / "run")) == [4]


def _leaving_one_out(folder: str) -> None:
    import threefold

    mesh, step, loader, _ = own_runs.parts({})
    with threefold.Run(folder, mesh=mesh) as run:
        run.load(step, loader)
        for batch in run.steps(loader, until=4):
            if run.step != 3:
                run.log(step(batch))
    mesh.close()


def test_rows_that_a_program_does_not_train_on_are_told(tmp_path: Path) -> None:
    run_ranks(_leaving_one_out, 1, str(tmp_path / "run"))
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").open()]
    assert [(line["step"], line.get("skipped")) for line in lines] == [
        (1, None),
        (2, None),
        (3, "no step(batch) with what it read"),
        (4, None),
    ]
    assert "no step(batch) with what it read" in runs.command(tmp_path, "why", "run").stdout


def _with_schedule(
    sizes: dict[str, int], folder: str, until: int, kind: str
) -> list[tuple[float, ...]]:
    """The losses, rates and betas of a run with a model whose parameters are in other groups on another mesh."""
    import torch

    import threefold

    mesh, _, loader, _ = own_runs.parts(sizes)
    # Biases of queries are split over tp, norms are not.
    config = {**own_runs.TINY_LLAMA, "model_type": "qwen2"}
    step = threefold.TrainStep(
        threefold.load_model(config=config, mesh=mesh, admission="off"), lr=1e-2
    )
    schedules = torch.optim.lr_scheduler
    optimizer = step.optimizer
    schedule: Any = {
        "rates": lambda: schedules.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
        "cycle": lambda: schedules.OneCycleLR(optimizer, max_lr=1e-2, total_steps=8),
        "sequence": lambda: schedules.SequentialLR(
            optimizer,
            [schedules.LinearLR(optimizer, 0.1), schedules.StepLR(optimizer, 1)],
            [3],
        ),
        "plateau": lambda: schedules.ReduceLROnPlateau(optimizer, patience=0),
    }[kind]()
    numbers = []
    with threefold.Run(folder, mesh=mesh) as run:
        run.load(step, loader, schedule=schedule)
        for batch in run.steps(loader, until=until):
            settings = {(each["lr"], *each["betas"]) for each in step.optimizer.param_groups}
            numbers.append((step(batch).loss, *settings.pop()))
            assert not settings
            schedule.step(*([1.0] if kind == "plateau" else []))
    mesh.close()
    return numbers


@pytest.mark.parametrize("kind", ["rates", "cycle", "sequence", "plateau"])
def test_scheduler_of_torch_goes_on_where_there_are_other_groups(
    kind: str, tmp_path: Path
) -> None:
    """OneCycleLR sets betas too."""
    whole = run_ranks(_with_schedule, 1, {}, str(tmp_path / "whole"), 4, kind)[0]
    run_ranks(_with_schedule, 1, {}, str(tmp_path / "run"), 2, kind)
    shutil.copytree(tmp_path / "run", tmp_path / "same")
    assert run_ranks(_with_schedule, 1, {}, str(tmp_path / "same"), 4, kind)[0] == whole[2:]
    rest = run_ranks(_with_schedule, 2, {"tp": 2}, str(tmp_path / "run"), 4, kind)[0]
    assert rest == [pytest.approx(each, abs=1e-5) for each in whole[2:]]


def _on_rank_0_alone(folder: str) -> list[str]:
    """What is printed by a run that logs on rank 0 alone, twice a step, and what is raised if it saves so too.

    Then what is raised if each rank has a dataset of its own, of another length or of the same.
    """
    import threefold
    from threefold.training import lag

    lag._PATIENCE = timedelta(seconds=1)
    mesh, step, loader, _ = own_runs.parts({"dp": 2})
    printed = io.StringIO()
    with redirect_stdout(printed), threefold.Run(f"{folder}/logs", mesh=mesh) as run:
        run.load(step, loader)
        for batch in run.steps(loader, until=3):
            numbers = step(batch)
            if mesh.rank == 0:
                run.log(numbers)
                run.log(numbers, again=1)
    found = [printed.getvalue()]

    def saving(run: Any) -> None:
        run.load(step, None, schedule=loader)
        for again in run.steps([batch], until=3):
            step(again)
            if mesh.rank == 0 and run.step == 2:
                run.save()

    def of_its_own(run: Any) -> None:
        rows = [own_runs.Windows()[row] for row in range(20 + mesh.rank)]
        run.load(step, own := threefold.distribute(DataLoader(rows, batch_size=2)))
        next(run.steps(own, until=3))

    def of_its_own_rows(run: Any) -> None:
        rows = [own_runs.Windows()[row + mesh.rank] for row in range(20)]
        run.load(step, own := threefold.distribute(DataLoader(rows, batch_size=2), tail="drop"))
        next(run.steps(own, until=3))

    for number, trains in enumerate((saving, of_its_own, of_its_own_rows)):
        with (
            pytest.raises((threefold.errors.RunError, threefold.errors.DataError)) as error,
            threefold.Run(f"{folder}/{number}", mesh=mesh) as run,
        ):
            trains(run)
        found.append(error.value.problems[0].what)
    mesh.close()
    return found


def test_calls_on_rank_0_alone_are_logged_or_named(tmp_path: Path) -> None:
    (printed, *said), (nothing, *other) = run_ranks(
        _on_rank_0_alone, 2, str(tmp_path), timeout_s=50
    )
    # The step itself has made three before.
    apart = "ranks are not in the same call: rank 0 is in run.s"
    assert said == other and said[0] == f"{apart}ave() after step 2, rank 1 in step 6"
    assert said[1].startswith(f"{apart}teps() over Order(num_rows=20, global_batch=4, ")
    assert said[1].endswith(", rank 1 in run.steps() over 21 rows are padded for 2 dp ranks")
    assert said[2] == "the dataset does not have the same rows on ranks 0 and 1"
    lines = map(json.loads, (tmp_path / "logs/metrics.jsonl").read_text().splitlines())
    assert [(line["step"], "slowest_rank" in line) for line in lines] == [
        *((1, True), (1, False), (2, False)),
        *((2, False), (3, False), (3, False)),
    ]
    # The scheduler was made for the step's optimizer, and not passed to run.load.
    assert printed.startswith("not saved: the optimizer's scheduler, ") and nothing == ""


class _Read:
    """An iterator, which is over when it is read again; it does not let itself be read for ever."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches, self.ends = batches, 0

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        if self.batches:
            return self.batches.pop(0)
        self.ends += 1
        assert self.ends < 5, "read again and again"
        raise StopIteration


def _guarded(folder: str) -> dict[str, Any]:
    """What single guards of a run say, each in a folder of its own."""
    import errno

    import threefold
    from threefold.checkpoint.checkpoint_folder import CheckpointFolder

    mesh, step, loader, scheduler = own_runs.parts({})

    def said(name: str, act: Any, **config: Any) -> Any:
        try:
            with threefold.Run(f"{folder}/{name}", mesh=mesh, config=config) as run:
                return act(run)
        except threefold.errors.ThreefoldError as error:
            return str(error)

    def trained(run: Any, until: int, batches: Any = loader, **stateful: Any) -> Any:
        run.load(step, loader if batches is loader else None, **stateful)
        before = dict(run.extra)
        for batch in run.steps(batches, until=until, save_every=1):
            step(batch)
            run.extra["seen"] = run.step
        return before

    def full(*args: Any, **settings: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def with_a_second_loader(run: Any) -> None:
        run.load(step, first)
        for batches in (first, second):
            for batch in run.steps(batches, until=run.step + 2):
                step(batch)

    rows = list(own_runs.parts({})[2])[:1]
    plain = DataLoader(own_runs.Windows(), batch_size=8)  # type: ignore[arg-type]
    first, second = (threefold.distribute(plain, order="torch") for _ in range(2))
    found = {
        "second": said("second", with_a_second_loader),
        "begun": said("run", lambda run: trained(run, 2)),
        "extra": said("run", lambda run: trained(run, 3)),
        "state": said("run", lambda run: trained(run, 4, schedule=scheduler)),
        "outside": said(
            "outside", lambda run: (trained(run, 1, batches=_Read([*rows])), step(rows[0]))
        ),
        "none": said("none", lambda run: trained(run, 2, batches=_Read([]))),
        "over": said("over", lambda run: trained(run, 6, batches=_Read(list(loader)[:2]))),
    }
    newest = max(Path(folder).glob("run/checkpoints/step-*/**/*.safetensors"))
    newest.write_bytes(newest.read_bytes()[:-1])
    found["damaged"] = said("run", lambda run: (trained(run, 4), run.folder.resume.step))
    CheckpointFolder.commit = full  # type: ignore[method-assign, assignment]
    found["full"] = said(
        "full", lambda run: trained(run, 2, list(loader)), **{"checkpoint.on_error": "continue"}
    )
    mesh.close()
    return found


def test_every_guard_of_a_run_says_what_it_found(tmp_path: Path) -> None:
    found = run_ranks(_guarded, 1, str(tmp_path))[0]
    assert found["second"].startswith(
        "run.steps(...) is given a DistributedLoader that run.load(...) was not"
    )
    assert found["begun"] == {} and found["extra"] == {"seen": 2}
    assert "step-00000003 has no state of schedule" in found["state"]
    assert "fix: run.load(...) without schedule=" in found["state"]
    assert found["outside"].startswith("step(batch) outside of run.steps(...)")
    assert found["none"].startswith("there are no batches for step 1")
    assert found["over"].startswith("there are no batches for step 3")
    assert found["damaged"] == ({"seen": 2}, 2)
    assert found["full"].startswith(
        "the state after step 2 is not saved; the newest checkpoint is of step 0"
    )


@pytest.mark.parametrize(
    ("settings", "tail", "why"),
    [
        ({"batch_size": 2}, "pad", "43 rows are padded for 2 dp ranks"),
        ({"batch_size": 2}, "drop", "tail='drop' leaves out 1 rows"),
        (
            {"batch_size": 2, "sampler": WeightedRandomSampler([1.0] * 43, 43)},
            "pad",
            "rows drawn with weights",
        ),
        ({"batch_size": 2}, "exact", ""),
        ({"batch_size": 2, "drop_last": True}, "drop", ""),
    ],
    ids=["padded", "dropped", "weights", "exact", "drop_last"],
)
def test_rows_that_are_not_each_read_once_are_not_audited(
    settings: dict[str, Any], tail: Any, why: str
) -> None:
    place = SimpleNamespace(dp_rank=0, dp_size=2)
    order, found, fix = _order_of(
        distribute(DataLoader(range(43), **settings), place, tail=tail)
    )  # type: ignore[arg-type]
    assert found.startswith(why) and bool(found) == bool(why) == bool(fix) == (order is None)


_HANGS = """
import time
from ranks.own_runs import in_a_run

def act(run, mesh):
    if run.step == 2 and mesh.rank == 1:
        time.sleep(600)

in_a_run({"dp": 2}, "run", 5, act, config={"log.stall_s": 2.0, "train.timeout_s": 4.0})
"""


def test_rank_that_does_not_go_on_is_named_and_ends_the_run(tmp_path: Path) -> None:
    (tmp_path / "hangs.py").write_text(_HANGS)
    done = runs.torchrun(tmp_path, 2, "hangs.py", timeout_s=120)
    assert done.returncode != 0
    said = done.stdout + done.stderr
    assert re.search(r"rank 1 of host \S+ \(process \d+\) is in the program of step 2", said), (
        said
    )
    assert (
        "if steps may take longer: config={'train.timeout_s': 8}, with a larger init_mesh(timeout_s=...)"
        in said
    )
    assert "hangs.py" in said and "the run ends here, and its checkpoints are kept" in said
