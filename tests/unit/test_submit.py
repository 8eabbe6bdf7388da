"""Jobs that `threefold submit` makes of a config: what is in them, what is refused, and that no secret is."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from threefold.commands import submit
from threefold.config.loading import load, validate
from threefold.config.schema import Config, MeshConfig
from threefold.config.yaml_text import as_document
from threefold.errors import EXIT_STOPPED_WITH_CHECKPOINT, ConfigError, RunError
from threefold.jobs import job as jobs
from threefold.jobs import kubernetes, sagemaker, slurm
from threefold.jobs.clusters import CLUSTERS, Job, kind_of
from threefold.jobs.entry import command, fetch_secrets
from threefold.jobs.kubernetes import KubernetesSettings
from threefold.jobs.sagemaker import SageMakerSettings
from threefold.jobs.settings import described, read
from threefold.jobs.slurm import SlurmSettings
from threefold.mesh.launchers.managed import managed
from threefold.run.terminal import Screen, Terminal


def config(**sections: Any) -> Config:
    return validate({"mesh": {"dp": 4, "tp": 2}, **sections})


def ranks(num_hosts: int = 2, **sections: Any) -> jobs.Ranks:
    return jobs.ranks_of(config(**sections).mesh, num_hosts=num_hosts, per_host=None)


def job(num_hosts: int = 2, **sections: Any) -> Job:
    return Job(config(**sections), ranks(num_hosts), {})


def said(error: pytest.ExceptionInfo[ConfigError]) -> str:
    return str(error.value)


# --- ranks, names, variables --------------------------------------------------------------------------------------


def test_ranks_follow_from_the_mesh_or_fill_it() -> None:
    found = ranks()
    assert (found.num_hosts, found.per_host, found.topology.world_size) == (2, 4, 8)
    filled = jobs.ranks_of(
        MeshConfig.model_validate({"dp": "auto", "tp": 4}), num_hosts=2, per_host=8
    )
    assert filled.topology.dp == 4


@pytest.mark.parametrize(
    ("mesh", "num_hosts", "per_host", "what"),
    [
        (
            {},
            1,
            None,
            "the mesh leaves the number of ranks open, but a job must request its hosts' devices",
        ),
        ({"dp": "auto", "tp": 2}, 1, None, "the mesh leaves the number of ranks open"),
        (
            {"dp": 4},
            3,
            None,
            "4 ranks (dp=4 x cp=1 x tp=1) cannot be divided equally among 3 hosts",
        ),
        (
            {"dp": 4},
            2,
            4,
            "mesh.dp x mesh.cp x mesh.tp = 4 x 1 x 1 = 4, but 8 ranks were started",
        ),
    ],
)
def test_ranks_that_do_not_fit(
    mesh: dict, num_hosts: int, per_host: int | None, what: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        asked = MeshConfig.model_validate(mesh)
        jobs.ranks_of(asked, num_hosts=num_hosts, per_host=per_host)
    assert said(caught).startswith(what)


@pytest.mark.parametrize("name", ["a job", "-x", "x" * 65, "", "näme", "a;rm", "$(x)"])
def test_name_that_is_none(name: str) -> None:
    with pytest.raises(
        ConfigError,
        match=re.escape(f"--name {name!r} is not a valid name for this cluster's jobs"),
    ):
        jobs.checked_name(name, longest=64)


def test_secrets_stay_out_of_variables() -> None:
    environ = {"HF_TOKEN": "hf_very_secret", "HF_HOME": "/cache"}
    fix = "--secret {name}=SECRET/KEY"
    assert jobs.variables(["HF_HOME", "A=b=c"], environ, secret_fix=fix) == {
        "HF_HOME": "/cache",
        "A": "b=c",
    }
    for free in (
        "TOKENIZERS_PARALLELISM=false",
        "KEYBOARD=us",
        "PWD=/",
        "URL=https://host/a@b",
        "MAX_TOKENS=5",
    ):
        assert jobs.variables([free], environ, secret_fix=fix)
    by_name = (
        "HF_TOKEN",
        "HF_TOKEN=hf_very_secret",
        "WANDB_API_KEY=x",
        "AWS_SECRET_ACCESS_KEY=x",
        "MY_PASS=x",
    )
    by_name += ("OPENAI_KEY=x", "HF_AUTH=x", "AWS_ACCESS_KEY_ID=x", "DB_PWD=x", "MYTOKEN=x")
    by_value = (
        "DATABASE_URL=postgres://user:word@host/db",
        "WHAT=hf_abcdef",
        "REDIS=redis://:word@host",
    )
    for given in (*by_name, *by_value):
        with pytest.raises(ConfigError) as caught:
            jobs.variables([given], environ, secret_fix=fix)
        name = given.partition("=")[0]
        assert said(caught) == (
            f"--env {name} looks like a secret: its value would be kept in the job's description\n"
            "  expected: secrets in the cluster's own store, and only their names in the job\n"
            f"  fix: --secret {name}=SECRET/KEY"
        )
    with pytest.raises(ConfigError, match="--env NOWHERE, but NOWHERE is not set here"):
        jobs.variables(["NOWHERE"], environ, secret_fix=fix)
    with pytest.raises(ConfigError, match="does not name a variable"):
        jobs.variables(["a-b=c"], environ, secret_fix=fix)


# --- Slurm --------------------------------------------------------------------------------------------------------


def test_batch_script_holds_the_config_and_starts_itself_again(tmp_path: Path) -> None:
    asked = config(train={"steps": 7}, log={"dir": "runs/it's mine"})
    options = SlurmSettings(
        name="job", time="01:00:00", cpus_per_task=4, python="/opt/my env/bin/python"
    )
    text = slurm.script(asked, ranks(), options)
    for line in (
        "--nodes=2",
        "--ntasks-per-node=4",
        "--gpus-per-node=4",
        "--signal=USR1@170",
        "--requeue",
        "--time=01:00:00",
    ):
        assert f"#SBATCH {line}\n" in text
    assert (
        "srun --wait=120 --cpus-per-task=4 '/opt/my env/bin/python' -m threefold train" in text
    )
    assert 'if [ "$code" -eq 75 ]; then\n    scontrol requeue "$SLURM_JOB_ID"' in text
    # The script is run with a srun of our own, which shows what the job would start and with which config.
    (tmp_path / "bin").mkdir()
    fake = tmp_path / "bin" / "srun"
    fake.write_text(
        '#!/bin/sh\nprintf "%s\\n" "$@" > srun.txt\necho "$THREEFOLD_TOKEN" > token.txt\nexit 75\n'
    )
    again = tmp_path / "bin" / "scontrol"
    again.write_text('#!/bin/sh\necho "$@" > scontrol.txt\n')
    for program in (fake, again):
        program.chmod(0o755)
    env = {"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin", "SLURM_JOB_ID": "7"}
    done = subprocess.run(
        ["bash", "-s"],
        input=text,
        cwd=tmp_path,
        env=env,
        text=True,
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "scontrol.txt").read_text() == "requeue 7\n"
    assert re.fullmatch("[0-9a-f]{64}\n", (tmp_path / "token.txt").read_text())
    assert "THREEFOLD_TOKEN" not in slurm.script(asked, ranks(num_hosts=1), options)
    started = (tmp_path / "srun.txt").read_text().splitlines()
    run = "runs/it's mine"
    assert started[-5:] == ["threefold", "train", f"{run}/submitted.yaml", "--log.dir", run]
    assert load(str(tmp_path / run / "submitted.yaml"), environ={}).config == asked


def test_batch_script_without_a_folder_names_it_after_the_job() -> None:
    text = slurm.script(config(), ranks(), SlurmSettings(requeue=False))
    assert 'run="runs/threefold-$SLURM_JOB_ID"' in text
    assert "#SBATCH --no-requeue" in text and "scontrol" not in text


def test_batch_script_on_cpus_asks_for_no_gpus() -> None:
    assert "gpus" not in slurm.script(
        config(mesh={"dp": 2, "device": "cpu"}), ranks(), SlurmSettings()
    )


def test_values_stay_on_their_line() -> None:
    with pytest.raises(ConfigError, match=r"--partition 'a b' is not one word"):
        slurm.script(config(), ranks(), SlurmSettings(partition="a b"))
    wrong = SlurmSettings(options=("exclusive",), srun_options=("--mpi=pmix", "--a\n--b"))
    found = [problem.what for problem in slurm.problems(config(), ranks(), wrong)]
    assert found == [
        "--option 'exclusive' is not an option of sbatch",
        "--srun-option '--a\\n--b' is not an option of srun",
    ]


@pytest.mark.parametrize(
    ("time", "fits"),
    [
        *(
            ("3", False),
            ("4", True),
            ("03:50", False),
            ("03:51", True),
            ("00:03:50", False),
            ("00:03:51", True),
        ),
        *(
            ("0-01", True),
            ("1-00:00", True),
            ("0-00:03", False),
            ("2-12:30:00", True),
            ("UNLIMITED", True),
        ),
    ],
)
def test_time_limit_leaves_time_to_train_before_the_signal(time: str, fits: bool) -> None:
    # grace_s 110, a minute to leave, one to be early.
    found = list(slurm.problems(config(), ranks(), SlurmSettings(time=time)))
    assert (
        not found
        if fits
        else found[0].what.startswith(
            f"--time {time}: ranks are told to save 170 s before it ends"
        )
    )
    if found:
        again = found[0].fix.removeprefix("--time ")
        assert not list(slurm.problems(config(), ranks(), SlurmSettings(time=again)))


def test_times_that_are_none() -> None:
    for time in ("1h", "1:2:3:4", "-5", "", "soon", "1-2-3"):
        assert [
            problem.what
            for problem in slurm.problems(config(), ranks(), SlurmSettings(time=time))
        ] == [f"--time {time!r} is not a Slurm time"]


def test_setup_may_use_variables_that_are_not_set(tmp_path: Path) -> None:
    setup = tmp_path / "set up.sh"
    setup.write_text("export PLACE=/opt/x:$NOT_SET_ANYWHERE\n")
    (tmp_path / "srun").write_text('#!/bin/sh\necho "$PLACE" > place.txt\n')
    (tmp_path / "srun").chmod(0o755)
    text = slurm.script(config(), ranks(), SlurmSettings(setup=str(setup)))
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "7"}

    def run() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-s"], input=text, cwd=tmp_path, env=env, text=True, capture_output=True
        )

    done = run()
    assert (done.returncode, done.stderr, (tmp_path / "place.txt").read_text()) == (
        0,
        "",
        "/opt/x:\n",
    )
    assert not list(slurm.missing_setup(SlurmSettings(setup=str(setup))))
    setup.unlink()
    assert (run().returncode, run().stderr) == (1, f"--setup {setup} cannot be read here\n")
    assert list(slurm.missing_setup(SlurmSettings(setup=str(setup))))


def test_container_and_srun_options() -> None:
    def start(**given: Any) -> str:
        text = slurm.script(config(), ranks(1), SlurmSettings(**given))
        return next(line for line in text.splitlines() if line.startswith("srun"))

    assert start(srun_options=("--mpi=pmix",), python="py").startswith(
        "srun --wait=120 --mpi=pmix py -m"
    )
    pyxis = start(container="nvcr.io#nvidia/pytorch:26.01-py3")
    assert "--container-image='nvcr.io#nvidia/pytorch:26.01-py3' --container-mounts=" in pyxis
    assert pyxis.index("--container-workdir") < pyxis.index("python -m threefold")
    for image in ("/images/my.sif", "docker://me/image:1"):
        assert f' {image} python -m threefold train "$run' in start(container=image)
        assert "apptainer exec --nv --bind" in start(container=image)


# --- SageMaker ----------------------------------------------------------------------------------------------------


def sagemaker_options(**given: Any) -> SageMakerSettings:
    made = {
        "name": "job",
        "image": "image",
        "role": "role",
        "instance_type": "ml.p5.48xlarge",
        "output": "s3://bucket/runs/",
        **given,
    }
    return SageMakerSettings(**made)


def test_request_and_source_are_what_a_container_needs() -> None:
    asked = config(mesh={"dp": 8}, checkpoint={"every": 10})
    options = sagemaker_options(
        spot=True, channels={"train": "s3://b/d"}, hyperparameters={"train.steps": "9"}
    )
    made = sagemaker.request(ranks(1, mesh={"dp": 8}), options, region="eu-west-1")
    assert list(sagemaker.problems(asked, ranks(1, mesh={"dp": 8}), options)) == []
    assert made["ResourceConfig"]["InstanceCount"] == 1
    assert made["EnableManagedSpotTraining"] is True
    assert made["StoppingCondition"] == {
        "MaxRuntimeInSeconds": 86_400,
        "MaxWaitTimeInSeconds": 90_000,
    }
    assert made["CheckpointConfig"] == {
        "S3Uri": "s3://bucket/runs/job/checkpoints",
        "LocalPath": "/opt/ml/checkpoints",
    }
    hyperparameters = {key: json.loads(value) for key, value in made["HyperParameters"].items()}
    assert hyperparameters["sagemaker_submit_directory"] == sagemaker.source_of(options)
    assert hyperparameters["train.steps"] == "9"
    with tarfile.open(fileobj=io.BytesIO(sagemaker.archive(asked, options))) as tar:
        names = tar.getnames()
        text = tar.extractfile("config.yaml").read().decode()  # type: ignore[union-attr]
    assert names == ["config.yaml", "threefold_entry.py"]
    assert "dir:" not in text  # the container's checkpoint folder is the default there
    assert sagemaker.archive(asked, options) == sagemaker.archive(asked, options)
    # What the request says is what the container's process reads.
    read = managed({"SM_HPS": json.dumps({"train.steps": "9"})})
    assert (
        read is not None
        and load(None, environ={}, settings=read.settings).config.train.steps == 9
    )


def test_wheels_are_installed_first(tmp_path: Path) -> None:
    wheel = tmp_path / "threefold-1-py3-none-any.whl"
    wheel.write_bytes(b"wheel")
    files = sagemaker.source_files(config(), sagemaker_options(packages=(wheel,)))
    assert (
        files["requirements.txt"] == b"./threefold-1-py3-none-any.whl\n"
        and files[wheel.name] == b"wheel"
    )


def test_jobs_that_would_lose_their_work_are_refused() -> None:
    def whats(options: SageMakerSettings, num_hosts: int = 1, **sections: Any) -> list[str]:
        found = sagemaker.problems(config(**sections), ranks(num_hosts), options)
        return [problem.what for problem in found]

    assert whats(sagemaker_options(spot=True)) == ["--spot with checkpoint.every = 0"]
    assert whats(sagemaker_options(), log={"dir": "runs/a"}) == [
        "log.dir = runs/a is lost with the instance"
    ]
    assert whats(sagemaker_options(), num_hosts=2) == [
        "2 instances, but log.dir is on each one's own disk"
    ]
    assert (
        whats(sagemaker_options(), num_hosts=2, log={"dir": "/opt/ml/input/data/shared/run"})
        == []
    )
    assert whats(sagemaker_options(output="bucket")) == [
        "--output 'bucket' is not an S3 address"
    ]
    assert whats(sagemaker_options(channels={"a": "s3://"})) == [
        "--channel a 's3://' is not an S3 address"
    ]


@pytest.mark.parametrize(
    ("instance_type", "num_hosts", "warned"),
    [
        ("ml.g5.2xlarge", 2, True),
        ("ml.g5.2xlarge", 1, False),
        ("ml.p4d.24xlarge", 2, False),
        ("ml.g5.12xlarge", 2, False),
    ],
)
def test_several_instances_without_efa_are_warned_of(
    instance_type: str, num_hosts: int, warned: bool
) -> None:
    found = sagemaker.warnings(ranks(num_hosts), sagemaker_options(instance_type=instance_type))
    assert bool(found) == warned
    if warned:
        assert found[0].startswith(
            "2 instances of ml.g5.2xlarge, which has no EFA: gradients go over plain TCP"
        )


def test_metric_definitions_read_our_own_lines() -> None:
    buffer = io.StringIO()
    terminal = Terminal(Screen(file=buffer, width=200), num_steps=120, done=0)
    step = {
        "step": 7,
        "loss": 2.5,
        "grad_norm": 0.4,
        "lr": 2e-4,
        "step_time_s": 0.52,
        "tokens_per_s": 4096.0,
    }
    terminal.log({**step, "mfu": 0.41})
    terminal.log({**step, "step": 8, "loss": float("nan"), "grad_norm": float("inf")})
    terminal.log({"step": 8, "eval_loss": 2.25, "eval_tokens": 1000})
    terminal.close()
    lines = [line for line in buffer.getvalue().splitlines() if line]
    read = {
        name: [found for line in lines for found in re.findall(regex, line)]
        for name, regex in sagemaker.METRICS.items()
    }
    assert read == {
        "train:loss": ["2.5000", "nan"],
        "train:grad_norm": ["0.400", "inf"],
        "train:lr": ["2.00e-04", "2.00e-04"],
        "train:step_time_s": ["0.52", "0.52"],
        "eval:loss": ["2.2500"],
    }


def test_entry_script_becomes_what_the_container_lacks() -> None:
    train = ["-m", "threefold", "train", "/code/config.yaml"]
    one = {"SM_HOSTS": '["algo-1"]', "SM_CURRENT_HOST": "algo-1"}
    two = {"SM_HOSTS": '["algo-2", "algo-1"]', "SM_CURRENT_HOST": "algo-2", "SM_NUM_GPUS": "8"}
    assert command(one, "/code") == [sys.executable, *train]
    assert command({**two, "RANK": "3"}, "/code") == [sys.executable, *train]
    found = command(two, "/code")
    assert found[1:3] == ["-m", "torch.distributed.run"] and found[-4:] == train
    assert dict(zip(found[3:-4:2], found[4:-4:2], strict=True)) == {
        "--nnodes": "2",
        "--nproc-per-node": "8",
        "--node-rank": "1",
        "--master-addr": "algo-1",
        "--master-port": "7777",
    }
    environ = {"A": "b"}
    fetch_secrets(environ)
    assert environ == {"A": "b"}


def test_secrets_are_in_no_request() -> None:
    options = sagemaker_options(secrets={"HF_TOKEN": "my/secret"}, variables={"A": "b"})
    made = sagemaker.request(ranks(1), options, region=None)
    assert made["Environment"] == {"A": "b", "THREEFOLD_SECRETS": '{"HF_TOKEN": "my/secret"}'}


def test_request_has_what_is_asked_of_aws() -> None:
    more = {
        "ResourceConfig.KeepAlivePeriodInSeconds": "600",
        "Tags": "[{Key: team, Value: research}]",
    }
    made = sagemaker.request(ranks(1), sagemaker_options(retries=3, more=more), region=None)
    assert made["RetryStrategy"] == {"MaximumRetryAttempts": 3}
    assert made["ResourceConfig"]["KeepAlivePeriodInSeconds"] == 600
    assert made["Tags"] == [{"Key": "team", "Value": "research"}]
    plain = sagemaker.request(ranks(1), sagemaker_options(), region=None)
    assert (
        not {"RetryStrategy", "Tags"} & plain.keys()
        and plain["ResourceConfig"]["VolumeSizeInGB"] == 100
    )


def test_a_field_that_cannot_be_set() -> None:
    with pytest.raises(ConfigError) as caught:
        sagemaker.request(ranks(1), sagemaker_options(more={"RoleArn.name": "x"}), region=None)
    assert said(caught) == (
        "--set RoleArn.name: no such field\n"
        "  expected: a field of the job, not a secret: --dry-run shows the job without --set\n"
        "  fix: leave --set RoleArn.name out"
    )
    with pytest.raises(
        ConfigError, match="the value of --set Environment looks like a secret"
    ) as caught:
        sagemaker.request(
            ranks(1), sagemaker_options(more={"Environment": "hf_abc"}), region=None
        )
    assert "hf_abc" not in said(caught)
    with pytest.raises(ConfigError, match="--set Tags"):
        sagemaker.request(ranks(1), sagemaker_options(more={"Tags": "["}), region=None)


def test_config_with_a_secret_is_sent_nowhere(tmp_path: Path) -> None:
    secret = "https://user:word@host/rows.jsonl"
    (tmp_path / "c.yaml").write_text(
        f"mesh: {{dp: 2}}\ndata: {{mixture: {{a: {{source: '{secret}', weight: 1.0}}}}}}\n"
    )
    with pytest.raises(
        ConfigError, match=re.escape("the value of data.mixture.a.source looks like a secret")
    ) as caught:
        submit.read_config(str(tmp_path / "c.yaml"), [])
    assert "word" not in said(caught)
    for free in ("s3://bucket/a@b", "hf_cache/rows.jsonl", "sk-learn/rows", "hf_data"):
        assert submit.read_config(None, [("data.source", free), ("mesh.dp", "2")]).mesh.dp == 2
    with pytest.raises(ConfigError, match=r"the value of data\.source looks like a secret"):
        submit.read_config(None, [("data.source", "hf_" + "a1" * 17)])


# --- Kubernetes ---------------------------------------------------------------------------------------------------


def kubernetes_options(**given: Any) -> KubernetesSettings:
    return KubernetesSettings(
        **{"name": "job", "image": "image", "volumes": {"claim": "/runs"}, **given}
    )


ON_VOLUME = {"log": {"dir": "/runs/a"}}


def test_what_kubectl_reads_of_a_manifest_is_what_was_given() -> None:
    """kubectl reads YAML 1.1, in which these texts mean other things, and replaces $(NAME) in values."""
    texts = [
        "on",
        "NO",
        "y",
        "null",
        "~",
        "1_000",
        "0b101",
        "0o17",
        "010",
        "1e3",
        "12:30:45",
        ".inf",
        "2001-01-01",
        "=",
        "<<",
        "true",
    ]
    texts += [
        "a: b # c",
        'line1\nline2: "x"\n',
        "a\rb",
        "  lead\ntrail  \n\n",
        "a\tb",
        "a\ab\n",
        "\n\n",
        "",
        "\x85",
        "é",
    ]
    values = {f"V{number}": text for number, text in enumerate(texts)}
    options = kubernetes_options(name="on", variables={**values, "D": "$(HF_HOME)"})
    documents = kubernetes.manifests(config(**ON_VOLUME), ranks(), options)
    from ruamel.yaml import YAML

    for version in ((1, 1), (1, 2)):
        yaml = YAML(typ="safe", pure=True)
        yaml.version = version  # type: ignore[assignment]
        assert list(yaml.load_all(as_document(*documents))) == documents
    # Go's reader differs a little from that of ruamel.yaml.
    for word in ("y", "on", "1_000", "12:30:45"):
        assert as_document({"a": word}) == f'a: "{word}"\n'
    assert '"$$(HF_HOME)"' in as_document(*documents)


@pytest.mark.parametrize("kind", kubernetes.KINDS)
def test_manifests_read_back_and_hold_the_config(kind: str) -> None:
    asked = config(**ON_VOLUME)
    options = kubernetes_options(
        kind=kind, secrets={"HF_TOKEN": "hf/token"}, variables={"A": "1"}, namespace="team"
    )
    documents = kubernetes.manifests(asked, ranks(), options)
    from ruamel.yaml import YAML

    assert list(YAML(typ="safe", pure=True).load_all(as_document(*documents))) == documents
    config_map, *objects = documents
    assert config_map["immutable"] is True
    read = YAML(typ="safe", pure=True).load(config_map["data"]["config.yaml"])
    assert validate(read) == asked
    text = json.dumps(objects)
    assert f'"configMap": {{"name": "{config_map["metadata"]["name"]}"}}' in text
    assert '"secretKeyRef": {"name": "hf", "key": "token"}' in text
    assert {document["metadata"]["namespace"] for document in documents} == {"team"}
    assert '"nvidia.com/gpu": "4"' in text
    assert '"claimName": "claim"' in text and '"terminationGracePeriodSeconds": 140' in text


def test_every_kind_starts_the_same_ranks() -> None:
    asked = config(**ON_VOLUME)
    made = {
        kind: kubernetes.manifests(asked, ranks(), kubernetes_options(kind=kind))[-1]["spec"]
        for kind in kubernetes.KINDS
    }
    specs = made["pytorchjob"]["pytorchReplicaSpecs"]
    assert [specs[kind]["replicas"] for kind in ("Master", "Worker")] == [1, 1]
    assert made["pytorchjob"]["nprocPerNode"] == "4"
    assert (
        made["trainjob"]["trainer"]["numNodes"],
        made["trainjob"]["trainer"]["numProcPerNode"],
    ) == (2, 4)
    job = made["jobset"]["replicatedJobs"][0]["template"]["spec"]
    assert (job["completions"], job["parallelism"], job["completionMode"]) == (2, 2, "Indexed")
    (container,) = job["template"]["spec"]["containers"]
    assert container["command"][:3] == ["torchrun", "--nnodes=2", "--nproc-per-node=4"]
    assert "--master-addr=job-node-0-0.job" in container["command"]


def _unlike(value: Any, schema: dict[str, Any], place: str = "") -> list[str]:
    """Where a value is not what a custom resource's schema has: unknown or missing fields, other kinds of values."""
    if schema.get("x-kubernetes-preserve-unknown-fields") or schema.get(
        "x-kubernetes-int-or-string"
    ):
        return []
    kinds = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool}
    kind = schema["type"]
    if not isinstance(value, kinds[kind]):
        return [f"{place}: {value!r} is no {kind}"]
    if "enum" in schema and value not in schema["enum"]:
        return [f"{place}: {value!r} is not among {schema['enum']}"]
    if kind == "array":
        return [
            each
            for entry in value
            for each in _unlike(entry, schema.get("items", {"type": "object"}), f"{place}[]")
        ]
    if kind != "object":
        return []
    known, free = schema.get("properties", {}), schema.get("additionalProperties")
    found = [
        f"{place}: {name} is missing"
        for name in schema.get("required", ())
        if name not in value
    ]
    for name, entry in value.items():
        if place == "" and name in ("apiVersion", "kind", "metadata"):
            continue
        if (own := known.get(name, free)) is None:
            found.append(f"{place}.{name} is not known")
        else:
            found += _unlike(entry, own, f"{place}.{name}") if own.get("type") else []
    return found


