"""Every causal architecture of transformers on every mesh, in real gloo processes on the CPU: writes docs/models.md.

    python benchmarks/families.py --all [--write docs/models.md] [--check]
    python benchmarks/families.py --types llama qwen3_next ...
    python benchmarks/families.py --all --lora --dropout --long --write docs/models.md

For each type a tiny model (its default config, reduced: every kind of layer that it has; every parameter perturbed)
takes two AdamW steps, on a mesh and as transformers' own model in one process: its own attention, each document alone,
no positions given. Three kinds of rows: `causal`: concatenated text; `documents`: packed, with a document mask;
`padding`: one document a row. Rows have 32 tokens, windows 7.

A cell is the largest of: the loss difference in nats / 1e-4, the gradient norm's relative difference / 1e-3, and the
largest difference of any parameter's first gradient, relative to its largest entry, / 1e-3. A value of at most 1 holds.
Otherwise it was refused by name, before anything was trained; or it is wrong, or it ended in a traceback. A difference
that begins after the first step is wrong if it is there with three random weights: an update carries a rounding on.

`LoRA`: adapters on all linear layers, B not zero, as peft trains them in one process. `dropout`: every rate that the
config has is 0.1; after three steps the copies of every tensor are the same bits, the losses are finite, and they are
not those without dropout. Noise on a mesh is not that of one process, so no gradient is compared.

`longest place`: rows of 1,056 tokens, or as many as the type has positions, of its default config with a few of its
layers, documents kept apart where that is admitted. The loss of each token is compared with one process, up to the
place that the cell names: at the type's real width, with its real windows, blocks and scales, as far as a CPU can
compute that in seconds, and beyond it at a reduced width. A run compares its own length (docs/verify.md).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from architectures import NAMES, NOT_RUN, config_of, perturbed
from ranks import spawn
from ranks.reference import compare_trainings
from threefold.__main__ import main as threefold
from threefold.check.compare import (
    SAME_WEIGHT,
    Bound,
    Comparison,
    Training,
    compare_tensors,
)
from threefold.errors import ThreefoldError
from threefold.mesh import environment
from threefold.mesh.topology import Topology

MESHES = {
    "one process": (Topology(), "auto"),
    "tp 2": (Topology(tp=2), "auto"),
    "cp 2 gather": (Topology(cp=2), "gather"),
    "cp 2 ulysses": (Topology(cp=2), "ulysses"),
    "dp_shard 2": (Topology(dp_shard=2), "auto"),
    "2x2x2": (Topology(dp_shard=2, cp=2, tp=2), "auto"),
}
_ADAPTED = {
    "LoRA, one process": (Topology(), "auto"),
    "LoRA, tp 2": (Topology(tp=2), "auto"),
    "LoRA, cp 2": (Topology(cp=2), "auto"),
}
_NOISY = {"dropout, tp 2": (Topology(tp=2), "auto"), "dropout, cp 2": (Topology(cp=2), "auto")}
_LONG = {
    "longest place, one process": (Topology(), "auto"),
    "longest place, cp 2": (Topology(cp=2), "auto"),
}
_ON_MESHES = {**MESHES, **_ADAPTED, **_NOISY, **_LONG}
# A mesh is not tried if a part of it does not hold: it would be refused for that part.
_PARTS_OF = {
    **dict.fromkeys(("tp 2", "cp 2 gather", "cp 2 ulysses", "dp_shard 2"), ("one process",)),
    "2x2x2": ("one process", "tp 2", "cp 2 gather", "dp_shard 2"),
    "LoRA, one process": ("one process",),
    **dict.fromkeys(("LoRA, tp 2", "LoRA, cp 2"), ("one process", "LoRA, one process")),
    **dict.fromkeys([*_NOISY, *_LONG], ("one process",)),
    "longest place, cp 2": ("one process", "cp 2 gather"),
}
ROWS: dict[str, dict[str, Any]] = {
    "causal": {"packing": "concat"},
    "documents": {"packing": "best_fit", "document_mask": True},
    "padding": {"packing": "none"},
}
WHOLE = "the command"
SAMPLE = ("llama", "gemma3_text", "gpt_oss", "mixtral", "phi3", "falcon", "mamba2", "bart")
_OWNER = "owner"
_STEPS = 2
# A difference that begins after the first step is confirmed with other weights, as admission confirms one.
_SEEDS = 3
_LONG_ROW = 1056
_LORA = {"r": 4, "alpha": 8, "target_modules": "all-linear"}
_RATE = re.compile(r"(^|_)(dropout|drop|pdrop)(_|$)")
# Of equal weights, but for where they lie in memory.
_SAME_LOGITS = Bound("logits", 1e-5, "a hundred roundings of float32, of the largest logit")
_SEQ_LEN = 32
_CASE_S = 60.0
_TRAIN_S = 120.0


def main() -> None:
    """Runs the cases and prints or writes the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--types", nargs="+", default=list(SAMPLE), metavar="TYPE")
    parser.add_argument("--all", action="store_true", help=f"all {len(NAMES)} types")
    parser.add_argument("--columns", nargs="+", default=[*MESHES, WHOLE], metavar="COLUMN")
    parser.add_argument(
        "--lora", action="store_true", help=f"besides, the columns {', '.join(_ADAPTED)}"
    )
    parser.add_argument(
        "--dropout", action="store_true", help=f"besides, the columns {', '.join(_NOISY)}"
    )
    parser.add_argument(
        "--long", action="store_true", help=f"besides, the columns {', '.join(_LONG)}"
    )
    parser.add_argument(
        "--write", type=Path, help="write the page there instead of printing it"
    )
    parser.add_argument(
        "--results", type=Path, help="keep each cell there, and run only those not in it yet"
    )
    parser.add_argument(
        "--check", action="store_true", help="exit 1 if a cell is wrong or ended in a traceback"
    )
    arguments = parser.parse_args()
    types = list(NAMES) if arguments.all else arguments.types
    columns = [
        *arguments.columns,
        *(_ADAPTED if arguments.lora else ()),
        *(_NOISY if arguments.dropout else ()),
    ]
    columns += _LONG if arguments.long else ()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="threefold-families-") as folder:
        os.environ.update(XDG_CACHE_HOME=f"{folder}/cache", HF_HUB_OFFLINE="1")
        (Path(folder) / _OWNER).write_text(str(os.getpid()))
        results = run_all(types, columns, Path(folder), kept=arguments.results)
    print(
        f"{len(types)} types in {(time.monotonic() - began) / 60:.1f} minutes", file=sys.stderr
    )
    page = _page(results, columns)
    if arguments.write:
        arguments.write.write_text(page)
    else:
        print(page)
    failed = [
        f"{name}, {key}: {cell}"
        for name, cells in results.items()
        for key, cell in cells.items()
        if _bad(cell)
    ]
    print("\n".join(failed), file=sys.stderr)
    sys.exit(1 if failed and arguments.check else 0)


