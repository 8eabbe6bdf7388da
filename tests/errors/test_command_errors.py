"""Wrong requests through the real command: exit code 2, one message in three parts, no traceback."""

from __future__ import annotations

import errno
import json
import os
import resource
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ranks import warm
from ranks.runs import cold_command, command, run
from threefold.errors import full_disk

LLAMA = {
    "model_type": "llama",
    "vocab_size": 257,
    "hidden_size": 36,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
}
ALONE = ("--mesh.dp", "1", "--mesh.device", "cpu", "--data.source", "corpus.txt")
# One rank of one: no server of forked ranks is started beside it, which would double the time of a test.
ONE_RANK = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
FROM_OUTSIDE = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC_", "HF_", "XDG_")
SIZES_FROM_OUTSIDE = ("DP_SIZE", "CP_SIZE", "TP_SIZE")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "corpus.txt").write_text("hello world " * 400)
    return tmp_path


def refused(folder: Path, *arguments: str, **variables: str) -> str:
    """What `threefold train` prints of a wrong request; nothing is found outside of `folder`, or written there."""
    environ = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(FROM_OUTSIDE) and name not in SIZES_FROM_OUTSIDE
    }
    environ |= {
        "HOME": str(folder),
        "XDG_CACHE_HOME": str(folder / "cache"),
        "HF_HUB_OFFLINE": "1",
        **variables,
    }
    return said(run(warm.threefold, folder, ("train", *arguments), environ))


