"""Random histories of folders: commands that are killed anywhere, copies, moves, links and what users do with files.

A start is what the folder and its checkpoints are of it: it is opened, begins, is accepted and saves, without a model.
The weights of a checkpoint are the starts that made them. A model beside the folders knows which starts each of them
had, wherever it was copied to, and so what a resume must find. The rules that must hold are `Rules` below; a guard that
is taken out of the code is found by them (`PLANTED`).
"""

from __future__ import annotations

import copy
import itertools
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    rule,
    run_state_machine_as_test,
)

from threefold.checkpoint import checkpoint_folder
from threefold.checkpoint.checkpoint_folder import Checkpoint, CheckpointFolder
from threefold.checkpoint.lineage import Identity, Journal, Origin
from threefold.checkpoint.seal import write_sealed
from threefold.commands import report, resume
from threefold.config import paths
from threefold.config.loading import LoadedConfig
from threefold.config.schema import Config
from threefold.errors import ThreefoldError
from threefold.export import model_folder
from threefold.run import folder as run_folder
from threefold.run import resume_choice
from threefold.run.folder import open_run

PLACES = ("a", "b", "c")
CHECKPOINT = re.compile(r"checkpoints/[^/]*step-")
# What a run writes again and again in its own folder.
GROWS = ("run.json", "config.yaml", "journal.jsonl")
# What a start that ended while it wrote run.json leaves in a folder that is no run yet; the next one there replaces it.
LEFT = ".run.json."
NUMBERS = itertools.count()


class Killed(BaseException):
    """The process ended here: nothing that comes later is done, not even what errors are caught for."""


@dataclass
class Truth:
    """What a run's folder is, as the machine knows it without reading it; a copy of the folder has a copy."""

    starts: list[tuple[str, int]] = field(default_factory=list)
    """(what the weights of a start are marked with, the step after which it began)."""
    saved: bool = False
    """its journal tells of a save."""
    named: bool = True
    """run.json is there."""
    origin: str | None = None
    """of a fork: the weights that it began with."""

    def is_own(self, weights: str, step: int) -> bool:
        """Whether weights of this step are on the way to where the run is now."""
        marks = [mark for mark, _ in self.starts]
        mark = weights.rpartition(" ")[2]
        return mark in marks and all(
            began >= step for _, began in self.starts[marks.index(mark) + 1 :]
        )

    def wrote(self, weights: str) -> bool:
        return weights.rpartition(" ")[2] in [mark for mark, _ in self.starts]


def files(root: Path) -> dict[str, str]:
    """Every file and link below a folder: what is in it, or where it leads."""
    found = {}
    for folder, folders, names in os.walk(root):
        for name in (
            *names,
            *(each for each in folders if os.path.islink(os.path.join(folder, each))),
        ):
            path = os.path.join(folder, name)
            content = (
                f"-> {os.readlink(path)}"
                if os.path.islink(path)
                else Path(path).read_text(errors="ignore")
            )
            found[os.path.relpath(path, root)] = content
    return found


def weights_of(checkpoint: Path) -> str | None:
    """The starts that made the weights of a checkpoint, if it is whole; by its bytes alone."""
    with suppress(OSError):
        if (checkpoint / "COMPLETE").exists() and Checkpoint(
            checkpoint, _step(checkpoint)
        ).damage() is None:
            return (checkpoint / "state/weights").read_text()
    return None


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])


