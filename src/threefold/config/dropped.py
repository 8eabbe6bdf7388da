"""Keys that other trainers have, or that drafts of this one had, with their replacements.

They are refused like any unknown key, but the fix is written here, not guessed from the nearest name. An option or a
command that was dropped is named as it is typed. A key of an entry of `data.mixture` or `optimizer.groups` is named
without the entry: `data.mixture.KEY`.
"""

from collections.abc import Mapping

DROPPED: Mapping[str, str] = {
    "calibrate": "leave it out: the seconds of `threefold plan` are estimates, and metrics.jsonl has those of a run",
    "checkpoint.keep_every": "--checkpoint.keep N keeps the N newest; exports of --checkpoint.export_every N all stay",
    "checkpoint.mode": "leave it out: a checkpoint is written while the next steps run, and the last one at once",
    "data.chat_date": "--data.template_variables '{date: 2026-01-31}'",
    "data.end_target": "leave it out: with data.document_mask no label crosses into another document",
    "data.lookahead": "leave it out: best_fit chooses among 8,192 documents at a time",
    "data.mixture.text_field": "fields: {text: NAME} in the source",
    "data.skip_empty_targets": "--data.skip_bad_lines true also counts rows with nothing to train on",
    "data.text_field": "--data.fields '{text: NAME}'",
    "data.train_on_end": "leave it out: the token that ends an answer is trained on, so that the model learns to stop",
    "encrypt": "--set EnableInterContainerTrafficEncryption=true",
    "global-batch": "--train.global_batch N",
    "host-network": "--set hostNetwork=true --set dnsPolicy=ClusterFirstWithHostNet",
    "html": "leave it out: --json prints every set-up of `threefold plan`, --emit FILE writes the first as a config",
    "instances": "--nodes N, as for every kind of job",
    "keep-alive": "--set ResourceConfig.KeepAlivePeriodInSeconds=SECONDS",
    "log.timeline": "--log.profile '[10, 12]' traces the phases of these steps, and every operation in them",
    "max-wait": "--set StoppingCondition.MaxWaitTimeInSeconds=SECONDS",
    "mesh.prefetch": "leave it out: each sharded unit is gathered one ahead of its turn",
    "node-selector": "--set 'nodeSelector={LABEL: VALUE}'",
    "priority": "--set priorityClassName=CLASS",
    "pull-secret": "--set 'imagePullSecrets=[{name: NAME}]'",
    "ranks": "the sizes of the axes, as numbers: --mesh.dp 8 --mesh.tp 2",
    "security-group": "--set 'VpcConfig={Subnets: [SUBNET], SecurityGroupIds: [GROUP]}'",
    "seq-len": "--data.seq_len N",
    "service-account": "--set serviceAccountName=NAME",
    "subnet": "--set 'VpcConfig={Subnets: [SUBNET], SecurityGroupIds: [GROUP]}'",
    "tag": "--set 'Tags=[{Key: KEY, Value: VALUE}]'",
    "threefold export --format": "torch.distributed.checkpoint reads a run's own files: docs/resume.md shows how",
    "threefold export --optimizer": "torch.distributed.checkpoint reads a run's own files: docs/resume.md shows how",
    "threefold flops": "threefold plan MODEL --data.seq_len N --gpu h100-80gb, which prints them with the memory",
    "threefold submit ray": "python examples/ray_job.py CONFIG.yaml, or `ray job submit` of that file",
    "threefold submit skypilot": "sky jobs launch examples/skypilot.yaml",
    "toleration": "--set 'tolerations=[{key: KEY, operator: Exists}]'",
    "trace": "threefold plan MODEL without --gpus traces a set-up: give the keys that --emit FILE writes",
    "train.accumulate": "leave it out: gradients are kept in shards; a larger --train.micro_batch reduces less often",
    "train.nonfinite_limit": "leave it out: the tenth skipped step in a row ends the run",
    "training-plan": "--set ResourceConfig.TrainingPlanArn=ARN",
    "volume-gb": "--set ResourceConfig.VolumeSizeInGB=N",
}
