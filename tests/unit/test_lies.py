"""Every proof is tried on a lie: each place that says "equal" or "proved" is given numbers that are not.

`PLACES` has every module that compares computed numbers or proves what was recorded. A module that begins to compare
and is not in it fails `test_every_place_is_in_the_table`.
"""

from __future__ import annotations

import ast
import copy
import json
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ranks.reference import PARITY, compare_trainings, require
from threefold.audit.proof import prove
from threefold.audit.record import read
from threefold.check import admission_cache, probes
from threefold.check.compare import Comparison, Difference, Training
from threefold.check.probes import Expected, Subject
from threefold.checkpoint.checkpoint_folder import CheckpointFolder, seal_folder
from threefold.checkpoint.seal import write_sealed
from threefold.errors import ThreefoldError
from threefold.mesh.mesh import Mesh, init_mesh
from unit.test_audit import CLEAN, CountingRows

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "threefold"
sys.path.insert(0, str(ROOT / "benchmarks"))
MODEL = {
    "model_type": "llama",
    "vocab_size": 67,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
}
MODEL |= {"num_attention_heads": 2, "num_key_value_heads": 2}

# --- the lies ---------------------------------------------------------------------------------------------------------


def training() -> Training:
    draws = torch.Generator().manual_seed(0)
    shapes = {"embedding": (5, 3), "layer": (3, 3), "head": (4, 2)}
    return Training(
        losses=[4.0, 3.5, 3.25],
        norms=[2.0, 1.5, 1.25],
        gradients={name: torch.randn(shape, generator=draws) for name, shape in shapes.items()},
    )


def _nan_loss(lying: Training) -> None:
    lying.losses[-1] = math.nan


def _nan_norm(lying: Training) -> None:
    lying.norms[-1] = math.nan


def _nan_gradient(lying: Training) -> None:
    last = [*lying.gradients][-1]
    lying.gradients[last] = lying.gradients[last].clone()
    lying.gradients[last].view(-1)[-1] = math.nan


def _loss_off(lying: Training) -> None:
    lying.losses[-1] += 2e-4


def _norm_off(lying: Training) -> None:
    lying.norms[-1] *= 1 + 2e-3


def _gradient_off(lying: Training) -> None:
    last = [*lying.gradients][-1]
    gradient = lying.gradients[last].clone()
    gradient.view(-1)[-1] += 2e-3 * gradient.abs().max()
    lying.gradients[last] = gradient


def _missing_gradient(lying: Training) -> None:
    del lying.gradients[[*lying.gradients][-1]]


def _no_gradients(lying: Training) -> None:
    lying.gradients.clear()


def _shorter(lying: Training) -> None:
    lying.losses.pop()
    lying.norms.pop()


def _empty(lying: Training) -> None:
    lying.losses.clear()
    lying.norms.clear()


STEPS = {
    "NaN in a loss that is not the first": _nan_loss,
    "NaN in a gradient norm": _nan_norm,
    "a loss off by 2 x its bound": _loss_off,
    "a norm off by 2 x its bound": _norm_off,
    "a shorter list": _shorter,
    "an empty list": _empty,
}
GRADIENTS = {
    "NaN in one gradient": _nan_gradient,
    "a gradient off by 2 x its bound": _gradient_off,
    "a missing gradient": _missing_gradient,
    "no gradient": _no_gradients,
}
LIES = STEPS | GRADIENTS


def lie(name: str, truth: Training) -> Training:
    lying = copy.deepcopy(truth)
    LIES[name](lying)
    return lying


# --- the places: each returns whether it says that all is well --------------------------------------------------------


