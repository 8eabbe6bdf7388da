"""The whole texts of the errors about a request: what is wrong, what was expected, and the text to paste."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, PretrainedConfig

from architectures import config_of
from threefold.checkpoint.checkpoint_folder import CheckpointFolder, find
from threefold.checkpoint.lineage import Identity
from threefold.commands.arguments import split
from threefold.config import loading as config_loading
from threefold.config.schema import Config, MeshConfig, every_key
from threefold.data.tokens import ByteTokenizer
from threefold.errors import (
    EXIT_WRONG_REQUEST,
    CheckpointError,
    ConfigError,
    Problem,
    RunError,
    ThreefoldError,
)
from threefold.mesh import environment
from threefold.mesh.topology import Topology, resolve
from threefold.model.load import outline, read_config
from threefold.model.reduced import reduced
from threefold.model.tensor_parallel.plan import plan_problems
from threefold.run.folder import open_run
from threefold.run.request import check
from threefold.run.sources import _named
from threefold.run.start import train

SECTIONS = ", ".join(Config.model_fields)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def text(act: Callable[[], Any], kind: type[ThreefoldError] = ConfigError) -> str:
    """What the command prints of the error that `act` raises, which asks for exit code 2."""
    with pytest.raises(kind) as caught:
        act()
    assert caught.value.exit_code == EXIT_WRONG_REQUEST
    return str(caught.value)


def problem(what: str, expected: str, fix: str) -> str:
    return f"{what}\n  expected: {expected}\n  fix: {fix}"


def test_problems_stand_below_one_another() -> None:
    """The one place where the form itself is spelled out; below, `problem` makes it."""
    assert text(lambda: split(["--train.steps", "--log.dir"])) == (
        "--train.steps has no value\n"
        "  expected: exactly one value for each key\n"
        "  fix: --train.steps VALUE\n"
        "\n"
        "--log.dir has no value\n"
        "  expected: exactly one value for each key\n"
        "  fix: --log.dir VALUE"
    )


# --- the command line --------------------------------------------------------------------------------------------


def test_unknown_option() -> None:
    assert text(lambda: split(["-v"])) == problem(
        "unknown option -v", "--section.key value", "`threefold train --help` shows the options"
    )


def test_second_config_file() -> None:
    assert text(lambda: split(["a.yaml", "--optimizer.betas", "[0.9,", "0.95]"])) == problem(
        "a second config file: 0.95]",
        "one config file (a.yaml) and --section.key value pairs",
        "a value comes after its key: --section.key 0.95]",
    )


# --- the config --------------------------------------------------------------------------------------------------


def loading(*overrides: tuple[str, str], **environ: str) -> Callable[[], Any]:
    return lambda: config_loading.load(None, overrides, environ=environ)


def loading_file(content: str) -> Callable[[], Any]:
    Path("c.yaml").write_text(content)
    return lambda: config_loading.load("c.yaml", environ={})


def test_missing_config_file() -> None:
    assert text(lambda: config_loading.load("c.yaml", environ={})) == problem(
        "c.yaml: No such file or directory", "a readable YAML file", "check the path"
    )


def test_config_file_of_another_encoding() -> None:
    Path("c.yaml").write_bytes(b"log: {dir: caf\xe9}")
    assert text(lambda: config_loading.load("c.yaml", environ={})) == problem(
        "c.yaml: not UTF-8 text", "a readable YAML file", "save it as UTF-8"
    )


def test_config_file_that_is_no_yaml() -> None:
    assert text(loading_file("train:\n  steps: 1\n  steps: 2\n")) == problem(
        'c.yaml, line 3: found duplicate key "steps" with value "2" (original value: "1")',
        "YAML 1.2",
        "correct the line",
    )


@pytest.mark.parametrize(
    ("path", "fix"),
    [
        ("rows.jsonl", "instead: --data.source rows.jsonl   (a config is a .yaml)"),
        ("book.txt", "instead: --data.source book.txt   (a config is a .yaml)"),
        ("words", "instead: --data.source words   (a config is a .yaml)"),
        ("a folder", "instead: --data.source 'a folder'   (a config is a .yaml)"),
        ("model", "instead: --model.name_or_path model   (a config is a .yaml)"),
        (
            "run",
            "run/config.yaml   (its config; to resume it: threefold resume run)",
        ),
        ("gone.txt", "check the path"),
    ],
)
def test_what_was_meant_by_a_path_that_is_no_config(path: str, fix: str) -> None:
    Path("rows.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n')
    Path("book.txt").write_text("one: two: three\nfour\n")
    Path("words").write_text("only words")
    for folder, file in (("a folder", "a.txt"), ("model", "config.json"), ("run", "run.json")):
        Path(folder).mkdir(exist_ok=True)
        Path(folder, file).write_text("{}")
    assert text(lambda: config_loading.load(path, environ={})).endswith(f"\n  fix: {fix}")


def test_config_file_that_is_a_list() -> None:
    assert text(loading_file("- steps: 5\n")) == problem(
        "c.yaml must contain sections such as train:",
        "sections with keys: `train:` and below it `  steps: 100`",
        f"the sections are {SECTIONS}",
    )


def test_section_that_is_a_value() -> None:
    assert text(loading_file("train: 5\n")) == problem(
        "c.yaml: train = 5 is not a section",
        "keys below the section's name",
        f"the sections are {SECTIONS}",
    )


@pytest.mark.parametrize(
    ("lines", "fix"),
    [
        ("data: {eval_share: 5%}", "--data.eval_share 0.05"),
        ("model: {lora: true}", "--model.lora.r 16"),
        ("model: {lora: false}", "leave model.lora out"),
    ],
)
def test_fix_does_what_was_meant(lines: str, fix: str) -> None:
    """Not the default: it evaluates nothing, and trains all weights."""
    assert text(loading_file(lines)).endswith(f"\n  fix: {fix}")


def test_value_that_is_no_yaml() -> None:
    assert text(loading(("data.source", "*.txt"))) == problem(
        "--data.source: found undefined alias '.txt'",
        "YAML 1.2",
        """text needs quotes inside the shell's quotes: '"*.txt"'""",
    )


