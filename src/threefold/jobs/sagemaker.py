"""A SageMaker training job; needs `pip install 'threefold[sagemaker]'` and AWS credentials.

Keys given as --section.key value become hyperparameters. Without log.dir the run's folder is the checkpoint folder. The
source archive holds the config, the entry script (`entry`) and requirements. The request starts the script in a
training container through torchrun, and declares which of our output lines are metrics. Checkpoints and metrics go to
the checkpoint folder, which SageMaker copies to S3 while the job runs, and back after a spot instance was interrupted.
"""

import gzip
import io
import json
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from threefold.config.schema import Config
from threefold.config.yaml_text import dump
from threefold.errors import ConfigError, Problem, RunError
from threefold.jobs.clusters import Job
from threefold.jobs.job import Ranks, checked_name, with_set
from threefold.jobs.settings import setting
from threefold.mesh import environment

ENTRY = "threefold_entry.py"
CHECKPOINTS = "/opt/ml/checkpoints"
_VOLUME_GB = 100  # of each instance
_S3 = "s3://"
# Prefixes of instance types with the Elastic Fabric Adapter; AWS' list of 2026.
_EFA = (
    "ml.p4d.",
    "ml.p4de.",
    "ml.p5.48",
    "ml.p5e.",
    "ml.p5en.",
    "ml.p6",
    "ml.trn",
    "ml.p3dn.",
    "ml.g6e.8",
    "ml.g6e.12",
    "ml.g6e.16",
    "ml.g6e.24",
    "ml.g6e.48",
    "ml.g6.8",
    "ml.g6.12",
    "ml.g6.16",
    "ml.g6.24",
    "ml.g6.48",
    "ml.g5.8",
    "ml.g5.12",
    "ml.g5.16",
    "ml.g5.24",
    "ml.g5.48",
    "ml.g4dn.8",
    "ml.g4dn.12",
    "ml.g4dn.16",
    "ml.c5n.18",
    "ml.c6i.32",
)
_NUMBER = r"([0-9.]+(?:e[+-]?[0-9]+)?|nan|inf)"
# The lines that run.console prints for each logged step and each evaluation.
METRICS = {
    "train:loss": rf"step +[0-9]+/[0-9]+  loss {_NUMBER}",
    "train:grad_norm": rf"step +[0-9]+/[0-9]+ .*grad norm {_NUMBER}",
    "train:lr": rf"step +[0-9]+/[0-9]+ .*  lr {_NUMBER}",
    "train:step_time_s": rf"step +[0-9]+/[0-9]+ .*  {_NUMBER} s/step",
    "eval:loss": rf"evaluation after step [0-9]+: loss {_NUMBER}",
}


EXAMPLE = "--role ARN --image IMAGE --output s3://BUCKET/jobs --instance-type ml.p5.48xlarge"


@dataclass(frozen=True)
class SageMakerSettings:
    """Settings of a SageMaker job that are not in a config."""

    role: str = setting("ARN of the job's role", ...)
    image: str = setting("training image with torch; threefold in it, or from --package", ...)
    output: str = setting("for source, checkpoints and model", ..., form="s3://BUCKET/PREFIX")
    instance_type: str = setting("ml.g5.12xlarge, ml.p5.48xlarge, ...", ...)
    name: str = setting("the job's name; default: threefold and the time", "")
    channels: Mapping[str, str] = setting(
        "read as channel:NAME", {}, option="channel", form="NAME=s3://BUCKET/PREFIX",
        example="train=s3://BUCKET/PREFIX",
    )  # fmt: skip
    variables: Mapping[str, str] = setting(
        "variable for the container, or a name to pass yours on", {}, option="env", form="NAME=VALUE",
        secret_fix="--secret {name}=ID_IN_SECRETS_MANAGER",
    )  # fmt: skip
    secrets: Mapping[str, str] = setting(
        "a secret in AWS Secrets Manager",
        {},
        option="secret",
        form="NAME=ID",
        example="HF_TOKEN=my-secret",
    )
    packages: tuple[Path, ...] = setting("a wheel to install first", (), option="package")
    spot: bool = setting("use spot instances; an interrupted job resumes", False)
    max_run_s: int = setting("longest time, s", 86_400, option="max-run", least=60)
    retries: int | None = setting("retries after SageMaker's own errors", least=1, most=30)
    more: Mapping[str, str] = setting(
        "another field of the request", {}, option="set", form="PATH=YAML",
        example="ResourceConfig.VolumeSizeInGB=200",
    )  # fmt: skip
    region: str | None = setting("default: from your AWS configuration")
    source_to: Path | None = setting(
        "also write the job's source here, for the SageMaker SDK", form="FOLDER"
    )
    # Keys of the config, as text: the job shows them, and its tuner may set them.
    hyperparameters: Mapping[str, str] = field(default_factory=dict)


