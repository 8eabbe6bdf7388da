"""`threefold hash`: weights have one hash, on any mesh and in any files; other weights have another."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from ranks.reference import TINY_LLAMA
from ranks.runs import command
from ranks.spawn import run_ranks

# An odd vocabulary, which no mesh divides, and a head that is the embedding.
MODEL = {**TINY_LLAMA, "vocab_size": 67, "tie_word_embeddings": True}


def hashed(folder: Path, *arguments: Any) -> dict[str, Any]:
    done = command(folder, "hash", *map(str, arguments), "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[0])


def _save(folder: Path, sizes: dict[str, int], lora: dict[str, int]) -> None:
    import threefold

    mesh = threefold.init_mesh(device="cpu", **sizes)
    model = threefold.load_model(
        mesh=mesh, config=MODEL, lora=lora or None, seed=3, admission="off"
    )
    threefold.save(folder, model=model, step=1)
    mesh.close()


def test_weights_have_one_hash_on_every_mesh_and_in_their_export(tmp_path: Path) -> None:
    meshes = [
        ({"dp": 1}, 1),
        ({"dp": 2}, 2),
        ({"dp": 2, "dp_shard": 2, "tp": 2}, 4),
        ({"cp": 2}, 2),
    ]
    for number, (sizes, num_ranks) in enumerate(meshes):
        run_ranks(_save, num_ranks, tmp_path / f"mesh-{number}", sizes, {})
    runs = [f"mesh-{number}" for number in range(len(meshes))]
    done = command(tmp_path, "hash", *runs)
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "equal", (
        done.stdout + done.stderr
    )
    assert (
        command(
            tmp_path, "export", runs[2], "--to", "model", "--max-shard-size", "30KB"
        ).returncode
        == 0
    )
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 1
    whole = hashed(tmp_path, "model")
    assert (
        whole["sha256"]
        == hashed(tmp_path, runs[0])["sha256"]
        == hashed(tmp_path, runs[0] + "/checkpoints/step-00000001")["sha256"]
    )
    # One bit of one number, a name or a type is another hash.
    file = next((tmp_path / "model").glob("*.safetensors"))
    tensors = load_file(file)
    name = sorted(tensors)[0]
    changed = tensors[name].clone()
    changed.view(torch.int32).flatten()[0] ^= 1
    for other in ({name: changed}, {name: tensors[name].half()}):
        save_file({**tensors, **other}, file)
        done = command(tmp_path, "hash", runs[0], "model")
        assert done.returncode == 1 and done.stdout.splitlines()[-1] == "not equal"


def test_adapters_have_the_hash_of_their_export(tmp_path: Path) -> None:
    run_ranks(_save, 2, tmp_path / "a", {"tp": 2}, {"r": 2})
    run_ranks(_save, 1, tmp_path / "b", {"dp": 1}, {"r": 2})
    done = command(tmp_path, "hash", "a", "b")
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_has_no_hash(tmp_path: Path) -> None:
    run_ranks(_save, 1, tmp_path / "run", {"dp": 1}, {})
    (tmp_path / "empty").mkdir()
    done = command(tmp_path, "hash", "empty")
    assert (
        done.returncode == 2
        and "empty holds neither a run's checkpoints nor a model's weights" in done.stderr
    )
    part = next((tmp_path / "run").rglob("step-*/state/*.safetensors"))
    content = bytearray(part.read_bytes())
    content[-9] ^= 1
    part.write_bytes(content)
    done = command(tmp_path, "hash", "run")
    assert done.returncode == 2 and "is damaged" in done.stderr, done.stdout + done.stderr
    (tmp_path / "empty" / "model.safetensors").write_bytes(b"no tensors")
    done = command(tmp_path, "hash", "empty")
    assert done.returncode == 2 and "cannot be read" in done.stderr


def test_half_of_the_files_has_no_hash(tmp_path: Path) -> None:
    """Two copies that both lack a file would be equal."""
    (tmp_path / "half").mkdir()
    file = tmp_path / "half" / "model-00001-of-00002.safetensors"
    save_file({"a": torch.ones(2)}, file)
    done = command(tmp_path, "hash", "half", "half")
    assert done.returncode == 2 and "half has 1 of 2 weights files\n" in done.stderr, (
        done.stdout
    )
    save_file({"b": torch.ones(2)}, file.with_stem("model-00002-of-00002"))
    assert hashed(tmp_path, "half")["num_tensors"] == 2