def test_unknown_key() -> None:
    assert text(loading(("train.stepz", "5"))) == problem(
        "unknown key train.stepz",
        f"one of train.{{{', '.join(Config().train.model_dump())}}}",
        "did you mean train.steps?",
    )


def test_unknown_section() -> None:
    assert text(loading(("lr", "5"), ("zzz.qqq", "5"))) == "\n\n".join(
        [
            problem(
                "unknown key lr",
                f"a key of the sections {SECTIONS}",
                "did you mean optimizer.lr?",
            ),
            problem(
                "unknown key zzz.qqq",
                f"a key of the sections {SECTIONS}",
                "`threefold train --print-config` lists every key",
            ),
        ]
    )


@pytest.mark.parametrize(
    ("config", "lacking", "fix"),
    [
        (
            {},
            "eval.source or data.eval_share",
            "--data.eval_share 0.01   (or --eval.source FILE_OR_FOLDER, or",
        ),
        (
            {"eval": {"source": "a"}, "log": {"sample_tokens": 0}},
            "log.sample_tokens, which is 0",
            "--log.sample_tokens 64   (or",
        ),
    ],
)
def test_samples_are_refused_where_none_is_written(
    config: dict[str, Any], lacking: str, fix: str
) -> None:
    config = {**config, "eval": {**config.get("eval", {}), "sample": ["hi"]}}
    assert text(lambda: config_loading.validate(config)) == problem(
        f"eval.sample = [hi] has no effect without {lacking}",
        "an evaluation, after which tokens are generated",
        f"{fix} leave eval.sample out)",
    )


