"""The programs of examples/common: what each prints in its usual form, and in the one that mends it."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from launchers.processes import free_port
from ranks import warm
from ranks.runs import command, environment, script, torchrun

COMMON = Path(__file__).parents[2] / "examples" / "common"
BIN = Path(sys.executable).parent
pytestmark = pytest.mark.examples


def run(folder: Path, example: str, *arguments: str, ranks: int = 0, **variables: str) -> str:
    """What a program prints under torchrun, or with `ranks` 0 in plain Python; both forked with torch imported."""
    path = str(COMMON / example)
    ended = (
        torchrun(folder, ranks, path, *arguments, **variables)
        if ranks
        else script(folder, path, *arguments)
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def test_a_sampler_on_the_dp_part_of_a_device_mesh_and_without_it(tmp_path: Path) -> None:
    assert "roneneldan/TinyStories of 1001 stories, HuggingFaceTB/SmolLM2-1.7B of " in run(
        tmp_path, "stand_ins.py"
    )
    assert run(tmp_path, "device_mesh_sampler.py", ranks=8).splitlines() == [
        "torch's DistributedSampler(rows): tp and cp ranks read other rows; 252 read, 0 of them twice",
        "torch's, of the dp part: tp and cp ranks read the same rows; 1001 read, 1 of them twice",
        "threefold.DistributedSampler(rows, mesh=mesh): tp and cp ranks read the same rows; 1001 read, 0 of them twice",
    ]


def test_stories_are_cut_at_the_length_and_keep_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path, "stand_ins.py")
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from device_mesh_sampler import stories; "
        "lengths = [len(row['input_ids']) for row in stories()]; print(max(lengths), len(set(lengths)))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code, str(COMMON)],
        cwd=tmp_path,
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert ended.returncode == 0, ended.stderr
    longest, different = map(int, ended.stdout.split())
    assert longest == 1024 and different > 30


@pytest.fixture(scope="module")
def loaders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What the program of plain loaders prints."""
    return run(tmp_path_factory.mktemp("loaders"), "plain_loader.py", ranks=2).splitlines()


def test_a_plain_loader_under_ddp_reads_every_row_on_every_rank(loaders: list[str]) -> None:
    assert loaders[:2] == [
        f"{form}: 256 of 256 rows, 256 of them twice; 32 rows in the first step"
        for form in ("without shuffling", "shuffled, all ranks with one seed")
    ]
    assert loaders[2].startswith(
        "shuffled, each rank with its own seed: 256 of 256 rows, 256 of them twice; "
    )
    assert (
        loaders[3]
        == "threefold.distribute(loader): 256 of 256 rows, 0 of them twice; 32 rows in the first step"
    )


def test_weighted_classes_are_drawn_once_by_all_ranks_together(loaders: list[str]) -> None:
    form = re.compile(r"(.+): (\d+)% of the (\d+) rows read are rare; (the same|other) rows on")
    printed = [form.match(line) for line in loaders[4:]]
    shares = {
        match[1]: (int(match[2]), int(match[3]), match[4])
        for match in printed
        if match is not None
    }
    assert shares["weighted classes"][1:] == (512, "the same")
    # One row in 16: the sampler that is set in its place draws no class more often.
    assert shares["weighted classes, then DistributedSampler"] == (6, 256, "other")
    share, rows, ranks = shares["threefold.distribute(weighted classes)"]
    assert 40 <= share <= 60 and (rows, ranks) == (256, "other")


def test_a_bert_job_has_one_gradient_on_any_ranks_and_transformers_a_multiple(
    tmp_path: Path,
) -> None:
    measured = {}
    for form, arguments in (("ours", ()), ("plain", ("--plain",))):
        for ranks in (0, 2):
            printed = run(tmp_path, "bert_sagemaker.py", *arguments, ranks=ranks)
            norm = re.search(
                r"gradient norm of the first step ([\d.]+), on (\d) ranks", printed
            )
            loss = re.search(r"evaluation loss ([\d.]+), accuracy", printed)
            assert norm is not None and loss is not None and int(norm[2]) == max(ranks, 1), (
                printed
            )
            measured[form, ranks] = (float(norm[1]), float(loss[1]))
    assert measured["ours", 2] == pytest.approx(measured["ours", 0], rel=2e-3)
    assert [
        two / one for one, two in zip(measured["plain", 0], measured["plain", 2], strict=True)
    ] == pytest.approx([2, 2], rel=2e-2)
    assert (tmp_path / "runs/bert/model/model.safetensors").is_file()