RICH = {
    "resources": {"vpc.amazonaws.com/efa": "4"},
    "more": {
        "nodeSelector": "{pool: gpu}",
        "tolerations": "[{key: nvidia.com/gpu, operator: Exists}]",
        "imagePullSecrets": "[{name: registry}]",
        "priorityClassName": "high",
        "hostNetwork": "true",
        "securityContext.fsGroup": "100",
    },
    "queue": "research",
    "restarts": 3,
}


@pytest.mark.parametrize("release", ["2.0", "2.1", "2.2", "2.3"])
def test_train_job_is_what_every_release_of_trainer_knows(release: str) -> None:
    schemas = json.loads((Path(__file__).parent / "trainer" / f"{release}.json").read_text())
    options = kubernetes_options(kind="trainjob", **RICH)
    _, runtime, job = kubernetes.manifests(config(**ON_VOLUME), ranks(), options)
    assert (runtime["kind"], job["kind"]) == ("TrainingRuntime", "TrainJob")
    for document in (runtime, job):
        assert _unlike(document, schemas[document["kind"]]) == []
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    # The check finds what a release does not know.
    job["spec"]["runtimePatches"] = []
    runtime["spec"]["template"]["spec"]["failurePolicy"]["maxRestarts"] = "3"
    assert _unlike(job, schemas["TrainJob"]) == [".spec.runtimePatches is not known"]
    assert _unlike(runtime, schemas["TrainingRuntime"]) == [
        ".spec.template.spec.failurePolicy.maxRestarts: '3' is no integer"
    ]