def run_python(program: str, argument: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """A program run to its end, in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", program, argument],
        cwd=folder,
        env={**os.environ, "HOME": str(folder), "XDG_CACHE_HOME": str(folder / "cache")},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def said(done: subprocess.CompletedProcess[str]) -> str:
    """The error message of a command that was refused, in three parts."""
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    for message in done.stderr.removesuffix("\n").split("\n\n"):
        _, expected, fix = message.split("\n")
        assert expected.startswith("  expected: ") and fix.startswith("  fix: ")
    return done.stderr


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (("data", "prepare", "--data.source", "corpus.txt", "--to", ""), "nothing after --to"),
        (("report", "run", "--to="), "nothing after --to"),
        (("init", ""), "nothing after init"),
        (("explain", "run", ""), "nothing after run"),
    ],
)
def test_what_an_unset_variable_leaves_is_no_value(
    folder: Path, words: tuple[str, ...], what: str
) -> None:
    """As a path it would be the folder of the shell."""
    assert said(command(folder, *words)).startswith(
        f"{what}\n  expected: a value: an empty or unset variable of the shell has none\n"
    )
    assert [each.name for each in folder.iterdir() if each.name != "cache"] == ["corpus.txt"]


def test_what_may_be_empty_stays_so(folder: Path) -> None:
    program = "import sys; sys.exit(sys.argv[1:] != [''])"
    for marked in (["--"], ["--steps", "1"], []):
        done = command(folder, "referee", *marked, sys.executable, "-c", program, "")
        assert "nothing after" not in done.stderr and done.returncode == 3
    program = "import sys; sys.exit(sys.argv[1:] != ['--name='])"
    done = command(folder, "referee", sys.executable, "-c", program, "--name=")
    assert "nothing after" not in done.stderr and done.returncode == 3


@pytest.mark.parametrize(
    ("words", "what", "path"),
    [
        (("export",), "Missing argument 'run'.", "threefold export"),
        (("export", "x"), "Missing option '--to'.", "threefold export"),
        (("trian",), "No such command 'trian'.", "threefold"),
        (
            # A slip of the hand, whose divisors nobody waits for.
            ("plan", "x", "--gpus", str(10**13), "--gpu", "a40"),
            "Invalid value for '--gpus': Input should be less than or equal to 1048576",
            "threefold plan",
        ),
        (
            ("verify", "x", "--against", "y"),
            "Option '--against' requires 2 arguments.",
            "threefold verify",
        ),
        (
            ("sample", "x", "--tokens", "many"),
            "Invalid value for '--tokens': ",
            "threefold sample",
        ),
    ],
)
def test_wrong_use_of_a_command_is_said_in_three_parts(
    folder: Path, words: tuple[str, ...], what: str, path: str
) -> None:
    message = said(command(folder, *words))
    assert message.startswith(what)
    assert message.endswith(f"\n  fix: `{path} --help` shows its options\n")


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (("resume", "--train.steps", "5", "runs/a"), "runs/a is not a run"),
        (("eval", "--eval.source", "corpus.txt", "runs/a"), "runs/a is not a run"),
        (("resume", "runs/a", "--train.steps", "5"), "runs/a is not a run"),
        (("resume", "--train.steps", "5"), "Missing argument 'run'."),
        (("resume", "--train.steps=5"), "Missing argument 'run'."),
        (("plan", "--mesh.dp", "8", "gone.yaml"), "gone.yaml: No such file"),
        (("plan", "--model.name_or_path", "./gone"), "model.name_or_path = './gone': no such"),
        (("plan", "--mesh.dp", "8"), "no model is named"),
        (("plan", "--mesh.dp", "--gpus", "8"), "--mesh.dp has no value"),
        (("train", "--train.steps", "-1"), "train.steps = -1 is not accepted"),
        (("train", "--train.steps"), "--train.steps has no value"),
    ],
)
def test_keys_may_come_before_what_a_command_takes(
    folder: Path, words: tuple[str, ...], what: str
) -> None:
    assert said(command(folder, *words)).startswith(what)


def test_a_command_that_was_dropped_is_refused_with_what_replaces_it(folder: Path) -> None:
    message = said(command(folder, "flops", "my-model"))
    assert message == (
        "No such command 'flops'.\n"
        "  expected: threefold as its help describes it\n"
        "  fix: threefold plan MODEL --data.seq_len N --gpu h100-80gb, which prints them with the memory\n"
    )


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        (
            ("export", "runs/a", "--to", "b", "--format=dcp"),
            "torch.distributed.checkpoint reads a run's own files",
        ),
        (("submit", "skypilot", "a.yaml"), "sky jobs launch examples/skypilot.yaml"),
        (("submit", "ray"), "python examples/ray_job.py CONFIG.yaml"),
    ],
    ids=str,
)
def test_what_was_dropped_of_a_command_is_refused_alike(
    words: tuple[str, ...], fix: str, folder: Path
) -> None:
    assert f"\n  fix: {fix}" in said(command(folder, *words))


def test_help_about_a_section_and_a_key(folder: Path) -> None:
    section = command(folder, "train", "--help", "optimizer")
    assert (
        section.returncode == 0
        and "--optimizer.betas  list  (default: [0.9, 0.95])\n" in section.stdout
    )
    key = command(folder, "verify", "-h", "model.lora.r")
    assert key.stdout.startswith(
        "--model.lora.r  whole number  (default: 0)\n      rank of the adapters; "
    )
    message = said(command(folder, "train", "--help", "optimiser"))
    assert message.startswith(
        "no key is about 'optimiser'\n  expected: a section (model, data, "
    )
    assert message.endswith(
        ", section.key, or words of a key's meaning\n  fix: threefold train --help optimizer\n"
    )


def test_help_finds_keys_by_words_of_their_meaning(folder: Path) -> None:
    by_name = command(folder, "train", "--help", "tail").stdout
    assert by_name.startswith("--data.tail  carry | drop  (default: carry)\n")
    by_meaning = command(folder, "train", "-h", "adapters", "projections").stdout
    assert by_meaning.count("\n--") == 0 and by_meaning.startswith(
        "--model.lora.target_modules "
    )
    rates = command(folder, "train", "--help", "learning rate").stdout
    assert (
        "--optimizer.lr " in rates and "--optimizer.min_lr " in rates and "--data." not in rates
    )


def test_init_refuses_what_exists_and_what_cannot_be_made(folder: Path) -> None:
    (folder / "config.yaml").write_text("# mine\n")
    message = said(command(folder, "init", "--train.steps", "7"))
    assert message == (
        "config.yaml: File exists\n"
        "  expected: the name of a new file, in a folder that exists\n"
        "  fix: threefold init config-1.yaml --train.steps=7\n"
    )
    assert (folder / "config.yaml").read_text() == "# mine\n"
    assert said(command(folder, "init", "nowhere/a.yaml")).startswith(
        "nowhere/a.yaml: No such file or directory\n"
    )
    fixed = command(folder, "init", "config-1.yaml", "--train.steps=7")
    assert (
        fixed.stdout
        == "config-1.yaml: every key, 1 of them set\ntrain it: threefold train config-1.yaml\n"
    )
    assert said(command(folder, "init", "b.yaml", "--train.stepz", "7")).startswith(
        "unknown key train.stepz\n"
    )
    assert not (folder / "b.yaml").exists()


# --- before torch is loaded --------------------------------------------------------------------------------------


def test_unknown_key(folder: Path) -> None:
    # Cold, as users start it: a request that is wrong from its words alone needs no torch.
    message = said(cold_command(folder, "train", "--optimizer.lrr", "1e-3"))
    assert message.startswith("unknown key optimizer.lrr\n  expected: one of optimizer.{name, ")
    assert message.endswith("\n  fix: did you mean optimizer.lr?\n")


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (("train", "--quite"), "--quiet"),
        (("data", "show", "--firts", "3"), "--first"),
        (("data", "prepare", "--to", "store", "--worker=3"), "--workers"),
    ],
)
def test_misspelt_option_is_not_taken_for_a_key(
    words: tuple[str, ...], option: str, folder: Path
) -> None:
    assert said(command(folder, *words)).endswith(f"\n  fix: did you mean {option}?\n")
    key = said(command(folder, "train", "--source", "x"))  # near --force
    assert key.endswith("\n  fix: did you mean data.source?\n")


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_paths_that_a_config_names_are_looked_at_before_torch_is_imported(
    folder: Path, num_ranks: int
) -> None:
    """A wrong one costs a second, and not the ten in which ranks begin."""
    (folder / "file").touch()
    wrong = {
        "checkpoint.resume = nowhere does not exist": {"checkpoint": {"resume": "nowhere"}},
        "log.dir = file/run cannot be written: Not a directory": {"log": {"dir": "file/run"}},
        "nowhere.yaml: No such file or directory": {"eval": {"tasks": ["nowhere.yaml"]}},
        "data.source = 'nowhere' does not exist": {"data": {"source": "nowhere"}},
        "eval.source = '*.csv' matches no file": {"eval": {"source": "*.csv"}},
        "data.source = '~nobody/a' does not exist": {"data": {"source": "~nobody/a"}},
        "data.mixture.a: data.source = 'a.txt' does not exist": {
            "data": {"mixture": {"a": {"source": "a.txt", "weight": 1}}}
        },
    }
    program = """
import json, sys
sys.modules["torch"] = None  # what imports it fails
from threefold.errors import ThreefoldError
from threefold.run.start import train
num_ranks, *configs = json.loads(sys.argv[1])
for config in configs:
    try:
        train({"mesh": {"dp": num_ranks, "device": "cpu"}, **config})
    except ThreefoldError as error:
        print(error.problems[0].what)
"""
    done = run_python(program, json.dumps([num_ranks, *wrong.values()]), folder)
    assert done.stdout.splitlines() == list(wrong), done.stderr


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_folder_that_may_not_be_written_is_refused_before_anything_is_made(
    folder: Path,
) -> None:
    (folder / "locked").mkdir(mode=0o500)
    assert refused(folder, *ALONE, "--log.dir", "locked/run").startswith(
        "log.dir = locked/run cannot be written: Permission denied\n"
    )


def test_several_errors_are_said_at_once(folder: Path) -> None:
    """Of the file, the command line and the environment together."""
    (folder / "c.yaml").write_text("train:\n  stepz: 5\n  seed: -1\n")
    message = refused(folder, "c.yaml", "--optimizer.lr", "fast", TP_SIZE="two")
    assert [part.splitlines()[0] for part in message.split("\n\n")] == [
        "unknown key train.stepz",
        "mesh.tp = two is not accepted (environment TP_SIZE)",
        "train.seed = -1 is not accepted (c.yaml)",
        "optimizer.lr = fast is not accepted (command line)",
    ]


def test_key_without_a_value(folder: Path) -> None:
    assert refused(folder, "--train.steps") == (
        "--train.steps has no value\n  expected: exactly one value for each key\n  fix: --train.steps VALUE\n"
    )


def test_half_a_launcher(folder: Path) -> None:
    assert refused(folder, RANK="0", WORLD_SIZE="2") == (
        "RANK and WORLD_SIZE set, but MASTER_ADDR and MASTER_PORT not set\n"
        "  expected: all of RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT (set by torchrun), or none of them\n"
        "  fix: start with torchrun --nproc_per_node=N -m threefold ..., or: unset RANK WORLD_SIZE\n"
    )


# --- before anything is sent -------------------------------------------------------------------------------------


def test_world_size(folder: Path) -> None:
    """No rank waits for the others: the one that runs here alone ends at once."""
    launcher = {**ONE_RANK, "WORLD_SIZE": "3"}
    assert refused(folder, "--mesh.dp", "2", "--mesh.tp", "2", **launcher) == (
        "mesh.dp x mesh.cp x mesh.tp = 2 x 1 x 2 = 4, but 3 ranks were started\n"
        "  expected: world size = dp x cp x tp, so that every rank has a place on the mesh\n"
        "  fix: start 4 ranks, or set --mesh.dp 3 --mesh.cp 1 --mesh.tp 1\n"
    )


def test_missing_source(folder: Path) -> None:
    assert refused(folder, *ALONE, "--data.source", "nowhere") == (
        "data.source = 'nowhere' does not exist\n"
        f"  expected: stdlib, hf:ID, a prepared folder, or a file, folder or glob, relative to {folder}\n"
        "  fix: --data.source PATH   (or stdlib, or hf:ID for a dataset on the Hub)\n"
    )


def test_missing_source_of_the_evaluation_is_named_by_its_own_key(folder: Path) -> None:
    assert refused(folder, *ALONE, "--eval.source", "nowhere") == (
        "eval.source = 'nowhere' does not exist\n"
        f"  expected: stdlib, hf:ID, a prepared folder, or a file, folder or glob, relative to {folder}\n"
        "  fix: --eval.source PATH   (or stdlib, or hf:ID for a dataset on the Hub)\n"
    )


def test_line_that_does_not_parse(folder: Path) -> None:
    (folder / "rows.jsonl").write_text('{"text": "good"}\n{"text": \n')
    message = refused(folder, *ALONE, "--data.source", "rows.jsonl", **ONE_RANK)
    assert message.startswith(
        "rows.jsonl, line 2: not JSON: Expecting value at character 8\n  expected: one JSON object per line\n"
    )


def test_model_folder_without_weights(folder: Path) -> None:
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(
        json.dumps({**LLAMA, "architectures": ["LlamaForCausalLM"]})
    )
    model = (
        "--model.name_or_path",
        "model",
        "--data.tokenizer",
        "bytes",
        "--data.allow_other_tokenizer",
        "true",
    )
    assert refused(folder, *ALONE, *model, **ONE_RANK) == (
        "model.name_or_path = 'model' has a config but no weights\n"
        "  expected: *.safetensors files next to config.json\n"
        "  fix: point to a complete folder, or --model.config '{model_type: ...}' for random weights\n"
    )


def test_missing_resume_path(folder: Path) -> None:
    assert refused(folder, *ALONE, "--checkpoint.resume", "runs/gone", **ONE_RANK) == (
        "checkpoint.resume = runs/gone does not exist\n"
        "  expected: auto, never, or the folder of a run or of one of its checkpoints\n"
        "  fix: check the path; `ls RUN/checkpoints` lists what a run has kept\n"
    )
    assert sorted(path.name for path in folder.iterdir() if path.name != "cache") == [
        "corpus.txt"
    ]


def test_sizes_that_tp_cannot_divide(folder: Path) -> None:
    """Two ranks find it, one says it."""
    tp = ("--mesh.tp", "2", "--mesh.device", "cpu", "--data.source", "corpus.txt")
    assert refused(folder, *tp, "--model.config", json.dumps(LLAMA)) == (
        "mesh.tp = 2 cannot divide the 3 attention heads of 'llama'\n"
        "  expected: whole heads on every rank: one of 1, 3\n"
        "  fix: --mesh.tp 1\n"
        "\n"
        "mesh.tp = 2 cannot divide the 3 key-value heads of 'llama'\n"
        "  expected: whole heads on every rank: one of 1, 3\n"
        "  fix: --mesh.tp 1\n"
    )


@pytest.mark.parametrize(
    ("number", "name"),
    [
        (errno.EACCES, "a b/run"),
        (errno.EROFS, "run"),
        (errno.ENAMETOOLONG, "x" * 300),
        (errno.EISDIR, "audit.jsonl"),
    ],
)
def test_path_that_is_refused_is_said_in_three_parts(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    number: int,
    name: str,
) -> None:
    from threefold.commands import main

    def look(**_: object) -> None:
        raise OSError(number, os.strerror(number), name)

    monkeypatch.setattr(main, "_load", lambda _: None)
    monkeypatch.setattr(main, "app", look)
    monkeypatch.setattr("sys.argv", ["threefold", "--version"])
    with pytest.raises(SystemExit) as ended:
        main.run()
    assert ended.value.code == 2
    assert capsys.readouterr().err == (
        f"{name}: {os.strerror(number)}\n"
        "  expected: an existing path that this user may reach, read and write\n"
        f"  fix: another path, or what is missing:   namei -l {shlex.quote(name)}   shows each part of it\n"
    )


def test_run_that_cannot_be_written_is_forked_by_its_fix(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from threefold.commands import main

    monkeypatch.chdir(folder)
    (folder / "a run").mkdir()
    (folder / "a run/run.json").write_text("{}")
    monkeypatch.setattr(os, "access", lambda _, mode, **__: mode != os.W_OK)
    monkeypatch.setattr("sys.argv", ["threefold", "resume", "a run", "--train.steps", "8"])
    with pytest.raises(SystemExit) as ended:
        main.run()
    assert ended.value.code == 2
    assert capsys.readouterr().err == (
        "a run cannot be written\n"
        "  expected: a run that this user can continue in its own folder\n"
        "  fix: threefold train 'a run/config.yaml' --checkpoint.resume 'a run' --log.dir ANOTHER_FOLDER "
        "--train.steps 8   (forks it)\n"
    )


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_output_that_lacks_a_character_ends_no_command(encoding: str) -> None:
    """Of a folder's name, or of what a model wrote; a name that is no UTF-8 has halves of surrogate pairs."""
    said = "main.app = lambda **_: print('\\u2603 \\udcff')"
    code = (
        f"from threefold.commands import main; main._load = lambda _: None; {said}; main.run()"
    )
    environ = {**os.environ, "PYTHONIOENCODING": encoding}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, timeout=60, capture_output=True
    )
    snow = "\u2603" if encoding == "utf-8" else r"\u2603"
    assert (done.returncode, done.stdout.decode()) == (0, snow + r" \udcff" + "\n"), done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_full_disk_is_said_in_three_parts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from threefold.commands import main

    def write(**_: object) -> None:
        Path("/dev/full").write_text("x")

    monkeypatch.setattr(main, "_load", lambda _: None)
    monkeypatch.setattr(main, "app", write)
    monkeypatch.setattr("sys.argv", ["threefold", "--version"])
    with pytest.raises(SystemExit) as ended:
        main.run()
    said = capsys.readouterr().err.split("\n")
    assert ended.value.code == 1 and said[0].startswith("a disk is full: ")
    assert said[1].startswith("  expected: ") and said[2].startswith("  fix: free space")


