"""SageMaker's parts: the toolkit in a container's tree, the SDK's own driver, and the API on a moto server."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from launchers import sagemaker
from ranks.runs import command, curve, environment, prepare
from threefold.commands import submit
from threefold.jobs import entry
from threefold.jobs import sagemaker as clusters_sagemaker
from threefold.jobs.job import ranks_of
from threefold.jobs.sagemaker import SageMakerSettings

pytestmark = [
    pytest.mark.launchers,
    pytest.mark.timeout(240),
    pytest.mark.skipif(sagemaker.why_not() is not None, reason=str(sagemaker.why_not())),
]

KEYS = {
    "mesh.dp": "2",
    "mesh.device": "cpu",
    "data.source": "channel:words",
    "checkpoint.every": "5",
}
HOST = os.uname().nodename


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    prepare(tmp_path)
    return tmp_path


def lay_out(folder: Path, base: Path, **hyperparameters: str) -> None:
    config = submit.read_config(str(folder / "config.yaml"), list(KEYS.items()))
    job = ranks_of(config.mesh, num_hosts=1, per_host=None)
    options = SageMakerSettings(
        name="test",
        image="image",
        role="role",
        instance_type=sagemaker.INSTANCE,
        output="s3://bucket/prefix",
        hyperparameters=hyperparameters,
        channels={"words": "s3://bucket/words"},
    )
    sagemaker.lay_out(
        base,
        request=clusters_sagemaker.request(job, options, region="us-east-1"),
        source=clusters_sagemaker.archive(config, options),
        host=HOST,
        hosts=[HOST],
        num_ranks=2,
        interface="lo",
        channels={"words": folder / "corpus"},
    )


def test_job_goes_on_in_the_next_container_and_leaves_its_model(folder: Path) -> None:
    """The checkpoint folder is all that the second container has of the first one."""
    first, second = folder / "first", folder / "second"
    for base, steps in ((first, "7"), (second, "12")):
        # The schedule is the longer run's: the rate of a step must not depend on where the first one was stopped.
        lay_out(folder, base, **{"train.steps": steps, "optimizer.schedule": "constant"})
    ended = sagemaker.run_toolkit(folder, first)
    assert ended.returncode == 0, ended.stderr
    shutil.copytree(first / "checkpoints", second / "checkpoints", dirs_exist_ok=True)
    ended = sagemaker.run_toolkit(folder, second)
    assert ended.returncode == 0, ended.stderr
    assert f"resumed from {second}/checkpoints/checkpoints/step-00000007" in ended.stdout
    source = (
        "--data.source",
        "corpus",
        "--train.steps",
        "12",
        "--optimizer.schedule",
        "constant",
    )
    whole = command(
        folder, "train", "config.yaml", "--mesh.dp", "2", *source, "--log.dir", "whole"
    )
    assert whole.returncode == 0, whole.stderr
    assert curve(second / "checkpoints") == curve(folder / "whole")
    assert (second / "output" / "success").exists()
    assert {"config.json", "model.safetensors"} <= {
        path.name for path in (second / "model").iterdir()
    }


def test_reason_of_a_failure_is_where_the_job_shows_it(folder: Path) -> None:
    lay_out(folder, folder / "ml", **{"train.step": "7"})
    ended = sagemaker.run_toolkit(folder, folder / "ml")
    assert ended.returncode != 0
    said = (folder / "ml" / "output" / "failure").read_text()
    assert said.startswith("unknown key train.step\n  expected: one of train."), said
    assert len(said) <= 1024


def test_job_reaches_the_api_and_holds_no_secret(folder: Path, moto: str) -> None:
    """`threefold submit sagemaker` itself; what AWS would have is read back from the server."""
    site = next((sagemaker.ROOT / ".venv-launchers" / "lib").glob("python*/site-packages"))
    env = {
        **environment(folder),
        "PYTHONPATH": str(site),  # boto3, which the project's own environment does not have
        "AWS_ENDPOINT_URL": moto,
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "a-secret-of-the-test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "HF_TOKEN": "hf-secret-of-the-test",
    }
    given = [part for key, value in KEYS.items() for part in (f"--{key}", value)]
    options = [
        "--role",
        "arn:aws:iam::123456789012:role/train",
        "--image",
        "image",
        "--output",
        "s3://bucket/runs",
    ]
    options += [
        "--instance-type",
        "ml.g5.2xlarge",
        "--name",
        "my-job",
        "--spot",
        "--secret",
        "HF_TOKEN=my/token",
    ]
    options += ["--channel", "words=s3://bucket/words"]
    make = [
        str(sagemaker.PYTHON),
        "-c",
        "import boto3; boto3.client('s3').create_bucket(Bucket='bucket')",
    ]
    subprocess.run(make, env=env, check=True, timeout=180)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "threefold",
            "submit",
            "sagemaker",
            "config.yaml",
            *given,
            *options,
        ],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "arn:aws:sagemaker:us-east-1:123456789012:training-job/my-job" in done.stdout
    read = (
        "import boto3, json; job = boto3.client('sagemaker').describe_training_job(TrainingJobName='my-job');"
        "keys = [each['Key'] for each in boto3.client('s3').list_objects_v2(Bucket='bucket')['Contents']];"
        "print(json.dumps([job, keys], default=str))"
    )
    found = subprocess.run(
        [str(sagemaker.PYTHON), "-c", read],
        env=env,
        capture_output=True,
        text=True,
        check=True,
        timeout=180,
    )
    job, keys = json.loads(found.stdout)
    assert keys == ["runs/my-job/source/sourcedir.tar.gz"]
    assert job["EnableManagedSpotTraining"] is True
    assert json.loads(job["HyperParameters"]["checkpoint.every"]) == "5"
    everything = found.stdout + done.stdout + done.stderr
    assert (
        "a-secret-of-the-test" not in everything and "hf-secret-of-the-test" not in everything
    )


def test_entry_script_fetches_secrets_by_name(folder: Path, moto: str) -> None:
    code = (
        "import importlib.util, json, sys, boto3;"
        "boto3.client('secretsmanager').create_secret(Name='my/token', SecretString='the value');"
        "spec = importlib.util.spec_from_file_location('entry', sys.argv[1]);"
        "entry = importlib.util.module_from_spec(spec); spec.loader.exec_module(entry);"
        "environ = {'THREEFOLD_SECRETS': json.dumps({'HF_TOKEN': 'my/token'})};"
        "entry.fetch_secrets(environ); print(environ)"
    )
    keys = {
        "AWS_ACCESS_KEY_ID": "x",
        "AWS_SECRET_ACCESS_KEY": "x",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    done = subprocess.run(
        [str(sagemaker.PYTHON), "-c", code, entry.__file__],
        env={**environment(folder), **keys, "AWS_ENDPOINT_URL": moto},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.stdout.strip() == "{'HF_TOKEN': 'the value'}", done.stderr


@pytest.mark.skipif(
    sagemaker.why_no_driver() is not None, reason=str(sagemaker.why_no_driver())
)
@pytest.mark.parametrize(
    "driver",
    ["torchrun_driver.py", pytest.param("basic_script_driver.py", marks=pytest.mark.long)],
)
def test_entry_script_under_the_sdks_own_drivers(folder: Path, driver: str) -> None:
    """The same source as the toolkit's; the SDK's paths are fixed, so /opt is a folder of the test's own there."""
    lay_out(folder, folder / "ml", train__steps="6")
    sagemaker.lay_out_drivers(folder / "ml", num_ranks=2)
    ended = subprocess.run(
        sagemaker.driver_command(folder / "ml", driver),
        cwd=folder,
        env={
            **sagemaker.toolkit_environment(folder, Path("/opt/ml")),
            "TRAINING_JOB_NAME": "test",
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert len(curve(folder / "ml" / "checkpoints")) == 6
    assert (folder / "ml" / "model" / "config.json").exists()