@pytest.mark.parametrize(
    ("config", "what", "expected", "fix"),
    [
        (
            {"dpo": {"beta": 0.2}},
            "dpo.beta has no effect with train.objective = next_token",
            "train.objective dpo",
            "--train.objective dpo   (or leave dpo.beta out)",
        ),
        (
            {"train": {"objective": "dpo"}, "data": {"format": "chat"}},
            "train.objective = dpo with data.format = chat",
            "rows with a chosen and a rejected answer",
            "--data.format preference",
        ),
        (
            {"train": {"objective": "dpo"}, "dpo": {"loss": "ipo", "label_smoothing": 0.1}},
            "dpo.label_smoothing = 0.1 has no effect with dpo.loss = ipo",
            "dpo.loss sigmoid",
            "--dpo.loss sigmoid   (or leave dpo.label_smoothing out)",
        ),
        (
            {"train": {"objective": "dpo", "label_smoothing": 0.1}},
            "train.label_smoothing = 0.1 has no effect with train.objective = dpo",
            "train.objective next_token: the loss of pairs is computed from log-probabilities",
            "leave train.label_smoothing out, or for swapped answers --dpo.label_smoothing 0.1",
        ),
        (
            {"audit": {"rows": True, "every": 0}},
            "audit.rows = true with audit.every = 0",
            "an audit: its record says which rows a step has read",
            "--audit.every 10   (or leave audit.rows out)",
        ),
        (
            {"train": {"objective": "dpo", "fused_loss": True}},
            "train.fused_loss = True has no effect with train.objective = dpo",
            "train.objective next_token: the loss of pairs is computed from log-probabilities",
            "leave train.fused_loss out",
        ),
    ],
)
def test_what_does_not_go_with_the_objective(
    config: dict[str, Any], what: str, expected: str, fix: str
) -> None:
    assert text(lambda: config_loading.validate(config)) == problem(what, expected, fix)


@pytest.mark.parametrize("key", every_key())
def test_what_is_expected_is_said_in_our_words(key: str) -> None:
    numbers, rest = (
        [-1, 3.7, 10**30, math.nan, True, None],
        ["x!", "", [], [3], [None], ["a", 3], [[1]], {}, {"a": {"b": 1}}],
    )
    for value in [*numbers, *rest]:
        sections: Any = value
        for part in reversed(key.split(".")):
            sections = {part: sections}
        try:
            config_loading.validate(sections)
        except ConfigError as error:
            assert not any(
                re.search(r"\b[Ii]nput\b|type=", each.expected) for each in error.problems
            ), value


def test_a_list_with_one_wrong_entry_is_set_whole() -> None:
    found = text(lambda: config_loading.validate({"data": {"source": ["a.txt", 1, 2]}}))
    assert (
        found.count("""fix: --data.source '[a.txt, "1", "2"]'   (quotes make it text)""") == 2
    )
    found = text(
        lambda: config_loading.validate({"data": {"fields": {"text": 3, "role": "by"}}})
    )
    assert """fix: --data.fields '{text: "3", role: by}'   (quotes make it text)""" in found
    found = text(lambda: config_loading.validate({"data": {"source": ["a.txt", None]}}))
    assert "None" not in found and "fix: --data.source stdlib   (the default)" in found


def test_grouping_by_length_is_refused_where_rows_are_full_mixed_or_in_order() -> None:
    data = {
        "group_by_length": True,
        "shuffle": False,
        "mixture": {"a": {"source": "a", "weight": 1}},
    }
    assert text(lambda: config_loading.validate({"data": data})) == "\n\n".join(
        [
            problem(
                "data.group_by_length = true has no effect with data.packing = best_fit or concat",
                "data.packing none: rows of the others are full and of equal length",
                "--data.packing none   (or leave data.group_by_length out)",
            ),
            problem(
                "data.group_by_length = true with data.mixture",
                "one source: batches of similar length would not have the mixture's shares",
                "leave data.group_by_length out",
            ),
            problem(
                "data.group_by_length = true with data.shuffle = false",
                "rows that may be reordered: without the shuffle they keep their order",
                "--data.shuffle true   (or leave data.group_by_length out)",
            ),
        ]
    )


