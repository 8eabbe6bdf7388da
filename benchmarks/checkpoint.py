"""Times saving and loading a checkpoint, compared with torch's dcp and accelerate, on the same model in one run.

    python benchmarks/checkpoint.py [--rounds 3] [--hidden 512] [--layers 12] [--folder DIR]

Two ranks train a Llama in float32 (46 million parameters, 0.55 GB with AdamW's moments, unless set otherwise). The
measured time is how long the training thread waits, between two barriers, on the slowest rank. A round runs every
contender once. A ratio is taken within a round, relative to that round's synchronous save (or load) of Threefold, and
the median over the rounds is printed. Threefold and dcp flush their files to disk (fsync), and Threefold computes
checksums; accelerate does neither. Loads read files that the system has in memory; Threefold's load first compares all
checksums.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from threefold.mesh import local_ranks
from threefold.run.start import PRELOAD

RANKS = 2
Times = dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--folder", help="where to write; default: a temporary folder")
    asked = parser.parse_args()
    local_ranks.preload(PRELOAD)
    parent = Path(tempfile.mkdtemp(prefix="checkpoint-", dir=asked.folder))
    try:
        code = local_ranks.start_ranks(
            _rank, (str(parent), asked.rounds, asked.hidden, asked.layers), num_ranks=RANKS
        )
        if code:
            raise SystemExit(code)
        print(table(json.loads((parent / "times.json").read_text())))
    finally:
        shutil.rmtree(parent, ignore_errors=True)


def table(found: dict[str, Any]) -> str:
    """Returns the Markdown table of all rounds."""
    rounds: list[Times] = found["rounds"]
    lines = [
        f"{found['parameters']:,} parameters, {found['bytes'] / 1e9:.2f} GB, {RANKS} ranks, {len(rounds)} rounds",
        "",
        "| | s | ratio to Threefold's sync |",
        "|---|---|---|",
    ]
    for name in rounds[0]:
        base = "load, same mesh" if "load" in name else "save, sync"
        ratio = statistics.median(times[name] / times[f"Threefold: {base}"] for times in rounds)
        lines.append(
            f"| {name} | {statistics.median(times[name] for times in rounds):.3f} | {ratio:.3f} |"
        )
    return "\n".join(lines)


def _rank(parent: str, num_rounds: int, hidden: int, layers: int) -> None:
    warnings.simplefilter("ignore")
    folder = Path(parent)
    model = {
        **{
            "model_type": "llama",
            "hidden_size": hidden,
            "intermediate_size": 3 * hidden,
            "vocab_size": 8192,
        },
        **{"num_hidden_layers": layers, "num_attention_heads": 8, "num_key_value_heads": 4},
    }
    contenders: list[Callable[[], Times]] = [
        _threefold(model, folder),
        _dcp(model, folder),
        _accelerate(model, folder),
    ]
    rounds: list[Times] = []
    for _ in range(num_rounds):
        times: Times = {}
        for contender in contenders:
            times |= contender()
        rounds.append(times)
    import torch.distributed as dist

    if dist.get_rank() == 0:
        parameters, num_bytes = _size(model)
        (folder / "times.json").write_text(
            json.dumps({"rounds": rounds, "parameters": parameters, "bytes": num_bytes})
        )
    dist.barrier()


def _size(model: dict[str, Any]) -> tuple[int, int]:
    from threefold.config.schema import ModelConfig
    from threefold.model import load

    whole = load.build_without_storage(
        load.read_config(ModelConfig(config=model)), attention="eager"
    )
    parameters = sum(parameter.numel() for parameter in whole.parameters())
    return parameters, 12 * parameters


def _timed(work: Callable[[], object]) -> float:
    """Seconds that the slowest rank waits for `work`."""
    import torch
    import torch.distributed as dist

    dist.barrier()
    start = time.perf_counter()
    work()
    seconds = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return seconds.item()


def _built(values: dict[str, Any], **sizes: int) -> tuple[Any, Any, Any]:
    """Mesh, model, and an optimizer whose moments are not zero."""
    import torch

    from threefold.config.schema import Config
    from threefold.mesh.mesh import init_mesh
    from threefold.model import load
    from threefold.model.build import build
    from threefold.optim.build import build_optimizer

    mesh = init_mesh(**sizes)
    config = Config.model_validate({"model": {"config": values}})
    model = build(config, load.read_config(config.model), mesh)
    optimizer = build_optimizer(model.module, config.optimizer)
    for parameter in model.module.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return mesh, model.module, optimizer


def _threefold(values: dict[str, Any], parent: Path) -> Callable[[], Times]:
    from threefold.checkpoint import state as run_state
    from threefold.checkpoint.background_saver import Save, Saver
    from threefold.checkpoint.checkpoint_folder import CheckpointFolder
    from threefold.checkpoint.tensor_index import Index

    mesh, model, optimizer = _built(values, dp=RANKS)
    other_mesh, other_model, other_optimizer = _built(values, dp=RANKS, dp_shard=RANKS)
    checkpoints = CheckpointFolder(parent / "threefold")
    held = run_state.holdings(run_state.state_of(model, optimizer), mesh)

    def parts() -> Any:
        return run_state.parts(run_state.state_of(model, optimizer), held, mesh)

    savers = {
        mode: Saver(mesh, parts, background=mode == "async", continue_on_error=False)
        for mode in ("sync", "async")
    }
    steps = iter(range(1, 1_000_000))

    def save(saver: Saver) -> None:
        step = next(steps)
        saver.save(
            Save(
                step,
                checkpoints.partial(step) / "state",
                begin=lambda: checkpoints.begin(step),
                commit=lambda seals: (
                    checkpoints.commit(
                        step, {}, {f"state/{name}": seal for name, seal in seals.items()}
                    ),
                    checkpoints.prune(1),
                ),
                abandon=lambda: checkpoints.abandon(step),
            )
        )

    def load(mesh: Any, model: Any, optimizer: Any) -> None:
        newest = checkpoints.newest()
        assert newest is not None
        damage = newest.damage(share=(mesh.rank, mesh.world_size))
        assert (
            mesh.decide("damage", str(damage), lambda reasons: ", ".join(set(reasons)))
            == "None"
        )
        index = Index.read(newest.state)
        run_state.read_into(run_state.state_of(model, optimizer), newest.state, index, mesh)

    def run() -> Times:
        return {
            "Threefold: save, sync": _timed(lambda: save(savers["sync"])),
            "Threefold: save, async, what the step waits": _timed(
                lambda: save(savers["async"])
            ),
            "Threefold: save, async, rest until it is whole": _timed(savers["async"].wait),
            "Threefold: load, same mesh": _timed(lambda: load(mesh, model, optimizer)),
            "Threefold: load, another mesh": _timed(
                lambda: load(other_mesh, other_model, other_optimizer)
            ),
        }

    return run


def _dcp(values: dict[str, Any], parent: Path) -> Callable[[], Times]:
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    _, model, optimizer = _built(values, dp=RANKS)
    _, other_model, other_optimizer = _built(values, dp=RANKS, dp_shard=RANKS)
    folder = parent / "dcp"
    # Its thread sends collectives, which must not interleave with the training thread's.
    apart = dist.new_group(backend="gloo")

    def state(model: Any, optimizer: Any) -> dict[str, Any]:
        weights, moments = get_state_dict(model, optimizer)
        return {"model": weights, "optimizer": moments}

    def load(model: Any, optimizer: Any) -> None:
        held = state(model, optimizer)
        dcp.load(held, checkpoint_id=folder)
        set_state_dict(
            model, optimizer, model_state_dict=held["model"], optim_state_dict=held["optimizer"]
        )

    def run() -> Times:
        futures: list[Any] = []
        times = {
            "dcp: save, sync": _timed(
                lambda: dcp.save(state(model, optimizer), checkpoint_id=folder)
            )
        }
        times["dcp: save, async, what the step waits"] = _timed(
            lambda: futures.append(
                dcp.async_save(
                    state(model, optimizer), checkpoint_id=folder, process_group=apart
                )
            )
        )
        times["dcp: save, async, rest until it is whole"] = _timed(lambda: futures[0].result())
        times["dcp: load, same mesh"] = _timed(lambda: load(model, optimizer))
        times["dcp: load, another mesh"] = _timed(lambda: load(other_model, other_optimizer))
        return times

    return run


def _accelerate(values: dict[str, Any], parent: Path) -> Callable[[], Times]:
    import torch
    from accelerate import Accelerator
    from transformers import AutoConfig, AutoModelForCausalLM

    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    assert accelerator.num_processes == RANKS
    config = AutoConfig.for_model(**values)
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model, optimizer = accelerator.prepare(
        plain, torch.optim.AdamW(plain.parameters(), fused=True)
    )
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    folder = parent / "accelerate"
    return lambda: {
        "accelerate: save_state": _timed(lambda: accelerator.save_state(str(folder))),
        "accelerate: load_state": _timed(lambda: accelerator.load_state(str(folder))),
    }


if __name__ == "__main__":
    main()
