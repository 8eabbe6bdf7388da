"""Export: any checkpoint as a folder that transformers loads to equal logits, in little memory."""

from __future__ import annotations

import ctypes
import json
import math
import os
import resource
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from ranks.keeping import LLAMA, Miniature, Sizes, write_corpus
from ranks.runs import command
from ranks.spawn import run_ranks
from ranks.test_damage import _sealed_anew
from ranks.test_resume_meshes import GPT2, MOE
from threefold.checkpoint.checkpoint_folder import Checkpoint, find
from threefold.errors import CheckpointError, ConfigError, RunError

pytestmark = pytest.mark.ranks

TIED = {**LLAMA, "tie_word_embeddings": True}
STATES = {
    **{
        "model_type": "granitemoehybrid",
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "vocab_size": 257,
    },
    **{
        "layer_types": ["linear_attention", "full_attention"],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    **{
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
        "mamba_d_state": 8,
        "mamba_chunk_size": 8,
        "shared_intermediate_size": 32,
    },
    **{
        "intermediate_size": 32,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "time_step_limit": [0.0, math.inf],
    },
}
_EMU3 = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
EMU3 = {
    "model_type": "emu3",
    "text_config": {**_EMU3, "num_key_value_heads": 2, "vocab_size": 257, "pad_token_id": 0},
}


def _frozen_part() -> dict[str, Any]:
    """BLT, whose patcher is frozen."""
    from architectures import config_of
    from threefold.checkpoint.manifest import architecture_of
    from threefold.model.reduced import reduced

    values = architecture_of(reduced(config_of("blt")))
    for each in (
        values,
        *(values[f"{part}_config"] for part in ("patcher", "encoder", "decoder")),
    ):
        each["vocab_size"] = 257
    return values


CASES: dict[str, tuple[dict[str, Any], Sizes]] = {
    "llama on one process": (LLAMA, (1, 1, 1, 1)),
    "llama on dp_shard x tp": (LLAMA, (1, 2, 1, 2)),
    "tied on dp": (TIED, (2, 1, 1, 1)),
    "tied on tp": (TIED, (1, 1, 1, 2)),
    "experts on tp": (MOE, (1, 1, 1, 2)),
    "gpt2 on dp": (GPT2, (2, 1, 1, 1)),
    "a config with an infinity": (STATES, (1, 1, 1, 1)),
    "a text part whose config has no class": (EMU3, (1, 1, 1, 1)),
}


def _trained(sizes: Sizes, folder: str, model: dict[str, Any] | str) -> Any:
    """One step, saved, of random weights or those in a folder; the weights by name, whole."""
    named = {"name_or_path": model, "config": None}
    run = Miniature(sizes, folder, model=named if isinstance(model, str) else {"config": model})
    run.advance(1)
    run.checkpointer.save(1, None, True)
    run.checkpointer.saver.wait()
    named = dict(run.model.module.named_parameters())
    return {
        name: (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor)
        .detach()
        .numpy()
        for name, tensor in named.items()
    }


@pytest.fixture(params=CASES, ids=str)
def trained(
    request: pytest.FixtureRequest, tmp_path: Path
) -> tuple[Path, dict[str, Any], bool]:
    """A run's folder, its weights, and whether it is tied."""
    model, sizes = CASES[request.param]
    write_corpus(tmp_path)
    folder = tmp_path / "run"
    weights = run_ranks(_trained, math.prod(sizes), sizes, str(folder), model)[0]
    return folder, weights, "lm_head.weight" not in weights


def test_export_reloads_to_the_trained_weights(
    trained: tuple[Path, dict[str, Any], bool], tmp_path: Path
) -> None:
    from threefold.export.model_folder import export

    folder, weights, tied = trained
    done = export(folder, tmp_path / "out", max_shard_bytes=20_000)
    assert done.verified == "reloaded: equal logits"
    assert len(done.files) > 1 and all(
        (tmp_path / "out" / file).stat().st_size < 60_000 for file in done.files
    )
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert (model.lm_head.weight is model.get_input_embeddings().weight) == tied
    found = dict(model.named_parameters())
    assert found.keys() == weights.keys()
    for name, values in weights.items():
        assert torch.equal(found[name], torch.from_numpy(values)), name
    weight_map = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())[
        "weight_map"
    ]
    for name, file in weight_map.items():
        with safe_open(tmp_path / "out" / file, framework="pt") as tensors:
            assert name in tensors.keys()  # noqa: SIM118 (no mapping)
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("ab")["input_ids"] == [97, 98]
    # Not those of its class, which are ids of another vocabulary.
    generation = GenerationConfig.from_pretrained(tmp_path / "out")
    assert (generation.bos_token_id, generation.eos_token_id) == (None, [256])