Settings = SageMakerSettings


def problems(config: Config, ranks: Ranks, options: SageMakerSettings) -> Iterator[Problem]:
    """Yields what would make the job fail or lose its work."""
    paths = {
        "--output": options.output,
        **{f"--channel {name}": path for name, path in options.channels.items()},
    }
    for option, path in paths.items():
        if not path.startswith(_S3) or not path.removeprefix(_S3).partition("/")[0]:
            what = f"{option} {path!r} is not an S3 address"
            yield Problem(what, "s3://BUCKET/PREFIX", f"{option} s3://BUCKET/PREFIX")
    if options.spot and not config.checkpoint.every:
        yield Problem(
            "--spot with checkpoint.every = 0",
            "checkpoints during the run: the container gets no signal before an instance is reclaimed",
            "--checkpoint.every 100",
        )
    if (
        config.log.dir is not None
        and ranks.num_hosts == 1
        and not config.log.dir.startswith("/opt/ml/")
    ):
        yield Problem(
            f"log.dir = {config.log.dir} is lost with the instance",
            f"a folder that SageMaker keeps; without log.dir it is {CHECKPOINTS}",
            "leave log.dir out of the config",
        )
    if ranks.num_hosts > 1 and (
        config.log.dir is None or config.log.dir.startswith(CHECKPOINTS)
    ):
        yield Problem(
            f"{ranks.num_hosts} instances, but log.dir is on each one's own disk",
            "a folder that all instances share: each rank writes its part of a checkpoint",
            "an FSx for Lustre or EFS channel, and log.dir below it: --log.dir /opt/ml/input/data/shared/run",
        )


def warnings(ranks: Ranks, options: SageMakerSettings) -> list[str]:
    """Returns warnings about settings that work, but not as well as they could."""
    if ranks.num_hosts == 1 or options.instance_type.startswith(_EFA):
        return []
    return [
        f"{ranks.num_hosts} instances of {options.instance_type}, which has no EFA: gradients go over plain TCP, many "
        "times slower; use one larger instance, or a type with EFA (ml.p4d, ml.p5, ml.g5.12xlarge and larger)"
    ]


def source_files(config: Config, options: SageMakerSettings) -> dict[str, bytes]:
    """Returns the files of the job's source, by name."""
    from threefold.jobs import entry

    files = {
        "config.yaml": dump(config, nulls=False).encode(),
        ENTRY: Path(entry.__file__).read_bytes(),
        **{path.name: path.read_bytes() for path in options.packages},
    }
    if options.packages:
        # The toolkit installs requirements from the folder where the archive is unpacked.
        files["requirements.txt"] = "".join(
            f"./{path.name}\n" for path in options.packages
        ).encode()
    return files


def archive(config: Config, options: SageMakerSettings) -> bytes:
    """Returns the source as a .tar.gz; equal contents give equal bytes."""
    buffer = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=buffer, mode="wb", mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w") as tar,
    ):
        for name, content in source_files(config, options).items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def source_of(options: SageMakerSettings) -> str:
    """Returns the S3 address of the archive."""
    return f"{options.output.rstrip('/')}/{options.name}/source/sourcedir.tar.gz"


