"""Settings and folders that come with a launcher: between which layers of the config they stand, and what they are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from threefold.config.loading import load
from threefold.mesh import environment
from threefold.mesh.launchers.managed import data_path, defaults, managed

JOB = {
    "SM_HPS": json.dumps(
        {
            "train.steps": 7,
            "optimizer.lr": 0.0001,
            "model.config": {"model_type": "llama"},
            "data.shuffle": False,
            "log.every": "3",
            "model.dtype": "bfloat16",
        }
    ),
    "SM_CHANNEL_TRAIN": "/opt/ml/input/data/train",
    "SM_MODEL_DIR": "/opt/ml/model",
    "SM_OUTPUT_DIR": "/opt/ml/output",
}


def test_no_job_and_no_sizes_suggest_nothing() -> None:
    assert managed({}) is None
    assert defaults({}) == ()


def test_hyperparameters_overrule_the_file_and_the_command_line_overrules_them(
    tmp_path: Path,
) -> None:
    (tmp_path / "c.yaml").write_text(
        "train: {steps: 5, global_batch: 4}\noptimizer: {lr: 1.0}\n"
    )
    job = managed(JOB)
    assert job is not None
    loaded = load(
        str(tmp_path / "c.yaml"), [("optimizer.lr", "0.5")], environ={}, settings=job.settings
    )
    config = loaded.config
    assert (config.train.steps, config.train.global_batch, config.optimizer.lr) == (7, 4, 0.5)
    assert (config.data.shuffle, config.log.every, config.model.dtype) == (False, 3, "bfloat16")
    assert config.model.config == {"model_type": "llama"}
    assert loaded.origins["train.steps"] == "hyperparameter train.steps"


def test_two_underscores_stand_for_the_dot() -> None:
    job = managed({"SM_HPS": json.dumps({"train__steps": "4", "data__seq_len": 8})})
    assert job is not None
    config = load(None, environ={}, settings=job.settings).config
    assert (config.train.steps, config.data.seq_len) == (4, 8)


def test_sagemakers_own_hyperparameters_are_left_out() -> None:
    job = managed({"SM_HPS": json.dumps({"sagemaker_program": "x.py", "train.steps": 1})})
    assert job is not None
    assert [setting.key for setting in job.settings] == ["train.steps"]


def test_checkpoint_folder_is_a_default_that_a_file_overrules(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("log: {dir: mine}\n")
    environ = {**JOB, "SAGEMAKER_BASE_DIR": str(tmp_path)}
    assert load(None, environ={}, defaults=defaults(environ)).config.log.dir == str(
        tmp_path / "checkpoints"
    )
    assert (
        load(str(tmp_path / "c.yaml"), environ={}, defaults=defaults(environ)).config.log.dir
        == "mine"
    )
    assert (
        load(None, environ={}, defaults=defaults(JOB)).config.log.dir == "/opt/ml/checkpoints"
    )


def test_folders_are_where_sagemaker_has_them() -> None:
    job = managed(JOB)
    assert job is not None
    assert job.model == Path("/opt/ml/model")
    assert job.failure == Path("/opt/ml/output/failure")
    moved = managed({"SM_HPS": "{}", "SM_OUTPUT_FAILURE": "/elsewhere/failure"})
    assert (
        moved is not None
        and moved.failure == Path("/elsewhere/failure")
        and moved.model is None
    )


@pytest.mark.parametrize("source", ["channel:train", "channel:TRAIN"])
def test_channel_is_a_folder(source: str) -> None:
    assert data_path(source, JOB) == "/opt/ml/input/data/train"


@pytest.mark.parametrize("source", ["stdlib", "hf:channel/x", "corpus/*.txt"])
def test_other_sources_stay(source: str) -> None:
    assert environment.data_path(source) == source


def test_accelerates_sizes_are_defaults_of_the_mesh(tmp_path: Path) -> None:
    environ = {
        "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2",
        "PARALLELISM_CONFIG_DP_SHARD_SIZE": "4",
        "PARALLELISM_CONFIG_TP_SIZE": "2",
        "PARALLELISM_CONFIG_CP_SIZE": "1",
    }
    mesh = load(None, environ=environ, defaults=defaults(environ)).config.mesh
    assert (mesh.dp, mesh.dp_shard, mesh.cp, mesh.tp) == (8, 4, 1, 2)
    (tmp_path / "c.yaml").write_text("mesh: {tp: 1}\n")
    assert (
        load(
            str(tmp_path / "c.yaml"), environ=environ, defaults=defaults(environ)
        ).config.mesh.tp
        == 1
    )
    assert defaults({**environ, "DP_SIZE": "8", "TP_SIZE": "2"}) == defaults(environ)


def test_accelerates_sizes_of_1_leave_the_mesh_open() -> None:
    assert (
        defaults(
            {
                f"PARALLELISM_CONFIG_{axis}_SIZE": "1"
                for axis in ("DP_REPLICATE", "DP_SHARD", "TP", "CP")
            }
        )
        == ()
    )
