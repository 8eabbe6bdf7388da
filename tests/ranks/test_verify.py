"""`threefold verify`: says yes to a right mesh, no to a wrong one, and which layer and axis are wrong."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ranks.runs import command, prepare, torchrun
from threefold.check.compare import Difference
from threefold.errors import ConfigError
from threefold.mesh.topology import Topology
from threefold.verify.verdict import Verification, compare_runs, diagnose, group_of

pytestmark = pytest.mark.ranks

SAME = Difference("gradient", 0.0, 1e-3, "w")
RIGHT = Verification([(1.0, 1.0)], [(2.0, 2.0)], [SAME])
WRONG = Verification([(1.0, 1.5)], [(2.0, 2.0)], [SAME])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("verify")
    prepare(folder)
    return folder


def test_right_mesh_is_confirmed(folder: Path) -> None:
    sizes = ("--mesh.dp", "2", "--mesh.cp", "2", "--mesh.tp", "2")
    packed = ("--data.packing", "best_fit", "--data.document_mask", "true")
    done = command(
        folder, "verify", "config.yaml", *sizes, *packed, "--steps", "2", "--layers", "1"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.rstrip().endswith("the mesh follows the single process")
    assert "model.layers.*.self_attn.q_proj.weight" in done.stdout


def test_mixture_and_epochs_that_end_before_the_steps(folder: Path) -> None:
    """The single process reads the rows that training reads; the steps to compare may be more than an epoch's."""
    mixture = "{most: {source: 'corpus/part-[012].txt', weight: 3}, rest: {source: corpus/part-3.txt, weight: 1}}"
    config = (folder / "config.yaml").read_text()
    (folder / "mixture.yaml").write_text(
        config.replace("source: corpus", f"mixture: {mixture}")
    )
    (folder / "epochs.yaml").write_text(
        config.replace("steps: 12, global_batch: 8", "epochs: 1, global_batch: 500")
    )
    for name in ("mixture.yaml", "epochs.yaml"):
        done = command(
            folder, "verify", name, "--mesh.dp", "2", "--steps", "3", "--layers", "1"
        )
        assert done.returncode == 0, done.stdout + done.stderr


PLANTED = {
    # tokens of the tail chunk are put where they do not stand
    "positions": (
        "from threefold.model.context_parallel import attention as c\n"
        "plain = c.local_positions\n"
        "c.local_positions = lambda n, *, cp_size, cp_rank: plain(n, cp_size=cp_size, cp_rank=cp_rank).roll(1)\n"
        "masks = c.BatchMasks\n"
        "c.BatchMasks = lambda *, queries, **rest: masks(queries=queries.roll(-1), **rest)\n",
        ("--mesh.cp", "2"),
        "the first layer whose output differs: layer 0",
    ),
    # one rank's part of a sum is lost
    "sum": (
        "import torch\n"
        "from threefold.model.tensor_parallel import layers\n"
        "plain = layers.scatter_sum\n"
        "layers.scatter_sum = lambda x, group: plain(x * (0.5 + torch.distributed.get_rank(group)), group)\n",
        ("--mesh.tp", "2", "--mesh.sequence_parallel", "true"),
        "<- differs",
    ),
    # the same data on both data ranks
    "data": (
        "from threefold.mesh import mesh\nmesh.Mesh.dp_rank = property(lambda self: 0)\n",
        ("--mesh.dp", "2"),
        "<- differs",
    ),
    # a weight of one rank becomes NaN after the first update
    "not finite": (
        "import torch\n"
        "from threefold.training.step import TrainStep\n"
        "plain = TrainStep.run\n"
        "def run(self, batches, *, lr=None):\n"
        "    result = plain(self, batches, lr=lr)\n"
        "    if torch.distributed.get_rank() == 1:\n"
        "        weight = next(p for name, p in self.model.module.named_parameters() if 'q_proj' in name)\n"
        "        weight.data._local_tensor.view(-1)[0] = float('nan')\n"
        "    return result\n"
        "TrainStep.run = run\n",
        ("--mesh.dp", "2", "--mesh.dp_shard", "2"),
        "step 1: the weight model.layers.0.self_attn.q_proj.weight of rank 1 is not finite\n"
        "step 2: the loss of rank 0 is not finite, in micro-batch 0\n",
    ),
}


