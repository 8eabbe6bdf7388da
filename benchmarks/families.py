"""Parity of model families on meshes, from real gloo processes on the CPU: writes the table of docs/models.md.

    python benchmarks/families.py [FAMILY ...] [--write docs/models.md]

Every case trains a tiny model of the family for two AdamW steps, on a mesh and in one process, on the same rows. Its
random weights have standard deviation 0.2, so that attention is far from uniform. A cell holds the largest of: the loss
difference in nats / 1e-4, the gradient norm's relative difference / 1e-3, and the largest relative difference of any
parameter's first gradient / 1e-3. A value of at most 1 passes.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from threefold.config.loading import validate
from threefold.errors import ThreefoldError
from threefold.mesh import environment, local_ranks
from threefold.mesh.topology import Topology
from threefold.run.start import PRELOAD
from threefold.verify.comparison import GRADIENT_TOLERANCE, LOSS_TOLERANCE, NORM_TOLERANCE, Comparison, Options

_SIZES = {
    "vocab_size": 257,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 256,
}
_GPT2 = {
    "vocab_size": 257,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "initializer_range": 0.2,
    "attn_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "bos_token_id": 256,
    "eos_token_id": 256,
}
_MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("", _SIZES),
    "llama (tied)": ("tied embeddings", {**_SIZES, "tie_word_embeddings": True}),
    "qwen2": ("biases", _SIZES),
    "qwen3": ("norms of queries and keys", {**_SIZES, "head_dim": 8}),
    "mistral": ("window of 7", {**_SIZES, "sliding_window": 7, "head_dim": 8}),
    "gemma2": (
        "window of 7 in every second layer, soft-caps",
        {**_SIZES, "head_dim": 8, "sliding_window": 7, "query_pre_attn_scalar": 8},
    ),
    "gemma3_text": ("window of 7, norms of queries and keys", {**_SIZES, "head_dim": 8, "sliding_window": 7}),
    "phi3": ("fused projections", _SIZES),
    "olmo2": ("norms after the layers", _SIZES),
    "granite": ("scaled residuals and logits", _SIZES),
    "starcoder2": ("biases", _SIZES),
    "cohere": ("parallel blocks, tied embeddings", _SIZES),
    "glm4": ("fused gate and up", {**_SIZES, "head_dim": 8}),
    "smollm3": ("layers without positions", _SIZES),
    "stablelm": ("partial rotary embedding", _SIZES),
    "gpt2": ("learned positions, Conv1D", _GPT2),
    "gpt_neox": ("parallel residual", _SIZES),
    "mixtral": ("4 experts, 2 a token", {**_SIZES, **_MOE}),
    "qwen3_moe": (
        "4 experts, 2 a token",
        {**_SIZES, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    ),
    "gpt_oss": ("sinks, window of 7, experts", {**_SIZES, **_MOE, "head_dim": 8, "sliding_window": 7}),
}
_BEYOND = [
    "",
    "Also tested: whole experts on each tp rank (`mesh.ep`, tests/ranks/test_experts.py), adapters",
    "(tests/ranks/test_lora.py), and the routers' loss over the global batch (tests/ranks/test_silent.py). Families",
    "that are refused under tp work on every mesh with tp = 1.",
    "",
    "In bfloat16, every product is rounded to 8 bits, so two meshes agree only to that rounding. On a CUDA device, one",
    "rank in bfloat16 must stay within 2e-2 nats in loss and 5e-2 in gradient norm of float32, over 8 steps of a model",
    "of 4 layers (tests/gpu/test_cuda.py, which reports it if there is no such device).",
]
MESHES = {
    "tp 2": (Topology(tp=2), "auto"),
    "cp 2 gather": (Topology(cp=2), "gather"),
    "cp 2 ulysses": (Topology(cp=2), "ulysses"),
    "dp_shard 2": (Topology(dp_shard=2), "auto"),
    "2x2x2": (Topology(dp_shard=2, cp=2, tp=2), "auto"),
}
MASKS: dict[str, dict[str, Any]] = {
    "causal": {"packing": "concat"},
    "documents": {"packing": "best_fit", "document_mask": True},
    "padded": {"packing": "none"},
}


def main() -> None:
    """Runs the cases and prints or writes the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", default=list(FAMILIES), metavar="FAMILY")
    parser.add_argument("--write", type=Path, help="write the page there instead of printing it")
    arguments = parser.parse_args()
    local_ranks.preload(PRELOAD)
    results: dict[str, dict[str, str]] = {family: {} for family in arguments.families}
    with tempfile.TemporaryDirectory(prefix="threefold-families-") as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        corpus = Path(folder) / "corpus.jsonl"
        _write_corpus(corpus)
        for mesh in MESHES:
            answers = Path(folder) / "answers.jsonl"
            answers.unlink(missing_ok=True)
            topology = MESHES[mesh][0]
            case = (mesh, list(arguments.families), str(corpus), str(answers))
            code = local_ranks.start_ranks(_run_cases, case, num_ranks=topology.world_size)
            for line in answers.read_text().splitlines():
                found = json.loads(line)
                results[found["family"]][f"{mesh}/{found['mask']}"] = found["cell"]
            if code:
                sys.exit(f"{mesh}: the ranks ended with exit code {code}")
    page = _page(results)
    if arguments.write:
        arguments.write.write_text(page)
    else:
        print(page)


