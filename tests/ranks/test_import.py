"""`threefold import`: what other programs trained is taken over whole, or refused by name."""

from __future__ import annotations

import builtins
import io
import json
import os
import pickle
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from transformers import AutoConfig, AutoModelForCausalLM

from ranks.keeping import LLAMA, write_corpus
from ranks.runs import command
from threefold.checkpoint.checkpoint_folder import find
from threefold.checkpoint.tensor_index import Index
from threefold.checkpoint.tensors import read_whole
from threefold.convert.dcp_reader import _Inert, open_dcp
from threefold.errors import CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
ARCHITECTURE = {**LLAMA, "vocab_size": 257}
QWEN3 = {**ARCHITECTURE, "model_type": "qwen3", "head_dim": 8}
KEYS = [
    "--data.tokenizer",
    "bytes",
    "--data.seq_len",
    "16",
    "--train.global_batch",
    "4",
    "--mesh.device",
    "cpu",
]
KEYS += [
    "--optimizer.schedule",
    "constant",
    "--optimizer.warmup_steps",
    "0",
    "--optimizer.lr",
    "1e-3",
]
STEP = 3


def model_keys(architecture: dict[str, Any] = ARCHITECTURE) -> list[str]:
    return ["--model.config", json.dumps(architecture)]


@pytest.fixture
def model() -> Any:
    return made(ARCHITECTURE)


def made(architecture: dict[str, Any]) -> Any:
    torch.manual_seed(1)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**architecture))


def moments_of(weights: dict[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    draws = torch.Generator().manual_seed(2)
    return {
        name: {
            "exp_avg": torch.randn(values.shape, generator=draws),
            "exp_avg_sq": torch.rand(values.shape, generator=draws),
            "step": torch.tensor(float(STEP)),
        }
        for name, values in weights.items()
    }


def imported(
    source: Path,
    to: Path,
    tmp_path: Path,
    *more: str,
    architecture: dict[str, Any] = ARCHITECTURE,
) -> Any:
    if not (tmp_path / "corpus.txt").exists():
        write_corpus(tmp_path)
    given = [
        *model_keys(architecture),
        "--data.source",
        str(tmp_path / "corpus.txt"),
        *KEYS,
        *more,
    ]
    return command(tmp_path, "import", str(source), "--to", str(to), *given)


def held(run: Path) -> dict[str, torch.Tensor]:
    state = find(run).state
    return {name: read_whole(state, entry) for name, entry in Index.read(state).entries.items()}


def expected(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    moments = moments_of(weights)
    found = {f"model.{name}": values for name, values in weights.items()}
    for name, values in moments.items():
        found |= {f"optimizer.{moment}.{name}": value for moment, value in values.items()}
    return found


def assert_equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, values in wanted.items():
        assert torch.equal(found[name], values), name


@pytest.mark.ranks
def test_accelerate_s_two_folders_become_a_run_that_goes_on(model: Any, tmp_path: Path) -> None:
    weights = dict(model.state_dict())
    dcp.save(
        {"model": weights},
        checkpoint_id=tmp_path / "theirs" / "pytorch_model_fsdp_0",
        no_dist=True,
    )
    state = {
        "state": moments_of(weights),
        "param_groups": [{"lr": 1e-3, "params": list(weights)}],
    }
    dcp.save(
        {"optimizer": state}, checkpoint_id=tmp_path / "theirs" / "optimizer_0", no_dist=True
    )
    run = tmp_path / "run"
    done = imported(tmp_path / "theirs", run, tmp_path, "--train.steps", "5")
    assert done.returncode == 0, done.stderr
    assert (
        f"{run}: step 3, {len(weights)} weights and their moments, by the names of transformers"
        in done.stdout
    )
    assert "left out: optimizer.param_groups.0." in done.stdout
    assert_equal(held(run), expected(weights))
    on = command(tmp_path, "resume", str(run), "--log.sample_tokens", "0")
    assert on.returncode == 0, on.stderr
    assert "resumed from " in on.stdout and "changed: " not in on.stdout.replace(
        "changed: log.sample_tokens 64 -> 0\n", ""
    )
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in steps] == [4, 5]
    audited = command(tmp_path, "data", "audit", str(run))
    assert audited.returncode == 0, audited.stderr
    out = command(tmp_path, "export", str(run), "--to", str(tmp_path / "model"))
    assert out.returncode == 0 and "reloaded: equal logits" in out.stdout, out.stderr


@pytest.mark.ranks
def test_lightning_s_moments_have_a_shorter_prefix_than_its_weights(
    model: Any, tmp_path: Path
) -> None:
    """The model is an attribute of a LightningModule, whose state is one of two entries."""
    weights = dict(model.state_dict())
    in_module = {f"model.{name}": values for name, values in moments_of(weights).items()}
    groups = [{"lr": 1e-3, "params": list(in_module)}]
    saved = {
        "model": {f"model.{name}": values for name, values in weights.items()},
        "optimizer_0": {"state": in_module, "param_groups": groups},
    }
    dcp.save(saved, checkpoint_id=tmp_path / "step=3.ckpt", no_dist=True)
    done = imported(tmp_path / "step=3.ckpt", tmp_path / "run", tmp_path)
    assert done.returncode == 0, done.stderr
    assert_equal(held(tmp_path / "run"), expected(weights))


@pytest.mark.ranks
def test_first_step_is_that_of_torch_s_adamw(model: Any, tmp_path: Path) -> None:
    """The moments are used as AdamW left them: one more step equals torch's own."""
    weights = dict(model.state_dict())
    dcp.save(
        {"model": weights, "optim": {"state": moments_of(weights)}},
        checkpoint_id=tmp_path / "a",
        no_dist=True,
    )
    run = tmp_path / "run"
    done = imported(
        tmp_path / "a", run, tmp_path, "--train.steps", "4", "--train.grad_clip", "0"
    )
    assert done.returncode == 0, done.stderr
    assert (
        command(
            tmp_path, "resume", str(run), "--data.shuffle", "false", "--log.sample_tokens", "0"
        ).returncode
        == 0
    )
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
        ],
        lr=1e-3,
        betas=(0.9, 0.95),
    )
    for name, values in moments_of(weights).items():
        optimizer.state[dict(model.named_parameters())[name]] = values
    text = list((tmp_path / "corpus.txt").read_bytes())[: 4 * 16 + 1]
    tokens = torch.tensor(text)
    logits = model(tokens[:-1].view(4, 16)).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[1:]).backward()
    optimizer.step()
    found = held(run)
    for name, parameter in model.named_parameters():
        assert torch.allclose(found[f"model.{name}"], parameter.detach(), atol=1e-6), name