@pytest.mark.parametrize(
    ("key", "value", "shown", "expected", "fix"),
    [
        ("train.steps", "1.5", "1.5", "a whole number", "leave train.steps out"),
        ("train.steps", "0", "0", "a number greater than 0", "leave train.steps out"),
        ("train.global_batch", "'1'", '"1"', "a whole number", "--train.global_batch 1"),
        ("train.seed", "-1", "-1", "a number of at least 0", "--train.seed 0   (the default)"),
        (
            "train.seed",
            f"{2**63}",
            f"{2**63}",
            "a number below 9.22337e+18",
            "--train.seed 0   (the default)",
        ),
        ("train.compile", "yes", "yes", "true or false, or auto", "--train.compile true"),
        (
            "train.fused_loss",
            "liger",
            "liger",
            "true or false, or auto",
            "--train.fused_loss auto   (the default)",
        ),
        (
            "train.loss_chunk_tokens",
            "x",
            "x",
            "a whole number, or auto",
            "--train.loss_chunk_tokens auto   (the default)",
        ),
        ("optimizer.ema", "7", "7", "a number below 1", "leave optimizer.ema out"),
        (
            "train.micro_batch",
            "none",
            "none",
            "a whole number greater than 0, or auto",
            "--train.micro_batch auto   (the default)",
        ),
        (
            "optimizer.lr",
            "fast",
            "fast",
            "a number greater than 0, or auto",
            "--optimizer.lr auto   (the default)",
        ),
        (
            "optimizer.lr",
            ".inf",
            ".inf",
            "a number greater than 0, or auto",
            "--optimizer.lr auto   (the default)",
        ),
        (
            "optimizer.schedule",
            "cosin",
            "cosin",
            "one of 'constant', 'linear', 'cosine', 'wsd' or 'inverse_sqrt'",
            "--optimizer.schedule cosine",
        ),
        (
            "optimizer.betas",
            "0.9",
            "0.9",
            "two numbers, both at least 0 and below 1",
            "--optimizer.betas '[0.9, 0.95]'   (the default)",
        ),
        (
            "mesh.tp",
            "two",
            "two",
            "a whole number greater than 0, or auto",
            "leave mesh.tp out",
        ),
        (
            "model.config",
            "llama",
            "llama",
            "a mapping: {key: value}",
            "--model.config '{model_type: llama}'",
        ),
        (
            "model.revision",
            "1234567",
            "1234567",
            "text",
            """--model.revision '"1234567"'   (quotes make it text)""",
        ),
        ("data.source", "null", "null", "text", "--data.source stdlib   (the default)"),
        ("data.source", "{a: b}", "{a: b}", "text", "--data.source stdlib   (the default)"),
        ("eval.sample", "Once", "Once", "a list", "--eval.sample '[Once]'"),
        ("data.source", "[]", "[]", "at least 1 entry", "--data.source stdlib   (the default)"),
        ("eval.source", "5", "5", "text", """--eval.source '"5"'   (quotes make it text)"""),
    ],
)
def test_value_of_another_kind(
    key: str, value: str, shown: str, expected: str, fix: str
) -> None:
    what = f"{key} = {shown} is not accepted (command line)"
    assert text(loading((key, value))) == problem(what, expected, fix)


def test_value_of_the_environment_is_mended_there() -> None:
    assert text(loading(DP_SIZE="two")) == problem(
        "mesh.dp = two is not accepted (environment DP_SIZE)",
        "a whole number greater than 0, or auto",
        "unset DP_SIZE",
    )


def test_contradictions() -> None:
    values: dict[str, Any] = {
        "model": {"name_or_path": "x", "config": {}},
        "data": {"num_workers": 1000},
        "train": {"steps": 5, "epochs": 10**20},
        "eval": {"every": 5},
        "optimizer": {"betas": [0.9, 1.0], "lr": 0.001, "min_lr": 0.01},
    }
    assert text(lambda: config_loading.validate(values)) == "\n\n".join(
        [
            problem(
                "model.name_or_path and model.config are both set",
                "one of them: trained weights by name, or random weights by their sizes",
                "leave one of them out",
            ),
            problem(
                f"train.steps = 5 and train.epochs = {10**20} are both set",
                "one measure of how long to train",
                "leave one of them out",
            ),
            problem(
                f"train.epochs = {10**20} is more than 1,000,000",
                "passes that end and whose rows a run can count",
                "--train.epochs 3",
            ),
            problem(
                "data.num_workers = 1000 is more than 64",
                "processes per rank, which share its host's cores and memory: a few keep a rank busy",
                "--data.num_workers 4",
            ),
            problem(
                "eval.every = 5 has no effect without eval.source or data.eval_share",
                "held-out data to evaluate on",
                "--data.eval_share 0.01   (or --eval.source FILE_OR_FOLDER, or leave eval.every out)",
            ),
            problem(
                "optimizer.betas[1] = 1.0 is not a decay",
                "0 <= beta < 1",
                "--optimizer.betas '[0.9, 0.95]'",
            ),
            problem(
                "optimizer.min_lr = 0.01 is above optimizer.lr = 0.001",
                "a schedule that falls from lr to min_lr",
                "--optimizer.min_lr 0   (or raise optimizer.lr above 0.01)",
            ),
        ]
    )