def test_ends_of_a_pretrained_model_stay_beside_those_that_were_learnt(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    from threefold.export.model_folder import export
    from threefold.export.tokenizer_files import byte_tokenizer

    base = LlamaForCausalLM(LlamaConfig(**LLAMA))
    base.generation_config.eos_token_id = [7, 8]
    base.save_pretrained(tmp_path / "base")
    byte_tokenizer().save_pretrained(tmp_path / "base")
    write_corpus(tmp_path)
    run_ranks(_trained, 1, (1, 1, 1, 1), str(tmp_path / "run"), str(tmp_path / "base"))
    export(tmp_path / "run", tmp_path / "out")
    generation = GenerationConfig.from_pretrained(tmp_path / "out")
    assert generation.eos_token_id == [7, 8, 256]


def test_what_an_architecture_freezes_is_kept(tmp_path: Path) -> None:
    """Its values are the run's own: nothing else has them."""
    from threefold.export.model_folder import export

    write_corpus(tmp_path)
    weights = run_ranks(_trained, 1, (1, 1, 1, 1), str(tmp_path / "run"), _frozen_part())[0]
    export(tmp_path / "run", tmp_path / "out")
    found = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "out").named_parameters())
    for name, values in weights.items():
        assert torch.equal(found[name], torch.from_numpy(values)), name