@pytest.mark.parametrize("fault", list(PLANTED))
def test_planted_fault_is_found(folder: Path, fault: str) -> None:
    code, sizes, named = PLANTED[fault]
    arguments = ["threefold", "verify", "config.yaml", *sizes, "--steps", "2"]
    (folder / f"{fault}.py").write_text(
        f"{code}import sys\nsys.argv = {arguments!r}\nfrom threefold.__main__ import main\nmain()\n"
    )
    done = torchrun(folder, 2, f"{fault}.py")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "the mesh differs from the single process" in done.stdout
    assert named in done.stdout


def test_diagnosis_tries_each_axis_alone() -> None:
    tried: list[Topology] = []

    def verify(topology: Topology) -> Verification:
        tried.append(topology)
        return WRONG if topology.cp > 1 else RIGHT

    mesh = Topology(dp_shard=2, cp=2, tp=2)
    assert diagnose(mesh, verify) == (
        "the mesh differs from the single process: context (dp=1 x cp=2 x tp=1); "
        "correct alone: data (dp=2 (sharded) x cp=1 x tp=1), tensor (dp=1 x cp=1 x tp=2)"
    )
    assert tried == [Topology(dp_shard=2), Topology(cp=2), Topology(tp=2)]
    assert "only when axes are combined" in diagnose(mesh, lambda topology: RIGHT)
    assert diagnose(Topology(tp=2), verify).endswith("the tensor axis, the only one it has")
    assert diagnose(Topology(), verify).endswith("on one rank: no axis of it is the cause")


def test_comparison_holds_within_the_promised_tolerances() -> None:
    assert RIGHT.holds and not WRONG.holds
    assert Verification([(1.0, 1.00009)], [(1.0, 1.0009)], [replace(SAME, figure=9e-4)]).holds
    assert not Verification([(1.0, 1.00011)], [(1.0, 1.0)], [SAME]).holds
    assert not Verification([(1.0, 1.0)], [(1.002, 1.0)], [SAME]).holds
    assert not Verification([(1.0, 1.0)], [(1.0, 1.0)], [replace(SAME, figure=2e-3)]).holds
    assert not replace(RIGHT, admitted=False).holds
    assert Verification.from_record(json.loads(json.dumps(RIGHT.to_record()))).holds
    assert not Verification.from_record(json.loads(json.dumps(WRONG.to_record()))).holds
    assert (
        group_of("model.layers.11.mlp.experts.0.weight")
        == "model.layers.*.mlp.experts.*.weight"
    )


ALL = range(1, 21)


@pytest.mark.parametrize(
    ("logged", "holds"),
    [
        (ALL, True),
        ([1, *range(5, 21, 5)], True),  # log.every 5
        (range(8, 21), True),  # begun from another run's checkpoint
        (range(1, 13), False),
        ([step for step in ALL if step != 7], False),
        ([step for step in ALL if step not in (7, 8)], False),
        ([1, 5, 15, 20], False),
    ],
    ids=[
        "all",
        "less often",
        "later",
        "ends before",
        "one missing",
        "two missing",
        "one of fewer missing",
    ],
)
def test_steps_that_one_run_lacks(logged: Any, holds: bool, tmp_path: Path) -> None:
    for name, steps in (("a", ALL), ("b", logged)):
        (tmp_path / name).mkdir()
        lines = [
            json.dumps({"step": step, "loss": 3.0 - step / 50, "grad_norm": 1.0}) + "\n"
            for step in steps
        ]
        (tmp_path / name / "metrics.jsonl").write_text("".join(lines))
    for pair in ("ab", "ba"):
        lines, equal = compare_runs(tmp_path / pair[0], tmp_path / pair[1])
        assert equal == holds, lines
    assert holds or "only the other run logged step" in "\n".join(lines)
    if min(logged) == 1:
        assert compare_runs(tmp_path / "a", tmp_path / "b", steps=1)[1]


