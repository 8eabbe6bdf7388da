"""One rank of an evaluation: a run's checkpoint on a mesh, over held-out rows and tasks. The run is left as it is."""

import sys
from functools import partial

from threefold.check.admit import admit
from threefold.checkpoint import state as run_state
from threefold.checkpoint.checkpoint_folder import Checkpoint, damaged
from threefold.checkpoint.manifest import (
    read_manifest,
    refuse_other,
    refuse_other_base,
    refuse_other_code,
)
from threefold.checkpoint.tensors import read_whole
from threefold.config.loading import LoadedConfig
from threefold.data.rows.concat import Rows
from threefold.jsonl import Metrics, as_json
from threefold.mesh.mesh import Mesh
from threefold.mesh.topology import Topology
from threefold.model import float8, load
from threefold.model.build import build
from threefold.model.model import Model
from threefold.plan import choices
from threefold.progress_bars import Bars
from threefold.run import assemble
from threefold.run.dpo import evaluation_of, pairs_of
from threefold.run.eval_tasks import EvalTasks
from threefold.run.process import as_rank, compute_alike
from threefold.run.request import Asked, asked_of
from threefold.run.terminal import evaluated, evaluated_tasks
from threefold.training.evaluation import EvalStep
from threefold.training.loop import eval_metrics


def evaluate_rank(
    loaded: LoadedConfig, topology: Topology, checkpoint: Checkpoint, *, ema: bool, values: bool
) -> int:
    """Evaluates as one rank of `topology`, and returns its exit code; rank 0 prints the metrics.

    Args:
        ema: evaluate the moving average of the weights.
        values: print JSON.
    """
    # No optimizer steps here: the run's own may not be one for this mesh or this machine, nor its global batch.
    config = float8.without(loaded.config).changed(
        optimizer={"name": "adamw", "options": {}},
        train={
            "global_batch": topology.dp * choices.micro_batch(loaded.config, topology).value
        },
    )

    def work(mesh: Mesh) -> int:
        metrics = _evaluated(asked_of(config, mesh), mesh, checkpoint, ema=ema)
        if mesh.rank == 0 and values:
            print(
                as_json({"checkpoint": str(checkpoint.path), "ema": ema, "metrics": metrics}),
                flush=True,
            )
        elif mesh.rank == 0:
            parts = [evaluated(metrics, digits=6)] if "eval_loss" in metrics else []
            parts += [tasks] if (tasks := evaluated_tasks(metrics)) else []
            print(
                f"{checkpoint.path}{': moving average' if ema else ''}: {'; '.join(parts)}",
                flush=True,
            )
        return 0

    return as_rank(config, topology, work)


def _evaluated(asked: Asked, mesh: Mesh, checkpoint: Checkpoint, *, ema: bool) -> Metrics:
    config = asked.config
    compute_alike(config)
    if (reason := run_state.damage_found(checkpoint, mesh)) is not None:
        raise damaged(checkpoint, reason)
    manifest = read_manifest(checkpoint)
    refuse_other(manifest, config, asked.architecture, checkpoint)
    refuse_other_base(manifest, load.base_of(config, mesh), config, checkpoint)
    admit(config, asked.architecture, mesh)
    rows = None
    if config.evaluates:
        if mesh.rank == 0 and (loss := (manifest.get("given") or {}).get("loss")):
            note = f"cross entropy, not {loss}, which the run was trained with: only its program has that"
            print(note, file=sys.stderr)
        vocabulary = asked.architecture.get_text_config().vocab_size
        rows = assemble.rows_of(
            config, asked.tokenizer, mesh, held_out=True, vocab_size=vocabulary
        )
    model, evaluate = _evaluation(asked, mesh, checkpoint, rows, ema=ema)
    refuse_other_code(manifest, load.own_code(model.module), config, checkpoint)
    means: Metrics = {}
    if rows is not None:
        batches = assemble.held_out_batches(config, rows, mesh, Bars(quiet=mesh.rank != 0))
        means = eval_metrics(evaluate, batches())
    return {**means, **(EvalTasks(config, model)(checkpoint.step) if config.eval.tasks else {})}


def _evaluation(
    asked: Asked, mesh: Mesh, checkpoint: Checkpoint, rows: Rows | None, *, ema: bool
) -> tuple[Model, EvalStep]:
    """The checkpoint's model, and its evaluation over rows.

    Adapters are based on the weights that the run began with, and pairs of answers are compared with these.
    """
    index = run_state.index_of(checkpoint, ema=ema)
    if asked.config.model.lora.r or asked.config.train.objective == "dpo":
        model = build(asked.config, asked.architecture, mesh)
        resumed = checkpoint.path.parents[1]
        pairs = (
            pairs_of(asked.config, model, rows, None, resumed=resumed, say=print)
            if rows is not None
            else None
        )
        state = run_state.model_state(model.module, index.entries)
        run_state.fit(state, index)
        run_state.read_into(state, checkpoint.state, index, mesh)
        return model, EvalStep(model) if pairs is None else evaluation_of(model, pairs.loss)
    weights = {
        name.removeprefix("model."): partial(read_whole, checkpoint.state, entry)
        for name, entry in index.entries.items()
        if name.startswith("model.")
    }
    model = build(asked.config, asked.architecture, mesh, weights=weights)
    return model, EvalStep(model)