@contextmanager
def killed_before(change: int | None) -> Iterator[None]:
    """Ends what is done inside before its n-th change of a file's or a folder's name, and leaves half of a removal."""
    left = itertools.count()
    originals = {
        name: getattr(os, name) for name in ("replace", "rename", "mkdir", "unlink", "rmdir")
    }
    remove = shutil.rmtree

    def counted(name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if next(left) == change:
                raise Killed
            return originals[name](*arguments, **options)

        return call

    def rmtree(path: Any, *arguments: Any, **options: Any) -> None:
        if next(left) == change:
            for file in sorted(path for path in Path(path).rglob("*") if path.is_file())[:1]:
                originals["unlink"](file)
            raise Killed
        with restored():
            remove(path, *arguments, **options)

    @contextmanager
    def restored() -> Iterator[None]:
        patched = {name: getattr(os, name) for name in originals}
        for name, original in originals.items():
            setattr(os, name, original)
        try:
            yield
        finally:
            for name, each in patched.items():
                setattr(os, name, each)

    for name in originals:
        setattr(os, name, counted(name))
    shutil.rmtree = rmtree  # type: ignore[assignment]
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(os, name, original)
        shutil.rmtree = remove


class Folders(RuleBasedStateMachine):
    """The rules: nothing is overwritten or removed that a run of this identity did not write; a refused command
    changes nothing; resume resumes or refuses; a request has the same answer from any working folder."""

    base: Path
    # Most histories begin where something can go wrong soon.
    befores: tuple[str, ...] = ("", "run", "parted", "fork", "replaced", "rewound")

    @initialize(number=st.integers(0, 59))
    def begin(self, number: int) -> None:
        before = self.befores[number % len(self.befores)]
        self.root = Path(self.base, str(next(NUMBERS)))
        (self.root / "elsewhere").mkdir(parents=True)
        os.chdir(self.root)
        self.truths: dict[str, Truth] = {}
        whole: dict[str, Any] = {"keep": 3, "dies": None, "by": "train"}
        if before:
            self.start("a", "auto", saves=3, **whole)
        if before == "parted":
            self.user_copies("a", "b", "")
            self.start("a", "auto", saves=1, **whole)
            self.start("b", "auto", saves=2, **whole)
        elif before in ("fork", "replaced"):
            self.start("b", "a/checkpoints/step-00000002", saves=0, **whole)
            if before == "replaced":
                self.user_removes("a")
                self.start("a", "auto", saves=3, **whole)
        elif before == "rewound":
            self.start("a", "a/checkpoints/step-00000001", saves=1, **whole)

    def teardown(self) -> None:
        os.chdir(self.base)
        shutil.rmtree(getattr(self, "root", self.base / "none"), ignore_errors=True)

    # What the machine asks of itself

    def truth(self, place: str) -> Truth | None:
        return self.truths.get(
            os.path.relpath(os.path.realpath(place), os.path.realpath(self.root))
        )

    def checkpoints(self) -> list[str]:
        found = (
            path
            for place in PLACES
            for path in sorted(Path(place, "checkpoints").glob("*step-*"))
        )
        return [str(path) for path in found if not path.name.startswith(".")]

    def expected(self, place: str) -> tuple[str, int] | None:
        """(weights, step) that the run in a folder must resume from; None: it begins at step 1, or is refused."""
        truth = self.truth(place)
        assert truth is not None
        whole = [
            (_step(path), weights_of(path))
            for path in Path(place, "checkpoints").glob("step-*")
        ]
        own = [
            (step, weights)
            for step, weights in whole
            if weights is not None and truth.is_own(weights, step)
        ]
        return max(own)[::-1] if own else None  # type: ignore[return-value]

    def check(
        self, before: dict[str, str], target: str, truth: Truth | None, *, refused: bool
    ) -> None:
        """Nothing that is not the target run's own was changed or removed; by a refused command nothing at all."""
        after = files(self.root)
        home = os.path.relpath(os.path.realpath(target), os.path.realpath(self.root))
        if refused:
            made = {
                path
                for path in after.keys() - before.keys()
                if not re.search(r"run\.lock$", path)
            }
            assert not made and all(after.get(path) == before[path] for path in before), (
                "refused, and changed"
            )
            return
        for path in [path for path in before if after.get(path) != before[path]]:
            inside = os.path.relpath(path, home)
            assert not inside.startswith(".."), f"{path} is not of {target}"
            if inside.startswith(LEFT):
                continue
            if inside in GROWS or re.match(r"\.", Path(inside).name) or inside == "report.html":
                assert truth is not None, f"{path} was a user's"
                continue
            match = re.match(r"checkpoints/([^/]+)", inside)
            assert truth is not None and match is not None, f"{path} was a user's"
            if match[1].startswith("."):
                continue
            weights = before.get(f"{home}/{match[0]}/state/weights")
            assert weights is not None and truth.wrote(weights), f"{path} is not the run's own"

    def answer(self, place: str, asked: str, cwd: str) -> tuple[Any, ...]:
        """Where a start would resume, as it is from a working folder."""
        spelled = os.path.relpath(place, cwd)
        wanted = asked if asked in ("auto", "never") else os.path.relpath(asked, cwd)
        os.chdir(cwd)
        try:
            found = resume_choice.of(request(spelled, wanted), Path(spelled))
            there = tuple(os.path.realpath(each.path) for each in found.candidates)
            return there, found.asked, found.origin
        except ThreefoldError as error:
            return type(error), error.problems[0].what.replace("../", "").replace(
                f"{self.root}/", ""
            )
        finally:
            os.chdir(self.root)

    # What a command does

    def start(
        self, place: str, asked: str, *, saves: int, keep: int, dies: int | None, by: str
    ) -> None:
        """A start by `train` or `resume`, which is killed before its change number `dies`."""
        if os.path.isdir(place) or not os.path.lexists(place):
            assert self.answer(place, asked, ".") == self.answer(place, asked, "elsewhere"), (
                "another answer"
            )
        before, truth = files(self.root), self.truth(place)
        was, expected = (
            copy.deepcopy(truth),
            self.expected(place) if truth is not None else None,
        )
        asked_weights = (
            weights_of(Path(asked))
            if asked not in ("auto", "never") and "step-" in asked
            else None
        )
        happened = SimpleNamespace(resumed=None, begun=False)

        def train_command(loaded: LoadedConfig, **_: Any) -> int:
            config = loaded.config
            assert config.log.dir is not None
            self._train(Path(config.log.dir), config, happened, saves=saves, keep=keep)
            return 0

        refused = None
        try:
            with killed_before(dies):
                if by == "train":
                    train_command(LoadedConfig(request(place, asked)))
                else:
                    resumed = place if asked == "auto" else asked
                    loading_as(train_command, resumed)
        except ThreefoldError as error:
            refused = error
        except (Killed, SystemExit):
            pass
        except FileExistsError:
            pass  # a save that found another's checkpoint at its name
        self.check(before, place, was, refused=refused is not None and not happened.begun)
        if refused is not None:
            assert all(problem.expected and problem.fix for problem in refused.problems)
            return
        if not happened.begun:
            return
        self.check_resumed(was, expected, asked, asked_weights, happened.resumed)
        if by == "resume":
            assert was is not None, "resume began a new run"

    def check_resumed(
        self,
        was: Truth | None,
        expected: Any,
        asked: str,
        asked_weights: str | None,
        resumed: str | None,
    ) -> None:
        """It resumed, and what it should."""
        if was is None:
            assert asked_weights in (None, resumed), "a fork of another checkpoint"
            return
        # A first start that was killed with nothing but its run.json written has nothing to lose without that.
        assert was.named or not (was.starts or was.saved), "a run without run.json"
        if resumed is not None and was.origin is None:
            assert was.wrote(resumed), "weights of another run"
        if asked_weights is not None:
            own = not was.wrote(asked_weights) or was.is_own(asked_weights, _step(Path(asked)))
            assert own, "what was left behind was resumed"
        elif asked == "auto" and expected is not None:
            assert resumed == expected[0], (resumed, expected)
        elif asked == "auto" and was.origin is not None:
            assert resumed == was.origin, "a fork began with other weights than its origin's"
        elif asked == "auto":
            assert not was.saved and resumed is None, "began anew over a run that has saved"

    def _train(
        self, path: Path, config: Config, happened: Any, *, saves: int, keep: int
    ) -> None:
        opened = open_run(config)
        chosen, passed = checkpoint_folder.newest_undamaged(
            opened.candidates, lambda each: each.damage()
        )
        opened = opened.resuming(chosen, passed)
        if chosen is not None:
            assert (chosen.path / "state/weights").is_file(), (
                "a checkpoint without weights was chosen"
            )
        resumed = (chosen.path / "state/weights").read_text() if chosen is not None else None
        before = _num_starts(path)
        place = os.path.relpath(os.path.realpath(path), os.path.realpath(self.root))
        mark = f"w{next(NUMBERS)}"
        try:
            opened.claim()
            opened.begin()
        finally:
            if _num_starts(path) > before or (path / "run.json").exists():
                truth = self.truths.setdefault(
                    place, Truth(origin=resumed if opened.origin is not None else None)
                )
                if _num_starts(path) > before:
                    truth.starts.append((mark, opened.done))
                    happened.resumed, happened.begun = resumed, True
        author = opened.accept(config)["author"]
        for step in range(opened.done + 1, opened.done + 1 + saves):
            state = opened.checkpoints.begin(step) / "state"
            seal = write_sealed(state / "weights", f"{resumed or ''} {mark}".encode())
            opened.checkpoints.commit(step, author, {"state/weights": seal})
            opened.checkpoints.prune(keep)
            opened.journal.note("save", step=step, start=author["start"])
            truth.saved = True

    @rule(
        place=st.sampled_from(PLACES), by=st.sampled_from(["train", "resume"]), saves=st.integers(0, 3),
        keep=st.integers(1, 3), dies=st.none() | st.integers(0, 24), never=st.integers(0, 9),
    )  # fmt: skip
    def starts(
        self, place: str, by: str, saves: int, keep: int, dies: int | None, never: int
    ) -> None:
        asked = "never" if by == "train" and never == 0 else "auto"
        self.start(place, asked, saves=saves, keep=keep, dies=dies, by=by)

    @rule(
        place=st.sampled_from(PLACES), number=st.integers(0, 30), saves=st.integers(0, 2),
        dies=st.none() | st.integers(0, 24), by=st.sampled_from(["train", "resume"]),
    )  # fmt: skip
    def starts_from(
        self, place: str, number: int, saves: int, dies: int | None, by: str
    ) -> None:
        """A fork, or a return to an older step."""
        if there := self.checkpoints():
            asked = there[number % len(there)]
            place = asked.split("/")[0] if by == "resume" else place
            self.start(place, asked, saves=saves, keep=3, dies=dies, by=by)

    @rule(
        place=st.sampled_from(PLACES),
        to=st.sampled_from([None, "page.html", "notes.md", "b/report.html"]),
    )
    def reports(self, place: str, to: str | None) -> None:
        before, refused = files(self.root), False
        try:
            report.command([Path(place)], Path(to) if to is not None else None)
        except ThreefoldError:
            refused = True
        after = files(self.root)
        spelled = Path(to or f"{place}/report.html")
        home = os.path.relpath(os.path.realpath(spelled.parent), os.path.realpath(self.root))
        target = os.path.normpath(f"{home}/{spelled.name}")
        for path in before.keys() | after.keys():
            was_page = path not in before or "threefold</title>" in before[path]
            assert after.get(path) == before.get(path) or (
                not refused and path == target and was_page
            ), path

    @rule(number=st.integers(0, 30), to=st.sampled_from(["a", "b", "c", "exported"]))
    def exports(self, number: int, to: str) -> None:
        before = files(self.root)
        with suppress(ThreefoldError):
            model_folder.refuse_filled(Path(to))
            found = checkpoint_folder.find(Path(PLACES[number % 3]))
            truth = self.truth(PLACES[number % 3])
            weights = weights_of(found.path)
            assert (
                truth is None or not truth.named or weights is None or truth.wrote(weights)
            ), "exported another's"
            shutil.rmtree(to, ignore_errors=True)
        assert before.items() <= files(self.root).items()

    # What users do

    @rule(
        place=st.sampled_from(PLACES),
        kind=st.sampled_from(["empty", "config.yaml", "a.jsonl", "file", "notes.md"]),
    )
    def user_makes(self, place: str, kind: str) -> None:
        if kind == "notes.md":
            Path(kind).write_text("mine")
        elif not os.path.lexists(place):
            if kind == "file":
                Path(place).write_text("mine")
            else:
                Path(place).mkdir()
                if kind != "empty":
                    Path(place, kind).write_text("train: {steps: 1}")

    @rule(place=st.sampled_from(PLACES), step=st.integers(1, 6))
    def user_copies_into_checkpoints(self, place: str, step: int) -> None:
        """A folder with a checkpoint's name, of which only something else is there yet."""
        target = Path(place, f"checkpoints/step-{step:08d}")
        if target.parent.is_dir() and not os.path.lexists(target):
            target.mkdir()
            (target / "mine.txt").write_text("mine")

    @rule(
        source=st.sampled_from(PLACES),
        to=st.sampled_from(PLACES),
        without=st.sampled_from(["", "", "", "run.json"]),
    )
    def user_copies(self, source: str, to: str, without: str) -> None:
        if os.path.isdir(source) and not os.path.islink(source) and not os.path.lexists(to):
            shutil.copytree(
                source,
                to,
                symlinks=True,
                ignore=lambda _, names: [each for each in names if each == without],
            )
            if source in self.truths:
                self.truths[to] = copy.deepcopy(self.truths[source])
                self.truths[to].named &= not without

    @rule(source=st.sampled_from(PLACES), to=st.sampled_from(PLACES), link=st.booleans())
    def user_moves_or_links(self, source: str, to: str, link: bool) -> None:
        if os.path.isdir(source) and not os.path.islink(source) and not os.path.lexists(to):
            if link:
                os.symlink(source, to)
            else:
                os.rename(source, to)
                if source in self.truths:
                    self.truths[to] = self.truths.pop(source)

    @rule(place=st.sampled_from(PLACES))
    def user_removes(self, place: str) -> None:
        if os.path.islink(place) or os.path.isfile(place):
            os.unlink(place)
        elif os.path.isdir(place):
            shutil.rmtree(place)
            self.truths.pop(place, None)

    @rule(
        number=st.integers(0, 30),
        to=st.sampled_from(PLACES),
        over=st.booleans(),
        link=st.booleans(),
    )
    def user_copies_a_checkpoint(self, number: int, to: str, over: bool, link: bool) -> None:
        """Under the name that it had as a checkpoint; also what was set aside."""
        if (there := self.checkpoints()) and Path(to, "checkpoints").is_dir():
            source = Path(there[number % len(there)])
            target = Path(to, "checkpoints", source.name[source.name.index("step-") :])
            if (
                over
                and target.is_dir()
                and not target.is_symlink()
                and target.resolve() != source.resolve()
            ):
                shutil.rmtree(target)
            # A link may lead to what a run has removed.
            if not os.path.lexists(target) and source.exists():
                if link:
                    os.symlink(source.absolute(), target)
                else:
                    shutil.copytree(source, target, symlinks=True)

    @rule(number=st.integers(0, 30), how=st.sampled_from(["removed", "damaged", "unmarked"]))
    def checkpoint_is_lost(self, number: int, how: str) -> None:
        there = [each for each in self.checkpoints() if not os.path.islink(each)]
        if there:
            path = Path(there[number % len(there)])
            if how == "removed":
                shutil.rmtree(path)
            elif how == "unmarked":
                (path / "COMPLETE").unlink(missing_ok=True)
            elif (path / "state/weights").exists():
                weights = (path / "state/weights").read_text()
                (path / "state/weights").write_text(f"damaged {weights.rpartition(' ')[2]}")

    @rule(place=st.sampled_from(PLACES), name=st.sampled_from(["run.json", "journal.jsonl"]))
    def record_is_lost(self, place: str, name: str) -> None:
        truth = self.truth(place)
        if truth is not None and Path(place, name).exists():
            Path(place, name).unlink()
            truth.named &= name != "run.json"
            truth.saved &= name != "journal.jsonl"

    @rule(place=st.sampled_from(PLACES))
    def user_pastes_the_fix(self, place: str) -> None:
        """The line that makes a run's files the run that they name."""
        truth = self.truth(place)
        if truth is None or truth.named or not paths.is_run(Path(place)):
            return
        try:
            open_run(request(place, "auto"))
        except ThreefoldError as refused:
            fix = refused.problems[0].fix
        else:
            raise AssertionError("a run without run.json")
        if fix.startswith("echo "):
            subprocess.run(["bash", "-c", fix], check=True)
            truth.named = True
            truth.origin = None


def _num_starts(run: Path) -> int:
    with suppress(OSError):
        return len(json.loads((run / "run.json").read_bytes())["starts"])
    return 0


REQUEST = Config()


def request(place: str, asked: str) -> Config:
    log = REQUEST.log.model_copy(update={"dir": place})
    return REQUEST.model_copy(
        update={
            "log": log,
            "checkpoint": REQUEST.checkpoint.model_copy(update={"resume": asked}),
        }
    )


def loading_as(train_command: Callable[..., int], named: str) -> None:
    """`threefold resume`, whose config is that of the folder which it finds."""

    def load_config(arguments: list[str]) -> LoadedConfig:
        asked = arguments[2] if len(arguments) > 1 else "auto"
        return LoadedConfig(request(str(Path(arguments[0]).parent), asked))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resume, "load_config", load_config)
        patch.setattr("threefold.run.start.train_command", train_command)
        options: dict[str, Any] = {
            "max_restarts": 0,
            "force": False,
            "accept_changes": False,
            "quiet": True,
        }
        resume.command(SimpleNamespace(args=[]), Path(named), **options)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing has to survive a power cut here, and a config or a page is a line."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Folders, "base", tmp_path, raising=False)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    monkeypatch.setattr(
        run_folder.config_text, "dump", lambda config: f"log: {{dir: {config.log.dir}}}\n"
    )
    monkeypatch.setattr("threefold.report.facts.gather", lambda folder, name: folder)
    monkeypatch.setattr(
        "threefold.report.document.report", lambda folders: b"<title>a - threefold</title>"
    )