@pytest.mark.parametrize("kind", kubernetes.KINDS)
def test_what_pods_of_a_cluster_with_gpus_need(kind: str) -> None:
    job = kubernetes.manifests(
        config(**ON_VOLUME), ranks(), kubernetes_options(kind=kind, **RICH)
    )[1:]
    assert job[-1]["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "research"
    text = json.dumps(job)
    for part in (
        '"limits": {"nvidia.com/gpu": "4", "vpc.amazonaws.com/efa": "4"}',
        '"securityContext": {"capabilities": {"add": ["IPC_LOCK"]}}',
        '"nodeSelector": {"pool": "gpu"}, "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}], '
        '"imagePullSecrets": [{"name": "registry"}], "priorityClassName": "high", "hostNetwork": true, '
        '"securityContext": {"fsGroup": 100}',
    ):
        assert part in text, part
    assert ('"maxRestarts": 3' in text) or ('"backoffLimit": 3' in text)
    plain = json.dumps(
        kubernetes.manifests(config(**ON_VOLUME), ranks(), kubernetes_options(kind=kind))
    )
    assert not any(
        word in plain
        for word in ("securityContext", "hostNetwork", "tolerations", "kueue", "null")
    )


def test_stops_and_evictions_count_as_no_restarts() -> None:
    for kind in ("trainjob", "jobset"):
        text = json.dumps(
            kubernetes.manifests(config(**ON_VOLUME), ranks(), kubernetes_options(kind=kind))
        )
        assert (
            '"action": "RestartJobSetAndIgnoreMaxRestarts", "onJobFailureReasons": ["PodFailurePolicy"]'
            in text
        )
        assert '"onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]' in text
        assert '"onExitCodes": {"operator": "In", "values": [75]}' in text


@pytest.mark.parametrize("kind", kubernetes.KINDS)
def test_another_job_has_other_names(kind: str) -> None:
    def names(steps: int, **given: Any) -> list[str]:
        asked = config(**ON_VOLUME, train={"steps": steps})
        documents = kubernetes.manifests(
            asked, ranks(), kubernetes_options(kind=kind, name=None, **given)
        )
        return [document["metadata"]["name"] for document in documents]

    assert names(1) == names(1)
    for other in (names(2), names(1, image="other"), names(1, variables={"A": "b"})):
        assert not set(names(1)[-1:]) & set(other)
    # One that has the name of another leaves the other its config.
    first, second = (
        kubernetes.manifests(
            config(**ON_VOLUME, train={"steps": steps}), ranks(), kubernetes_options(kind=kind)
        )
        for steps in (1, 2)
    )
    assert first[-1]["metadata"]["name"] == second[-1]["metadata"]["name"] == "job"
    assert first[0]["metadata"]["name"] != second[0]["metadata"]["name"]
    for documents in (first, second):
        assert all(len(document["metadata"]["name"]) <= 63 for document in documents)


def test_pods_that_would_lose_their_work_are_refused() -> None:
    def whats(options: KubernetesSettings, **sections: Any) -> list[str]:
        return [
            problem.what
            for problem in kubernetes.problems(config(**sections), ranks(), options)
        ]

    assert whats(kubernetes_options(), **ON_VOLUME) == []
    assert whats(kubernetes_options()) == [
        "log.dir is not set: the files that a pod writes are lost with it"
    ]
    lost = ["log.dir = /tmp/a is not on a volume: the files that a pod writes are lost with it"]
    assert whats(kubernetes_options(), log={"dir": "/tmp/a"}) == lost
    assert whats(kubernetes_options(kind="job"), **ON_VOLUME) == ["--kind 'job'"]
    secret = kubernetes_options(secrets={"A": "nokey"})
    assert whats(secret, **ON_VOLUME) == ["--secret A=nokey does not name a key of a Secret"]
    volcano = kubernetes_options(kind="jobset", volcano_queue="q")
    assert whats(volcano, **ON_VOLUME)[0].startswith("--volcano-queue with --kind jobset")
    assert whats(kubernetes_options(queue="a", volcano_queue="b"), **ON_VOLUME) == [
        "--queue and --volcano-queue"
    ]
    policy = kubernetes.manifests(
        config(**ON_VOLUME), ranks(), kubernetes_options(volcano_queue="q")
    )[1]["spec"]
    assert policy["runPolicy"]["schedulingPolicy"] == {"queue": "q", "minAvailable": 2}


# --- SkyPilot -----------------------------------------------------------------------------------------------------


def test_the_example_for_skypilot_starts_the_ranks_of_a_host(tmp_path: Path) -> None:
    task = yaml.safe_load(
        (Path(__file__).parents[2] / "examples" / "skypilot.yaml").read_text()
    )
    assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == [
        EXIT_STOPPED_WITH_CHECKPOINT
    ]
    assert task["envs"]["PET_SHUTDOWN_TIMEOUT"] == str(Config().checkpoint.grace_s)
    # What a host runs, with a torchrun of our own.
    (tmp_path / "torchrun").write_text('#!/bin/sh\nprintf "%s\\n" "$@" > ran.txt\n')
    (tmp_path / "torchrun").chmod(0o755)
    env = {
        "PATH": f"{tmp_path}:/usr/bin:/bin",
        "HOME": str(tmp_path),
        "SKYPILOT_NUM_NODES": "2",
    }
    env |= {"SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"}
    subprocess.run(["bash", "-c", task["run"]], cwd=tmp_path, env=env, check=True)
    ran = (tmp_path / "ran.txt").read_text().split()
    assert dict(zip(ran[:10:2], ran[1:10:2], strict=True)) == {
        **{
            "--nnodes": "2",
            "--nproc-per-node": "8",
            "--node-rank": "1",
            "--master-addr": "10.0.0.1",
        },
        "--master-port": "29500",
    }
    assert ran[10:] == ["-m", "threefold", "train", f"{tmp_path}/job.yaml"]


# --- the command --------------------------------------------------------------------------------------------------


def test_programs_that_are_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(ConfigError, match="sbatch is not installed here"):
        slurm.send(job(), SlurmSettings())
    with pytest.raises(ConfigError, match="kubectl is not installed here"):
        kubernetes.send(job(**ON_VOLUME), kubernetes_options())


def test_dry_run_shows_no_value_of_a_variable() -> None:
    options = sagemaker_options(variables={"HF_HOME": "private-place"})
    assert (
        "(not shown)" in (shown := sagemaker.text(job(1), options))
        and "private-place" not in shown
    )


def test_source_for_the_sdk_is_written(tmp_path: Path) -> None:
    lines = sagemaker.text(job(1), sagemaker_options(source_to=tmp_path / "src")).splitlines()
    assert lines[0] == f"wrote {tmp_path / 'src'}: entry script threefold_entry.py"
    assert sorted(path.name for path in (tmp_path / "src").iterdir()) == [
        "config.yaml",
        "threefold_entry.py",
    ]


# --- a preparation as an array -----------------------------------------------------------------------------------


def preparation(to: str = "a store", workers: int | None = None, **options: Any) -> str:
    asked = config(data={"source": "rows.jsonl", "tokenizer": "bytes"})
    return slurm.preparation(asked, SlurmSettings(**options), to, num_tasks=16, workers=workers)


def test_script_of_a_preparation() -> None:
    text = preparation(
        time="4:00:00",
        partition="cpu",
        cpus_per_task=8,
        setup="env.sh",
        python="py",
        requeue=False,
    )
    head, body = text.split("\n\n", 1)
    directives = [
        "job-name=threefold",
        "nodes=1",
        "ntasks-per-node=1",
        "no-requeue",
        "open-mode=append",
    ]
    directives += [
        "output=threefold-%j.out",
        "time=4:00:00",
        "partition=cpu",
        "cpus-per-task=8",
    ]
    assert head.splitlines() == ["#!/bin/bash", *(f"#SBATCH --{line}" for line in directives)]
    lines = body.splitlines()
    assert lines[1:6] == [
        "source env.sh",
        "set -u",
        "run='a store'",
        "task=join",
        '[ -z "${SLURM_ARRAY_TASK_ID:-}" ] || task="$SLURM_ARRAY_TASK_ID/16"',
    ]
    words = 'data prepare /dev/stdin --to \'a store\' --task "$task" --workers "${SLURM_CPUS_PER_TASK:-1}"'
    assert (
        lines[6]
        == f"srun --wait=120 --cpus-per-task=8 py -m threefold {words} <<'END_OF_CONFIG'"
    )
    assert lines[-1] == "END_OF_CONFIG"
    assert yaml.safe_load("\n".join(lines[7:-1]))["data"]["source"] == "rows.jsonl"
    assert " --workers 3 <<" in preparation(workers=3)
    contained = preparation("s3://bucket/tokens", container="a.sif")
    assert "\nrun=.\n" in contained and " apptainer exec --nv --bind " in contained


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (
            {"retries": 1},
            "--retries, --signal-ahead and --gpus-per-node have no effect on a preparation",
        ),
        (
            {"signal_ahead_s": 60},
            "--retries, --signal-ahead and --gpus-per-node have no effect on a preparation",
        ),
        (
            {"gpus_per_node": 1},
            "--retries, --signal-ahead and --gpus-per-node have no effect on a preparation",
        ),
        ({"options": ("-x",)}, "--option '-x' is not an option of sbatch"),
        ({"time": "soon"}, "--time 'soon' is not a Slurm time"),
        ({"partition": "a b"}, "--partition 'a b' is not one word"),
        ({"name": "a b"}, "--name 'a b' is not a valid name for this cluster's jobs"),
    ],
)
def test_preparation_that_slurm_would_not_take(options: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError) as caught:
        preparation(**options)
    assert said(caught).startswith(what)