def run_all(
    types: Sequence[str], columns: Sequence[str], folder: Path, *, kept: Path | None = None
) -> dict[str, dict[str, str]]:
    """Type -> `column/rows` -> cell; `-` holds why transformers itself does not run a type.

    Cells in the file `kept` are taken from it; each is written there as soon as it is known.
    """
    spawn.PRELOAD += [
        f"transformers.models.{module}" for name in types if (module := _modeling(name))
    ]
    known = json.loads(kept.read_text()) if kept is not None and kept.exists() else {}
    results: dict[str, dict[str, str]] = {name: {**known.get(name, {})} for name in types}
    results |= {name: {"-": NOT_RUN[name]} for name in types if name in NOT_RUN}
    asked = [(name, "") for name in types if _missing(results[name], columns)]

    def keep() -> None:
        if kept is not None:
            own = kept.with_suffix(f".{os.getpid()}")
            own.write_text(json.dumps({**known, **results}, indent=1))
            own.replace(kept)

    _Group("reference", 1, _prepare, folder).run(asked, results)
    for name, _ in asked:
        if (found := results[name].pop("reference/", "no answer")) != "ready":
            results[name] = {"-": found}
    ready = [name for name, _ in asked if "-" not in results[name]]
    for column in columns:
        if column == WHOLE:
            left = [
                (name, "")
                for name in ready
                if _holds(results[name].get("one process/causal", "0"))
            ]
            group = _Group(WHOLE, 1, _by_command, folder, limit_s=_TRAIN_S, keep=keep)
        else:
            left = [
                (name, rows)
                for name in ready
                for rows in _rows_of(column)
                if not _left_out(results[name], column, rows)
            ]
            act = _drift if column in _NOISY else _to_the_end if column in _LONG else _compare
            group = _Group(column, _ON_MESHES[column][0].world_size, act, folder, keep=keep)
        group.run(
            [(name, rows) for name, rows in left if f"{column}/{rows}" not in results[name]],
            results,
        )
    keep()
    return results


def _rows_of(column: str) -> list[str]:
    """Padding is looked at in the columns of whole models."""
    kept = (
        ROWS
        if column in MESHES
        else ("causal",)
        if column in _LONG
        else ("causal", "documents")
    )
    return [""] if column == WHOLE else [rows for rows in ROWS if rows in kept]


def _missing(cells: dict[str, str], columns: Sequence[str]) -> bool:
    wanted = [f"{column}/{rows}" for column in columns for rows in _rows_of(column)]
    return "-" not in cells and not all(key in cells for key in wanted)


def _left_out(cells: dict[str, str], column: str, rows: str) -> bool:
    """Whether a case is not run, because a part of its mesh does not hold; says so in its cell."""
    for part in _PARTS_OF.get(column, ()):
        if not _holds(cells.get(f"{part}/{rows}", "0")):
            cells[f"{column}/{rows}"] = f"not run: {part} does not hold"
            return True
    return False