def test_tensor_parallelism_of_transformers_and_what_its_usual_form_does(
    tmp_path: Path,
) -> None:
    printed = run(tmp_path, "tensor_parallel.py", ranks=4)
    held = re.findall(
        r"^(.+): (\d+) of 1,024 numbers on a rank; loss ([\d.]+), gradient norm (.+)$",
        printed,
        re.M,
    )
    assert [name for name, *_ in held] == [
        "DistributedConfig(tp_size=2, fsdp_size=2)",
        "fully_shard(model)",
        "FSDP, FULL_SHARD",
        "FSDP, NO_SHARD",
        "DistributedDataParallel(model)",
    ]
    numbers, losses, norms = ({name: row[index] for name, *row in held} for index in range(3))
    assert [numbers[name] for name in numbers if name != "FSDP, FULL_SHARD"] == [
        "256",
        "256",
        "1024",
        "1024",
    ]
    mesh = re.search(
        r"^threefold.TrainStep on dp 2 x tp 2: loss ([\d.]+), gradient norm ([\d.]+)$",
        printed,
        re.M,
    )
    assert mesh is not None
    assert [float(loss) for loss in losses.values()] == pytest.approx(
        [float(mesh[1])] * 5, abs=2e-5
    )
    whole = [
        norms[name]
        for name in ("fully_shard(model)", "FSDP, NO_SHARD", "DistributedDataParallel(model)")
    ]
    assert [float(norm) for norm in whole] == pytest.approx([float(mesh[2])] * 3, abs=2e-4)
    # Each rank takes the share that it holds for the whole gradient; together, they are it.
    shares = [float(norm) for norm in norms["FSDP, FULL_SHARD"].split(", ")]
    assert len(shares) == 4 and sum(share**2 for share in shares) == pytest.approx(
        float(mesh[2]) ** 2, rel=1e-3
    )
    refused = norms["DistributedConfig(tp_size=2, fsdp_size=2)"]
    assert refused == "RuntimeError: All operands in aten.stack.default must have the same mesh"
    plain = run(tmp_path, "tensor_parallel.py", "--plain", ranks=4)
    assert "RuntimeError: shape '[4, 16, -1, 8]' is invalid for input of size 256" in plain


def test_a_sequence_split_by_hand_has_another_loss(tmp_path: Path) -> None:
    printed = run(tmp_path, "context_parallel.py", ranks=2)
    losses = {
        name: float(loss) for name, loss in re.findall(r"^(.+): loss ([\d.]+)$", printed, re.M)
    }
    assert losses["threefold.load_model on cp=2"] == pytest.approx(
        losses["one process"], abs=2e-5
    )
    assert losses["input_ids.chunk(2, dim=1)"] > losses["one process"] + 1
    # On a CPU; where torch has learnt it, its loss must be that of one process.
    refused = "torch's context_parallel: NotImplementedError: Operator aten._scaled_dot_product_flash_attention_for_cpu"
    assert refused in printed


def test_checkpoints_of_torch_become_a_run_and_a_run_is_read_by_torch(tmp_path: Path) -> None:
    assert "threefold" not in re.sub(
        r'""".*?"""', "", (COMMON / "checkpoints.py").read_text(), flags=re.DOTALL
    )

    def printed(action: str, path: str) -> str:
        return run(tmp_path, "checkpoints.py", action, path, ranks=2).strip()

    wrote = printed("write", "theirs")
    loss = wrote.removeprefix("theirs: ").removesuffix(" after three steps")
    assert re.fullmatch(r"loss [\d.]+", loss), wrote
    usual = printed("read", "theirs/rank0.pt")
    assert (
        usual.startswith("rank0.pt: RuntimeError: ")
        and "got mixed torch.Tensor and DTensor" in usual
    )
    assert printed("read", "theirs/dcp") == f"dcp: {loss}"

    (tmp_path / "book.txt").write_text("".join(f"{number}\n" for number in range(1, 3001)))
    keys = [
        "--data.source",
        "book.txt",
        "--data.tokenizer",
        "bytes",
        "--data.seq_len",
        "32",
        "--train.steps",
        "6",
    ]
    keys += [
        "--train.global_batch",
        "8",
        "--optimizer.schedule",
        "constant",
        "--log.sample_tokens",
        "0",
    ]
    imported = command(
        tmp_path, "import", "theirs/dcp", "theirs/config.yaml", "--to", "runs/imported", *keys
    )
    assert imported.returncode == 0, imported.stderr
    assert "step 3, 21 weights and their moments" in imported.stdout
    assert printed("read", "runs/imported") == f"imported: {loss}"
    exported = command(tmp_path, "export", "runs/imported", "--to", "model")
    assert exported.returncode == 0 and "reloaded: equal logits" in exported.stdout, (
        exported.stderr
    )
    assert printed("read", "model") == f"model: {loss}"
    resumed = command(tmp_path, "resume", "runs/imported")
    assert resumed.returncode == 0 and "done: 6 steps" in resumed.stdout, resumed.stderr