@pytest.mark.parametrize(
    ("error", "ends"), [(EOFError, EOFError), (KeyboardInterrupt, SystemExit)]
)
def test_file_that_ends_too_early_is_not_taken_for_ctrl_c(
    monkeypatch: pytest.MonkeyPatch, error: type[BaseException], ends: type[BaseException]
) -> None:
    """typer answers both by the same error, and the command ended without a word."""
    from threefold import __main__ as command
    from threefold.commands import main

    def ended(**_: object) -> None:
        raise main.typer.Abort from error()

    monkeypatch.setattr(main, "_load", lambda _: None)
    monkeypatch.setattr(main, "app", ended)
    monkeypatch.setattr("sys.argv", ["threefold", "--version"])
    handled = signal.getsignal(signal.SIGINT)
    with pytest.raises(ends) as seen:
        command.main()
    signal.signal(signal.SIGINT, handled)
    assert getattr(seen.value, "code", 130) == 130


@pytest.mark.parametrize(("size", "full"), [(4_000, True), (10_000_000, False)])
def test_disk_that_is_full_for_weights_is_said(tmp_path: Path, size: int, full: bool) -> None:
    """safetensors raises an error of its own, which ended in a traceback."""
    import torch
    from safetensors.torch import save_file

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    place = tmp_path / ("weights" if full else "missing/weights")
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
        with pytest.raises(Exception) as failed:
            save_file({"weight": torch.zeros(10_000)}, place)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    told = full_disk(failed.value)
    assert (told is not None and str(told).startswith("a disk is full: ")) == full