def test_array_and_the_job_after_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, told = tmp_path / "sbatch", tmp_path / "told"
    program.write_text(
        f'#!/bin/sh\necho "$@" >> {told}\ncat > /dev/null\necho "$(wc -l < {told})7;here"\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    settings = SlurmSettings(name="mine")
    said = slurm.send_preparation("text", settings, [0, 3, 4])
    assert said == "job 17 makes parts in 3 tasks; job 27 joins and proves them: mine-27.out"
    assert (
        slurm.send_preparation("text", settings, [])
        == "job 37 joins and proves them: mine-37.out"
    )
    assert told.read_text().splitlines() == [
        "--parsable --array=0,3,4",
        "--parsable --dependency=afterany:17",
        "--parsable",
    ]
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    with pytest.raises(ConfigError) as caught:
        slurm.send_preparation("text", settings, [])
    assert str(caught.value).splitlines()[2] == (
        "  fix: on any hosts: threefold data prepare ... --task I/N, with I from 0 to N - 1; then: --task join"
    )


@pytest.fixture
def refusing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """sbatch and kubectl that refuse."""
    for name in ("sbatch", "kubectl"):
        program = tmp_path / name
        program.write_text("#!/bin/sh\ncat > /dev/null\necho 'not today' >&2\nexit 1\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")


@pytest.mark.usefixtures("refusing")
def test_clusters_that_refuse() -> None:
    with pytest.raises(RunError) as caught:
        slurm.send(job(), SlurmSettings())
    assert str(caught.value) == (
        "sbatch did not accept the job: not today\n"
        "  expected: options that this cluster accepts\n"
        "  fix: --dry-run shows the script; sinfo shows partitions, sacctmgr show assoc your accounts"
    )
    with pytest.raises(RunError) as caught:
        slurm.send_preparation("text", SlurmSettings(), [1])
    assert (
        str(caught.value).splitlines()[2]
        == "  fix: sinfo shows partitions, sacctmgr show assoc your accounts"
    )
    with pytest.raises(RunError) as caught:
        kubernetes.send(job(**ON_VOLUME), kubernetes_options())
    assert str(caught.value) == (
        "kubectl did not accept the job: not today\n"
        "  expected: a cluster with the operator of this --kind, the right to create jobs there, "
        "and an unused name\n"
        "  fix: kubectl auth can-i create pytorchjobs; --kind jobset or trainjob if the cluster has another operator"
    )


def test_sagemaker_without_boto3(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(ConfigError) as caught:
        sagemaker.send(job(1), sagemaker_options())
    assert said(caught) == (
        "boto3 is not installed\n  expected: AWS' library, to send the job\n  fix: pip install 'threefold[sagemaker]'"
    )


def test_option_that_names_no_pair() -> None:
    with pytest.raises(ConfigError) as caught:
        jobs.named_pairs(
            ["words"], "--channel", "NAME=s3://BUCKET/PREFIX", example="a=s3://b/c"
        )
    assert said(caught) == (
        "--channel 'words' is not NAME=s3://BUCKET/PREFIX\n"
        "  expected: NAME=s3://BUCKET/PREFIX\n"
        "  fix: --channel a=s3://b/c"
    )


SETTINGS = {
    "slurm": [
        "--time",
        "1:00:00",
        "--no-requeue",
        "--option=--exclusive",
        "--option=--x=y",
        "--retries",
        "3",
    ],
    "sagemaker": [
        "--role",
        "r",
        "--image",
        "i",
        "--output",
        "s3://b/p",
        "--instance-type",
        "ml.p5",
        "--spot",
    ],
    "kubernetes": [
        "--image",
        "i",
        "--volume",
        "c=/runs",
        "--env",
        "A=b",
        "--set",
        "hostNetwork=true",
    ],
}


@pytest.mark.parametrize("name", CLUSTERS)
def test_settings_are_read_from_the_fields(name: str) -> None:
    kind = kind_of(name).Settings
    keys = ["c.yaml", "--train.steps", "-1", "--mesh.dp=2"]
    settings, rest = read(kind, [*keys[:1], *SETTINGS[name], *keys[1:]], {})
    assert rest == keys
    expected: dict[str, dict[str, Any]] = {
        "slurm": {
            "time": "1:00:00",
            "requeue": False,
            "options": ("--exclusive", "--x=y"),
            "retries": 3,
        },
        "sagemaker": {
            "role": "r",
            "image": "i",
            "output": "s3://b/p",
            "instance_type": "ml.p5",
            "spot": True,
        },
        "kubernetes": {
            "image": "i",
            "volumes": {"c": "/runs"},
            "variables": {"A": "b"},
            "more": {"hostNetwork": "true"},
        },
    }
    assert settings == kind(**expected[name])
    assert len({option for option, _ in described(kind)}) == len(list(described(kind)))


@pytest.mark.parametrize(
    ("arguments", "whats"),
    [
        (["--tim", "3"], ["unknown option --tim"]),
        (["--retries", "-1", "--time"], ["--time has no value", "--retries = '-1'"]),
        (["--cpus-per-task", "0"], ["--cpus-per-task = '0'"]),
        (["--requeue=maybe"], ["--requeue = 'maybe'"]),
        (["--time", "1", "--time", "2"], ["--time is given 2 times"]),
    ],
)
def test_settings_that_cannot_be_read(arguments: list[str], whats: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        read(SlurmSettings, arguments, {})
    assert [problem.what for problem in caught.value.problems] == whats
    assert all(problem.expected and problem.fix for problem in caught.value.problems)


def test_dropped_setting_is_refused_with_what_replaces_it() -> None:
    with pytest.raises(ConfigError) as caught:
        read(SageMakerSettings, [*SETTINGS["sagemaker"], "--instances", "2"], {})
    assert [problem.fix for problem in caught.value.problems] == [
        "--nodes N, as for every kind of job"
    ]


def test_required_setting_is_named() -> None:
    with pytest.raises(
        ConfigError,
        match="no --image\n  expected: image with threefold and torch\n  fix: --image TEXT",
    ):
        read(KubernetesSettings, [], {})


def test_the_command_prints_a_job(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("mesh: {dp: 2, device: cpu}\n")
    arguments = ["submit", "slurm", "c.yaml", "--train.steps", "5", "--nodes", "2", "--dry-run"]
    # Cold, by the script that pip installs.
    script = Path(sys.executable).with_name("threefold")
    done = subprocess.run(
        [script, *arguments], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("#!/bin/bash\n") and "  steps: 5\n" in done.stdout
    assert list(tmp_path.iterdir()) == [tmp_path / "c.yaml"]