LOSS = re.compile(r"loss of step 1: ([\d.]+)$", re.M)


def two_agents(folder: Path, *arguments: str) -> str:
    """Two agents of torchrun, as of two nodes, on this machine's loopback; two ranks each."""
    place = [
        "--nnodes",
        "2",
        "--nproc-per-node",
        "2",
        "--master-addr",
        "127.0.0.1",
        "--master-port",
        str(free_port()),
    ]
    place += ["--start-method", "forkserver"]
    program = ["--run-path", str(COMMON / "launches.py"), *arguments]
    variables = {**environment(folder), "OMP_NUM_THREADS": "1"}
    with contextlib.ExitStack() as running:
        agents = [
            running.enter_context(
                warm.Running(warm.torchrun, folder, [*place, *node, *program], variables)
            )
            for node in (["--node-rank", "0"], ["--node-rank", "1"])
        ]
        # The first keeps the store and waits for the second, whether that fails or not.
        for agent in reversed(agents):
            code = agent.wait(240)
            assert code == 0, agent.err()[-4000:]
        return "".join(agent.out() for agent in agents)


@pytest.mark.timing
def test_every_launch_has_the_mesh_of_the_variables_and_one_loss(tmp_path: Path) -> None:
    sizes = {"DP_SIZE": "2", "CP_SIZE": "2", "TP_SIZE": "2"}
    printed = {
        "dp=4 x cp=1 x tp=1": run(tmp_path, "launches.py", "runs/four", ranks=4),
        "dp=2 x cp=1 x tp=2": run(
            tmp_path, "launches.py", "runs/tp", ranks=4, DP_SIZE="2", TP_SIZE="2"
        ),
        "dp=2 x cp=2 x tp=2": run(tmp_path, "launches.py", "runs/eight", ranks=8, **sizes),
        "dp=4 x cp=1 x tp=1 ": two_agents(tmp_path, "runs/two-nodes"),
    }
    for mesh, line in printed.items():
        assert line.startswith(f"{mesh.strip()}; 1 writer(s), loss of step 1: "), line
    losses = [float(LOSS.findall(line)[0]) for line in printed.values()]
    assert losses == pytest.approx([losses[0]] * 4, abs=2e-4)


def test_sizes_that_are_not_all_of_the_ranks_are_refused_by_name(tmp_path: Path) -> None:
    ended = torchrun(tmp_path, 4, str(COMMON / "launches.py"), "runs/refused", TP_SIZE="2")
    assert ended.returncode != 0
    assert (
        "mesh.dp x mesh.cp x mesh.tp = 1 x 1 x 2 = 2, but 4 ranks were started" in ended.stderr
    )
    assert not (tmp_path / "runs").exists()


@pytest.mark.timing
def test_a_tracker_on_each_node_has_two_curves_under_one_name(tmp_path: Path) -> None:
    printed = two_agents(tmp_path, "runs/plain", "--plain")
    curves = re.search(
        r"^DDP on 4 ranks; 2 writer\(s\), loss of step 1: ([\d.]+), ([\d.]+)$", printed, re.M
    )
    assert curves is not None and curves[1] != curves[2], printed


def test_accelerate_on_a_cpu_starts_one_process_and_the_command_two(tmp_path: Path) -> None:
    def accelerate(*arguments: str) -> str:
        ended = subprocess.run(
            [str(BIN / "accelerate"), "launch", *arguments],
            cwd=tmp_path,
            env={**environment(tmp_path), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout

    launches = str(COMMON / "launches.py")
    assert accelerate("--cpu", "--num_processes=2", launches, "runs/one").startswith(
        "dp=1 x cp=1 x tp=1; 1 writer(s)"
    )
    place = (
        "--num_processes=2",
        "--main_process_port",
        str(free_port()),
        "--use_fsdp",
        "--fsdp_version=2",
    )
    assert accelerate(*place, launches, "runs/two").startswith(
        "dp=2 x cp=1 x tp=1; 1 writer(s)"
    )
    (tmp_path / "book.txt").write_text(
        "".join(f"line {number} of a book\n" for number in range(2000))
    )
    keys = (
        "--mesh.dp",
        "2",
        "--data.source",
        "book.txt",
        "--train.steps",
        "2",
        "--log.dir",
        "runs/command",
    )
    assert "mesh   dp=2 x cp=1 x tp=1 on 2 ranks (cpu)" in accelerate(
        "--cpu", "--num_processes=2", "-m", "threefold", "train", *keys
    )
