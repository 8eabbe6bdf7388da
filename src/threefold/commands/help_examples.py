"""The end of each command's help: its exit codes, and examples to paste. No heavy imports."""

from collections.abc import Sequence
from typing import Any

_KEYS = "[CONFIG.yaml] [--section.key VALUE ...] [OPTIONS]"
_MORE_KEYS = "[--section.key VALUE ...] [OPTIONS]"
_OPTIONS = "[OPTIONS]"
_DONE = "0 done; 1 it failed; 2 the request was wrong"
_TRAINED = "0 done; 1 the run failed; 2 the request was wrong; 75 stopped by a signal with a checkpoint saved"

# Command -> its usage after the name, exit codes, examples.
_ENDINGS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "init": (
        _KEYS,
        "0 written; 2 the request was wrong, or the file exists",
        ("threefold init", "threefold init job.yaml --train.objective dpo --data.source pairs.jsonl"),
    ),
    "train": (
        _KEYS,
        _TRAINED,
        (
            "threefold train",
            "threefold train job.yaml --train.steps 500 --log.dir runs/a",
            "threefold train --model.name_or_path ./my-model --data.source texts --mesh.dp 4",
            "threefold train --help optimizer      the keys of a section, one key, or a search: --help learning rate",
        ),
    ),
    "resume": (_MORE_KEYS, _TRAINED, ("threefold resume runs/a", "threefold resume runs/a --train.steps 2000")),
    "eval": (
        _MORE_KEYS,
        _DONE,
        ("threefold eval runs/a --eval.source held-out.jsonl", "threefold eval runs/a --eval.tasks '[hellaswag]'"),
    ),
    "sample": (
        _OPTIONS,
        _DONE,
        ("threefold sample runs/a --prompt 'Once upon a time'", "echo 'What is it?' | threefold sample runs/a --chat"),
    ),
    "verify": (
        _KEYS,
        "0 the mesh follows the single process; 1 it does not; 2 the request was wrong",
        ("threefold verify --mesh.dp 2 --mesh.tp 2", "threefold verify job.yaml --mesh.cp 4"),
    ),
    "export": (
        _OPTIONS,
        _DONE,
        (
            "threefold export runs/a --to my-model",
            "threefold export runs/a --to a --adapter",
            "threefold export runs/a --to s3://bucket/my-model",
        ),
    ),
    "hash": (
        _OPTIONS,
        "0 told, and equal; 1 not equal; 2 the request was wrong",
        ("threefold hash runs/a", "threefold hash runs/a my-model"),
    ),
    "import": (
        f"CHECKPOINT --to FOLDER {_KEYS}",
        _DONE,
        (
            "threefold import checkpoint/step-1000 --to runs/a job.yaml",
            "threefold import pytorch_model_fsdp_0 --to my-model --weights --model.name_or_path ./base",
        ),
    ),
    "doctor": (
        _KEYS,
        "0 nothing would stop a run; 1 something would; 2 the request was wrong",
        ("threefold doctor", "threefold doctor s3://bucket/prefix", "torchrun --nproc-per-node 8 -m threefold doctor"),
    ),
    "explain": (
        _OPTIONS,
        "0 explained, or no failure; 1 no known error found; 2 there is no such log",
        ("threefold explain train.log", "threefold explain runs/a --json", "srun ... 2>&1 | threefold explain"),
    ),
    "profile": (
        _OPTIONS,
        "0 printed; 2 there are no traces",
        ("threefold profile runs/a", "threefold profile runs/a --json"),
    ),
    "why": (
        _OPTIONS,
        "0 told; 1 its record is damaged; 2 there is no such run or step",
        ("threefold why runs/a", "threefold why runs/a --step 120", "threefold why runs/a --json"),
    ),
    "plan": (
        f"MODEL {_MORE_KEYS}",
        "0 printed; 1 it does not fit on --gpu; 2 the request was wrong",
        ("threefold plan ./my-model --mesh.dp 8 --mesh.dp_shard 8 --mesh.tp 8 --data.seq_len 8192 --gpu h100-80gb",),
    ),
    "report": (
        _OPTIONS,
        "0 written; 2 there is no such run, or the file cannot be written",
        ("threefold report runs/a", "threefold report runs/a runs/b --to compared.html"),
    ),
    "referee": (
        "[OPTIONS] -- COMMAND...",
        "0 proved; 1 refuted; 2 the request was wrong; 3 not judged, with the reason",
        (
            "threefold referee -- torchrun --nproc-per-node 2 train.py",
            "threefold referee --record record -- accelerate launch train.py",
            "threefold referee judge record",
        ),
    ),
    "view": (
        "[RUN|FOLDER] [OPTIONS]",
        "0 ended by Ctrl-C; 2 there is no such folder, or the port is taken",
        ("threefold view", "threefold view runs/a --port 8800"),
    ),
    "data prepare": (
        _KEYS,
        _DONE,
        (
            "threefold data prepare --data.source texts --data.tokenizer ./my-model --to store",
            "threefold data prepare job.yaml --to store",
            "threefold data prepare job.yaml --to s3://bucket/tokens",
            "threefold data prepare job.yaml --to s3://bucket/tokens --engine slurm --partition cpu --time 4:00:00",
            "threefold data prepare job.yaml --to store --task 0/16      and when all 16 have ended: --task join",
        ),
    ),
    "data show": (
        "[RUN|CONFIG.yaml] [--section.key VALUE ...] [OPTIONS]",
        _DONE,
        (
            "threefold data show --data.source chat.jsonl --data.tokenizer ./my-model",
            "threefold data show runs/a --row 12 --ids",
        ),
    ),
    "data order": (
        _OPTIONS,
        _DONE,
        ("threefold data order runs/a --step 40 --show", "threefold data order runs/a --sample 123"),
    ),
    "data overlap": (
        _KEYS,
        "0 nothing of the evaluation is trained on; 1 something is; 2 the request was wrong",
        (
            "threefold data overlap job.yaml",
            "threefold data overlap --data.source a.jsonl --eval.source b.jsonl --data.tokenizer ./my-model",
        ),
    ),
    "data audit": (
        _OPTIONS,
        "0 proved; 1 not, with the first wrong step; 2 there is no such record",
        ("threefold data audit runs/a", "threefold data audit runs/a --contents"),
    ),
}  # fmt: skip


def ending(command: str) -> dict[str, Any]:
    """The arguments of typer's `command` for a command, named as it is typed."""
    return ending_of(*_ENDINGS[command])


def ending_of(usage: str, codes: str, examples: Sequence[str]) -> dict[str, Any]:
    """The arguments of typer's `command`: usage after the name, exit codes, examples."""
    lines = "\n".join(["\b", "Examples:", *(f"  {example}" for example in examples)])
    return {"options_metavar": usage, "epilog": f"Exit codes: {codes}.\n\n{lines}"}
