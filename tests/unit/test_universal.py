"""DeepSpeed's universal checkpoints, in the form that ds_to_universal writes: read, and refused where they are not."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from threefold.convert.universal import open_universal
from threefold.errors import CheckpointError

NAME = "model.embed_tokens.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One weight, as ZeRO 3 has it: a vector, without a step of its own."""
    place = tmp_path / "zero" / NAME
    place.mkdir(parents=True)
    for number, file in enumerate(("fp32", "exp_avg", "exp_avg_sq")):
        torch.save(torch.arange(6.0) + number, place / f"{file}.pt")
    head = {
        "param_shapes": [OrderedDict({NAME: torch.Size([2, 3])})],
        "global_steps": 5,
        "skipped_steps": 1,
    }
    torch.save(head, tmp_path / "zero_pp_rank_0_mp_rank_00_model_states.pt")
    return tmp_path


def test_vectors_have_the_shapes_of_their_weights_and_skipped_steps_do_not_count(
    folder: Path,
) -> None:
    held = open_universal(folder)
    assert held is not None
    assert {name: each.shape for name, each in held.tensors.items()} == {
        NAME: (2, 3),
        f"optimizer.exp_avg.{NAME}": (2, 3),
        f"optimizer.exp_avg_sq.{NAME}": (2, 3),
        f"optimizer.step.{NAME}": (),
    }
    assert torch.equal(held.read(f"optimizer.exp_avg.{NAME}"), torch.arange(6.0).view(2, 3) + 1)
    assert held.read(f"optimizer.step.{NAME}").item() == 4


def test_a_matrix_and_its_own_step_are_read_as_they_are(folder: Path) -> None:
    place = folder / "zero" / NAME
    torch.save({"cat_dim": 0, "param": torch.ones(2, 3)}, place / "fp32.pt")
    torch.save(torch.tensor(3.0), place / "step.pt")
    held = open_universal(folder)
    assert held is not None and torch.equal(held.read(NAME), torch.ones(2, 3))
    assert held.read(f"optimizer.step.{NAME}").item() == 3


class _Runs:
    def __reduce__(self) -> Any:
        return print, ("a pickle that runs",)


def _is_run(path: Path) -> None:
    path.write_bytes(pickle.dumps(_Runs()))


def _is_cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


def _is_text(path: Path) -> None:
    torch.save("text", path)


@pytest.mark.parametrize("change", [_is_run, _is_cut, _is_text])
@pytest.mark.parametrize(
    "file", [f"zero/{NAME}/fp32.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"]
)
def test_files_that_hold_something_else_are_refused_and_not_run(
    change: Any, file: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change(folder / file)
    with pytest.raises(CheckpointError) as refused:
        held = open_universal(folder)
        assert held is not None and held.tensors
    assert refused.value.problems[0].what.startswith(f"{folder / file} cannot be read: ")
    assert refused.value.problems[0].fix == "make it again, or copy it again"
    assert capsys.readouterr().out == ""


def test_zero_s_own_files_are_refused_with_what_makes_them_universal(tmp_path: Path) -> None:
    place = tmp_path / "global_step3"
    place.mkdir()
    (place / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt").touch()
    with pytest.raises(CheckpointError) as refused:
        open_universal(place)
    (problem,) = refused.value.problems
    assert (
        problem.what
        == f"{place} is a checkpoint of DeepSpeed's ZeRO: pickles of DeepSpeed's own classes"
    )
    assert problem.fix == (
        f"python -m deepspeed.checkpoint.ds_to_universal --inject_missing_state --input_folder {place} "
        f"--output_folder {place}-universal; threefold import {place}-universal"
    )


def test_the_folder_above_leads_to_the_newest_checkpoint(tmp_path: Path) -> None:
    """As DeepSpeed names it in a file, which a Trainer's checkpoint has beside the model's own files."""
    (tmp_path / "global_step3").mkdir()
    (tmp_path / "global_step3" / "zero_pp_rank_0_mp_rank_00_optim_states.pt").touch()
    (tmp_path / "latest").write_text("global_step3")
    with pytest.raises(
        CheckpointError, match="global_step3 is a checkpoint of DeepSpeed's ZeRO"
    ):
        open_universal(tmp_path)
    (tmp_path / "latest_universal").write_text("global_step3-universal")
    assert open_universal(tmp_path) is None


def test_other_folders_are_none(tmp_path: Path) -> None:
    assert open_universal(tmp_path) is None and open_universal(tmp_path / "nix") is None