class Room:
    """What a place may need: a folder of its own, a mesh of one process, and patches that are undone."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.patch = patch
        self._mesh: Mesh | None = None

    @property
    def mesh(self) -> Mesh:
        self._mesh = self._mesh or init_mesh(device="cpu")
        return self._mesh

    def close(self) -> None:
        if self._mesh is not None:
            self._mesh.close()


@pytest.fixture
def room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Room]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    room = Room(tmp_path, monkeypatch)
    yield room
    room.close()


def parity(room: Room, name: str | None) -> bool:
    """`require`, which every test of a mesh calls."""
    truth = training()
    try:
        require(compare_trainings(lie(name, truth) if name else truth, truth, PARITY))
    except AssertionError:
        return False
    return True


def families(room: Room, name: str | None) -> bool:
    """A cell of docs/models.md."""
    from families import cell_of

    truth = training()
    return not cell_of(
        compare_trainings(lie(name, truth) if name else truth, truth)
    ).startswith("wrong")


def verify(room: Room, name: str | None) -> bool:
    """`threefold verify`, whose single process lies; what is compared is what both have."""
    from threefold.config.loading import validate
    from threefold.verify import rank
    from threefold.verify.verdict import Verification, VerifyOptions

    (room.folder / "corpus.txt").write_text(" ".join(f"word{n * n % 97}" for n in range(800)))
    values = {
        "model": {"config": {**MODEL, "vocab_size": 257}},
        "data": {"source": str(room.folder / "corpus.txt"), "seq_len": 16},
        "train": {"global_batch": 2},
    }
    computed = rank.run_alone

    def lying(*args: Any, **options: Any) -> Training:
        truth = computed(*args, **options)
        return lie(name, truth) if name else truth

    room.patch.setattr(rank, "run_alone", lying)
    verification = rank.verify_on(
        room.mesh, validate(values), VerifyOptions(steps=3, admission=False)
    )
    return Verification.from_record(json.loads(json.dumps(verification.to_record()))).holds


def verify_against(room: Room, name: str | None) -> bool:
    """`threefold verify --against`, in both orders."""
    from threefold.verify.verdict import compare_runs

    truth = training()
    for run, logged in (("a", truth), ("b", lie(name, truth) if name else truth)):
        (room.folder / run).mkdir()
        lines = zip(logged.losses, logged.norms, strict=True)
        text = [
            json.dumps({"step": step, "loss": a, "grad_norm": b}) + "\n"
            for step, (a, b) in enumerate(lines, 1)
        ]
        (room.folder / run / "metrics.jsonl").write_text("".join(text))
    first, second = room.folder / "a", room.folder / "b"
    return compare_runs(first, second)[1] or compare_runs(second, first)[1]


def verify_bits(room: Room, name: str | None) -> bool:
    """`threefold verify --bits`."""
    from threefold.verify.bits import compared

    def steps(computed: Training) -> list[Any]:
        hashes = {
            key: str(tensor.tolist()) if tensor.isfinite().all() else None
            for key, tensor in computed.gradients.items()
        }
        numbers = zip(computed.losses, computed.norms, strict=True)
        return [
            {"loss": loss, "gradient norm": norm, "weights": hashes} for loss, norm in numbers
        ]

    truth = training()
    return compared({"dp=1": steps(truth), "dp=2": steps(lie(name, truth) if name else truth)})[
        1
    ]


def admission(room: Room, name: str | None) -> bool:
    """The probes of admission, whose single process lies."""
    computed = probes._expected

    def lying(*args: Any) -> Expected:
        truth = computed(*args)
        assert truth is not None
        numbers = Training([truth.loss], [truth.grad_norm], truth.gradients)
        told = lie(name, numbers) if name else numbers
        return replace(
            truth, loss=told.losses[0], grad_norm=told.norms[0], gradients=told.gradients
        )

    from threefold.check.probe_rows import Mode
    from threefold.config.loading import validate
    from threefold.model import load

    room.patch.setattr(probes, "_expected", lying)
    config = validate({"model": {"config": MODEL}, "data": {"seq_len": 32}})
    subject = Subject(
        config, load.read_config(config.model), Mode(documents=True, padding=True)
    )
    return Comparison(probes.probe(subject, room.mesh)).holds


def exported_logits(room: Room, name: str | None) -> bool:
    """The reloaded export of a model."""
    from threefold.export.model_folder import _compare

    truth = training()

    def model(logits: Any) -> Any:
        config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=5))
        computed = SimpleNamespace(eval=lambda: lambda **inputs: SimpleNamespace(logits=logits))
        return SimpleNamespace(config=config, eval=computed.eval)

    reloaded = (lie(name, truth) if name else truth).gradients["head"]
    _compare(model(truth.gradients["head"]), model(reloaded), room.folder, trained="a run")
    return True


def hashes(room: Room, name: str | None) -> bool:
    """`threefold hash` of two folders."""
    from threefold.export.hashes import hash_of_folder

    truth, sums = training(), []
    for folder, own in (("a", truth), ("b", lie(name, truth) if name else truth)):
        (room.folder / folder).mkdir()
        save_file(own.gradients, room.folder / folder / "model.safetensors")
        sums.append(hash_of_folder(room.folder / folder).sha256)
    return sums[0] == sums[1]


TRAININGS: dict[str, tuple[Callable[[Room, str | None], bool], dict[str, Any]]] = {
    # The modules of a place, what it does, and the lies that concern what it compares.
    "tests/ranks/reference.py": (parity, LIES),
    "benchmarks/families.py": (families, LIES),
    "verify/rank.py": (verify, LIES),
    "verify/verdict.py": (verify_against, STEPS),
    "verify/bits.py": (verify_bits, LIES),
    # One step, so a list of losses cannot be shorter.
    "check/probes.py": (admission, {name: LIES[name] for name in LIES if "list" not in name}),
    # One tensor of logits.
    "export/model_folder.py": (
        exported_logits,
        {name: GRADIENTS[name] for name in [*GRADIENTS][:2]},
    ),
    "export/hashes.py": (hashes, GRADIENTS),
}


@pytest.mark.parametrize("place", TRAININGS)
def test_the_truth_is_believed(place: str, room: Room) -> None:
    assert TRAININGS[place][0](room, None)


@pytest.mark.parametrize(
    ("place", "name"),
    [(place, name) for place, (_, lies) in TRAININGS.items() for name in lies],
)
def test_a_lie_is_found(place: str, name: str, room: Room) -> None:
    try:
        assert not TRAININGS[place][0](room, name)
    except (ThreefoldError, IndexError):
        return  # refused, or there is no number to compare


def test_not_finite_on_both_sides_is_not_equal(room: Room) -> None:
    """What both sides computed wrongly alike: only bits may be equal then, and `verify --bits` says no."""
    from threefold.verify.bits import compared

    for name in ("NaN in a loss that is not the first", "NaN in one gradient"):
        truth = lie(name, training())
        assert not compare_trainings(truth, copy.deepcopy(truth)).holds
    for numbers, weight in ((math.nan, "hash"), (1.0, None)):
        steps = [{"loss": numbers, "gradient norm": 1.0, "weights": {"w": weight}}]
        assert not compared({"dp=1": steps, "dp=2": copy.deepcopy(steps)})[1]
    assert not compared({"dp=1": [], "dp=2": []})[1]
    nothing = [{"loss": 1.0, "gradient norm": 1.0, "weights": {}}]
    assert not compared({"dp=1": nothing, "dp=2": nothing})[1]


def test_rounding_explains_gradients_that_are_as_far_from_float32s_as_the_models_own() -> None:
    truth = training().gradients
    for own, rounded, holds in (
        (1.0, 1.0, True),
        (1.2, 1.0, True),
        (1.3, 1.0, False),
        (1.5, 1.1, True),
        (1.6, 1.1, False),
        (1.6, math.nan, True),  # transformers' own rounds it to no number at all
        (5.0, math.nan, False),
        (math.nan, 1.0, False),
        (math.nan, math.nan, False),
    ):
        for name in truth:
            run, plain = ({**truth, name: truth[name] * times} for times in (own, rounded))
            assert probes._beyond_rounding(run, truth, plain).holds == holds, (
                own,
                rounded,
                name,
            )
    for name in truth:
        assert not probes._beyond_rounding(
            {key: truth[key] for key in truth if key != name}, truth, truth
        ).holds
    assert not probes._beyond_rounding({**truth, "more": truth["head"]}, truth, truth).holds


# --- places whose lies are of another kind ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "holds"),
    [
        ([{"quantity": "loss", "figure": 1e-6, "bound": 1e-4}], True),
        ([{"quantity": "loss", "figure": math.nan, "bound": 1e-4}], False),
        (
            [
                {"quantity": "a", "figure": 0.0, "bound": 0.0},
                {"quantity": "b", "figure": math.nan, "bound": 1.0},
            ],
            False,
        ),
        ([{"quantity": "loss", "figure": 2e-4, "bound": 1e-4}], False),
        ([{"quantity": "loss", "figure": 1e-6}], False),
        ([], False),
        ({}, False),
        (None, False),
    ],
)
def test_results_of_admission_that_are_kept_must_hold(
    written: Any, holds: bool, room: Room
) -> None:
    (room.folder / "cache/threefold/admission").mkdir(parents=True)
    (room.folder / "cache/threefold/admission/key.json").write_text(json.dumps(written))
    assert (admission_cache.read("key") is not None) == holds


def _checkpoint(folder: Path) -> Any:
    partial = folder / "partial"
    (partial / "state").mkdir(parents=True)
    seals = {
        f"state/{name}": write_sealed(partial / "state" / name, name.encode() * 9)
        for name in ("a", "b")
    }
    return seal_folder(partial, folder / "checkpoints" / "step-00000001", 1, {}, seals)


@pytest.mark.parametrize(
    "change", ["a byte", "a shorter file", "a missing file", "a list without files"]
)
def test_a_changed_checkpoint_is_not_resumed(change: str, tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    checkpoint = _checkpoint(tmp_path)
    assert checkpoint.damage() is None and CheckpointFolder(tmp_path).path.exists()
    file = checkpoint.path / "state" / "b"
    if change == "a byte":
        file.write_bytes(b"x" + file.read_bytes()[1:])
    elif change == "a shorter file":
        file.write_bytes(file.read_bytes()[:-1])
    elif change == "a missing file":
        file.unlink()
    else:
        (tmp_path / "partial").mkdir()
        checkpoint = seal_folder(
            tmp_path / "partial", tmp_path / "checkpoints" / "step-00000002", 2, {}, {}
        )
    assert checkpoint.damage() is not None


LAST = CLEAN[-1].to_record()


@pytest.mark.parametrize(
    "records",
    [
        [{**LAST, "contents": [math.nan]}],
        [{**LAST, "samples": [math.nan]}],
        [
            {
                **LAST,
                "contents": [
                    LAST["contents"][0][:-1] + ("0" if LAST["contents"][0][-1] != "0" else "1")
                ],
            }
        ],
        [{**LAST, "contents": []}],
        [{**LAST, "samples": []}],
        [{key: value for key, value in LAST.items() if key != "contents"}],
        [LAST, LAST],
        None,
    ],
    ids=[
        "NaN contents",
        "NaN samples",
        "one digit",
        "no contents",
        "no samples",
        "no key",
        "a line twice",
        "no line",
    ],
)
def test_a_changed_record_proves_nothing(records: Any, tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    path.write_text("".join(json.dumps(line.to_record()) + "\n" for line in CLEAN))
    prove(read(path), CountingRows(43))
    changed = [*(line.to_record() for line in CLEAN[:-1]), *records] if records else []
    path.write_text("".join(json.dumps(record) + "\n" for record in changed))
    with pytest.raises(ThreefoldError):
        prove(read(path), CountingRows(43))


# --- the table is complete --------------------------------------------------------------------------------------------

# What compares: the names of `check.compare`, and what torch and numpy offer.
COMPARES = {"compare_trainings", "compare_curves", "compare_number", "compare_numbers"}
COMPARES |= {"compare_tensors", "compare_exactly", "TensorComparison"}
COMPARES |= {"equal", "array_equal", "allclose", "isclose", "assert_close"}
COVERED = {
    **{place: "test_a_lie_is_found" for place in TRAININGS},
    "check/compare.py": "tests/unit/test_compare.py",
    "check/reference.py": "its head's logits are a probe of admission: tests/ranks/test_admission.py",
    "export/mesh_model.py": "tests/ranks/test_own_modules.py: a reloaded classifier with another weight",
    "audit/digest.py": "tests/unit/test_audit.py: a changed token",
    "audit/offences.py": "tests/unit/test_audit.py: what is wrong is named, not decided",
    "convert/convert.py": "tests/ranks/test_import.py: tied tensors that differ",
    "training/loss.py": "tests/unit/test_loss.py: a router's loss that is another one",
    "report/thinned_curves.py": "tests/unit/test_report_curves.py: losses of rows that are others",
    "benchmarks/gpu_rows.py": "its gradients' bits: one that is not a number is equal to none",
    "referee/judge/laws.py": "tests/unit/test_referee_gradients.py: gradients that are others, and NaN",
    "model/tensor_parallel/symmetric.py": "tests/ranks/test_split_products.py: products one off, and no number",
    "model/working_copy.py": "tests/unit/test_working_copy.py: a weight that was changed, to a NaN too",
    "optim/classes.py": "tests/unit/test_optimizer.py: an optimizer that cannot be split",
}
# Ids and labels: integers, which have no NaN.
OF_INTEGERS = {
    *(
        "data/chat/preference.py",
        "data/rows/pieces.py",
        "data/store/in_memory.py",
        "data/store/index.py",
    ),
    *("training/batches.py", "why/contents.py"),
}


def _calls(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            names.add(
                node.func.attr
                if isinstance(node.func, ast.Attribute)
                else getattr(node.func, "id", "")
            )
    return names


def test_every_place_is_in_the_table() -> None:
    comparing = {
        path.relative_to(base).as_posix()
        for base, pattern in ((SOURCE, "**/*.py"), (ROOT, "benchmarks/*.py"))
        for path in base.glob(pattern)
        if _calls(path) & COMPARES
    }
    known = {*COVERED, *OF_INTEGERS}
    assert comparing - known == set(), "compares, and no lie is tried on it"
    assert known - comparing - {"tests/ranks/reference.py", "export/hashes.py"} == set(), (
        "compares nothing any more"
    )


# Distances of positions in an order, which are integers.
DISTANCES = {
    "unit/test_mixture_turns.py",
    "unit/test_length_buckets.py",
    "unit/test_mixture.py",
    "unit/test_sampler.py",
}


def _takes_a_largest_difference(node: ast.AST) -> bool:
    """Whether it is a `max` over absolute values that is compared with a bound."""
    if not isinstance(node, ast.Compare):
        return False
    side = [inner for inner in ast.walk(node.left) if isinstance(inner, ast.Call)]
    names = {
        call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        for call in side
    }
    return {"max", "abs"} <= names and isinstance(node.ops[0], ast.Lt | ast.LtE)


@pytest.mark.parametrize("folder", ["tests", "benchmarks", "src/threefold"])
def test_no_largest_difference_is_taken_by_hand(folder: str) -> None:
    """`max` passes over a NaN that is not first."""
    own = [
        f"{path.relative_to(ROOT / folder)}:{node.lineno}"
        for path in (ROOT / folder).rglob("*.py")
        if path.relative_to(ROOT / folder).as_posix() not in DISTANCES
        and "abs" in (text := path.read_text())
        for node in ast.walk(ast.parse(text))
        if _takes_a_largest_difference(node)
    ]
    assert own == []


def test_a_largest_difference_by_hand_is_seen() -> None:
    for text in (
        "max(abs(a - b) for a, b in pairs) <= 1e-4",
        "abs(a - b).max() < 1e-3 * abs(b).max()",
    ):
        assert _takes_a_largest_difference(ast.parse(text, mode="eval").body)


def test_a_difference_without_a_figure_does_not_hold() -> None:
    assert (
        not Difference("loss", math.nan, 1.0).holds
        and not Difference("loss", math.nan, math.inf).holds
    )