class _Group:
    """Processes of one mesh that stay for many cases, and are started again if a case breaks or hangs them."""

    def __init__(
        self,
        column: str,
        size: int,
        act: Any,
        folder: Path,
        *,
        limit_s: float = _CASE_S,
        keep: Callable[[], None] = lambda: None,
    ) -> None:
        self._column, self._size, self._act, self._folder, self._limit_s = (
            column,
            size,
            act,
            folder,
            limit_s,
        )
        self._keep = keep
        self._answers = folder / f"answers-{column.replace(' ', '-')}.jsonl"
        self._starts = 0

    def run(self, cases: Sequence[tuple[str, str]], results: dict[str, dict[str, str]]) -> None:
        """Runs `act` on each case (type, rows) and writes its cells to `results`."""
        left = list(cases)
        while left:
            left = self._serve(left, results)

    def _serve(
        self, left: list[tuple[str, str]], results: dict[str, dict[str, str]]
    ) -> list[tuple[str, str]]:
        self._starts += 1
        self._answers.write_text("")
        context = spawn.server()
        join = self._folder / f"join-{self._answers.stem}-{self._starts}"
        given = (self._column, self._size, self._act, self._folder, join, self._answers, left)
        processes = [
            context.Process(target=_member, args=(rank, *given)) for rank in range(self._size)
        ]
        for process in processes:
            process.start()
        done, since, reason = 0, time.monotonic(), ""
        try:
            while done < len(left):
                time.sleep(0.02)
                # In this order: one that has gone has written all that it had to say.
                gone = [
                    process.exitcode for process in processes if process.exitcode is not None
                ]
                lines = [
                    json.loads(line)
                    for line in self._answers.read_text().splitlines()
                    if line.endswith("}")
                ]
                for line in [line for line in lines if "cell" in line][done:]:
                    self._write(left[done], line["cell"], results)
                    done, since = done + 1, time.monotonic()
                # A rank may be done before rank 0 has told the last cell.
                if any(gone) or (len(gone) == len(processes) and done < len(left)):
                    code = next((code for code in gone if code), 0)
                    reason = next(
                        (line["error"] for line in lines if "error" in line),
                        f"exit code {code}",
                    )
                    break
                if time.monotonic() - since > self._limit_s:
                    reason = f"no answer within {self._limit_s:.0f} s"
                    break
        finally:
            for process in processes:
                if reason:
                    process.kill()
                process.join(10)
        if done < len(left) and reason:
            self._write(left[done], f"traceback: {reason}", results)
            done += 1
        return left[done:]

    def _write(
        self, case: tuple[str, str], cell: str, results: dict[str, dict[str, str]]
    ) -> None:
        results[case[0]][f"{self._column}/{case[1]}"] = cell
        self._keep()
        print(
            f"{self._column:>12}  {case[0]:<24} {case[1]:<10} {cell}",
            file=sys.stderr,
            flush=True,
        )


