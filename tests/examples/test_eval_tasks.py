"""Tasks of lm-evaluation-harness over a model on its mesh: what the harness finds of the exported model by itself."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lm_eval", reason="pip install lm-eval   (make test-examples does)")
pytestmark = pytest.mark.examples

from ranks.runs import command, prepare  # noqa: E402
from ranks.spawn import run_ranks  # noqa: E402
from threefold.errors import ConfigError  # noqa: E402

WORDS = [
    "the",
    "cat",
    "sat",
    "on",
    "mats",
    "while",
    "two",
    "dogs",
    "ran",
    "over",
    "green",
    "hills",
    "and",
    "rivers",
]
MESHES: list[dict[str, int]] = [
    {},
    {"dp": 2},
    {"dp": 2, "dp_shard": 2},
    {"cp": 2},
    {"tp": 2},
    {"dp": 2, "dp_shard": 2, "cp": 2, "tp": 2},
]
MODEL = {
    "model_type": "llama", "vocab_size": 264, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 48,
}  # fmt: skip


def _sentence(number: int, length: int) -> str:
    return " ".join(
        WORDS[(number * 7 + place * (number % 5 + 1)) % len(WORDS)] for place in range(length)
    )


def _requests() -> list[tuple[list[int], list[int]]]:
    """Of lengths up to twice what the model takes, also of one token each."""
    found = [
        ([1], [2]),
        ([256], list(b"a")),
        (list(b"x" * 60), list(b"yz")),
        (list(b"no "), list(b"x" * 48)),
    ]
    for number in range(23):
        found.append(
            (
                list(_sentence(number, 1 + number % 9).encode()),
                list(_sentence(number + 1, 1).encode()),
            )
        )
    return found


def scored(sizes: dict[str, int], folder: str, requests: list[Any]) -> list[tuple[float, bool]]:
    import threefold
    from threefold.run import task_scores

    # Several batches, of which the last is shared unevenly.
    task_scores._MOST_BYTES = 4 * 264 * 48 * 3
    mesh = threefold.init_mesh(**sizes, device="cpu")
    model = threefold.load_model(folder, mesh=mesh, seq_len=48, admission="off")
    found = task_scores.Scores(model, 48)(requests)
    assert model.module.training
    return found


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights, large enough that tokens differ in probability, in a folder of transformers."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    from threefold.export.tokenizer_files import byte_tokenizer

    torch.manual_seed(3)
    folder = tmp_path_factory.mktemp("exported")
    given = {name: value for name, value in MODEL.items() if name != "model_type"}
    model = AutoModelForCausalLM.from_config(
        LlamaConfig(**given, initializer_range=0.2, bos_token_id=None, eos_token_id=256)
    )
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def _of_harness(folder: Path) -> Any:
    from lm_eval.models.huggingface import HFLM

    return HFLM(pretrained=str(folder), device="cpu", batch_size=1, dtype="float32")


def test_scores_are_the_harness_own_on_every_mesh(exported: Path) -> None:
    harness, requests = _of_harness(exported), _requests()
    begun = torch.tensor([list(b"he")])
    requests.append((list(b"he"), [int(harness.model(begun).logits[0, -1].argmax())]))
    theirs = harness._loglikelihood_tokens(
        [(("", ""), *each) for each in requests], disable_tqdm=True
    )
    assert len({greedy for _, greedy in theirs}) == 2, "both occur"
    for sizes in MESHES:
        ranks = sizes.get("dp", 1) * sizes.get("cp", 1) * sizes.get("tp", 1)
        for ours in run_ranks(scored, ranks, sizes, str(exported), requests):
            assert [greedy for _, greedy in ours] == [greedy for _, greedy in theirs], sizes
            assert [value for value, _ in ours] == pytest.approx(
                [value for value, _ in theirs], rel=1e-6
            ), sizes


def _rolled(folder: str, texts: list[str]) -> list[float]:
    from lm_eval.api.instance import Instance
    from transformers import AutoTokenizer

    import threefold
    from threefold.run import task_scores

    mesh = threefold.init_mesh(device="cpu")
    model = threefold.load_model(folder, mesh=mesh, seq_len=48, admission="off")
    scores = task_scores.Scores(model, 48)
    ours = task_scores.harness_of(scores, AutoTokenizer.from_pretrained(folder))
    asked = [Instance("loglikelihood_rolling", {}, (text,), 0) for text in texts]
    theirs: list[float] = _of_harness(Path(folder)).loglikelihood_rolling(
        asked, disable_tqdm=True
    )
    assert ours.loglikelihood_rolling(asked) == pytest.approx(theirs, rel=1e-6)
    mesh.close()
    return theirs


def test_long_texts_are_scored_window_by_window_as_the_harness_does(exported: Path) -> None:
    texts = ["a", "hello world", "x" * 130, _sentence(3, 60)]
    assert len({*run_ranks(_rolled, 1, str(exported), texts)[0]}) == 4


def test_a_text_is_cut_where_the_harness_cuts_it_though_scaled_positions_take_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from lm_eval.models.utils import resolve_max_length

    import threefold
    from threefold.config.loading import validate
    from threefold.run import eval_tasks

    for name in ("_load", "harness_of", "tokenizer_of"):
        monkeypatch.setattr(eval_tasks, name, lambda *_: None)
    scaling = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    mesh = threefold.init_mesh(device="cpu")
    model = threefold.load_model(config={**MODEL, "rope_parameters": scaling}, mesh=mesh)
    assert model.positions == 96
    tasks = eval_tasks.EvalTasks(validate({}), model)
    theirs = resolve_max_length(model.module.config, None, default=2048)
    mesh.close()
    assert tasks._scores.longest == theirs == 48


def _too_long(folder: str) -> str:
    with pytest.raises(ConfigError) as raised:
        scored({"dp": 2}, folder, [([1], [2]), ([1], [2] * 49)])
    return str(raised.value)


def test_text_that_the_model_does_not_take_is_refused_on_every_rank(exported: Path) -> None:
    for said in run_ranks(_too_long, 2, str(exported)):
        assert "a task of eval.tasks scores a text of 49 tokens, but the model takes 48" in said


def _task(folder: Path, name: str, kind: str, **more: Any) -> str:
    rows = [
        {"start": _sentence(number, 4), "ends": [_sentence(number + k, 2) for k in range(3)], "right": number % 3,
         "whole": _sentence(number, 12)}
        for number in range(13)
    ]  # fmt: skip
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {
        "task": name, "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(folder / f"{name}.jsonl")}},
        "test_split": "test", "output_type": kind, **more,
    }  # fmt: skip
    (folder / f"{name}.yaml").write_text(json.dumps(task))
    return f"{name}.yaml"


def _tasks(folder: Path) -> list[str]:
    choice = {"doc_to_text": "{{start}}", "doc_to_choice": "{{ends}}", "doc_to_target": "right"}
    both = [
        {"metric": each, "aggregation": "mean", "higher_is_better": True}
        for each in ("acc", "acc_norm")
    ]
    rolling = [
        {
            "metric": "byte_perplexity",
            "aggregation": "weighted_perplexity",
            "higher_is_better": False,
        }
    ]
    word = [{"metric": "perplexity", "aggregation": "perplexity", "higher_is_better": False}]
    return [
        _task(
            folder,
            "choose",
            "multiple_choice",
            metric_list=both,
            num_fewshot=1,
            fewshot_split="test",
            **choice,
        ),
        _task(
            folder,
            "roll",
            "loglikelihood_rolling",
            doc_to_text="",
            doc_to_target="{{whole}}",
            metric_list=rolling,
        ),
        _task(
            folder,
            "word",
            "loglikelihood",
            doc_to_text="{{start}}",
            doc_to_target=" {{ends[0]}}",
            metric_list=word,
        ),
    ]


# One process, every part of which the mesh has too, is a long case: each command imports the harness.
@pytest.mark.parametrize(
    "mesh",
    [pytest.param({}, marks=pytest.mark.long), {"dp": 2, "dp_shard": 2, "tp": 2}],
    ids=["one process", "2x1x2"],
)
def test_run_tells_what_the_harness_finds_of_its_export(
    mesh: dict[str, int], tmp_path: Path
) -> None:
    from lm_eval.evaluator import simple_evaluate

    prepare(tmp_path)
    names = _tasks(tmp_path)
    sizes = [
        text
        for axis, size in {"dp": 1, **mesh}.items()
        for text in (f"--mesh.{axis}", str(size))
    ]
    asked = (
        "--eval.tasks",
        f"[{', '.join(names)}]",
        "--eval.every",
        "5",
        "--train.steps",
        "8",
        "--train.seed",
        "1",
    )
    done = command(tmp_path, "train", "config.yaml", "--log.dir", "run", *asked, *sizes)
    assert done.returncode == 0, done.stderr
    assert "tasks after step 5: choose_acc" in done.stdout
    lines = [
        json.loads(text)
        for text in (tmp_path / "run/metrics.jsonl").read_text().splitlines()
        if "task_" in text
    ]
    assert [line["step"] for line in lines] == [5, 8]
    assert command(tmp_path, "export", "run", "--to", "model").returncode == 0
    paths = [json.loads((tmp_path / name).read_text()) for name in names]
    theirs = simple_evaluate(_of_harness(tmp_path / "model"), tasks=paths, bootstrap_iters=0)[
        "results"
    ]
    last = lines[-1]
    assert last["task_choose_acc"] == theirs["choose"]["acc,none"]
    assert last["task_choose_acc_norm"] == theirs["choose"]["acc_norm,none"]
    assert last["task_roll_byte_perplexity"] == pytest.approx(
        theirs["roll"]["byte_perplexity,none"], rel=1e-5
    )
    assert last["task_word_perplexity"] == pytest.approx(
        theirs["word"]["perplexity,none"], rel=1e-5
    )
    (elsewhere := tmp_path / "elsewhere").mkdir()
    again = command(elsewhere, "eval", "../run", "--mesh.dp", "2")
    assert (
        f": choose_acc {last['task_choose_acc']:.4f}, " in again.stdout
        and "loss" not in again.stdout
    ), again.stderr
    both = command(
        tmp_path, "eval", "run", "--eval.source", "corpus", "--eval.tasks", f"[{names[2]}]"
    )
    assert (
        re.search(r": loss \d.*; word_perplexity \d", both.stdout)
        and "choose" not in both.stdout
    ), both.stderr


def test_tasks_change_no_bit_of_the_run(tmp_path: Path) -> None:
    prepare(tmp_path)
    plain = ("--train.steps", "6", "--mesh.dp", "2")
    asked = (*plain, "--eval.every", "2", "--eval.tasks", f"[{_tasks(tmp_path)[0]}]")
    for name, keys in (("plain", plain), ("scored", asked)):
        assert (
            command(tmp_path, "train", "config.yaml", "--log.dir", name, *keys).returncode == 0
        )
    hashes = {command(tmp_path, "hash", name).stdout.split()[0] for name in ("plain", "scored")}
    assert len(hashes) == 1


def test_what_cannot_be_scored_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from threefold.run.eval_tasks import _load

    prepare(tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "code.yaml").write_text("task: code\nprocess_docs: !function utils.steal\n")
    (tmp_path / "list.yaml").write_text("- 1\n")
    (tmp_path / "nodata.yaml").write_text(
        json.dumps({"task": "nodata", "dataset_path": "json", "test_split": "test"})
    )
    _task(
        tmp_path,
        "written",
        "generate_until",
        doc_to_text="{{start}}",
        doc_to_target="{{whole}}",
    )
    cases = {
        "gsm8k.yaml": "gsm8k.yaml: No such file or directory",
        "code.yaml": "code.yaml names a function, which would be run",
        "list.yaml": "list.yaml is not a task",
        "nodata.yaml": "eval.tasks cannot be loaded",
        "written.yaml": "eval.tasks has written, which is scored by generate_until",
    }
    for task, said in cases.items():
        with pytest.raises(ConfigError) as raised:
            _load([task])
        assert str(raised.value).startswith(said)
    refused = command(
        tmp_path, "train", "config.yaml", "--mesh.dp", "1", "--eval.tasks", "[helaswag]"
    )
    assert refused.returncode == 2 and refused.stderr.startswith(
        "eval.tasks has helaswag, which is not known"
    )
    assert (
        "step" not in refused.stdout.split("done")[0].split("epochs")[0].partition("step 1/")[2]
    )