def request(
    ranks: Ranks, options: SageMakerSettings, *, region: str | None
) -> Mapping[str, Any]:
    """Returns the CreateTrainingJob request, which contains no values of secrets."""
    checked_name(options.name, longest=63)
    place = f"{options.output.rstrip('/')}/{options.name}"
    channel = {"S3DataType": "S3Prefix", "S3DataDistributionType": "FullyReplicated"}
    # Every hyperparameter is a JSON document in a string, as in SageMaker's own SDK.
    toolkit = {
        "sagemaker_program": ENTRY,
        "sagemaker_submit_directory": source_of(options),
        "sagemaker_torch_distributed_enabled": True,
        "sagemaker_instance_type": options.instance_type,
        "sagemaker_job_name": options.name,
        "sagemaker_container_log_level": 20,
        **({"sagemaker_region": region} if region is not None else {}),
    }
    environment = dict(options.variables)
    if options.secrets:
        environment["THREEFOLD_SECRETS"] = json.dumps(dict(options.secrets))
    stopping = {"MaxRuntimeInSeconds": options.max_run_s}
    if options.spot:
        stopping["MaxWaitTimeInSeconds"] = options.max_run_s + 3600
    made: dict[str, Any] = {
        "TrainingJobName": options.name,
        "RoleArn": options.role,
        "AlgorithmSpecification": {
            "TrainingImage": options.image,
            "TrainingInputMode": "File",
            "MetricDefinitions": [
                {"Name": name, "Regex": regex} for name, regex in METRICS.items()
            ],
        },
        "HyperParameters": {
            key: json.dumps(value)
            for key, value in {**toolkit, **options.hyperparameters}.items()
        },
        "OutputDataConfig": {"S3OutputPath": f"{place}/output"},
        "CheckpointConfig": {"S3Uri": f"{place}/checkpoints", "LocalPath": CHECKPOINTS},
        "ResourceConfig": {
            "InstanceType": options.instance_type,
            "InstanceCount": ranks.num_hosts,
            "VolumeSizeInGB": _VOLUME_GB,
        },
        "StoppingCondition": stopping,
        "EnableManagedSpotTraining": options.spot,
    }
    if environment:
        made["Environment"] = environment
    if options.retries is not None:
        made["RetryStrategy"] = {"MaximumRetryAttempts": options.retries}
    if options.channels:
        made["InputDataConfig"] = [
            {
                "ChannelName": name,
                "DataSource": {"S3DataSource": {**channel, "S3Uri": path}},
                "InputMode": "File",
            }
            for name, path in options.channels.items()
        ]
    return with_set(made, options.more)


def text(job: Job, options: SageMakerSettings) -> str:
    """Warnings, and the request as JSON; writes the source where the SDK takes it from, if that is asked for."""
    options = _complete(job, options)
    # Values of variables may be private, and terminals keep their text.
    hidden = replace(options, variables=dict.fromkeys(options.variables, "(not shown)"))
    return "\n".join(
        [
            *_notes(job, options),
            json.dumps(request(job.ranks, hidden, region=options.region), indent=2),
        ]
    )


def send(job: Job, options: SageMakerSettings) -> str:
    """Uploads the source and creates the job; returns warnings, and its ARN.

    Raises:
        ConfigError: boto3 is not installed. RunError: AWS refuses, or no credentials are found.
    """
    options = _complete(job, options)
    notes = _notes(job, options)
    made = request(job.ranks, options, region=options.region)
    return "\n".join(
        [
            *notes,
            _create(made, archive(job.config, options), source_of(options), options.region),
        ]
    )


def _complete(job: Job, options: SageMakerSettings) -> SageMakerSettings:
    """The settings with what depends on the time, the environment and the command line."""
    environ = environment.variables()
    return replace(
        options,
        name=options.name or f"threefold-{datetime.now():%Y-%m-%d-%H-%M-%S}",
        region=options.region or environ.get("AWS_REGION") or environ.get("AWS_DEFAULT_REGION"),
        hyperparameters=dict(job.keys),
    )


def _notes(job: Job, options: SageMakerSettings) -> list[str]:
    notes = [f"# warning: {warning}" for warning in warnings(job.ranks, options)]
    if options.source_to is None:
        return notes
    options.source_to.mkdir(parents=True, exist_ok=True)
    for name, content in source_files(job.config, options).items():
        (options.source_to / name).write_bytes(content)
    return [f"wrote {options.source_to}: entry script {ENTRY}", *notes]


def _create(made: Mapping[str, Any], source: bytes, to: str, region: str | None) -> str:
    try:
        import boto3
        from botocore.exceptions import BotoCoreError, ClientError
    except ImportError:
        raise ConfigError(
            "boto3 is not installed",
            expected="AWS' library, to send the job",
            fix="pip install 'threefold[sagemaker]'",
        ) from None
    session = boto3.Session(region_name=region)
    bucket, _, key = to.removeprefix(_S3).partition("/")
    try:
        session.client("s3").put_object(Bucket=bucket, Key=key, Body=source)
        return str(session.client("sagemaker").create_training_job(**made)["TrainingJobArn"])
    except (BotoCoreError, ClientError) as error:
        raise RunError(
            f"AWS did not accept the job: {error}",
            expected="credentials that may write to the bucket, pass the role and create training jobs, and a region",
            fix="aws sts get-caller-identity shows who you are; --region, AWS_PROFILE; or see the request: --dry-run",
        ) from error