def _member(
    rank: int,
    column: str,
    size: int,
    act: Any,
    folder: Path,
    join: Path,
    answers: Path,
    cases: list[tuple[str, str]],
) -> None:
    """One process of a group."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist
    import transformers

    from threefold.mesh.mesh import join_mesh
    from threefold.run.rank import quieten_libraries

    spawn.fork_from_own_server()
    torch.set_num_threads(1)
    quieten_libraries()
    transformers.logging.set_verbosity_error()
    mesh: Any = None
    if size > 1:
        limit = timedelta(seconds=_CASE_S)
        dist.init_process_group(
            "gloo", init_method=f"file://{join}", rank=rank, world_size=size, timeout=limit
        )
    if column in _ADAPTED:
        _begin_adapters_away_from_zero()
    if column in _ON_MESHES:
        info = environment.LaunchInfo(
            rank=rank, world_size=size, launcher="process group" if size > 1 else None
        )
        mesh = join_mesh(_ON_MESHES[column][0], info, device="cpu", timeout_s=_CASE_S)
    for name, rows in cases:
        if not _alive(folder / _OWNER):  # the table's own process was ended
            os._exit(1)
        try:
            cell = act(name, rows, folder, mesh, column)
        except ThreefoldError as error:
            cell = f"refused: {error.problems[0].what}"
        except BaseException as error:
            _append(answers, {"error": _shortened(error)})
            os._exit(3)
        if rank == 0:
            _append(answers, {"cell": cell})


def _alive(owner: Path) -> bool:
    try:
        os.kill(int(owner.read_text()), 0)
    except ProcessLookupError:
        return False
    except (OSError, ValueError):
        return owner.parent.exists()
    return True


def _append(answers: Path, line: dict[str, str]) -> None:
    with answers.open("a") as file:
        file.write(json.dumps(line) + "\n")


def _shortened(error: BaseException) -> str:
    place = traceback.extract_tb(error.__traceback__)[-1]
    text = (" ".join(str(error).split()))[:160]
    return f"{type(error).__name__}: {text} ({Path(place.filename).name}:{place.lineno})"


def _modeling(name: str) -> str:
    from transformers.models.auto.configuration_auto import model_type_to_module_name

    module = model_type_to_module_name(name)
    return f"{module}.modeling_{module}"


def _asked(name: str, rows: str, folder: Path, column: str) -> Any:
    from threefold.config.loading import validate

    topology, method = _ON_MESHES[column]
    return validate(
        {
            "model": {
                "name_or_path": str(folder / (f"{name}-dropout" if column in _NOISY else name)),
                "admission": os.environ.get("FAMILIES_ADMISSION", "auto"),
                **({"lora": _LORA} if column in _ADAPTED else {}),
            },
            "data": {
                "source": str(_corpus(folder)),
                "tokenizer": str(folder),
                "seq_len": _SEQ_LEN,
                "allow_other_tokenizer": True,
                **ROWS[rows],
            },
            "optimizer": {"lr": 2e-3},
            "train": {"global_batch": 4, "micro_batch": 2 // topology.dp},
            "mesh": {"device": "cpu", "cp_method": method},
        }
    )


def _corpus(folder: Path) -> Path:
    return folder / "corpus.jsonl"


def _write_corpus(folder: Path) -> None:
    """Documents of 5 to 60 letters, so that a row of 32 holds several and some are cut; and a tokenizer of letters."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    lines = []
    for number in range(200):
        length = 5 + (number * 37) % 56
        text = "".join(
            chr(97 + (number * 11 + place * place * 7 + place * number) % 26)
            for place in range(length)
        )
        lines.append(json.dumps({"text": text}))
    _corpus(folder).write_text("\n".join(lines) + "\n")
    letters = {
        token: number
        for number, token in enumerate(["<pad>", "<s>", "</s>", *map(chr, range(97, 123))])
    }
    tokenizer = Tokenizer(models.WordLevel(letters, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.add_special_tokens(["<pad>", "<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "</s>",
        "pad_token": "<pad>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(described))


def _prepare(
    name: str, rows: str, folder: Path, mesh: Any, column: str, *, seed: int = 0
) -> str:
    """Writes a type's model, and what transformers' own model of it computes for each kind of rows."""
    import torch
    from transformers import AutoModelForCausalLM

    from threefold.model.reduced import reduced

    if not _corpus(folder).exists():
        _write_corpus(folder)
    torch.manual_seed(seed)
    try:
        config = reduced(config_of(name), ranks=2, seq_len=_SEQ_LEN)
        model: Any = perturbed(
            AutoModelForCausalLM.from_config(config, attn_implementation="eager"), seed=seed
        )
        model.save_pretrained(folder / name)
        config.save_pretrained(folder / name)  # of all parts, where the model is of one
    except Exception as error:
        return _shortened(error)
    said = []
    for kind in ROWS:
        try:
            expected = _alone(name, kind, folder)
        except Exception as error:
            said.append(_shortened(error))
            expected = {"error": said[-1]}
        torch.save(expected, folder / name / f"{kind}.pt")
    _write_with_dropout(folder, name)
    return "ready" if len(said) < len(ROWS) else said[0]


def _write_with_dropout(folder: Path, name: str) -> None:
    """The same weights, with every rate of dropout at 0.1; no folder if the config has none."""
    noisy, config = (
        folder / f"{name}-dropout",
        json.loads((folder / name / "config.json").read_text()),
    )
    rates: list[str] = []

    def raised(values: dict[str, Any]) -> dict[str, Any]:
        own = [
            key
            for key, value in values.items()
            if _RATE.search(key) and isinstance(value, float | int)
        ]
        rates.extend(own)
        nested = {
            key: raised(value) for key, value in values.items() if isinstance(value, dict)
        }
        return {**values, **nested, **dict.fromkeys(own, 0.1)}

    config = raised(config)
    if not rates:
        return
    noisy.mkdir()
    for file in (folder / name).iterdir():
        (noisy / file.name).symlink_to(file)
    (noisy / "config.json").unlink()
    (noisy / "config.json").write_text(json.dumps(config))


def _begin_adapters_away_from_zero() -> None:
    """In this process; of B = 0 the gradient of A would be 0 as well."""
    import torch

    from threefold.model import lora

    def values(name: str, shape: torch.Size, *, seed: int) -> torch.Tensor:
        return (
            torch.randn(
                shape, generator=torch.Generator().manual_seed(sum(name.encode()) + seed)
            )
            * 0.1
        )

    lora.initial = values


def _batches(config: Any, mesh: Any) -> tuple[Any, Iterator[Any]]:
    from threefold.run import assemble, request

    rows = assemble.rows_of(config, request.tokenizer_of(config), mesh)
    return rows, iter(assemble.loader_of(config, rows, mesh))


def _alone(name: str, kind: str, folder: Path, column: str = "one process") -> dict[str, Any]:
    """Losses, norms and first gradients of transformers' own model, which is given one document at a time."""
    import torch
    from transformers import AutoModelForCausalLM

    from threefold.check.reference import frozen_as_built, train_alone
    from threefold.mesh.mesh import join_mesh
    from threefold.model import load, lora
    from threefold.optim.build import build_optimizer

    config = _asked(name, kind, folder, column)
    mesh = join_mesh(Topology(), environment.LaunchInfo(), device="cpu", timeout_s=60)
    rows, loader = _batches(config, mesh)
    model = AutoModelForCausalLM.from_pretrained(
        folder / name, attn_implementation="eager", dtype=torch.float32
    )
    model = frozen_as_built(model, load.outline(load.read_config(config.model)))
    if config.model.lora.r:
        lora.insert_whole(model, config.model.lora, seed=config.train.seed)
    model.train()
    read = (rows.rows(next(loader)["indices"].numpy()) for _ in range(_STEPS))
    training = train_alone(
        model,
        ({key: torch.from_numpy(value) for key, value in batch.items()} for batch in read),
        optimizer=build_optimizer(model, config.optimizer),
        lr=lambda step: config.optimizer.lr,
        grad_clip=config.train.grad_clip,
    )
    return {"losses": training.losses, "norms": training.norms, "gradients": training.gradients}


def _compare(name: str, kind: str, folder: Path, mesh: Any, column: str) -> str:
    """The product's own check, build and steps on a mesh against `_alone`; every rank calls it.

    The first update carries a rounding on: a router's near tie may fall the other way. What is wrong in the first step
    is wrong; what is only wrong later, if it is so with each of a few other weights too.
    """
    for seed in range(_SEEDS):
        own = folder / f"seed {seed}" if seed else folder
        if seed:
            own.mkdir(exist_ok=True)
            mesh.share(
                f"{name} from seed {seed}",
                partial(_prepare, name, "", own, mesh, column, seed=seed),
            )
        compared = _compared(name, kind, own, mesh, column)
        if isinstance(compared, str):
            return compared
        first = compared.first
        later = (
            first is not None and first.place.startswith("step ") and first.place != "step 1"
        )
        if not mesh.decide("a later difference", later, any):
            break
    return cell_of(compared)


def _compared(name: str, kind: str, folder: Path, mesh: Any, column: str) -> Comparison | str:
    import torch

    from threefold.check.admit import admit
    from threefold.check.compare import complete_gradients
    from threefold.model.build import build
    from threefold.optim.build import build_optimizer
    from threefold.run import request
    from threefold.training.batches import micro_batches
    from threefold.training.numbers import mean_loss
    from threefold.training.step import TrainStep

    config = _asked(name, kind, folder, column)
    asked = request.asked_of(config, mesh)
    expected = torch.load(folder / name / f"{kind}.pt")
    if "error" in expected:
        return f"not run: transformers itself cannot: {expected['error']}"
    if column in _ADAPTED:
        try:
            expected = _adapters_alone(name, kind, folder)
        except ThreefoldError:
            raise
        except Exception as error:
            return f"not run: peft's adapters of transformers' own model: {_shortened(error)}"
    if config.model.admission != "off":
        admit(config, asked.architecture, mesh)
    model = build(config, asked.architecture, mesh)
    actual = Training()

    def observe() -> None:
        if not actual.gradients:
            actual.gradients.update(
                (key, gradient.clone()) for key, gradient in complete_gradients(model)
            )

    step = TrainStep(
        model,
        build_optimizer(model.module, config.optimizer),
        grad_clip=config.train.grad_clip,
        observe=observe,
    )
    _, loader = _batches(config, mesh)
    assert isinstance(config.train.micro_batch, int)
    for _ in range(_STEPS):
        result = step.run(
            micro_batches(next(loader), config.train.micro_batch), lr=config.optimizer.lr
        )
        actual.losses.append(mean_loss(result, mesh))
        actual.norms.append(result.grad_norm.item())
    mesh.barrier()
    return compare_trainings(actual, Training(**expected))


def _adapters_alone(name: str, kind: str, folder: Path) -> dict[str, Any]:
    """What peft's adapters of transformers' own model compute, once for all meshes and ranks."""
    import torch

    kept = folder / name / f"{kind}-lora.pt"
    if not kept.exists():
        own = kept.with_suffix(f".{os.getpid()}")
        torch.save(_alone(name, kind, folder, "LoRA, one process"), own)
        own.replace(kept)
    expected: dict[str, Any] = torch.load(kept)
    return expected


def _drift(name: str, kind: str, folder: Path, mesh: Any, column: str) -> str:
    """Three steps with dropout, after which every copy of a tensor has the same bits; every rank calls it.

    The figure is 0, as copies are equal or not.
    """
    import torch

    from threefold.check.admit import admit
    from threefold.checkpoint.copies import refuse_drift, state_held
    from threefold.model.build import build
    from threefold.optim.build import build_optimizer
    from threefold.run import request
    from threefold.training.batches import micro_batches
    from threefold.training.numbers import mean_loss
    from threefold.training.step import TrainStep

    if not (folder / f"{name}-dropout").exists():
        return "not run: its config has no dropout"
    losses: dict[str, list[float]] = {}
    for variant in ("one process", column):  # on this mesh both; the first without dropout
        config = _asked(name, kind, folder, column)
        if variant != column:
            config = config.model_copy(
                update={
                    "model": config.model.model_copy(
                        update={"name_or_path": str(folder / name)}
                    )
                }
            )
        asked = request.asked_of(config, mesh)
        admit(config, asked.architecture, mesh)
        model = build(config, asked.architecture, mesh)
        optimizer = build_optimizer(model.module, config.optimizer)
        step = TrainStep(
            model, optimizer, grad_clip=config.train.grad_clip, compare_copies=False
        )
        _, loader = _batches(config, mesh)
        torch.manual_seed(1)
        own = losses.setdefault(variant, [])
        for _ in range(3):
            result = step.run(
                micro_batches(next(loader), config.train.micro_batch), lr=config.optimizer.lr
            )
            own.append(mean_loss(result, mesh))
        try:
            refuse_drift(state_held(model.module, optimizer), mesh, when="after 3 steps")
        except ThreefoldError as error:
            return f"wrong: {error.problems[0].what}"
    if not all(map(math.isfinite, losses[column])):
        return "wrong: a loss is not finite"
    if losses[column][0] == losses["one process"][0]:
        return "not run: no forward of it drops anything"
    return "0.000"


def _to_the_end(name: str, kind: str, folder: Path, mesh: Any, column: str) -> str:
    """The loss of every token of long rows on a mesh and in one process; without documents if they are refused."""
    from threefold.check.compare import REAL_SIZE
    from threefold.check.probe_rows import Mode, row_length
    from threefold.check.real_size import compare_real_sizes, real_sizes
    from threefold.config.loading import validate
    from threefold.errors import ConfigError
    from threefold.model import load
    from threefold.run import request

    topology, method = _ON_MESHES[column]
    named = config_of(name)
    architecture = type(named).from_dict(named.to_dict())  # as it is read from a folder
    longest = request.longest_row(architecture, load.outline(architecture)) or _LONG_ROW
    seq_len = min(_LONG_ROW, longest) // 8 * 8
    if seq_len < row_length(topology):
        return f"not run: rows of at most {longest} tokens"
    for mode in (Mode(documents=True, padding=True), Mode(documents=False, padding=False)):
        data = {
            "seq_len": seq_len,
            "document_mask": mode.documents,
            "packing": "none" if mode.padding else "concat",
        }
        model = {"config": {"model_type": name}}
        config = validate(
            {"model": model, "data": data, "mesh": {"device": "cpu", "cp_method": method}}
        )
        sizes = real_sizes(config, architecture, topology, ranks=2, leading=0)
        try:
            ConfigError.raise_for(
                request.setup_problems(config, architecture, topology, device="cpu")
            )
            for seed in (0, 1):  # as admission confirms a failure
                results = compare_real_sizes(config, sizes, mode, mesh, seed=seed)
                if Comparison(results).holds:
                    break
        except ThreefoldError:
            if not mode.documents:
                raise
            continue
        if not Comparison(results).holds:
            return f"refused: {name!r} fails the probe of real size"
        if not (found := [each for each in results if each.quantity == REAL_SIZE.quantity]):
            return f"not run: {results[0].detail}"
        figure = max(each.figure / each.bound for each in found)
        return (
            f"{figure:.3f} {', '.join(each.detail.removeprefix('to token ') for each in found)}"
        )
    raise AssertionError


def cell_of(comparison: Comparison) -> str:
    """The largest difference in units of its bound; with its quantity and parameter where it exceeds the bound."""
    worst = comparison.worst()
    if (first := comparison.first) is None:
        return f"{worst.figure / worst.bound:.3f}"
    where = re.sub(r"[.][0-9]+[.]", ".*.", first.place or first.quantity)
    return f"wrong: {first.figure / first.bound:.3g} ({first.quantity if where.startswith('step') else where})"


def _by_command(name: str, rows: str, folder: Path, mesh: Any, column: str) -> str:
    """Two steps, a checkpoint, one step more from it, an export, and the reloaded model's weights and logits.

    The figure is the logits' relative difference / 1e-5.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from threefold.checkpoint.checkpoint_folder import find
    from threefold.export.model_folder import load_whole

    run, out = folder / f"run-{name}", folder / f"out-{name}"
    request = {
        "model": {"name_or_path": str(folder / name)},
        "data": {
            "source": str(_corpus(folder)),
            "tokenizer": str(folder),
            "seq_len": _SEQ_LEN,
            "allow_other_tokenizer": True,
        },
        "train": {"global_batch": 2, "steps": 2},
        "mesh": {"device": "cpu", "tp": 1, "dp": 1, "cp": 1},
        "log": {"dir": str(run), "sample_tokens": 0},
    }
    config = folder / f"{name}.yaml"
    config.write_text(json.dumps(request))
    for arguments in (["train", str(config)], ["train", str(config), "--train.steps", "3"]):
        if said := _command(folder, *arguments):
            return said
    if said := _command(folder, "export", str(run), "--to", str(out)):
        return said
    reloaded = AutoModelForCausalLM.from_pretrained(
        out, attn_implementation="eager", dtype=torch.float32
    ).eval()
    trained, _ = load_whole(find(run))
    assert find(run).step == 3
    weights, exported = trained.state_dict(), reloaded.state_dict()
    if (first := Comparison(compare_tensors(SAME_WEIGHT, exported, weights)).first) is not None:
        return f"wrong: exported with another {first}"
    with torch.no_grad():
        ids = torch.arange(3, 19)[None]
        expected, found = (
            each(input_ids=ids, use_cache=False).logits for each in (trained, reloaded)
        )
    comparison = Comparison(
        compare_tensors(_SAME_LOGITS, {"logits": found}, {"logits": expected})
    )
    figure = comparison.worst().figure
    return (
        f"{figure / _SAME_LOGITS.limit:.3f}"
        if comparison.holds
        else f"wrong: logits differ by {figure:.3g}"
    )


def _command(folder: Path, *arguments: str) -> str:
    """`threefold ...` in a process of its own, forked from this one; empty if it ended well, else why not."""
    said = folder / "said.txt"
    if not (child := os.fork()):
        code = 1
        try:
            file = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(file, 1)
            os.dup2(file, 2)
            sys.argv = ["threefold", *arguments]
            threefold()
            code = 0
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else int(bool(stop.code))
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    lines = [line for line in said.read_text().splitlines() if line.strip()]
    if not code:
        return ""
    if code == 2:
        return f"refused: {next((line for line in lines if not line.startswith(' ')), '')}"
    return f"traceback: {arguments[0]}: {lines[-1] if lines else code}"


def _holds(cell: str) -> bool:
    return cell[:1].isdigit()


def _bad(cell: str) -> bool:
    return cell.startswith(("wrong", "traceback"))


def _page(results: dict[str, dict[str, str]], columns: Sequence[str]) -> str:
    """The page, with a table of each kind of columns that was asked for."""
    import torch
    import transformers

    described = (__doc__ or "").split("\n\n")
    trained = {name: cells for name, cells in results.items() if "-" not in cells}
    lines = [
        "# Model families",
        "",
        "Written by `python benchmarks/families.py --all --lora --dropout --long --write docs/models.md`, real runs in",
        f"float32, torch {torch.__version__.split('+')[0]}, transformers {transformers.__version__}.",
        "",
        *("\n\n".join(described[2:4])).splitlines(),
        "",
        "`2x2x2` is dp_shard 2, cp 2, tp 2. `the command` trains by `threefold train`, resumes from its checkpoint,",
        "exports with `threefold export`, and compares the reloaded model: equal weights, logits within 1e-5 of the",
        "largest.",
        "",
        "Counted are types and kinds of rows. Not run: a part of the mesh does not hold alone.",
        "",
        "In a cell: the largest figure of the kinds of rows that hold; what else there is, by kind of rows, with the",
        "reason below the table; `-` is not run.",
        "",
        *_table(trained, [column for column in columns if column in (*MESHES, WHOLE)]),
    ]
    if others := {name: cells["-"] for name, cells in results.items() if "-" in cells}:
        lines += ["", "transformers itself does not run these from a row of tokens:", ""]
        lines += [f"- {name}: {reason}" for name, reason in others.items()]
    for title, kinds, text in (
        ("Adapters and dropout", {**_ADAPTED, **_NOISY}, described[4]),
        ("The longest place probed", _LONG, described[5]),
    ):
        if own := [column for column in columns if column in kinds]:
            lines += [
                "",
                f"## {title}",
                "",
                *text.strip().splitlines(),
                "",
                *_table(trained, own),
            ]
    return "\n".join([*lines, *_BEYOND]) + "\n"


def _table(results: dict[str, dict[str, str]], columns: Sequence[str]) -> list[str]:
    notes: dict[str, int] = {}
    head, rule = "| | " + " | ".join(columns) + " |", "|---|" + "---|" * len(columns)
    counts = [
        _counts(results, columns, kind)
        for kind in ("holds", "refused", "not run", "wrong", "traceback")
    ]
    cells = [
        f"| {name} | " + " | ".join(_cell(own, column, notes) for column in columns) + " |"
        for name, own in results.items()
    ]
    reasons = [f"{number}. {reason}" for reason, number in notes.items()]
    return [head, rule, *counts, "", f"| type {head[2:]}", rule, *cells, "", *reasons]


_BEYOND = [
    "",
    "Also tested: whole experts on each tp rank (`mesh.ep`, tests/ranks/test_experts.py), adapters on other meshes",
    "(tests/ranks/test_lora.py), and the routers' loss over the global batch (tests/ranks/test_silent.py).",
    "",
    "## bfloat16",
    "",
    "`model.dtype: bfloat16` is the same arithmetic on every mesh, one process among them. FSDP2 casts the",
    "float32 weights for each forward, the layers compute what transformers' own model in bfloat16 computes, and",
    "gradients are summed in float32, over micro-batches and over ranks. These parameters stay float32",
    "everywhere: those that transformers lists (`_keep_in_fp32_modules`, strict or not), decays of state-space",
    "layers, attention sinks, and routers whose own forward computes in float32. So a data rank computes what a",
    "micro-batch of one process does, to the bit but for the order of float32 sums. tp and cp split sums that are",
    "then rounded to bfloat16.",
    "",
    "Measured over 20 AdamW steps of tiny models (llama, qwen3_moe, deepseek_v3, gpt_oss, mamba2) against one",
    "process on the same micro-batches, without clipping: largest differences of a loss, in nats, and of a norm of",
    "the gradient, relative (`pytest -s -m 'slow or not slow' tests/ranks/test_bfloat16.py`, which holds the bounds):",
    "",
    "| | first step | bound | 20 steps | bound |",
    "|---|---|---|---|---|",
    "| DDP, FSDP, HSDP (`dp`, `dp_shard`) | 3e-7, 1e-7 | | 4e-7, 2e-7 | 1e-6, 1e-6 |",
    "| cp 2 | 1.1e-3, 8e-4 | 5e-3, 3e-3 | 2.0e-2, 2.4e-2 | 6e-2, 5e-2 |",
    "| tp 2 | 2.1e-3, 1.0e-3 | 5e-3, 3e-3 | 4.2e-2, 1.7e-2 | 6e-2, 5e-2 |",
    "| 2x2x2 | 3.6e-3, 7e-4 | 5e-3, 3e-3 | 2.5e-2, 1.8e-2 | 6e-2, 5e-2 |",
    "| one process in 2 micro-batches, not 1 | | | 3.9e-2, 3.1e-2 | |",
    "",
    "The last row is no mesh: each update carries a rounding on, and any other order of rounding departs as far.",
    "",
    "`train.grad_clip` scales every gradient by the norm, which shards add up in another order. One bit of it (7e-8)",
    "may cross a rounding to bfloat16, and from then on the curves part as in the last row: gpt_oss on two shards at a",
    "rate of 1e-3 equals one process for 4 steps, and is 2e-2 nats and 1e-2 of the norm apart by step 12. At 1e-4, and",
    "on two replicas at both rates, it stays within 6e-7 over 12 steps.",
    "",
    "A run in bfloat16 is admitted if a step of it, at reduced size on its mesh, is within 0.2 nats of float32;",
    "the largest of all architectures is 0.04. xlstm is refused by name: transformers itself multiplies bfloat16",
    "by float32 there.",
    "",
    "Not in bfloat16: `threefold verify`, `generate`, `sample` and exported weights are float32 on every mesh. A",
    "custom module is cast by operation (torch.autocast) on every mesh, as its layers may not be written",
    "for weights in bfloat16. On a CUDA device, one rank in bfloat16 must stay within 2e-2 nats in loss and 5e-2",
    "in gradient norm of float32, over 8 steps of a model of 4 layers (tests/gpu/test_cuda.py, which reports it",
    "if there is no such device).",
]


def _kind(cell: str) -> str:
    return "holds" if _holds(cell) else cell.split(":")[0]


def _counts(results: dict[str, dict[str, str]], columns: Sequence[str], kind: str) -> str:
    counts = []
    for column in columns:
        cells = [
            cell
            for each in results.values()
            for key, cell in each.items()
            if key.split("/")[0] == column
        ]
        counts.append(str(sum(_kind(cell) == kind for cell in cells)))
    return f"| {kind} | " + " | ".join(counts) + " |"


def _cell(cells: dict[str, str], column: str, notes: dict[str, int]) -> str:
    own = {
        key.split("/")[1]: cell for key, cell in cells.items() if key.split("/")[0] == column
    }
    figures = [float(cell.split()[0]) for cell in own.values() if _holds(cell)]
    said: dict[str, list[str]] = {}
    for rows, cell in own.items():
        if not _holds(cell):
            said.setdefault(_noted(cell, notes), []).append(rows)
    parts = [f"{max(figures):.3f}"] if figures else []
    if column in _LONG and figures:
        parts = [cell.split(maxsplit=1)[1] for cell in own.values()]
    for text, kinds in said.items():
        parts.append(text if len(kinds) == len(own) else f"{' and '.join(kinds)} {text}")
    return ", ".join(parts) or "-"


def _noted(cell: str, notes: dict[str, int]) -> str:
    kind, _, reason = cell.partition(": ")
    if kind == "not run":
        return "-"
    if kind == "wrong":
        return f"**{reason}**"
    # The same for all types: without their names, and without what was measured.
    reason = re.sub(r"'[^']*'", "it", reason)
    reason = re.sub(r"(the probe of [^:]*): .*", r"\1", reason)
    reason = re.sub(r" on dp=\S+( \(sharded\))? x cp=\d+ x tp=\d+", "", reason)
    reason = re.sub(r"^mesh\.(tp|cp) = 2, but ", r"mesh.\1: ", reason)
    reason = re.sub(r"^(mesh\.cp: it [^:(]*\w).*", r"\1", reason)
    reason = re.sub(r"^(it cannot be computed[^:]*): (\w+):.*", r"\1 (\2)", reason)
    return f"{'refused' if kind == 'refused' else '**traceback**'} [{notes.setdefault(reason, len(notes) + 1)}]"


if __name__ == "__main__":
    main()