def _write_corpus(path: Path) -> None:
    # Documents of 5 to 60 bytes, so that a row of 32 holds several and some are cut.
    lines = []
    for number in range(400):
        length = 5 + (number * 37) % 56
        text = "".join(chr(97 + (number * 11 + place * place * 7) % 26) for place in range(length))
        lines.append(json.dumps({"text": text}))
    path.write_text("\n".join(lines) + "\n")


def _run_cases(mesh_name: str, families: list[str], corpus: str, answers: str) -> None:
    import torch

    from threefold.mesh.mesh import join_mesh
    from threefold.run.rank import quieten_libraries
    from threefold.verify.mesh_side import compare_on

    quieten_libraries()
    topology, method = MESHES[mesh_name]
    mesh = join_mesh(topology, environment.current(), device="cpu", timeout_s=120)
    for family in families:
        for mask, data in MASKS.items():
            config = validate(
                {
                    "model": {"config": {"model_type": family.split(" ")[0], **FAMILIES[family][1]}},
                    "data": {"source": corpus, "seq_len": 32, **data},
                    "train": {"global_batch": 8, "micro_batch": 2},
                    "mesh": {"device": "cpu", "cp_method": method},
                }
            )
            try:
                cell = _cell(compare_on(mesh, config, Options(steps=2)))
            except ThreefoldError as error:
                cell = "refused: " + error.problems[0].what
            if mesh.rank == 0:
                print(f"{mesh_name:>12}  {family:<14} {mask:<10} {cell}", file=sys.stderr, flush=True)
                with open(answers, "a") as file:
                    file.write(json.dumps({"family": family, "mask": mask, "cell": cell}) + "\n")
    torch.distributed.barrier()
    mesh.close()


def _cell(found: Comparison) -> str:
    worst = max(
        found.loss_difference / LOSS_TOLERANCE,
        found.norm_difference / NORM_TOLERANCE,
        found.gradient_difference / GRADIENT_TOLERANCE,
    )
    return f"{worst:.3f}" if worst <= 1 else f"**{worst:.3g}**"


def _page(results: dict[str, dict[str, str]]) -> str:
    import torch
    import transformers

    refusals: dict[str, int] = {}
    lines = [
        "# Model families",
        "",
        "Written by `python benchmarks/families.py --write docs/models.md` from real runs: gloo processes on a CPU, "
        f"float32, torch {torch.__version__.split('+')[0]}, transformers {transformers.__version__}.",
        "",
        *[line for line in (__doc__ or "").split("\n\n")[2].strip().splitlines()],
        "",
        "Masks: `causal`: rows of concatenated text; `documents`: packed with a document mask, while the single "
        "process runs each document alone; `padded`: one document per row. Rows have 32 tokens, windows 7.",
        "",
        "| family | what it has | mask | " + " | ".join(MESHES) + " |",
        "|---|---|---|" + "---|" * len(MESHES),
    ]
    for family, cells in results.items():
        for mask in MASKS:
            row = []
            for mesh in MESHES:
                cell = cells.get(f"{mesh}/{mask}", "not run")
                if cell.startswith("refused"):
                    cell = f"refused [{refusals.setdefault(cell, len(refusals) + 1)}]"
                row.append(cell)
            first = mask == next(iter(MASKS))
            name, what = (family, FAMILIES[family][0]) if first else ("", "")
            lines.append(f"| {name} | {what} | {mask} | " + " | ".join(row) + " |")
    if refusals:
        lines += ["", "Refused before anything is sent:", ""]
        lines += [f"{number}. {reason.removeprefix('refused: ')}" for reason, number in refusals.items()]
    return "\n".join([*lines, *_BEYOND]) + "\n"


if __name__ == "__main__":
    main()