def test_lowest_rate_above_the_automatic_one() -> None:
    values: dict[str, Any] = {"model": {"name_or_path": "x"}, "optimizer": {"min_lr": 1e-3}}
    assert text(lambda: config_loading.validate(values)) == problem(
        "optimizer.min_lr = 0.001 is above optimizer.lr = 2e-05 (auto: the weights are pretrained)",
        "a schedule that falls from lr to min_lr",
        "--optimizer.min_lr 0   (or raise optimizer.lr above 0.001)",
    )


@pytest.mark.parametrize(
    ("given", "lacking"),
    [({}, "model.name_or_path"), ({"name_or_path": "x"}, "data.tokenizer")],
)
def test_allowing_another_tokenizer_without_effect(given: dict[str, Any], lacking: str) -> None:
    values = {"model": given, "data": {"allow_other_tokenizer": True}}
    assert text(lambda: config_loading.validate(values)) == problem(
        f"data.allow_other_tokenizer = true has no effect without {lacking}",
        "pretrained weights, and a tokenizer other than their own",
        "leave data.allow_other_tokenizer out",
    )


# --- the mesh ----------------------------------------------------------------------------------------------------


def resolving(
    *, launched: int | None = None, devices: int | None = None, **keys: Any
) -> Callable[[], Any]:
    return lambda: resolve(
        MeshConfig(**keys), launched_world_size=launched, num_devices=devices
    )


def test_world_size() -> None:
    assert text(resolving(dp=2, cp=2, tp=1, launched=8)) == problem(
        "mesh.dp x mesh.cp x mesh.tp = 2 x 2 x 1 = 4, but 8 ranks were started",
        "world size = dp x cp x tp, so that every rank has a place on the mesh",
        "start 4 ranks, or set --mesh.dp 2 --mesh.cp 2 --mesh.tp 2",
    )


def test_axis_that_cannot_be_filled() -> None:
    assert text(resolving(dp="auto", tp=3, devices=4)) == problem(
        "mesh.dp = auto cannot be filled: 4 ranks are not a multiple of 3",
        "world size = dp x cp x tp",
        "--mesh.dp 2 --mesh.cp 1 --mesh.tp 2",
    )


def test_two_open_axes() -> None:
    assert text(resolving(dp="auto", tp="auto")) == problem(
        "mesh.dp = auto and mesh.tp = auto leave more than one axis open",
        "at most one axis on auto, filled from the number of ranks and the others",
        "--mesh.tp 1",
    )


def test_dp_shard_that_does_not_divide() -> None:
    assert text(resolving(dp=4, dp_shard=3)) == problem(
        "mesh.dp_shard = 3 does not divide mesh.dp = 4",
        "dp = dp_replicate x dp_shard: 1 (DDP), dp (FSDP), or a divisor of dp between (HSDP)",
        "--mesh.dp_shard 4   (or 1)",
    )


# --- the launcher ------------------------------------------------------------------------------------------------


def test_half_set_launcher() -> None:
    assert text(lambda: environment.read({"RANK": "0", "WORLD_SIZE": "2"})) == problem(
        "RANK and WORLD_SIZE set, but MASTER_ADDR and MASTER_PORT not set",
        "all of RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT (set by torchrun), or none of them",
        "start with torchrun --nproc_per_node=N -m threefold ..., or: unset RANK WORLD_SIZE",
    )


def test_launcher_of_words() -> None:
    environ = {"RANK": "zero", "WORLD_SIZE": "2", "MASTER_ADDR": "host", "MASTER_PORT": "1"}
    assert text(lambda: environment.read(environ)) == problem(
        "RANK = 'zero' is not a number",
        "a whole number, as a launcher sets it",
        "unset RANK, or start with torchrun",
    )