def histories(number: int, *, derandomize: bool = True) -> None:
    run_state_machine_as_test(
        Folders,
        settings=settings(
            max_examples=number, stateful_step_count=25, deadline=None, derandomize=derandomize, database=None,
            phases=(Phase.generate,), suppress_health_check=list(HealthCheck), report_multiple_bugs=False,
        ),
    )  # fmt: skip


@pytest.mark.parametrize("number", [60, pytest.param(2000, marks=pytest.mark.long)])
def test_no_history_breaks_a_rule(number: int) -> None:
    histories(number)


def _replacing(seal: Callable[..., Checkpoint]) -> Callable[..., Checkpoint]:
    def replace(partial: Path, final: Path, *rest: Any) -> Checkpoint:
        if final.is_dir() and not final.is_symlink():
            shutil.rmtree(final)
        return seal(partial, final, *rest)

    return replace


# What is taken out of the code: (where, what it is then, where the histories begin). The rules must find each.
PLANTED: dict[str, tuple[Any, str, Any, str]] = {
    "a copy's starts are the run's": (Identity, "has", lambda self, author: author.run == self.id, "parted"),
    "what was left behind stands": (Identity, "stands", lambda self, author, step: True, "rewound"),
    "what was left behind is gone back to": (resume_choice, "_refuse_left", lambda *_: None, "rewound"),
    "a run needs no run.json": (resume_choice, "is_run", lambda folder: False, "run"),
    "any folder is taken": (run_folder, "_refuse_filled", lambda path, words: None, ""),
    "a save replaces what has its name": (
        checkpoint_folder, "seal_folder", _replacing(checkpoint_folder.seal_folder), "run",
    ),
    "all checkpoints are the run's": (CheckpointFolder, "own", CheckpointFolder.all, "parted"),
    "an origin is what lies at its place": (Origin, "is_same", lambda self, other: True, "replaced"),
    "an origin is named as it was spelled": (
        resume_choice, "_origin",
        lambda of: Origin(str(of.path), of.step, of.author and of.author.run, of.checksum), "run",
    ),
    "a save is not noted": (Journal, "note", lambda self, *_, **__: None, "run"),
    "resume takes any folder": (paths, "is_run", lambda folder: True, ""),
    "links are folders": (Path, "is_symlink", lambda self: False, "parted"),
    "damage is not looked for": (
        checkpoint_folder, "newest_undamaged", lambda found, damage: (next(iter(found), None), []), "run",
    ),
    "a page replaces any file": (report, "_refuse_other", lambda target: None, "run"),
    "an export takes any folder": (model_folder, "refuse_filled", lambda to: None, "run"),
}  # fmt: skip


# Found after many histories.
LONG = (
    "damage is not looked for",
    "any folder is taken",
    "links are folders",
    "a save replaces what has its name",
    "a save is not noted",
    "what was left behind stands",
    "what was left behind is gone back to",
    "all checkpoints are the run's",
    "a run needs no run.json",
    "a copy's starts are the run's",
)


@pytest.mark.parametrize(
    "planted",
    [pytest.param(name, marks=pytest.mark.long) if name in LONG else name for name in PLANTED],
)
def test_guard_that_is_taken_out_is_found(
    planted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    *guard, before = PLANTED[planted]
    monkeypatch.setattr(*guard)
    monkeypatch.setattr(Folders, "befores", (before,))
    # A rule is broken, or the command ends with an error that no user should see.
    with pytest.raises((AssertionError, OSError)):
        histories(2000)
