"""Loading the config: what overrides what, what is refused, and that everything wrong is said at once."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from threefold.config import loading
from threefold.config.dropped import DROPPED, ELSEWHERE
from threefold.config.loading import LoadedConfig, validate
from threefold.config.paths import with_absolute_paths
from threefold.config.schema import Config, OptimizerConfig, TrainConfig, every_key
from threefold.config.yaml_text import as_yaml, dump
from threefold.errors import ConfigError

TEXT = st.text(st.characters(exclude_categories=["Cc", "Cs"]), max_size=120)
COUNT = st.integers(0, 2**62)
SIZE = st.none() | st.just("auto") | st.integers(1, 4096)
POSITIVE = st.floats(1e-300, 1e300)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def load(
    text: str | None = None,
    *overrides: tuple[str, str],
    environ: Mapping[str, str] | None = None,
) -> LoadedConfig:
    """Loads `text` as c.yaml in the working folder."""
    if text is not None:
        Path("c.yaml").write_text(text, encoding="utf-8")
    return loading.load(
        "c.yaml" if text is not None else None, overrides, environ=environ or {}
    )


def refused(
    text: str | None = None,
    *overrides: tuple[str, str],
    environ: Mapping[str, str] | None = None,
) -> list[str]:
    """What is wrong, one line a problem."""
    with pytest.raises(ConfigError) as caught:
        load(text, *overrides, environ=environ)
    return [problem.what for problem in caught.value.problems]


# --- YAML 1.2 ----------------------------------------------------------------------------------------------------


def test_nothing_given_is_the_default(folder: Path) -> None:
    assert load() == LoadedConfig(Config())
    for text in ("", "# nothing\n", "---\n", "train:\n", "train: {}\n", "\ufeff"):
        assert load(text) == LoadedConfig(Config()), repr(text)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("1E-4", 1e-4),
        ("2.5e-05", 2.5e-5),
        (".001", 0.001),
        ("1", 1.0),
        ("0.1", 0.1),
        ("1e22", 1e22),
    ],
)
def test_numbers_of_yaml_1_2_are_numbers(folder: Path, text: str, value: float) -> None:
    lr = load(None, ("optimizer.lr", text)).config.optimizer.lr
    assert type(lr) is float
    assert lr == value
    assert load(f"optimizer: {{lr: {text}}}\n").config.optimizer.lr == value


def test_words_of_yaml_1_1_are_text(folder: Path) -> None:
    """`yes`, `no`, `on` and `12:30:00` are neither booleans nor a number of seconds."""
    for text in ("yes", "no", "on", "12:30:00", "hf:ID", "/a b/c"):
        assert load(None, ("data.source", text)).config.data.source == text
    assert refused(None, ("data.shuffle", "yes")) == [
        "data.shuffle = yes is not accepted (command line)"
    ]


@pytest.mark.parametrize("text", ["", " ", "\n"])
def test_empty_value_is_refused_and_null_is_written(text: str) -> None:
    """As of `--model.name_or_path "$MODEL"` where MODEL is not set: never null, which means another run."""
    keys = [*every_key(), "model.nmae"]
    with pytest.raises(ConfigError) as error:
        load(None, *((key, text) for key in keys))
    empty = [problem for problem in error.value.problems if problem.what.endswith(" is empty")]
    assert [problem.what for problem in empty] == [f"--{key} is empty" for key in keys]
    fixes = {problem.what.split()[0]: problem.fix for problem in empty}
    assert fixes["--model.name_or_path"] == "--model.name_or_path null"
    assert fixes["--data.seq_len"] == "leave --data.seq_len out"
    nulls = [tuple(fix[2:].split()) for fix in fixes.values() if fix.startswith("--")]
    assert load(None, *((key, value) for key, value in nulls)).config == Config()


def test_null_lists_and_mappings(folder: Path) -> None:
    text = """
model:
  config: {model_type: llama, layers: [1, {a: null}], rope: {theta: 1e4}}
train: {steps: null}
optimizer:
  betas:
  - 0.8
  - 0.9
