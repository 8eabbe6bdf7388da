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

# Our key -> what transformers, TRL, axolotl, LLaMA-Factory, torchtitan and nanotron call it, if it has another name.
_ELSEWHERE = {
    "model.name_or_path": "base_model model_name model_id hf_assets_path pretrained pretrained_model",
    "model.dtype": "bf16 fp16 tf32 precision torch_dtype mixed_precision_param",
    "model.attention": "flash_attn flash_attention use_flash_attn attn_implementation attn",
    "model.lora.r": "lora lora_r lora_rank rank adapter finetuning_type use_peft",
    "data.source": "dataset datasets dataset_name dataset_path dataset_dir data_path train_file train_data",
    "data.mixture": "data_mix dataset_weights probabilities interleave_probs",
    "data.tokenizer": "tokenizer_name tokenizer_path tokenizer_name_or_path",
    "data.seq_len": "sequence_len sequence_length cutoff_len max_seq_length max_seq_len max_length "
    "model_max_length block_size context_length pad_to_sequence_len",
    "data.fields": "dataset_text_field text_column",
    "data.eval_share": "val_set_size val_size val_split",
    "data.train_on": "train_on_inputs assistant_only_loss completion_only_loss mask_history train_on_prompt "
    "roles_to_train",
    "mesh.dp_shard": "fsdp fsdp_config deepspeed zero_stage data_parallel_shard_degree",
    "mesh.tp": "tensor_parallel_degree tensor_parallel_size tensor_model_parallel_size tp_size tp_degree",
    "mesh.cp": "context_parallel_degree context_parallel_size sequence_parallel_degree cp_size cp_degree",
    "train.micro_batch": "local_batch_size per_device_train_batch_size mbs",
    "train.global_batch": "gradient_accumulation_steps batch_accumulation_per_replica grad_accum grad_accumulation "
    "accumulate_grad_batches train_batch_size batch_size total_batch_size gbs",
    "train.label_smoothing": "label_smoothing_factor",
    "train.grad_clip": "max_grad_norm max_norm clip_grad clip_grad_norm clip_norm grad_norm "
    "gradient_clip_val gradient_clipping",
    "train.steps": "max_iters iters",
    "dpo.beta": "pref_beta",
    "optimizer.lr": "learning_rate max_lr",
    "optimizer.betas": "adam_beta1 adam_beta2 beta1 beta2",
    "optimizer.eps": "adam_epsilon",
    "optimizer.schedule": "lr_scheduler lr_scheduler_type",
    "optimizer.warmup_steps": "warmup_ratio warmup warmup_iters",
    "checkpoint.every": "save_every save_freq save_steps save_strategy save_interval checkpoint_interval ckpt_interval",
    "checkpoint.keep": "save_total_limit save_top_k keep_last",
    "checkpoint.resume": "resume_from_checkpoint resume_from load_from",
    "eval.source": "eval_dataset val_dataset val_data validation_file eval_file test_file",
    "eval.every": "eval_steps eval_strategy eval_interval val_steps val_interval val_check_interval",
    "log.dir": "output_dir out_dir save_dir run_dir work_dir default_root_dir dump_folder "
    "checkpoints_path checkpoint_dir ckpt_dir",
    "log.every": "logging_steps log_freq log_interval",
    "log.project": "wandb_project",
    "log.trackers": "report_to wandb use_wandb enable_wandb enable_tensorboard",
}
ELSEWHERE = {name: key for key, names in _ELSEWHERE.items() for name in names.split()}
"""A key's name in other trainers -> our key."""