def lines_of(run: Path) -> list[Any]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_evaluations_of_two_runs_are_compared(tmp_path: Path) -> None:
    """The last step had another learning rate: only the evaluation after it shows that."""
    steps = [{"step": step, "loss": 3.0 - step / 8, "grad_norm": 1.0} for step in range(1, 5)]
    for name, last, more in (("a", 2.5, []), ("b", 2.5, []), ("c", 2.75, []), ("d", 2.5, [3])):
        (tmp_path / name).mkdir()
        evaluated = {2: 3.0, **dict.fromkeys(more, 9.0), 4: last}
        evaluations = [{"step": step, "eval_loss": loss} for step, loss in evaluated.items()]
        lines = sorted([*steps, *evaluations], key=lambda line: line["step"])
        (tmp_path / name / "metrics.jsonl").write_text(
            "".join(json.dumps(line) + "\n" for line in lines)
        )
    lines, holds = compare_runs(tmp_path / "a", tmp_path / "b")
    assert holds
    same = "2 evaluations in common, after steps 2 to 4: largest difference of their loss 0.0e+00 nats, at step 2"
    assert lines[3] == same
    lines, holds = compare_runs(tmp_path / "a", tmp_path / "c")
    assert not holds and "largest difference of their loss 2.5e-01 nats, at step 4" in lines[3]
    differs = "evaluation loss of step 4: 2.5, expected 2.75: differs by 2.5e-01, bound 1e-04"
    assert f"the first difference: {differs}" in lines
    assert compare_runs(tmp_path / "a", tmp_path / "c", steps=3)[1]
    assert compare_runs(tmp_path / "a", tmp_path / "d")[1], (
        "step 3 was evaluated by one of them"
    )


def test_two_runs_are_compared(tmp_path: Path) -> None:
    for name, shift in (("a", 0.0), ("b", 5e-5), ("c", 0.5)):
        (tmp_path / name).mkdir()
        lines = [
            {"step": step, "loss": 3.0 - step + shift, "grad_norm": 1.0} for step in (1, 2)
        ]
        (tmp_path / name / "metrics.jsonl").write_text(
            "".join(json.dumps(line) + "\n" for line in lines)
        )
    lines, holds = compare_runs(tmp_path / "a", tmp_path / "b")
    assert holds and lines[0] == "2 steps in common, 1 to 2"
    lines, holds = compare_runs(tmp_path / "a", tmp_path / "c")
    assert not holds and "5.0e-01 nats" in lines[1]
    assert (
        "the first difference: loss of step 1: 2, expected 2.5: differs by 5.0e-01, bound 1e-04"
        in lines
    )
    for name, lines in (
        ("rewound", [{"step": 3, "loss": 9.0, "grad_norm": 1.0}, *lines_of(tmp_path / "a")]),
        ("damaged", [*lines_of(tmp_path / "a"), ["not a line of a run"]]),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text(
            "".join(json.dumps(line) + "\n" for line in lines)
        )
    assert compare_runs(tmp_path / "a", tmp_path / "rewound")[1], (
        "step 3 was logged before the run was rewound"
    )
    with pytest.raises(ConfigError, match=r"metrics\.jsonl, line 3: it is not a JSON object"):
        compare_runs(tmp_path / "a", tmp_path / "damaged")
    with pytest.raises(ConfigError, match=r"has no metrics\.jsonl"):
        compare_runs(tmp_path / "a", tmp_path / "nowhere")