def test_rank_outside_of_the_world() -> None:
    environ = {"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "host", "MASTER_PORT": "1"}
    assert text(lambda: environment.read(environ)) == problem(
        "RANK = 2 with WORLD_SIZE = 2",
        "0 <= RANK < WORLD_SIZE",
        "start with torchrun --nproc_per_node=N -m threefold ...",
    )


# --- the run's folder and its checkpoints ------------------------------------------------------------------------


def opening(resume: str = "auto") -> Callable[[], Any]:
    config = config_loading.validate({"log": {"dir": "run"}, "checkpoint": {"resume": resume}})
    return lambda: open_run(config)


def test_folder_that_holds_a_run() -> None:
    Path("run").mkdir()
    Identity.new().write(Path("run"))
    Path("run/metrics.jsonl").touch()
    assert text(opening("never")) == problem(
        "log.dir = run holds a run, and checkpoint.resume is never",
        "an empty folder, so that no earlier run is mixed into this one",
        "--log.dir ANOTHER_FOLDER   (or --checkpoint.resume auto to resume it)",
    )


def test_folder_that_cannot_be_written() -> None:
    # The superuser of a test machine may write everywhere, but not below a file.
    Path("run").touch()
    assert text(opening()) == problem(
        "log.dir = run cannot be written: Not a directory",
        "a folder that this user can write, with room for checkpoints",
        "--log.dir ANOTHER_FOLDER",
    )


def test_missing_resume_path() -> None:
    assert text(opening("gone/step-00000005"), CheckpointError) == problem(
        "checkpoint.resume = gone/step-00000005 does not exist",
        "auto, never, or the folder of a run or of one of its checkpoints",
        "check the path; `ls RUN/checkpoints` lists what a run has kept",
    )


def test_missing_checkpoint_of_a_run_that_has_kept_others() -> None:
    checkpoints = CheckpointFolder(Path("a run"))
    for step in (10, 15):
        checkpoints.begin(step)
        checkpoints.commit(step, {})
    gone = checkpoints.at(5).path
    for act in (opening(str(gone)), lambda: find(gone)):
        fix = "check the path; its run has kept 'a run/checkpoints/step-00000010', 'a run/checkpoints/step-00000015'"
        assert text(act, CheckpointError).endswith(f"  fix: {fix}")


@pytest.mark.parametrize(
    "act", [opening("empty"), lambda: find(Path("empty"))], ids=["resume", "find"]
)
def test_folder_without_a_checkpoint(act: Callable[[], Any]) -> None:
    Path("empty").mkdir()
    assert text(act, CheckpointError) == problem(
        "no complete checkpoint in empty",
        "the folder of a run, or of one of its checkpoints (checkpoints/step-...)",
        "check the path; `ls RUN/checkpoints` lists what a run has kept",
    )


def test_manifest_that_cannot_be_read() -> None:
    checkpoints = CheckpointFolder(Path("run"))
    checkpoints.begin(5)
    saved = checkpoints.commit(5, {})
    manifest = saved.path / "manifest.json"
    manifest.unlink()
    assert text(saved.manifest, CheckpointError) == problem(
        f"{manifest} cannot be read: [Errno 2] No such file or directory: '{manifest}'",
        "the manifest that was written with the checkpoint",
        "remove run/checkpoints/step-00000005, and resume from an older checkpoint",
    )


# --- the model, the batch and the mesh together ------------------------------------------------------------------


def architecture(model_type: str = "llama", **sizes: Any) -> PretrainedConfig:
    values = {
        "vocab_size": 257,
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
    }
    if model_type == "llama":
        values |= {
            "intermediate_size": 64,
            "num_key_value_heads": 2,
            "max_position_embeddings": 64,
        }
    return AutoConfig.for_model(model_type, **{**values, **sizes})


def checking(
    topology: Topology, model: PretrainedConfig | None = None, **train: Any
) -> Callable[[], Any]:
    config = config_loading.validate({"data": {"seq_len": 32}, "train": train})
    return lambda: check(
        config, model or architecture(), ByteTokenizer(), topology, device="cpu"
    )


HEADS = problem(
    "mesh.tp = 3 cannot divide the 4 attention heads of 'llama'",
    "whole heads on every rank: one of 1, 2",
    "--mesh.tp 2",
)
KV_HEADS = problem(
    "mesh.tp = 3 cannot divide the 2 key-value heads of 'llama'",
    "whole heads on every rank: one of 1, 2",
    "--mesh.tp 2",
)


def test_what_fits_is_not_refused() -> None:
    checking(Topology())()
    checking(Topology(dp_replicate=2, dp_shard=2, cp=2, tp=2), micro_batch=2)()


def test_config_that_a_checkpoint_could_not_keep() -> None:
    model = architecture("moshi", audio_vocab_size=None, max_position_embeddings=64)
    assert text(checking(Topology(), model)) == problem(
        "the config of 'moshi' is not the same when read back: audio_vocab_size = None becomes 2048",
        "a config that a checkpoint can keep: the model of the run could not be resumed or exported",
        "set the key to the value that it becomes, in model.config or in config.json",
    )


@pytest.mark.parametrize(
    ("model_type", "why"),
    [
        ("glm4_moe", "but 'glm4_moe' has no routers' loss in transformers"),
        ("afmoe", "but 'afmoe' has no routers' loss in transformers"),
        ("hunyuan_v1_moe", "but 'hunyuan_v1_moe' has no routers' loss in transformers"),
        ("doge", "but the routers' loss of 'doge' is a different one"),
    ],
)
def test_routers_without_the_loss_that_is_asked_for(model_type: str, why: str) -> None:
    model = reduced(config_of(model_type))
    model.output_router_logits, model.vocab_size = True, 257
    assert text(checking(Topology(), model)) == problem(
        f"model.config has output_router_logits = true, {why}",
        "the loss of Switch Transformer, as for Mixtral: its routers would be trained without it, or with another",
        "output_router_logits: false   (in model.config, or in the model's config.json)",
    )


@pytest.mark.parametrize("model_type", ["jetmoe", "mixtral", "dbrx", "deepseek_v4", "flint"])
def test_routers_with_the_loss_that_is_asked_for(model_type: str) -> None:
    model = reduced(config_of(model_type))
    model.output_router_logits, model.vocab_size = True, 257
    checking(Topology(), model)()


@pytest.mark.parametrize(("dp", "fix"), [(3, "18   (or 15)"), (32, "32")])
def test_global_batch_by_dp(dp: int, fix: str) -> None:
    assert text(checking(Topology(dp_replicate=dp))) == problem(
        f"train.global_batch = 16 cannot be divided equally among {dp} dp ranks",
        f"a multiple of mesh.dp ({dp}), so that every dp rank makes the same number of steps",
        f"--train.global_batch {fix}",
    )


@pytest.mark.parametrize(("micro_batch", "fix"), [(3, 2), (9, 8)])
def test_micro_batch(micro_batch: int, fix: int) -> None:
    assert text(checking(Topology(dp_shard=2), micro_batch=micro_batch)) == problem(
        f"train.micro_batch = {micro_batch} does not divide the 8 rows of a dp rank",
        "micro-batches of equal size",
        f"--train.micro_batch {fix}   (or auto)",
    )


def test_sequence_by_cp() -> None:
    assert text(checking(Topology(cp=3))) == problem(
        "data.seq_len = 32 cannot be split over 3 cp ranks",
        "a multiple of 2 x mesh.cp (6): each rank takes a chunk of the head and one of the tail",
        "--data.seq_len 36",
    )


def test_heads_by_tp() -> None:
    assert text(checking(Topology(tp=3))) == f"{HEADS}\n\n{KV_HEADS}"


def test_key_value_heads_by_tp() -> None:
    assert text(checking(Topology(tp=4))) == problem(
        "mesh.tp = 4 cannot divide the 2 key-value heads of 'llama'",
        "whole heads on every rank: one of 1, 2",
        "--mesh.tp 2",
    )


def test_size_to_paste_divides_heads_of_both_kinds() -> None:
    """8 heads alone could be split over 4 ranks, 2 key-value heads not."""
    model = architecture(num_attention_heads=8)
    found = plan_problems(model, 5, plan=outline(model).tp_plan or {})
    assert [str(one) for one in found] == [
        problem(
            f"mesh.tp = 5 cannot divide the {heads} of 'llama'",
            "whole heads on every rank: one of 1, 2",
            "--mesh.tp 2",
        )
        for heads in ("8 attention heads", "2 key-value heads")
    ]


@pytest.mark.parametrize("model_type", ["gpt2", "stablelm"])
def test_model_without_a_plan(model_type: str) -> None:
    model = architecture(model_type, num_key_value_heads=4)
    no_plan = problem(
        f"mesh.tp = 2, but transformers has no tensor-parallel plan for {model_type!r}",
        "a model whose layers can be split, or one tp rank",
        "--mesh.tp 1   (use mesh.dp, mesh.dp_shard or mesh.cp instead)",
    )
    assert [str(one) for one in plan_problems(model, 2, plan=outline(model).tp_plan or {})] == [
        no_plan
    ]
    assert text(checking(Topology(tp=2), model)) == no_plan
    assert plan_problems(model, 1, plan=outline(model).tp_plan or {}) == []
    checking(Topology(dp_replicate=2), model)()


def test_tokenizer_larger_than_the_model() -> None:
    assert text(checking(Topology(), architecture(vocab_size=100))) == problem(
        "the tokenizer 'bytes' has 257 tokens, the model only 100",
        "an embedding for every token that the tokenizer can produce",
        "--model.config '{..., vocab_size: 257}', or the model's own tokenizer",
    )


def test_rows_longer_than_the_model_knows() -> None:
    assert text(checking(Topology(), architecture(max_position_embeddings=16))) == problem(
        "data.seq_len = 32, but the model supports at most 16 positions",
        "rows that are no longer than the model's max_position_embeddings",
        "--data.seq_len 16",
    )


def test_everything_wrong_is_said_at_once() -> None:
    found = text(checking(Topology(dp_replicate=3, cp=3, tp=3), architecture(vocab_size=100)))
    assert [one.splitlines()[0] for one in found.split("\n\n")] == [
        "train.global_batch = 16 cannot be divided equally among 3 dp ranks",
        "data.seq_len = 32 cannot be split over 3 cp ranks",
        HEADS.splitlines()[0],
        KV_HEADS.splitlines()[0],
        "the tokenizer 'bytes' has 257 tokens, the model only 100",
    ]


@pytest.mark.parametrize(
    ("values", "unknown", "fix"),
    [
        ({"model_type": "llama", "hiden_size": 64}, "hiden_size", "did you mean hidden_size?"),
        ({"model_type": "llama", "zzz": 2, "yyyy": 9}, "zzz, yyyy", "leave zzz out"),
    ],
)
def test_misspelt_key_of_an_architecture(
    values: dict[str, Any], unknown: str, fix: str
) -> None:
    """transformers takes it without a word, and a Llama of 6.7 billion parameters is what comes of the first."""
    with pytest.raises(ConfigError) as error:
        read_config(config_loading.validate({"model": {"config": values}}).model)
    assert str(error.value) == (
        f"model.config has a key that 'llama' does not know: {unknown}\n"
        "  expected: the architecture's own keys: transformers would ignore this one, and train another model\n"
        f"  fix: {fix}"
    )


@pytest.mark.parametrize(
    "values",
    [
        {
            "model_type": "llama",
            "rope_theta": 1e4,
            "rope_scaling": {"rope_type": "linear", "factor": 2.0},
        },
        {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "num_attention_heads": 2},
        {"model_type": "gemma3_text", "rope_local_base_freq": 1e4, "sliding_window": 7},
        {"model_type": "qwen3_moe", "head_dim": 8},
        {"model_type": "mixtral", "output_router_logits": True, "router_aux_loss_coef": 0.01},
    ],
)
def test_keys_that_transformers_reads_or_converts_are_known(values: dict[str, Any]) -> None:
    assert (
        read_config(config_loading.validate({"model": {"config": values}}).model).model_type
        == values["model_type"]
    )


def test_error_of_another_source_names_its_key_and_leaves_paths_alone() -> None:
    problem = Problem(
        "data.source = '/a/data.source/x' does not exist",
        "a folder",
        "--data.source PATH   (data.source)",
    )
    assert _named("eval.source", problem) == Problem(
        "eval.source = '/a/data.source/x' does not exist",
        "a folder",
        "--eval.source PATH   (eval.source)",
    )


def test_fields_of_one_source_are_not_those_of_all() -> None:
    """data.fields is of every source: pasted, it was wrong for the others."""
    fix = "--data.fields '{prompt: question, completion: answer}'   (only the answer is trained on)"
    problem = Problem("data.fields.text = 'text': x.jsonl: no such field", "others", fix)
    in_source = "fields: {prompt: question, completion: answer} in the source   (only the answer is trained on)"
    assert _named("data.mixture.b", problem).fix == in_source
    held_out = _named("eval.source", problem)
    assert held_out.what == f"eval.source: {problem.what}"
    assert held_out.fix == (
        "threefold data prepare ... --data.fields '{prompt: question, completion: answer}' --to DIR   of these rows, "
        "and --eval.source DIR"
    )
    assert _named("data.source", problem) == problem


@pytest.mark.parametrize(("code", "kind"), [(2, ConfigError), (1, RunError)])
def test_error_of_threefold_train_is_of_its_kind(
    code: int, kind: type[ThreefoldError], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("threefold.run.start.train_command", lambda loaded: code)
    with pytest.raises(kind):
        train({})
