"""One rank of an evaluation: a run's checkpoint on a mesh, over held-out rows. The run's folder stays as it is."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

from threefold.checkpoint import state as run_state
from threefold.checkpoint.boxes import Index
from threefold.checkpoint.layout import Checkpoint, damaged
from threefold.checkpoint.manifest import read_manifest, refuse_other
from threefold.checkpoint.tensors import read_whole
from threefold.config.loading import Loaded
from threefold.data.loader import evaluation_batches
from threefold.errors import ThreefoldError
from threefold.mesh import environment
from threefold.mesh.mesh import Mesh, join_mesh
from threefold.mesh.topology import Topology
from threefold.model.build import ParallelModel, build
from threefold.run import assemble
from threefold.run.rank import facts_of, quieten_libraries, report_failure
from threefold.run.request import Asked, asked_of
from threefold.training.admission.admit import admit
from threefold.training.step import evaluate


def evaluate_rank(loaded: Loaded, topology: Topology, checkpoint: Path, step: int) -> int:
    """Evaluates as one rank of `topology`, and returns its exit code; rank 0 prints the loss."""
    quieten_libraries()
    config, info = loaded.config, environment.current()
    mesh: Mesh | None = None
    try:
        asked = config.mesh
        mesh = join_mesh(topology, info, device=asked.device, timeout_s=asked.timeout_s, facts=facts_of(config))
        loss, tokens = _loss_of(asked_of(config, mesh), mesh, Checkpoint(checkpoint, step))
        if mesh.rank == 0:
            perplexity = math.exp(min(loss, 700.0))
            print(f"{checkpoint}: loss {loss:.6f} (perplexity {perplexity:.3f}) over {tokens:,} tokens", flush=True)
        mesh.barrier()
        mesh.close()
        return 0
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:
        code = report_failure(error, mesh, info.rank)
        if isinstance(error, ThreefoldError) and mesh is not None:
            mesh.close()
        return code


def _loss_of(asked: Asked, mesh: Mesh, checkpoint: Checkpoint) -> tuple[float, int]:
    config = asked.config
    if (reason := run_state.damage_found(checkpoint, mesh)) is not None:
        raise damaged(checkpoint, reason)
    refuse_other(read_manifest(checkpoint), config, asked.architecture, checkpoint)
    admit(config, asked.architecture, mesh)
    vocabulary = asked.architecture.get_text_config().vocab_size
    rows = assemble.rows_of(config, asked.tokenizer, mesh, held_out=True, vocab_size=vocabulary)
    model = _trained(asked, mesh, checkpoint)
    size = config.train.micro_batch
    batches = evaluation_batches(
        rows,
        rows_per_rank=max(1, config.train.global_batch // mesh.dp_size) if size == "auto" else size,
        dp_rank=mesh.dp_rank,
        dp_size=mesh.dp_size,
        document_mask=bool(config.data.document_mask),
    )
    total, tokens = evaluate(model, batches, mesh)
    return total / max(1, tokens), tokens


def _trained(asked: Asked, mesh: Mesh, checkpoint: Checkpoint) -> ParallelModel:
    """The model with the checkpoint's weights; adapters lie on the weights that the run began with."""
    index = Index.read(checkpoint.state)
    if asked.config.model.lora.r:
        model = build(asked.config, asked.architecture, mesh)
        state = run_state.model_state(model.module)
        run_state.fit(state, index)
        run_state.read_into(state, checkpoint.state, index, mesh)
        return model
    named = {name.removeprefix("model."): entry for name, entry in index.entries.items() if name.startswith("model.")}
    weights = {name: partial(read_whole, checkpoint.state, entry) for name, entry in named.items()}
    return build(asked.config, asked.architecture, mesh, weights=weights)
