"""What a folder of a custom loop refuses: to be a run's or another loop's, to hold two timelines, other groups."""

from __future__ import annotations

import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from ruamel.yaml import YAML

import threefold
from ranks import runs
from ranks.reference import TINY_LLAMA
from threefold.checkpoint.checkpoint_folder import CheckpointFolder
from threefold.checkpoint.lineage import Identity
from threefold.errors import CheckpointError, ConfigError
from threefold.export.model_folder import export

IDS = torch.randint(67, (4, 9), generator=torch.Generator().manual_seed(0))
BATCH = {"input_ids": IDS[:, :-1], "labels": IDS[:, 1:]}


@pytest.fixture
def mesh() -> Any:
    mesh = threefold.init_mesh()
    yield mesh
    mesh.close()


def loop(mesh: Any) -> Any:
    model = threefold.load_model(config=TINY_LLAMA, mesh=mesh, admission="off")
    return model, threefold.TrainStep(model, lr=1e-3)


def steps_in(folder: Path) -> list[int]:
    return [each.step for each in CheckpointFolder(folder).all()]


def test_a_folder_of_a_run_is_not_a_loops(mesh: Any, tmp_path: Path) -> None:
    Identity.new().write(tmp_path)
    model, step = loop(mesh)
    with pytest.raises(ConfigError) as error:
        threefold.save(tmp_path, model=model, step=1, optimizer=step, keep=1)
    assert error.value.problems[0].what == (
        f"threefold.save({str(tmp_path)!r}): this is the folder of a run"
    )
    assert steps_in(tmp_path) == [] and not (tmp_path / "run.lock").exists()


def test_a_loop_does_not_save_over_what_it_did_not_load(mesh: Any, tmp_path: Path) -> None:
    model, step = loop(mesh)
    for number in (1, 2, 3):
        threefold.save(tmp_path, model=model, step=number, optimizer=step, wait=number != 2)
    with pytest.raises(ConfigError, match=r"step = 3, and step 3 is saved there already"):
        threefold.save(tmp_path, model=model, step=3, optimizer=step)
    other, its_step = loop(mesh)
    with pytest.raises(
        ConfigError, match=r"another loop has saved step 3 there, which this one has not loaded"
    ):
        threefold.save(tmp_path, model=other, step=4, optimizer=its_step)
    assert threefold.load(tmp_path, model=other, optimizer=its_step).step == 3
    threefold.save(tmp_path, model=other, step=4, optimizer=its_step)
    # The first loop did not see step 4.
    with pytest.raises(
        ConfigError, match=r"step 4 is there, and this loop has gone back to step 3"
    ):
        threefold.save(tmp_path, model=model, step=5, optimizer=step)


def test_a_loop_that_went_back_sets_the_later_steps_aside_by_the_printed_fix(
    mesh: Any, tmp_path: Path
) -> None:
    model, step = loop(mesh)
    for number in (1, 2, 3, 4):
        threefold.save(tmp_path, model=model, step=number, optimizer=step)
    assert (
        threefold.load(
            tmp_path / "checkpoints" / "step-00000002", model=model, optimizer=step
        ).step
        == 2
    )
    with pytest.raises(ConfigError) as error:
        threefold.save(tmp_path, model=model, step=3, optimizer=step)
    assert (
        "step 4 is there, and this loop has gone back to step 2" in error.value.problems[0].what
    )
    subprocess.run(error.value.problems[0].fix.split("   (")[0], shell=True, check=True)
    threefold.save(tmp_path, model=model, step=3, optimizer=step)
    assert steps_in(tmp_path) == [1, 2, 3]


def test_another_process_does_not_save_there(mesh: Any, tmp_path: Path) -> None:
    model, step = loop(mesh)
    threefold.save(tmp_path, model=model, step=1, optimizer=step)
    (tmp_path / "program.py").write_text(f"""
import threefold
from threefold.checkpoint import lock
lock._PATIENCE_S = 0.0
mesh = threefold.init_mesh()
model = threefold.load_model(config={TINY_LLAMA!r}, mesh=mesh, admission="off")
threefold.load({str(tmp_path)!r}, model=model)
threefold.save({str(tmp_path)!r}, model=model, step=2)
""")
    ended = runs.script(tmp_path, "program.py", timeout_s=120)
    assert (
        ended.returncode == 1
        and f"{tmp_path} is in use by another run: process " in ended.stderr
    ), ended.stderr
    assert steps_in(tmp_path) == [1]


