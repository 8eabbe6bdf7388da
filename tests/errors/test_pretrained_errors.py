"""Requests for pretrained weights: a path at which no model is, and a tokenizer that is not theirs."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

from threefold.config import paths
from threefold.config.loading import validate
from threefold.data.tokens import load_tokenizer
from threefold.errors import ThreefoldError
from threefold.export.tokenizer_files import byte_tokenizer
from threefold.mesh import local_ranks
from threefold.mesh.topology import Topology
from threefold.model.config_errors import reason_of
from threefold.model.load import read_config
from threefold.run.request import check, model_of
from threefold.run.start import train

WORDS = {"a": 0, "b": 1, "</s>": 2}
EXPECTED = "a folder with config.json and weights"
OWN = "the tokenizer that the weights were trained with: others' ids mean other tokens"


def write_tokenizer(
    folder: Path, words: dict[str, int] = WORDS, end: str = "</s>", special: bool = True
) -> None:
    folder.mkdir(exist_ok=True)
    made = Tokenizer(models.WordLevel(words, unk_token="a"))
    if special:
        made.add_special_tokens(["</s>"])
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": end}))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder `model`, with a config and a tokenizer of three words."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    write_tokenizer(tmp_path / "model")
    sizes = {
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
    }
    LlamaConfig(vocab_size=300, hidden_size=16, **sizes).save_pretrained("model")
    return tmp_path


def asked(tokenizer: str | None, **data: Any) -> None:
    config = validate(
        {
            "model": {"name_or_path": "model"},
            "data": {"tokenizer": tokenizer, "seq_len": 8, **data},
        }
    )
    found, architecture = model_of(config)
    check(config, architecture, found, Topology(), device="cpu")


def said(act: Any) -> tuple[str, str, str]:
    with pytest.raises(ThreefoldError) as caught:
        act()
    (problem,) = caught.value.problems
    assert caught.value.exit_code == 2
    return problem.what, problem.expected, problem.fix


# --- the tokenizer ---------------------------------------------------------------------------------------------


def test_own_tokenizer_is_taken(folder: Path) -> None:
    shutil.copytree("model", "copied")
    (folder / "copied" / "config.json").unlink()
    for tokenizer in (None, "model", "./model", "copied", str(folder / "copied")):
        asked(tokenizer)


def test_own_tokenizer_in_another_form_is_taken(folder: Path) -> None:
    """A model that was trained on bytes and exported: the ids are the same."""
    byte_tokenizer().save_pretrained("model")
    asked("bytes")
    assert load_tokenizer("model").end_id == 256


OTHERS = [
    ("bytes", "it has 257 tokens, the model's own 3"),
    ("more", "it has 4 tokens, the model's own 3"),
    ("turned", "2 ids are other tokens: 0 is 'b', in the model's own 'a'"),
    ("ended", "its end token is 1, the model's own 2"),
    ("plain", "2 is a special token in one of them only"),
]


@pytest.mark.parametrize(("tokenizer", "differs"), OTHERS)
def test_another_tokenizer(folder: Path, tokenizer: str, differs: str) -> None:
    write_tokenizer(folder / "more", {**WORDS, "c": 3})
    write_tokenizer(folder / "turned", {"b": 0, "a": 1, "</s>": 2})
    write_tokenizer(folder / "ended", end="b")
    write_tokenizer(folder / "plain", special=False)
    assert said(lambda: asked(tokenizer)) == (
        f"data.tokenizer = {tokenizer!r} is not the tokenizer of model.name_or_path = 'model': {differs}",
        OWN,
        "leave data.tokenizer out   (or, to train the weights anew: --data.allow_other_tokenizer true)",
    )
    asked(tokenizer, allow_other_tokenizer=True)


def test_the_fix_of_a_tokenizer_with_more_tokens_than_the_model_adds_them(folder: Path) -> None:
    config = LlamaConfig.from_pretrained("model", vocab_size=3)
    LlamaForCausalLM(config).save_pretrained("model")
    write_tokenizer(folder / "model", {**WORDS, "c": 3, "d": 4})
    what, _, fix = said(lambda: asked(None))
    assert what == "the tokenizer 'model' has 5 tokens, the model only 3"
    python, option, code, _, *_, key, resized, rest = shlex.split(fix)
    assert (python, option, key, rest) == ("python3", "-c", "--model.name_or_path", "...")
    exec(code)
    model = validate({"model": {"name_or_path": resized}, "data": {"seq_len": 8}})
    tokenizer, architecture = model_of(model)
    assert (tokenizer.vocab_size, architecture.vocab_size) == (5, 5)
    check(model, architecture, tokenizer, Topology(), device="cpu")


def test_model_without_a_tokenizer(folder: Path) -> None:
    Path("model/tokenizer.json").unlink()
    files = (
        "tokenizer.json, or an older vocabulary (*.model, vocab.json, vocab.txt, "
        "merges.txt, *.tiktoken, tekken.json)"
    )
    copy = "copy the files of the tokenizer that the weights were trained with there"
    lacks = "model.name_or_path = 'model' contains no tokenizer"
    assert said(lambda: asked(None)) == (lacks, f"{files}, in model", copy)
    assert said(lambda: asked("bytes")) == (
        f"data.tokenizer = 'bytes' cannot be compared with the model's own: {lacks}",
        OWN,
        f"{copy}, and leave data.tokenizer out; if bytes is the model's own: --data.allow_other_tokenizer true",
    )
    asked("bytes", allow_other_tokenizer=True)


# --- the path --------------------------------------------------------------------------------------------------


def reading(name: str) -> tuple[str, str, str]:
    return said(lambda: read_config(validate({"model": {"name_or_path": name}}).model))


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("./modle", "did you mean model?"),
        ("./qqqq", "check the path"),
        ("/nowhere/at/all", "check the path"),
        ("a/b/c", "check the path"),
        ("modle/", "did you mean model?"),
    ],
)
def test_folder_that_is_not_there(name: str, fix: str) -> None:
    assert reading(name) == (f"model.name_or_path = {name!r}: no such folder", EXPECTED, fix)


def test_name_that_may_be_on_the_hub() -> None:
    what, expected, fix = reading("modle")
    assert what.startswith("model.name_or_path = 'modle' cannot be read: ")
    assert expected == "a local folder, or a Hub id that can be reached"
    assert fix == (
        "did you mean the folder model? Otherwise check the name, your connection, and `hf auth login` for gated models"
    )


@pytest.mark.parametrize(
    ("values", "what", "fix"),
    [
        (
            {"model_type": "own", "auto_map": {"AutoConfig": "configuration_own.OwnConfig"}},
            "The repository own contains custom code",
            "--model.trust_remote_code true   (if you have read that code, or trust its author)",
        ),
        (
            {"model_type": "llama9"},
            "model type `llama9`",
            "pip install -U transformers   (a later release may have it)",
        ),
    ],
)
def test_a_config_of_code_or_of_a_later_release(
    values: dict[str, Any], what: str, fix: str
) -> None:
    """Not `check the path`: the folder is right."""
    Path("own").mkdir()
    Path("own/config.json").write_text(json.dumps(values))
    said_of = reading("own")
    assert what in said_of[0] and said_of[2] == fix


@pytest.mark.parametrize(
    ("model_type", "fix"),
    [
        ("lama", "did you mean llama?"),
        ("qqqq", "pip install -U transformers   (a later release may have it)"),
        (["llama"], "did you mean llama?"),
    ],
)
def test_a_model_type_that_transformers_lacks(model_type: Any, fix: str) -> None:
    """In one line: transformers names all of its hundreds."""
    what, _, named = said(
        lambda: read_config(validate({"model": {"config": {"model_type": model_type}}}).model)
    )
    assert what.startswith(f"model.config has model_type {model_type!r}, ") and len(what) < 120
    assert named == fix


def test_transformers_list_of_its_models_is_left_out() -> None:
    with pytest.raises(ValueError, match="Should contain one of") as caught:
        AutoConfig.for_model("qqqq")
    assert reason_of(str(caught.value)) == "Unrecognized model identifier: qqqq"


def test_quoted_home(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv("HOME", str(folder))
    assert reading("~/model") == (
        "model.name_or_path = '~/model': no such folder",
        EXPECTED,
        f"--model.name_or_path {folder}/model   (the shell expands ~, but it was quoted)",
    )


def test_file() -> None:
    assert reading("model/config.json") == (
        "model.name_or_path = 'model/config.json' is a file, not a folder",
        EXPECTED,
        "--model.name_or_path model   (the folder of the file)",
    )


def test_folder_without_a_model(folder: Path) -> None:
    Path("empty").mkdir()
    assert reading("empty") == (
        "model.name_or_path = 'empty' is an empty folder",
        EXPECTED,
        "check the path",
    )
    Path("other/logs").mkdir(parents=True)
    assert reading("other") == (
        "model.name_or_path = 'other' has no config.json",
        EXPECTED,
        "check the path",
    )
    shutil.copytree("model", "other/inside")
    what, _, fix = reading("other")
    assert (what, fix) == (
        "model.name_or_path = 'other' has no config.json",
        "--model.name_or_path other/inside",
    )
    Path("run/checkpoints").mkdir(parents=True)
    assert reading("run") == (
        "model.name_or_path = 'run' has no config.json: it is the folder of a run",
        EXPECTED,
        "threefold export run --to DIR   and --model.name_or_path DIR",
    )


@pytest.mark.parametrize("with_model", [False, True])
def test_adapters_are_no_model(with_model: bool) -> None:
    """Trained from the folder's own weights, the adapters would be lost. Pasted, the fix makes the model of both."""
    model = LlamaForCausalLM(LlamaConfig.from_pretrained("model"))
    model.save_pretrained("model")
    own = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], init_lora_weights=False)
    adapted = get_peft_model(LlamaForCausalLM.from_pretrained("model"), own)
    adapted.save_pretrained("my adapters")
    write_tokenizer(Path("my adapters"))
    if with_model:
        shutil.copytree("model", "my adapters", dirs_exist_ok=True)
    what, _, fix = reading("my adapters")
    assert what == (
        "model.name_or_path = 'my adapters' holds adapters, which transformers would load with the model"
    )
    command, _, key = fix.partition("   and --model.name_or_path ")
    subprocess.run(command.replace("python", sys.executable, 1), shell=True, check=True)
    paths.refuse_wrong_model(key)
    ids = torch.arange(8)[None]
    with torch.no_grad():
        merged = LlamaForCausalLM.from_pretrained(key)(ids).logits
        torch.testing.assert_close(merged, adapted.eval()(ids).logits)
    assert load_tokenizer(key).end_id == 2


def test_path_to_paste_is_one_word_of_the_shell() -> None:
    shutil.copytree("model", "my models/one")
    assert reading("my models")[2] == "--model.name_or_path 'my models/one'"
    assert reading("my models/one/config.json")[2].startswith("--model.name_or_path 'my mod")


def test_wrong_folder_is_said_before_ranks_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_ranks, "start_ranks", lambda *_, **__: pytest.fail("started"))
    what, _, fix = said(
        lambda: train({"model": {"name_or_path": "./modle"}, "mesh": {"dp": 2}})
    )
    assert what == "model.name_or_path = './modle': no such folder"
    assert fix == "did you mean model?"


def test_wrong_model_is_said_before_its_tokenizer() -> None:
    config = validate({"model": {"name_or_path": "./modle"}})
    assert said(lambda: model_of(config))[0] == "model.name_or_path = './modle': no such folder"