def in_torchtitan(
    weights: dict[str, torch.Tensor], *, version: str, rotate: bool
) -> dict[str, torch.Tensor]:
    """Their names; of Llama, q and k with the rows of each head interleaved, as complex rotation pairs them."""
    fused = "qkv_linear." if version == "new" else ""
    names = {
        **{
            "self_attn.q_proj": f"attention.{fused}wq",
            "self_attn.k_proj": f"attention.{fused}wk",
        },
        **{"self_attn.v_proj": f"attention.{fused}wv", "self_attn.o_proj": "attention.wo"},
        **{"self_attn.q_norm": "attention.q_norm", "self_attn.k_norm": "attention.k_norm"},
        **{
            "mlp.gate_proj": "feed_forward.w1",
            "mlp.down_proj": "feed_forward.w2",
            "mlp.up_proj": "feed_forward.w3",
        },
        **{"input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm"},
        **{"model.embed_tokens": "tok_embeddings", "model.norm": "norm"},
        "lm_head": "lm_head" if version == "new" else "output",
    }
    found = {}
    for name, values in weights.items():
        theirs = name.removesuffix(".weight").replace("model.layers.", "layers.")
        for ours, other in names.items():
            theirs = theirs.replace(ours, other) if theirs.endswith(ours) else theirs
        heads = {"q_proj": 4, "k_proj": 2}.get(name.split(".")[-2])
        if rotate and heads and values.ndim == 2:
            rows = []
            for head in values.view(heads, -1, values.shape[1]):
                half = len(head) // 2
                rows += [
                    head[place // 2 + (half if place % 2 else 0)] for place in range(len(head))
                ]
            values = torch.stack(rows)
        found[f"{theirs}.weight"] = values
    return found


@pytest.mark.parametrize(
    ("architecture", "version"), [(ARCHITECTURE, "old"), (ARCHITECTURE, "new"), (QWEN3, "new")]
)
def test_torchtitan_s_names_are_all_found(
    architecture: dict[str, Any], version: str, tmp_path: Path
) -> None:
    weights = dict(made(architecture).state_dict())
    rotate = architecture["model_type"] == "llama"
    moments = moments_of(weights)
    state: dict[str, Any] = dict(in_torchtitan(weights, version=version, rotate=rotate))
    for moment in ("exp_avg", "exp_avg_sq", "step"):
        group = in_torchtitan(
            {name: each[moment] for name, each in moments.items()},
            version=version,
            rotate=rotate,
        )
        state |= {f"optimizer.state.{name}.{moment}": value for name, value in group.items()}
    state |= {
        "train_state": {"step": torch.tensor(STEP)},
        "dataloader": {"dp_rank_0": b"..."},
        "lr_scheduler": {"n": 1},
    }
    dcp.save(state, checkpoint_id=tmp_path / "step-3", no_dist=True)
    done = imported(tmp_path / "step-3", tmp_path / "run", tmp_path, architecture=architecture)
    assert done.returncode == 0, done.stderr
    assert "by the names of torchtitan" in done.stdout
    assert_equal(held(tmp_path / "run"), expected(weights))


def test_weights_alone_become_a_folder_of_transformers(model: Any, tmp_path: Path) -> None:
    weights = {
        f"_orig_mod.module.{name}": values for name, values in model.state_dict().items()
    }
    dcp.save(
        weights,
        storage_writer=HuggingFaceStorageWriter(str(tmp_path / "a"), save_distributed=True),
        no_dist=True,
    )
    refused = imported(tmp_path / "a", tmp_path / "run", tmp_path)
    assert (
        refused.returncode == 2
        and "has no state of AdamW" in refused.stderr
        and "--weights" in refused.stderr
    )
    assert not (tmp_path / "run").exists()
    (tmp_path / "a" / "optimizer.bin").write_bytes(b"as accelerate pickles it")
    refused = imported(tmp_path / "a", tmp_path / "run", tmp_path)
    assert (
        "that is read: optimizer.bin is pickled, by accelerate or a Trainer" in refused.stderr
    )
    done = imported(tmp_path / "a", tmp_path / "out", tmp_path, "--weights")
    assert done.returncode == 0 and "reloaded: equal logits" in done.stdout, done.stderr
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert_equal(dict(found), dict(model.state_dict()))


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        tokens = torch.arange(8) + number
        return {"input_ids": tokens, "labels": tokens}


def by_accelerate(model: Any, folder: Path) -> Path:
    """A step, and its plain `save_state`."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    accelerator = Accelerator(cpu=True)
    prepared, optimizer = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters(), lr=1e-2)
    )
    accelerator.backward(
        prepared(**{name: rows[None] for name, rows in Rows()[0].items()}).loss
    )
    optimizer.step()
    accelerator.save_state(str(folder))
    AcceleratorState._reset_state(reset_partial_state=True)
    return folder


def by_a_trainer(model: Any, folder: Path) -> Path:
    """The checkpoint of transformers' Trainer after two steps."""
    from transformers import Trainer, TrainingArguments

    quiet: dict[str, Any] = {"report_to": "none", "disable_tqdm": True, "use_cpu": True}
    args = TrainingArguments(
        str(folder), max_steps=2, save_steps=2, dataloader_pin_memory=False, **quiet
    )
    Trainer(model, args, train_dataset=Rows()).train()
    return folder / "checkpoint-2"


@pytest.mark.parametrize(
    ("make", "file"),
    [(by_accelerate, "optimizer.bin"), (by_a_trainer, "optimizer.pt")],
    ids=["accelerate", "Trainer"],
)
def test_pickled_moments_are_refused_with_a_fix_that_keeps_the_weights(
    make: Any, file: str, model: Any, tmp_path: Path
) -> None:
    before = model.state_dict()["model.norm.weight"].clone()
    source = make(model, tmp_path / "theirs")
    assert (source / file).exists() and not torch.equal(
        before, model.state_dict()["model.norm.weight"]
    )
    refused = imported(source, tmp_path / "run", tmp_path)
    assert (
        refused.returncode == 2
        and f"that is read: {file} is pickled, by accelerate or a Trainer" in refused.stderr
    )
    (option,) = re.findall(r"fix: (--\S+)", refused.stderr)
    done = imported(source, tmp_path / "out", tmp_path, option)
    assert done.returncode == 0 and "reloaded: equal logits" in done.stdout, done.stderr
    assert_equal(
        dict(AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()),
        dict(model.state_dict()),
    )


def test_moments_that_are_no_weight_s_are_left_out_as_the_fix_says(
    model: Any, tmp_path: Path
) -> None:
    """Moments of torchtitan's fused queries, keys and values belong to its names of a Llama 3, not to these."""
    weights = dict(model.state_dict())
    fused = {"layers.0.attention.qkv_linear.wqkv.weight": torch.ones(64, 32)}
    state = {"model": weights, "optimizer": {"state": moments_of(fused)}}
    dcp.save(state, checkpoint_id=tmp_path / "a", no_dist=True)
    refused = imported(tmp_path / "a", tmp_path / "run", tmp_path)
    assert refused.returncode == 2 and "has no complete state of AdamW" in refused.stderr
    assert "fix: --weights " in refused.stderr
    done = imported(tmp_path / "a", tmp_path / "out", tmp_path, "--weights")
    assert done.returncode == 0 and "left out: " in done.stdout, done.stderr
    assert_equal(
        dict(AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()), weights
    )


def test_moments_of_two_optimizers_are_refused(model: Any, tmp_path: Path) -> None:
    weights = dict(model.state_dict())
    moments = moments_of(weights)
    state = {"model": weights, "optimizer": {"state": moments}, "other": {"state": moments}}
    dcp.save(state, checkpoint_id=tmp_path / "a", no_dist=True)
    refused = imported(tmp_path / "a", tmp_path / "run", tmp_path)
    assert refused.returncode == 2
    assert "more of no weight of the model, or given twice" in refused.stderr


WRONG = {
    "a weight is missing": (
        lambda w: w.pop("model.norm.weight"),
        "model.norm.weight of the model is not in it",
    ),
    "a weight more": (
        lambda w: w.update(extra=torch.zeros(2)),
        "extra is not in the model",
    ),
    "a weight again, of another model": (
        lambda w: w.update({"module.model.norm.weight": torch.zeros(32)}),
        " is not in the model, or given twice",
    ),
    "misspelt": (
        lambda w: w.update(norn=w.pop("model.norm.weight")),
        "model.norm.weight of the model is not in it; model.norn is not in the model",
    ),
    "another shape": (
        lambda w: w.update({"model.norm.weight": torch.ones(31)}),
        "model.norm.weight: [32] in the model, [31] in it",
    ),
    "integers": (
        lambda w: w.update({"model.norm.weight": torch.ones(32, dtype=torch.int64)}),
        "model.model.norm.weight is I64, and F32 does not hold all of its values",
    ),
}


@pytest.mark.parametrize("case", WRONG, ids=str)
def test_other_weights_are_refused_by_name(case: str, model: Any, tmp_path: Path) -> None:
    spoil, reason = WRONG[case]
    weights = dict(model.state_dict())
    moments = moments_of(weights)
    spoil(weights)
    dcp.save(
        {"model": weights, "o": {"state": moments}}, checkpoint_id=tmp_path / "a", no_dist=True
    )
    done = imported(tmp_path / "a", tmp_path / "run", tmp_path)
    assert done.returncode == 2 and reason in done.stderr.replace("\n", " "), done.stderr
    assert not (tmp_path / "run").exists()


def test_moments_that_are_not_complete_are_refused_by_name(model: Any, tmp_path: Path) -> None:
    weights = dict(model.state_dict())
    for case, reason in {
        "missing": "exp_avg of model.norm.weight missing",
        "steps": "has counted 3 and 4 steps",
    }.items():
        moments = moments_of(weights)
        if case == "missing":
            del moments["model.norm.weight"]["exp_avg"]
        else:
            moments["model.norm.weight"]["step"] += 1
        dcp.save(
            {"model": weights, "o": {"state": moments}},
            checkpoint_id=tmp_path / case,
            no_dist=True,
        )
        done = imported(tmp_path / case, tmp_path / "run", tmp_path)
        assert done.returncode == 2 and reason in done.stderr, done.stderr


def test_numbers_that_are_not_finite_are_refused_by_name(model: Any, tmp_path: Path) -> None:
    weights = dict(model.state_dict())
    moments = moments_of(weights)
    spoilt = {**weights, "model.norm.weight": torch.full((32,), torch.nan)}
    for case, held, option in (("model", spoilt, "--weights"), ("o.state", weights, "--json")):
        dcp.save(
            {"model": held, "o": {"state": moments}},
            checkpoint_id=tmp_path / case,
            no_dist=True,
        )
        moments["model.norm.weight"]["exp_avg_sq"][3] = torch.inf
        done = imported(tmp_path / case, tmp_path / "to", tmp_path, option)
        assert done.returncode == 2 and not (tmp_path / "to").exists(), done.stderr
        name = "exp_avg_sq" * (case == "o.state")
        assert done.stderr.splitlines() == [
            f"{case}.model.norm.weight{name and f'.{name}'} has numbers that are not finite",
            "  expected: weights and moments that training can continue from",
            "  fix: import an earlier checkpoint",
        ]


@pytest.mark.parametrize(
    "asked",
    [
        ("name", "sgd"),
        ("name", "torch.optim.NAdam"),
        ("moments", "bfloat16"),
        ("options", "{amsgrad: true}"),
    ],
    ids=str,
)
def test_an_optimizer_that_cannot_go_on_with_the_moments_is_refused(
    asked: tuple[str, str], tmp_path: Path
) -> None:
    key, value = asked
    done = imported(tmp_path, tmp_path / "run", tmp_path, f"--optimizer.{key}", value)
    shown = {"name": "adamw", "moments": "float32", "options": "{}"} | {key: value}
    assert done.returncode == 2 and done.stderr.splitlines() == [
        f"optimizer.name = {shown['name']}, optimizer.moments = {shown['moments']} and optimizer.options = "
        f"{shown['options']} do not continue with AdamW's moments, which are imported",
        "  expected: adamw, torch.optim.AdamW, torch.optim.Adam: with moments in float32 and without amsgrad",
        "  fix: --optimizer.name adamw --optimizer.moments float32 --optimizer.options '{}'   (or --weights, for a "
        "Hugging Face folder from which a new run begins)",
    ]


@pytest.mark.ranks
def test_an_imported_run_with_exact_sums_begins_on_any_mesh(model: Any, tmp_path: Path) -> None:
    """No mesh has made its bits: what was saved by another program has none to keep."""
    weights = dict(model.state_dict())
    state = {"model": weights, "optim": {"state": moments_of(weights)}}
    dcp.save(state, checkpoint_id=tmp_path / "a", no_dist=True)
    exact = ("--train.steps", "4", "--train.reduce", "exact", "--train.micro_batch", "2")
    done = imported(tmp_path / "a", tmp_path / "run", tmp_path, *exact)
    assert done.returncode == 0, done.stderr
    mesh = ("--mesh.dp", "1", "--mesh.tp", "2", "--log.sample_tokens", "0")
    on = command(tmp_path, "resume", str(tmp_path / "run"), *mesh)
    assert on.returncode == 0, on.stderr
    (line,) = [each for each in on.stdout.splitlines() if "resumed from " in each]
    assert "bit for bit" not in line


class _Calls:
    def __init__(self, function: Any, *arguments: Any) -> None:
        self._call = (function, arguments)

    def __reduce__(self) -> Any:
        return self._call


MARK = "threefold-was-here"
HOSTILE = {
    "system": _Calls(os.system, f"touch {MARK}"),
    "eval": _Calls(builtins.eval, f"open('{MARK}', 'w')"),
    "getattr": _Calls(builtins.getattr, "text", "upper"),
    "a class of torch": _Calls(torch.nn.Linear, 2, 2),
    "numpy": _Calls(__import__("numpy").zeros, 3),
    "inside": {"state_dict_metadata": {"a": [_Calls(os.mkdir, MARK)]}, "storage_data": {}},
}


@pytest.mark.parametrize("case", HOSTILE, ids=str)
def test_a_pickle_that_names_anything_else_runs_nothing(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for protocol in (2, 4):
        (tmp_path / ".metadata").write_bytes(pickle.dumps(HOSTILE[case], protocol))
        with pytest.raises(CheckpointError, match=r"the \.metadata names "):
            open_dcp(tmp_path)
    assert not (tmp_path / MARK).exists()


def test_members_of_enumerations_are_read_as_python_before_3_11_4_writes_them(
    tmp_path: Path,
) -> None:
    """As getattr(kind, name), of torch's kinds alone, which stand for inert records here."""
    from torch.distributed.checkpoint import metadata

    kind = metadata._MEM_FORMAT_ENCODING
    plain = pickle.loads(pickle.dumps(kind.TORCH_CONTIGUOUS_FORMAT))
    assert plain is kind.TORCH_CONTIGUOUS_FORMAT
    empty = {"state_dict_metadata": {}, "storage_data": {}}
    values = {"planner_data": _Calls(getattr, kind, "TORCH_CONTIGUOUS_FORMAT"), **empty}
    (tmp_path / ".metadata").write_bytes(pickle.dumps(values))
    assert (
        _Inert(io.BytesIO((tmp_path / ".metadata").read_bytes()))
        .load()["planner_data"]
        .arguments
        == ()
    )
    for name in ("__class__", "__subclasses__", "__init__"):
        content = pickle.dumps(_Calls(getattr, kind, name))
        assert type(_Inert(io.BytesIO(content)).load()).__name__ == "_MEM_FORMAT_ENCODING"
    with pytest.raises(CheckpointError, match=r"names builtins\.getattr"):
        _Inert(
            io.BytesIO(
                pickle.dumps(
                    _Calls(getattr, metadata.ChunkStorageMetadata((0,), (1,)), "sizes")
                )
            )
        ).load()


def test_damaged_metadata_and_files_are_refused_by_name(model: Any, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    dcp.save({"model": dict(model.state_dict())}, checkpoint_id=whole, no_dist=True)
    content = (whole / ".metadata").read_bytes()
    draws = torch.Generator().manual_seed(0)
    refused = 0
    for number in range(120):
        place = int(torch.randint(len(content), (), generator=draws))
        spoilt = bytearray(content)
        spoilt[place] ^= 1 << int(torch.randint(8, (), generator=draws))
        (whole / ".metadata").write_bytes(bytes(spoilt) if number % 3 else content[:place])
        try:
            found = open_dcp(whole)
            for name in found.tensors:
                found.read(name)
        except CheckpointError:
            refused += 1
    assert refused > 60  # the rest changes names, or what nobody reads
    (whole / ".metadata").write_bytes(content)
    name = next(iter(open_dcp(whole).tensors))
    file = next(whole.glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match="cannot be read for "):
        for name in open_dcp(whole).tensors:
            open_dcp(whole).read(name)
    shutil.rmtree(whole)
    with pytest.raises(CheckpointError, match="has no checkpoint of torch"):
        open_dcp(whole)


def test_folders_that_are_filled_and_options_without_effect_are_refused(tmp_path: Path) -> None:
    (tmp_path / "to").mkdir()
    (tmp_path / "to" / "a").touch()
    assert (
        "is not empty"
        in command(
            tmp_path, "import", str(tmp_path), "--to", str(tmp_path / "to"), *model_keys()
        ).stderr
    )
    assert "missing" in command(tmp_path, "import", str(tmp_path), *model_keys()).stderr.lower()
