"""`threefold explain --ask`: a page of several causes is never sure by a line, and may be by a question."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from logs.cases import EXAMPLES
from threefold.commands.explain import explain_command
from threefold.explain.answer import data, text
from threefold.explain.ask import confirm
from threefold.explain.explain import Confidence, Diagnosis, Explanation, Status, explain
from threefold.explain.known import PAGES, Retry, known_errors

# Each only reads, and none is a shell.
PROGRAMS = {"python", "df", "nvidia-smi", "systemctl", "curl"}
NO_CUDA = "AssertionError: Torch not compiled with CUDA enabled\n"


def explanation(folder: Path, command: str, *answers: str) -> Explanation:
    """What a page of several causes says that asks this."""
    page = (PAGES / "no-cuda.md").read_text(encoding="utf-8")
    question = f"    ask: {command}\n" + "".join(f"      {answer}\n" for answer in answers)
    page = re.sub(
        r"^    ask: .+\n(?:      .+\n)+", lambda _: question, page, count=1, flags=re.MULTILINE
    )
    (folder / "no-cuda.md").write_text(page, encoding="utf-8")
    told = explain(NO_CUDA, pages=folder)
    assert told is not None and told.confidence is Confidence.LIKELY
    return told


@pytest.mark.parametrize(
    ("program", "said", "confidence"),
    [
        ("print(3)", "it is", Confidence.SURE),
        ("print(4)", "it is not", Confidence.LIKELY),
        ("print(5)", "python: its output does not settle it", Confidence.LIKELY),
        ("import sys; sys.exit('3')", "it is", Confidence.SURE),
    ],
)
def test_the_answer_settles_what_is_likely(
    tmp_path: Path, program: str, said: str, confidence: Confidence
) -> None:
    command = shlex.join(["python", "-c", program])
    told = confirm(explanation(tmp_path, command, "yes ^3 => it is", "no ^4 => it is not"))
    assert (told.asked, told.confidence) == (said, confidence)
    shown = text(Diagnosis(Status.FAILURE, told))
    assert f"asked here: {said}" in shown
    assert ("one of several causes: " in shown) == (confidence is not Confidence.SURE)
    assert data(Diagnosis(Status.FAILURE, told))["asked"] == said


def test_a_program_that_is_not_here_settles_nothing(tmp_path: Path) -> None:
    told = confirm(explanation(tmp_path, "no-such-program", "yes . => it is"))
    assert (told.asked, told.confidence) == (
        "no-such-program: it cannot be run here",
        Confidence.LIKELY,
    )


def test_no_module_of_the_folder_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch.py").write_text("open('ran', 'w').close()\n", encoding="utf-8")
    (tmp_path / "pip.py").write_text("open('ran', 'w').close()\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    for name in ("no-cuda", "package-versions"):
        told = explain(f"torch\n{EXAMPLES[name]}\n")
        assert told is not None and told.known.name == name
        assert confirm(told).asked is not None
    assert not (tmp_path / "ran").exists()


def test_a_symptom_is_not_made_sure(tmp_path: Path) -> None:
    likely = explanation(tmp_path, "python -c 'print(3)'", "yes ^3 => it is")
    symptom = replace(likely, confidence=Confidence.SYMPTOM)
    told = confirm(symptom)
    assert (told.asked, told.confidence) == ("it is", Confidence.SYMPTOM)


def test_a_page_without_a_question_says_so(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text("torch.OutOfMemoryError: CUDA out of memory.\n")
    told = json.loads(explain_command([tmp_path / "a.log"], ask=True, as_json=True)[0])
    assert (told["asked"], told["confidence"]) == ("no command settles this by itself", "sure")


def test_questions_only_read_and_are_no_shell() -> None:
    questions = [one.question for one in known_errors().values() if one.question is not None]
    assert len(questions) >= 10
    assert all(one.check for one in known_errors().values())
    for question in questions:
        assert question.command[0] in PROGRAMS
        assert {right for right, _, _ in question.answers} == {True, False}, question.command
        arguments = question.command[1:]
        assert question.command[0] == "python" or not re.search(
            r"[;|&<>$`]", " ".join(arguments)
        ), arguments


@pytest.mark.parametrize(
    ("page", "output", "right"),
    [
        ("no-cuda", "2.12.0+cpu None 0\n", True),
        ("no-cuda", "2.12.0+cu130 13.0 0\n", True),
        ("no-cuda", "2.12.0+cu130 13.0 8\n", False),
        ("shared-memory", "shm 65536 12 65524 1% /dev/shm\n", True),
        ("shared-memory", "tmpfs 16000000 15900000 100000 99% /dev/shm\n", True),
        ("shared-memory", "tmpfs 16000000 0 16000000 0% /dev/shm\n", False),
        ("open-files", "1024 1048576\n", True),
        ("open-files", "1048576 1048576\n", False),
        ("locked-memory", "65536 65536\n", True),
        ("locked-memory", "-1 -1\n", False),
        ("no-compiler", "None None None\n", True),
        ("no-compiler", "/usr/bin/g++ None /usr/local/cuda/bin/nvcc\n", False),
        ("no-kernel-image", "sm_121 sm_80 sm_90 sm_100\n", True),
        ("no-kernel-image", "sm_90 sm_80 sm_90 sm_100\n", False),
        (
            "peer-access",
            " GPU0 X CNS\nLegend:\n OK = Status Ok\n CNS = Chipset not supported\n",
            True,
        ),
        (
            "peer-access",
            " GPU0 X OK\nLegend:\n OK = Status Ok\n CNS = Chipset not supported\n",
            False,
        ),
        ("fabric-manager", "inactive\n", True),
        ("fabric-manager", "active\n", False),
        ("hub-unreachable", "", True),
        ("hub-unreachable", "HTTP/2 200\n", False),
    ],
)
def test_question_reads_what_its_command_prints(page: str, output: str, right: bool) -> None:
    question = known_errors()[page].question
    assert question is not None
    assert next(one for one, sign, _ in question.answers if sign.search(output)) is right


def test_a_page_of_several_causes_is_never_sure_by_a_line() -> None:
    for known in known_errors().values():
        told = explain(f"torch\n{EXAMPLES[known.name]}\n")
        assert (
            told is None or not told.known.several or told.confidence is not Confidence.SURE
        ), known.name


def test_what_a_machine_did_is_tried_on_another() -> None:
    known = known_errors()
    assert {known[name].retry for name in ("gpu-fault", "node-failure", "container-gpu")} == {
        Retry.OTHER_NODE
    }
    assert {known[name].retry for name in ("preempted", "time-limit", "hub-rate-limit")} == {
        Retry.YES
    }
    assert {known[name].retry for name in ("out-of-memory", "own-error", "disk-full")} == {
        Retry.NO
    }