data: {shuffle: false}
"""
    config = load(text, ("eval.source", "null"), ("log.dir", "~")).config
    assert config.model.config == {
        "model_type": "llama",
        "layers": [1, {"a": None}],
        "rope": {"theta": 1e4},
    }
    assert config.optimizer.betas == (0.8, 0.9)
    assert config.train.steps is None and config.eval.source is None and config.log.dir is None
    assert config.data.shuffle is False
    assert load(None, ("optimizer.betas", "[0, 0.5]")).config.optimizer.betas == (0.0, 0.5)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (
            "train: {steps: 1, steps: 2}\n",
            'c.yaml, line 1: found duplicate key "steps" with value "2" (original value: "1")',
        ),
        (
            "train:\n\tsteps: 1\n",
            "c.yaml, line 2: found character '\\t' that cannot start any token",
        ),
        ("train: {steps: 1\n", "c.yaml, line 2: expected ',' or '}', but got '<stream end>'"),
        (
            "train:\n  steps: !new 1\n",
            "c.yaml, line 2: could not determine a constructor for the tag '!new'",
        ),
        ("train: {steps: 1}\n---\nlog: {}\n", "c.yaml, line 2: but found another document"),
    ],
)
def test_file_that_is_no_yaml_is_refused_with_its_line(
    folder: Path, text: str, what: str
) -> None:
    assert refused(text) == [what]


def test_section_given_twice_is_refused(folder: Path) -> None:
    (what,) = refused("train: {steps: 1}\ntrain: {steps: 2}\n")
    assert what.startswith('c.yaml, line 2: found duplicate key "train"')


@pytest.mark.parametrize(
    "text", ["[1", "{a: 1", "a: b: c", "*.txt", "2024-13-45", "9" * 5000, "&a {a: *a}", "\0"]
)
def test_value_that_is_no_yaml_is_one_problem(folder: Path, text: str) -> None:
    """Also where the reader fails with an exception of its own; a default is never put in its place."""
    (what,) = refused(None, ("model.config", text))
    assert what.startswith("--model.config: ")


@pytest.mark.parametrize("text", ["- 1\n- 2\n", "5\n", "text\n"])
def test_file_that_is_no_mapping_is_refused(folder: Path, text: str) -> None:
    assert refused(text) == ["c.yaml must contain sections such as train:"]


def test_sections_that_are_none(folder: Path) -> None:
    assert refused("train: 5\nlog: [a]\n") == [
        "c.yaml: train = 5 is not a section",
        "c.yaml: log = ['a'] is not a section",
    ]
    assert refused("tarin:\ntrain: {steps: 1}\nfoo: {}\n") == [
        "unknown key tarin",
        "unknown key foo",
    ]


def test_file_that_cannot_be_read(folder: Path) -> None:
    Path("latin1.yaml").write_bytes("log: {dir: caf\xe9}\n".encode("latin-1"))
    for path, reason in [
        ("nothing.yaml", "No such file or directory"),
        (".", "Is a directory"),
        ("latin1.yaml", "not UTF-8 text"),
    ]:
        with pytest.raises(ConfigError) as caught:
            loading.load(path, environ={})
        assert [problem.what for problem in caught.value.problems] == [f"{path}: {reason}"]


# --- what overrides what -----------------------------------------------------------------------------------------


def test_override_over_file_over_environment(folder: Path) -> None:
    environ = {"DP_SIZE": "2", "CP_SIZE": "3", "TP_SIZE": "4", "PATH": "/bin"}
    loaded = load(
        "mesh: {cp: 5, tp: 6}\n",
        ("mesh.tp", "7"),
        ("log.every", "1"),
        ("log.every", "2"),
        environ=environ,
    )
    mesh = loaded.config.mesh
    assert (mesh.dp, mesh.cp, mesh.tp, loaded.config.log.every) == (2, 5, 7, 2)
    assert loaded.origins == {
        "mesh.dp": "environment DP_SIZE",
        "mesh.cp": "c.yaml",
        "mesh.tp": "command line",
        "log.every": "command line",
    }


def test_environment_gives_mesh_defaults(folder: Path) -> None:
    mesh = load(environ={"DP_SIZE": "auto", "CP_SIZE": "2"}).config.mesh
    assert (mesh.dp, mesh.dp_shard, mesh.cp, mesh.tp) == ("auto", None, 2, None)
    assert load(environ={"TP_SIZE": ""}).config.mesh.tp is None
    assert refused(environ={"DP_SIZE": "0", "TP_SIZE": "two"}) == [
        "mesh.dp = 0 is not accepted (environment DP_SIZE)",
        "mesh.tp = two is not accepted (environment TP_SIZE)",
    ]


# --- what is refused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("train.steps", "true"),
        ("train.steps", "1.0"),
        ("train.steps", "'1'"),
        ("train.steps", "0"),
        ("train.steps", "-1"),
        ("train.steps", "[1]"),
        ("train.global_batch", "null"),
        ("train.seed", "-1"),
        ("train.micro_batch", "0"),
        ("train.micro_batch", "automatic"),
        ("train.compile", "1"),
        ("train.compile", "'true'"),
        ("train.activation_checkpointing", "true"),
        ("optimizer.lr", "true"),
        ("optimizer.lr", "'1e-4'"),
        ("optimizer.lr", "0"),
        ("optimizer.lr", ".inf"),
        ("optimizer.lr", ".nan"),
        ("optimizer.eps", "0"),
        ("optimizer.weight_decay", "-0.1"),
        ("optimizer.schedule", "Cosine"),
        ("optimizer.betas", "0.9"),
        ("optimizer.betas", "[0.9, 0.9, 0.9]"),
        ("mesh.dp", "0"),
        ("mesh.tp", "2.0"),
        ("mesh.cp", "true"),
        ("mesh.timeout_s", ".inf"),
        ("model.config", "[1]"),
        ("log.dir", "5"),
        ("data.source", "null"),
        ("data.source", "2024-01-01"),
        ("checkpoint.keep", "0"),
    ],
)
def test_value_of_another_kind_is_refused(folder: Path, key: str, text: str) -> None:
    (what,) = refused(None, (key, text))
    assert what == f"{key} = {as_yaml_of(text)} is not accepted (command line)"


def as_yaml_of(text: str) -> str:
    return {"'1'": '"1"', "'true'": '"true"', "'1e-4'": '"1e-4"', "": "null"}.get(text, text)


def test_entry_of_a_list_is_named(folder: Path) -> None:
    assert refused(None, ("optimizer.betas", "['0.9', true]")) == [
        'optimizer.betas[0] = "0.9" is not accepted (command line)',
        "optimizer.betas[1] = true is not accepted (command line)",
    ]
    assert refused(None, ("optimizer.betas", "[0.9]")) == [
        "optimizer.betas = [0.9] is not accepted (command line)"
    ]


@pytest.mark.parametrize(
    ("unknown", "meant"),
    [
        ("train.stepz", "train.steps"),
        ("trian.steps", "train.steps"),
        ("lr", "optimizer.lr"),
        ("optimizer.learning_rate", "optimizer.lr"),
        ("checkpoint.evry", "checkpoint.every"),
        ("model.seq_len", "data.seq_len"),
        ("tarin", "train"),
        ("optimizer.clip_grad", "train.grad_clip"),
        ("tokens.sequence_length", "data.seq_len"),
        ("checkpoints.checkpoint_interval", "checkpoint.every"),
        ("sequence_parallel_degree", "mesh.cp"),
    ],
)
def test_unknown_key_is_refused_with_the_nearest(
    folder: Path, unknown: str, meant: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(None, (unknown, "1"))
    (problem,) = caught.value.problems
    assert problem.what == f"unknown key {unknown}"
    assert problem.fix == f"did you mean {meant}?"


def test_run_whose_config_is_gone_says_what_it_lacks(folder: Path) -> None:
    Path("a run").mkdir()
    Path("a run/metrics.jsonl").touch()
    with pytest.raises(ConfigError) as caught:
        loading.load("a run/config.yaml", environ={})
    (problem,) = caught.value.problems
    assert problem.what == "the run a run has no config.yaml that can be read"
    assert problem.fix == (
        "restore 'a run/config.yaml' from a copy; its weights: threefold export 'a run' --to DIR"
    )


@pytest.mark.parametrize("unknown", ["strict", "dataset_prepared_path", "quantization_bit"])
def test_unknown_key_like_none_is_not_guessed(folder: Path, unknown: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(None, (unknown, "1"))
    assert caught.value.problems[0].fix == "`threefold train --print-config` lists every key"


def test_dotted_keys_of_a_program_are_answered_with_their_nesting() -> None:
    with pytest.raises(ConfigError) as caught:
        loading.validate({"train.steps": 5, "model.lora": {"r": 8}})
    assert [problem.fix for problem in caught.value.problems] == [
        "train: {steps: ...}",
        "model: {lora: {r: ...}}",
    ]


@pytest.mark.parametrize("line", ["learning_rate: 1e-4", "train: {learning_rate: 1e-4}"])
def test_key_of_another_trainer_is_refused_with_ours(folder: Path, line: str) -> None:
    """Also at the top of a file, where others have all of theirs; the nearest by its spelling was train.nonfinite."""
    Path("c.yaml").write_text(f"{line}\n")
    with pytest.raises(ConfigError) as caught:
        loading.load("c.yaml", environ={})
    assert [problem.fix for problem in caught.value.problems] == ["did you mean optimizer.lr?"]
    # The nearest by spelling: eval.every, optimizer.name, train.compile, eval.tasks, dpo.label_smoothing.
    for name, key in (
        ("save_every", "checkpoint.every"),
        ("tokenizer_name", "data.tokenizer"),
        ("train_file", "data.source"),
        ("eval_dataset", "eval.source"),
        ("label_smoothing_factor", "train.label_smoothing"),
    ):
        with pytest.raises(ConfigError) as caught:
            loading.load(overrides=[(name, "1")], environ={})
        assert caught.value.problems[0].fix == f"did you mean {key}?"
    assert {*ELSEWHERE.values()} <= {*every_key()}
    assert not ELSEWHERE.keys() & {key.rpartition(".")[2] for key in every_key()}


def test_key_with_its_section_in_a_file(folder: Path) -> None:
    Path("c.yaml").write_text("train.steps: 10\n")
    with pytest.raises(ConfigError) as caught:
        loading.load("c.yaml", environ={})
    (problem,) = caught.value.problems
    assert problem.fix == "train: {steps: 10}"
    Path("c.yaml").write_text(problem.fix)
    assert loading.load("c.yaml", environ={}).config.train.steps == 10


@pytest.mark.parametrize("key", sorted(key for key in DROPPED if "." in key))
def test_dropped_key_is_refused_with_what_replaces_it(key: str) -> None:
    section, name, *leaf = key.split(".")
    value: Any = {"some": {leaf[0]: 1}} if leaf else 1
    with pytest.raises(ConfigError) as caught:
        validate({section: {name: value}})
    assert [
        problem.fix for problem in caught.value.problems if "unknown key" in problem.what
    ] == [DROPPED[key]]
    assert {*re.findall(r"--([a-z]+\.[a-z_.]*[a-z])", DROPPED[key])} <= {*every_key()}


@pytest.mark.parametrize(
    "option", sorted(key for key in DROPPED if "." not in key and " " not in key)
)
def test_dropped_option_is_refused_with_what_replaces_it(folder: Path, option: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(None, (option, "1"))
    assert [problem.fix for problem in caught.value.problems] == [DROPPED[option]]


@pytest.mark.parametrize(
    "name", ["model_fields", "model_config", "__class__", "steps.more", ""]
)
def test_names_of_the_machinery_are_no_keys(folder: Path, name: str) -> None:
    (what,) = refused(None, (f"train.{name}", "1"))
    assert what == f"unknown key train.{name}".removesuffix(".")


def test_everything_wrong_is_said_at_once(folder: Path) -> None:
    text = "train: {steps: -1, stepz: 2}\nfoo: {a: 1, b: 2}\n"
    assert refused(
        text, ("optimizer.lr", "fast"), ("data.source", "[x"), environ={"DP_SIZE": "0"}
    ) == [
        "--data.source: expected ',' or ']', but got '<stream end>'",
        "unknown key train.stepz",
        "unknown key foo.a",
        "unknown key foo.b",
        "mesh.dp = 0 is not accepted (environment DP_SIZE)",
        "train.steps = -1 is not accepted (c.yaml)",
        "optimizer.lr = fast is not accepted (command line)",
    ]


@pytest.mark.parametrize(
    ("sections", "what"),
    [
        (
            {"model": {"name_or_path": "x", "config": {"model_type": "llama"}}},
            "model.name_or_path and model.config are both set",
        ),
        (
            {"train": {"steps": 1, "epochs": 2}},
            "train.steps = 1 and train.epochs = 2 are both set",
        ),
        (
            {"eval": {"every": 5}},
            "eval.every = 5 has no effect without eval.source or data.eval_share",
        ),
        ({"optimizer": {"betas": [1.0, 0.9]}}, "optimizer.betas[0] = 1.0 is not a decay"),
        ({"optimizer": {"betas": [0.9, -0.1]}}, "optimizer.betas[1] = -0.1 is not a decay"),
        (
            {"optimizer": {"lr": 1e-3, "min_lr": 0.01}},
            "optimizer.min_lr = 0.01 is above optimizer.lr = 0.001",
        ),
    ],
)
def test_contradictions_are_refused(sections: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError) as caught:
        validate(sections)
    assert [problem.what for problem in caught.value.problems] == [what]


def test_contradictions_are_said_beside_unknown_keys(folder: Path) -> None:
    assert refused("train: {steps: 1, epochs: 2, x: 3}\n") == [
        "unknown key train.x",
        "train.steps = 1 and train.epochs = 2 are both set",
    ]


def test_boundaries_are_accepted() -> None:
    config = validate(
        {
            "optimizer": {"betas": [0, 0.999], "lr": 1e-3, "min_lr": 1e-3, "warmup_steps": 0},
            "train": {"steps": 1, "grad_clip": 0},
            "eval": {"source": "x", "every": 1},
        }
    )
    assert config.optimizer.betas == (0.0, 0.999)


@pytest.mark.parametrize("value", [5, None, [1]])
def test_section_that_is_no_mapping_is_one_problem(value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        validate({"train": value})
    assert [problem.what for problem in caught.value.problems] == [
        f"train = {as_yaml(value)} is not accepted"
    ]


# --- the config itself -------------------------------------------------------------------------------------------


def test_config_is_frozen() -> None:
    config = Config()
    with pytest.raises(ValidationError, match="frozen"):
        config.train = TrainConfig(steps=1)  # type: ignore[misc]
    with pytest.raises(ValidationError, match="frozen"):
        config.train.steps = 1  # type: ignore[misc]
    assert config == Config()


@settings(deadline=None, max_examples=25)
@given(
    # A path with ~ or $ is refused: a shell was to replace them. So is an address of no store.
    texts=st.tuples(
        TEXT.filter(lambda text: not {"~", "$"} & {*text} and "://" not in text), TEXT, TEXT
    ),
    sizes=st.tuples(SIZE, SIZE, SIZE, SIZE),
    rates=st.tuples(POSITIVE, POSITIVE),
    betas=st.tuples(st.floats(0, 1, exclude_max=True), st.floats(0, 1, exclude_max=True)),
    counts=st.tuples(COUNT, COUNT),
    model=st.none()
    | st.dictionaries(
        TEXT, st.none() | st.booleans() | COUNT | POSITIVE | TEXT | st.lists(TEXT)
    ),
)
def test_dump_loads_as_the_same_config(
    tmp_path_factory: pytest.TempPathFactory,
    texts: tuple[str, str, str],
    sizes: tuple[Any, Any, Any, Any],
    rates: tuple[float, float],
    betas: tuple[float, float],
    counts: tuple[int, int],
    model: dict[str, Any] | None,
) -> None:
    """Whatever text a value holds: quotes, colons, `null`, `1e-4`, a date."""
    config = validate(
        {
            "model": {"config": None if model is None else model | {"model_type": "llama"}},
            "data": {"source": texts[0], "split": texts[1], "seed": counts[0]},
            "mesh": dict(zip(("dp", "dp_shard", "cp", "tp"), sizes, strict=True)),
            "optimizer": {"lr": max(rates), "min_lr": min(rates), "betas": list(betas)},
            "train": {"seed": counts[1]},
            "log": {"dir": texts[2].translate({ord("$"): "S", ord("~"): "t", ord(":"): "c"})},
        }
    )
    path = tmp_path_factory.getbasetemp() / "dumped.yaml"
    path.write_text(dump(config), encoding="utf-8")
    assert loading.load(str(path), environ={"DP_SIZE": "3"}).config == config


@pytest.mark.parametrize(
    "text",
    ["null", "1e-4", "true", "yes", "2024-01-01", "", " ", "a: b", "#x", "- a", "'", "é"],
)
def test_text_that_looks_like_something_else_stays_text(folder: Path, text: str) -> None:
    config = validate({"log": {"dir": text}})
    assert load(dump(config)).config == config


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
    lambda values: st.lists(values, max_size=3) | st.dictionaries(TEXT, values, max_size=3),
    max_leaves=6,
)


@settings(deadline=None, max_examples=25)
@given(value=VALUES)
def test_shown_value_reads_back_to_the_same(value: Any) -> None:
    """What an error or --print-config shows can be pasted."""
    shown = as_yaml(value)
    assert "\n" not in shown
    text = f"{{model_type: llama, value: {shown}}}"
    loaded = loading.load(None, [("model.config", text)], environ={})
    assert loaded.config.model.config == {"model_type": "llama", "value": value}


def test_section_defaults_hold_alone() -> None:
    """Every default is a value that the config itself accepts."""
    assert validate(Config().model_dump(mode="json")) == Config()
    assert OptimizerConfig().betas == (0.9, 0.95)


def test_files_of_tasks_are_found_from_another_folder_and_names_stay(folder: Path) -> None:
    (folder / "own.yaml").write_text("task: own\n")
    (folder / "hellaswag").mkdir()
    config = validate({"eval": {"tasks": ["own.yaml", "hellaswag"], "every": 5}})
    assert with_absolute_paths(config).eval.tasks == (str(folder / "own.yaml"), "hellaswag")


@pytest.mark.parametrize(
    ("key", "text", "fix"),
    [
        ("data.fields", "{text:body}", "{text: body}"),
        (
            "optimizer.options",
            "{ momentum:0.9 , nesterov: true}",
            "{momentum: 0.9 , nesterov: true}",
        ),
        ("model.config", "{model_type:llama}", "{model_type: llama}"),
    ],
)
def test_colon_of_a_key_without_a_space_is_named(key: str, text: str, fix: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load(None, (key, text))
    (problem,) = refused.value.problems
    assert "is a key, without a value" in problem.what and problem.fix == f"write '{fix}'"
    spelled = {"data.fields": '{"a:b": c}', "model.config": "{model_type: llama, a:b: null}"}
    for other, value in spelled.items():
        load(None, (other, value))


@pytest.mark.parametrize("text", ["a\nb", "a ", " a", "a # b"])
def test_text_that_yaml_changes_is_refused_and_its_fix_is_the_text(text: str) -> None:
    """Folded or cut, it is the name of another folder: of another run, say."""
    with pytest.raises(ConfigError) as refused:
        load(None, ("log.dir", text))
    (problem,) = refused.value.problems
    assert problem.what.startswith(f"--log.dir = {text!r} is read as 'a")
    words = shlex.split(problem.fix)
    assert words[0] == "--log.dir"
    assert load(None, ("log.dir", words[1])).config.log.dir == text


@pytest.mark.parametrize(
    ("key", "text", "fix"),
    [
        ("log.dir", "~/runs/a", "--log.dir ~/runs/a"),
        ("log.dir", "$HOME/runs", '--log.dir "$HOME/runs"'),
        ("data.source", "${DATA}/a.jsonl", '--data.source "${DATA}/a.jsonl"'),
        ("model.name_or_path", "$MODEL", '--model.name_or_path "$MODEL"'),
        ("log.dir", "$HOME/läufe", '--log.dir "$HOME/läufe"'),
    ],
)
def test_path_that_no_shell_has_expanded_is_refused(key: str, text: str, fix: str) -> None:
    """A folder of the name ~ would be made."""
    with pytest.raises(ConfigError) as refused:
        load(None, (key, text))
    (problem,) = refused.value.problems
    sign = "~" if text.startswith("~") else "its $"
    assert (
        problem.what == f"{key} = {text!r} does not exist, and {sign} is taken literally"
        and problem.fix == fix
    )


def test_path_with_such_a_name_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("$cost").mkdir()
    assert load(None, ("log.dir", "$cost")).config.log.dir == "$cost"


def test_run_in_place_of_a_config_is_answered_with_its_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a run").mkdir()
    Path("a run/run.json").write_text("{}")
    with pytest.raises(ConfigError) as refused:
        loading.load("a run", environ={})
    (problem,) = refused.value.problems
    assert (problem.what, problem.fix) == (
        "a run: Is a directory",
        "'a run/config.yaml'   (its config; to resume it: threefold resume 'a run')",
    )