def test_every_rank_file_is_plain_safetensors(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    weights = run_ranks(_trained, 2, (1, 2, 1, 1), str(tmp_path / "run"), LLAMA)[0]
    state = find(tmp_path / "run").state
    parts = [load_file(state / f"rank-0000{rank}.safetensors") for rank in range(2)]
    name = "model.model.layers.0.self_attn.q_proj.weight"
    whole = torch.cat([parts[0][name], parts[1][name]])
    assert torch.equal(whole, torch.from_numpy(weights[name.removeprefix("model.")]))


def test_experts_have_the_names_of_the_hub(tmp_path: Path) -> None:
    from threefold.export.model_folder import export

    write_corpus(tmp_path)
    run_ranks(_trained, 1, (1, 1, 1, 1), str(tmp_path / "run"), MOE)
    export(tmp_path / "run", tmp_path / "out")
    names = load_file(tmp_path / "out" / "model.safetensors")
    assert "model.layers.0.mlp.experts.3.gate_proj.weight" in names
    assert not any("gate_up_proj" in name for name in names)


# --- memory ------------------------------------------------------------------------------------------------------

TENSORS, TENSOR_BYTES = 40, 8_000_000
_M_MMAP_THRESHOLD = -3  # malloc.h


def _write_large(state: str) -> None:
    from threefold.checkpoint.tensor_index import FILE, Box, Entry, Index
    from threefold.checkpoint.tensors import TensorPart, entries_of, write_parts

    shape = (TENSOR_BYTES // 4000, 1000)
    parts = [
        TensorPart(
            f"model.layers.{number}.w",
            shape,
            Box((0, 0), shape),
            torch.full(shape, float(number)),
        )
        for number in range(TENSORS)
    ]
    path = Path(state) / "rank-00000.safetensors"
    write_parts(path.parent, path.stem, parts)
    entries = {
        name: Entry(dtype, shape, [chunk]) for name, dtype, shape, chunk in entries_of(path)
    }
    (Path(state) / FILE).write_text(Index(entries).to_json())


def _export_large(state: str, to: str) -> int:
    from threefold.checkpoint.tensor_index import Index
    from threefold.export.weights import write_weights

    # malloc raises the size from which it returns memory at once with each large block that it frees: what it keeps
    # then depends on the order of things. A fixed size leaves what is held.
    assert ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, TENSOR_BYTES // 8) == 1
    index = Index.read(Path(state))
    names = [name.removeprefix("model.") for name in index.entries]
    # The libraries' own pages come into a forked process when they are first used.
    write_weights(
        Path(state), index, names[:1], Path(to), max_shard_bytes=1, convert=lambda layer: layer
    )
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    write_weights(
        Path(state),
        index,
        names,
        Path(to),
        max_shard_bytes=3 * TENSOR_BYTES,
        convert=lambda layer: layer,
    )
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before


def test_memory_holds_one_file_and_one_layer(tmp_path: Path) -> None:
    state, to = tmp_path / "state", tmp_path / "out"
    state.mkdir()
    to.mkdir()
    run_ranks(_write_large, 1, str(state))
    grown = run_ranks(_export_large, 1, str(state), str(to))[0]
    assert len(list(to.glob("*-of-*.safetensors"))) == math.ceil(TENSORS / 3)
    # Four tensors at a time: the file's three, and the one that no longer fits into it. All of them would be 320 MB.
    assert grown < 5 * TENSOR_BYTES, f"{grown:,} bytes for files of {3 * TENSOR_BYTES:,}"


# --- what is refused ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    parent = tmp_path_factory.mktemp("export")
    write_corpus(parent)
    run_ranks(_trained, 1, (1, 1, 1, 1), str(parent / "run"), LLAMA)
    return parent / "run"


def test_damaged_checkpoint_is_not_exported(run: Path, tmp_path: Path) -> None:
    from threefold.export.model_folder import export

    copy = Path(
        shutil.copytree(run / "checkpoints" / "step-00000001", tmp_path / "step-00000001")
    )
    (copy / "state" / "index.json").write_text("{}")
    with pytest.raises(
        CheckpointError, match=r"is damaged: state/index\.json has 2 bytes, not "
    ):
        export(copy, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_other_logits_are_told_and_nothing_stays(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from threefold.export import model_folder

    def wrong(model: Any, layer: dict[str, Any]) -> dict[str, Any]:
        return {
            name: tensor + 1 if name == "lm_head.weight" else tensor
            for name, tensor in layer.items()
        }

    monkeypatch.setattr(model_folder, "revert_weight_conversion", wrong)
    with pytest.raises(
        RunError, match=r"reloads to logits that differ from those of .* by up to "
    ):
        model_folder.export(run, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert model_folder.export(run, tmp_path / "out", verify=False).verified == "not reloaded"


def test_folder_that_is_not_empty_is_refused(run: Path, tmp_path: Path) -> None:
    from threefold.export.model_folder import export

    (tmp_path / "file").touch()
    for to in (tmp_path, tmp_path / "file"):
        with pytest.raises(ConfigError, match="is not empty") as caught:
            export(run, to)
        assert caught.value.problems[0].fix == f"another folder, such as {to}-2"


def _dies_while_it_writes() -> None:
    from threefold.export import model_folder

    model_folder._Export._save_descriptions = lambda *_: os.kill(os.getpid(), signal.SIGKILL)


def test_what_a_killed_export_left_is_removed(run: Path) -> None:
    """kill -9 after the weights were written, then the same command again."""
    export = ("export", "run", "--no-verify", "--to", "killed")
    killed, folder = (
        command(run.parent, *export, first=_dies_while_it_writes),
        run.parent / "killed",
    )
    assert killed.returncode == -signal.SIGKILL and (folder / "model.safetensors").exists()
    (folder / ".part-00007").touch()
    (folder / "deep").mkdir()
    again = command(run.parent, *export)
    assert again.returncode == 0, again.stderr
    assert command(run.parent, *export[:-1], "whole").returncode == 0
    names = [
        sorted(path.name for path in (run.parent / each).iterdir())
        for each in ("killed", "whole")
    ]
    assert names[0] == names[1] and ".threefold-export" not in names[0]


def test_a_living_export_is_not_disturbed(run: Path, tmp_path: Path) -> None:
    from threefold.export.model_folder import export

    (tmp_path / "out").mkdir()
    with FileLock(tmp_path / "out" / ".threefold-export"):
        (tmp_path / "out" / ".part-00000").touch()
        with pytest.raises(ConfigError, match="another process is writing to ") as caught:
            export(run, tmp_path / "out")
    assert caught.value.problems[0].fix == "--to ANOTHER_FOLDER   (or wait until it has ended)"
    assert (tmp_path / "out" / ".part-00000").exists()


def test_command_says_what_it_wrote(run: Path) -> None:
    done = command(run.parent, "export", "run", "--to", "out", "--max-shard-size", "100KB")
    assert done.returncode == 0, done.stderr
    assert done.stdout == (
        "out: step 1 of run, 35,040 parameters, 2 files of weights; reloaded: equal logits\n"
    ), done.stdout
    refused = command(
        run.parent, "export", "run", "--to", "out2", "--max-shard-size", "100 apples"
    )
    assert refused.returncode == 2
    assert refused.stderr == (
        "--max-shard-size = '100 apples' is not a size\n"
        "  expected: a whole number with KB, MB, GB, KiB, MiB or GiB\n"
        "  fix: --max-shard-size 5GB\n"
    )


def test_strangers_code_is_run_only_where_allowed(run: Path, tmp_path: Path) -> None:
    """A checkpoint that says its model is code of a repository, and that this code is trusted."""
    from threefold.export.model_folder import export

    repository = tmp_path / "repository"
    repository.mkdir()
    (repository / "evil.py").write_text(
        "from transformers import LlamaConfig\n"
        f"open({str(tmp_path / 'ran')!r}, 'w').close()\n"
        "class Evil(LlamaConfig):\n    model_type = 'evil'\n"
    )
    stranger = Path(
        shutil.copytree(run / "checkpoints" / "step-00000001", tmp_path / "step-00000001")
    )
    manifest = json.loads((stranger / "manifest.json").read_text())
    auto_map = {"auto_map": {"AutoConfig": "evil.Evil"}, "model_type": "evil"}
    (repository / "config.json").write_text(json.dumps(auto_map))
    manifest["config"]["model"] |= {
        "name_or_path": str(repository),
        "config": None,
        "trust_remote_code": True,
    }
    _sealed_anew(
        stranger, config=manifest["config"], architecture=manifest["architecture"] | auto_map
    )
    assert Checkpoint(stranger, 1).damage() is None
    with pytest.raises(CheckpointError, match=r"transformers has no model for .*evil"):
        export(stranger, tmp_path / "out")
    assert not (tmp_path / "ran").exists()


def test_strangers_kernels_are_not_fetched(run: Path, tmp_path: Path) -> None:
    from threefold.export.model_folder import load_whole

    stranger = Path(
        shutil.copytree(run / "checkpoints" / "step-00000001", tmp_path / "step-00000001")
    )
    manifest = json.loads((stranger / "manifest.json").read_text())
    kernels = {
        "_attn_implementation": "somebody/kernels",
        "attn_implementation": "somebody/kernels",
    }
    _sealed_anew(stranger, architecture=manifest["architecture"] | kernels)
    model, _ = load_whole(Checkpoint(stranger, 1))
    assert model.config._attn_implementation == "eager"