def _groups(model: Any, *, swapped: bool = False, other: bool = False) -> Any:
    matrices = [each for each in model.parameters() if each.ndim > 1]
    vectors = [each for each in model.parameters() if each.ndim < 2]
    if other:
        vectors.append(matrices.pop())
    found = [
        {"params": matrices, "lr": 1e-2},
        {"params": vectors, "lr": 1e-4, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(found[::-1] if swapped else found, lr=1.0)


def test_settings_of_groups_are_restored_by_their_parameters_names(
    mesh: Any, tmp_path: Path
) -> None:
    model, _ = loop(mesh)
    optimizer = _groups(model)
    threefold.TrainStep(model, optimizer)(BATCH)
    threefold.save(tmp_path, model=model, step=1, optimizer=optimizer)
    swapped = _groups(model, swapped=True)
    for group in swapped.param_groups:
        group["lr"] = 0.5
    threefold.load(tmp_path, model=model, optimizer=swapped)
    assert [(group["params"][0].ndim, group["lr"]) for group in swapped.param_groups] == [
        (1, 1e-4),
        (2, 1e-2),
    ]
    with pytest.raises(CheckpointError, match=r"was saved with other groups of parameters"):
        threefold.load(tmp_path, model=model, optimizer=_groups(model, other=True))


def test_a_run_does_not_continue_where_nobody_knows_what_was_read(
    mesh: Any, tmp_path: Path
) -> None:
    runs.prepare(tmp_path)
    config = YAML(typ="safe").load(tmp_path / "config.yaml")["model"]["config"]
    model = threefold.load_model(
        config={**config, "vocab_size": 257}, mesh=mesh, admission="off"
    )
    threefold.save(
        tmp_path / "loop", model=model, step=3, optimizer=threefold.TrainStep(model, lr=1e-3)
    )
    asked = (
        "--checkpoint.resume",
        "loop/checkpoints/step-00000003",
        "--log.dir",
        "run",
        "--model.admission",
        "off",
    )
    ended = runs.command(tmp_path, "train", "config.yaml", *asked)
    assert ended.returncode == 2, ended.stdout + ended.stderr
    assert (
        "was saved by a custom loop, without its position in the data"
        in ended.stdout + ended.stderr
    )


def test_the_audit_of_a_loop_without_a_run_says_what_a_run_would_be(
    mesh: Any, tmp_path: Path
) -> None:
    model, step = loop(mesh)
    threefold.save(tmp_path / "loop", model=model, step=1, optimizer=step)
    ended = runs.command(tmp_path, "data", "audit", "loop")
    assert (ended.returncode, ended.stderr) == (
        2,
        "loop was not audited: its loop has no run\n"
        "  expected: rows whose order is known, and steps of a run: nothing can be proved about others\n"
        "  fix: for the next run: threefold.Run(folder), and for batch in run.steps(loader)\n",
    )


def test_a_loop_whose_model_has_no_tokenizer_is_exported(mesh: Any, tmp_path: Path) -> None:
    model, _ = loop(mesh)
    model.save_pretrained(tmp_path / "weights")
    assert not (tmp_path / "run.lock").exists() and model.locks == {}
    adapted = threefold.load_model(
        str(tmp_path / "weights"), mesh=mesh, admission="off", lora={"r": 2}
    )
    threefold.save(tmp_path / "loop", model=adapted, step=1)
    for name, adapter in (("merged", False), ("adapter", True)):
        export(tmp_path / "loop", tmp_path / name, adapter=adapter)
    assert (tmp_path / "adapter" / "adapter_config.json").exists()
    assert not list(tmp_path.glob("*/tokenizer*"))


def _filled(folder: Path) -> dict[str, Any]:
    folder.mkdir()
    (folder / "thesis.txt").touch()
    return {}


def _of_the_command(folder: Path) -> dict[str, Any]:
    folder.mkdir()
    Identity.new().write(folder)
    return {}


def _never(folder: Path) -> dict[str, Any]:
    folder.mkdir()
    Identity.new(program=True).write(folder)
    (folder / "metrics.jsonl").touch()
    return {"checkpoint.resume": "never"}


def _inside(folder: Path) -> dict[str, Any]:
    Identity.new().write(folder.parent)
    return {}


@pytest.mark.parametrize(
    ("prepare", "what", "fix"),
    [
        (
            _filled,
            "is not empty and holds no run: it has thesis.txt",
            "threefold.Run('runs/",
        ),
        (
            _of_the_command,
            "holds a run of threefold train",
            "threefold resume {0}; or, for a new run, {1}",
        ),
        (
            _never,
            "holds a run, and checkpoint.resume is never",
            "{1}   (or config={{'checkpoint.resume': 'auto'}} to",
        ),
        (_inside, "is inside the folder of another run: {2}", "threefold.Run('{3}', ...)"),
    ],
)
def test_a_program_reads_of_its_folder_in_its_own_words(
    prepare: Any, what: str, fix: str, mesh: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "parent" / "run"
    folder.parent.mkdir()
    config = prepare(folder)
    names = (folder, "threefold.Run('ANOTHER_FOLDER', ...)", folder.parent, tmp_path / "run")
    with pytest.raises(ConfigError) as refused, threefold.Run(folder, mesh=mesh, config=config):
        pass
    (problem,) = refused.value.problems
    assert problem.what.startswith(f"the run's folder {folder} {what.format(*names)}")
    assert problem.fix.startswith(fix.format(*names)) and " --" not in problem.fix


def test_other_adapters_are_refused_in_the_words_of_a_program(
    mesh: Any, tmp_path: Path
) -> None:
    model, _ = loop(mesh)
    model.save_pretrained(tmp_path / "weights")
    adapted = {
        rank: threefold.load_model(
            str(tmp_path / "weights"), mesh=mesh, admission="off", lora={"r": rank}
        )
        for rank in (2, 4)
    }
    threefold.save(tmp_path / "loop", model=adapted[2], step=1)
    with pytest.raises(
        CheckpointError, match=r"was made with model\.lora\.r = 2, not 4"
    ) as refused:
        threefold.load(tmp_path / "loop", model=adapted[4])
    assert refused.value.problems[0].fix == "threefold.load_model(..., lora={'r': 2})"


def test_other_groups_of_an_optimizer_are_not_given_the_settings_of_its_parameters(
    mesh: Any, tmp_path: Path
) -> None:
    model, _ = loop(mesh)
    groups = [{"match": "embed", "weight_decay": 0.5}]
    threefold.save(
        tmp_path / "one",
        model=model,
        step=1,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
    )
    threefold.save(
        tmp_path / "named", model=model, step=1, optimizer=threefold.optimizer("adamw", model)
    )
    others = {
        "one": _groups(model),
        "named": threefold.optimizer("adamw", model, groups=groups),
    }
    for name, other in others.items():
        with pytest.raises(CheckpointError, match="was saved with other groups of parameters"):
            threefold.load(tmp_path / name, model=model, optimizer=other)


SGD, AdamW = torch.optim.SGD, torch.optim.AdamW


@pytest.mark.parametrize(
    ("saved", "loaded", "what"),
    [
        (partial(SGD, lr=0.1), partial(AdamW, lr=0.1, amsgrad=True), ("SGD", "AdamW")),
        (
            partial(SGD, lr=0.1),
            partial(SGD, lr=0.1, momentum=0.9),
            ("SGD", "SGD with momentum"),
        ),
        (partial(AdamW, lr=0.1), partial(torch.optim.RAdam, lr=0.1), ("AdamW", "RAdam")),
    ],
)
def test_another_optimizer_does_not_get_the_settings_that_were_saved(
    mesh: Any, tmp_path: Path, saved: Any, loaded: Any, what: tuple[str, str]
) -> None:
    model, _ = loop(mesh)
    path = tmp_path / "checkpoints/step-00000001"
    threefold.save(tmp_path, model=model, step=1, optimizer=saved(model.parameters()))
    with pytest.raises(CheckpointError) as refused:
        threefold.load(tmp_path, model=model, optimizer=loaded(model.parameters()))
    assert refused.value.problems[0].what == (
        f"{path} was saved with the optimizer {what[0]}, and this one is {what[1]}"
    )
    assert threefold.load(tmp_path, model=model, optimizer=saved(model.parameters())).step == 1
