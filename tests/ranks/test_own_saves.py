"""Saves of a loop of one's own: stop on one mesh and go on on another, in the background, sealed, and as a folder."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from ranks import loops
from ranks.reference import TINY_LLAMA
from ranks.spawn import run_ranks
from threefold.check.compare import Bound, Comparison, compare_tensors

pytestmark = pytest.mark.ranks

MESHES: list[dict[str, int]] = [
    {},
    {"dp": 2, "dp_shard": 2},
    {"tp": 2},
    {"cp": 2},
    {"dp": 2, "cp": 2, "tp": 2},
]
STEPS, STOP = 6, 3


class Windows:
    """Rows whose number says what is in them."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, number: int) -> dict[str, Any]:
        import torch

        tokens = torch.randint(67, (17,), generator=torch.Generator().manual_seed(number))
        return {"input_ids": tokens[:-1], "labels": tokens[1:]}


def ranks_of(sizes: dict[str, int]) -> int:
    return math.prod(size for axis, size in sizes.items() if axis != "dp_shard")


def _loop(
    sizes: dict[str, int],
    folder: str,
    until: int,
    wait: bool,
    dropout: float = 0.0,
    dtype: str = "auto",
) -> tuple[int, list[float], Any]:
    """(steps done before, losses, extra) of a loop that goes on from the folder's newest checkpoint, and saves."""
    from torch.utils.data import DataLoader

    import threefold

    mesh = threefold.init_mesh(**sizes)
    config = {**TINY_LLAMA, "attention_dropout": dropout}
    model = threefold.load_model(config=config, mesh=mesh, admission="off", dtype=dtype)
    step = threefold.TrainStep(model, lr=1e-2)
    loader = threefold.distribute(
        DataLoader(Windows(), batch_size=8 // mesh.dp_size, shuffle=True, drop_last=True)
    )
    found = threefold.load(folder, model=model, optimizer=step, loader=loader)
    done = before = found.step if found is not None else 0
    losses: list[float] = []
    while done < until:
        for batch in loader:
            losses.append(step(batch).loss)
            done += 1
            if done % STOP == 0:
                step.lr = 5e-3
                said = {"best": min(losses)}
                threefold.save(
                    folder,
                    model=model,
                    step=done,
                    optimizer=step,
                    loader=loader,
                    extra=said,
                    wait=wait,
                    keep=2,
                )
            if done == until:
                break
    mesh.close()
    return before, losses, found.extra if found is not None else None


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return run_ranks(_loop, 1, {}, str(tmp_path_factory.mktemp("unbroken")), STEPS, True)[0][1]


# Both ways between one process and a full mesh are always run, the others with the long cases.
@pytest.mark.parametrize(
    "number", [0, *(pytest.param(n, marks=pytest.mark.long) for n in (1, 2, 3)), 4]
)
def test_a_loop_goes_on_on_another_mesh(
    number: int, tmp_path: Path, unbroken: list[float]
) -> None:
    first, then = MESHES[number], MESHES[(number + 1) % len(MESHES)]
    _, begun, nothing = run_ranks(
        _loop, ranks_of(first), first, str(tmp_path), STOP, bool(number % 2)
    )[0]
    before, rest, extra = run_ranks(_loop, ranks_of(then), then, str(tmp_path), STEPS, True)[0]
    assert (before, nothing, extra) == (STOP, None, {"best": min(begun)})
    assert [*begun, *rest] == pytest.approx(unbroken, abs=1e-4)


def test_a_loop_in_bfloat16_goes_on_with_the_kernels_of_another_mesh(tmp_path: Path) -> None:
    """One process updates weights and their copies in one pass; ranks have torch's fused AdamW."""
    curves: dict[str, list[float]] = {"whole": [], "parts": []}
    for name, sizes, until in (
        ("whole", {}, 3 * STOP),
        ("parts", {}, STOP),
        ("parts", {"dp": 2, "dp_shard": 2}, 2 * STOP),
        ("parts", {}, 3 * STOP),
    ):
        asked = (sizes, str(tmp_path / name), until, True, 0.0, "bfloat16")
        before, losses, _ = run_ranks(_loop, ranks_of(sizes), *asked)[0]
        assert before == len(curves[name])
        curves[name] += losses
    # Other roundings to bfloat16, carried on by updates.
    assert curves["parts"] == pytest.approx(curves["whole"], abs=2e-2)


def test_the_same_mesh_goes_on_bit_for_bit(tmp_path: Path) -> None:
    sizes, dropout = {"dp": 2, "tp": 2}, 0.3
    whole, parts = str(tmp_path / "whole"), str(tmp_path / "parts")
    unbroken = run_ranks(_loop, 4, sizes, whole, STEPS, False, dropout)[0][1]
    begun = run_ranks(_loop, 4, sizes, parts, STOP, False, dropout)[0][1]
    rest = run_ranks(_loop, 4, sizes, parts, STEPS, True, dropout)[0][1]
    assert [*begun, *rest] == unbroken


def _with_an_optimizer(sizes: dict[str, int], folder: str, until: int) -> Any:
    """Losses with an optimizer and a scheduler of one's own, of steps of which one is not a number on one rank."""
    import torch

    import threefold

    mesh = threefold.init_mesh(**sizes)
    model = threefold.load_model(config=TINY_LLAMA, mesh=mesh, admission="off", dtype="float32")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.8, 0.9))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    def loss(logits: Any, batch: Any) -> Any:
        total, count = loops.weighted(logits, batch)
        return (
            total * float("nan") if bad and mesh.dp_rank == mesh.cp_rank == 0 else total
        ), count

    step = threefold.TrainStep(model, optimizer, loss=loss)
    found = threefold.load(folder, model=model, optimizer=optimizer)
    if found is not None:
        scheduler.load_state_dict(found.extra["scheduler"])
    numbers = []
    for number in range(found.step if found else 0, until):
        bad = number == 1
        numbers.append(tuple(step(loops.share(loops.batches(6)[number], mesh))))
        scheduler.step()
    extra = {"scheduler": scheduler.state_dict()}
    threefold.save(folder, model=model, step=until, optimizer=optimizer, extra=extra)
    mesh.close()
    return numbers, [group["lr"] for group in optimizer.param_groups]


def test_an_optimizer_and_a_scheduler_of_ones_own_go_on(tmp_path: Path) -> None:
    sizes = {"dp": 2, "cp": 2, "tp": 2}
    alone, rates = run_ranks(_with_an_optimizer, 1, {}, str(tmp_path / "alone"), 5)[0]
    begun, _ = run_ranks(_with_an_optimizer, 8, sizes, str(tmp_path / "split"), 3)[0]
    rest, rates_then = run_ranks(_with_an_optimizer, 1, {}, str(tmp_path / "split"), 5)[0]
    assert all(map(math.isnan, begun[1])) and all(map(math.isnan, alone[1]))
    for a, b in zip([*begun[:1], *begun[2:], *rest], [*alone[:1], *alone[2:]], strict=True):
        assert a == pytest.approx(b, rel=1e-3)
    assert rates_then == rates


def _beside_adapters(sizes: dict[str, int], folder: str, until: int) -> Any:
    """A norm after steps that train adapters, and the norm too in the second; each is saved."""
    import torch

    import threefold

    mesh = threefold.init_mesh(**sizes)
    model = threefold.load_model(
        config=TINY_LLAMA, mesh=mesh, admission="off", lora={"r": 2}, dtype="float32"
    )
    norm = next(each for name, each in model.named_parameters() if name == "model.norm.weight")
    # It keeps no state of what it trains.
    step = threefold.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1))
    found = threefold.load(folder, model=model, optimizer=step)
    for number in range(found.step if found else 0, until):
        batch = loops.share(loops.batches(1)[0], mesh)
        batch.pop("weights")
        norm.requires_grad_(number == 1)
        step(batch)
        threefold.save(folder, model=model, step=number + 1, optimizer=step, wait=False)
    held = loops.whole(norm).numpy()
    mesh.close()
    return held


def test_weights_trained_beside_adapters_are_saved_when_they_are_frozen_again(
    tmp_path: Path,
) -> None:
    sizes = {"dp": 2, "dp_shard": 2}
    first, *_ = run_ranks(_beside_adapters, 2, sizes, str(tmp_path), 3)
    assert (first != 1).any()
    for until, there in ((4, {}), (5, sizes), (5, {"tp": 2})):
        ranks = run_ranks(_beside_adapters, ranks_of(there), there, str(tmp_path), until)
        assert all((each == first).all() for each in ranks)


def _begun_beside_adapters(
    sizes: dict[str, int], folder: str, until: int
) -> tuple[list[Any], str]:
    """The numbers of steps of which the second is the first that trains the norm, and what going back says."""
    import torch

    import threefold

    mesh = threefold.init_mesh(**sizes)
    model = threefold.load_model(
        config=TINY_LLAMA, mesh=mesh, admission="off", lora={"r": 2}, dtype="float32"
    )
    norm = next(each for name, each in model.named_parameters() if name == "model.norm.weight")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step = threefold.TrainStep(model, optimizer)
    norm.requires_grad_(until > 1)
    found = threefold.load(folder, model=model, optimizer=step)
    numbers = []
    for number in range(found.step if found else 0, until):
        norm.requires_grad_(number > 0)
        batch = loops.share(loops.batches(until)[number], mesh)
        batch.pop("weights")
        numbers.append(tuple(step(batch)))
    if until == 1:
        threefold.save(folder, model=model, step=until, optimizer=step)
        return numbers, ""
    norm.requires_grad_(False)
    try:
        threefold.load(folder, model=model, optimizer=step)
        return numbers, ""
    except threefold.errors.CheckpointError as error:
        return numbers, error.problems[0].what
    finally:
        mesh.close()


def test_base_weights_begin_when_they_are_trained_after_a_save_of_adapters(
    tmp_path: Path,
) -> None:
    sizes = {"dp": 2, "dp_shard": 2}
    unbroken, said = run_ranks(_begun_beside_adapters, 1, {}, str(tmp_path / "whole"), 3)[0]
    assert said == ""  # nothing was saved
    begun, _ = run_ranks(_begun_beside_adapters, 2, sizes, str(tmp_path), 1)[0]
    for there in (sizes, {}):
        ended = run_ranks(_begun_beside_adapters, ranks_of(there), there, str(tmp_path), 3)
        for rest, said in ended:
            for numbers, expected in zip(begun + rest, unbroken, strict=True):
                assert numbers == pytest.approx(expected, rel=1e-4)
            # The base is no longer in memory.
            assert said.startswith("the checkpoint has nothing for model.model.norm.weight")


def _unfreezing(sizes: dict[str, int], folder: str, until: int) -> list[tuple[float, float]]:
    """The numbers of steps of which the third is the first that trains layer 0; it is saved after the last."""
    import torch

    import threefold

    mesh = threefold.init_mesh(**sizes)
    model = threefold.load_model(config=TINY_LLAMA, mesh=mesh, admission="off")
    step = threefold.TrainStep(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    found = threefold.load(folder, model=model, optimizer=step)
    numbers = []
    for number in range(found.step if found else 0, until):
        batch = loops.share(loops.batches(until)[number], mesh)
        batch.pop("weights")
        for name, each in model.named_parameters():
            each.requires_grad_(number >= 2 or "layers.0." not in name)
        numbers.append(tuple(step(batch)))
    threefold.save(folder, model=model, step=until, optimizer=step)
    mesh.close()
    return numbers


def test_moments_that_had_not_begun_when_it_was_saved_begin_when_it_goes_on(
    tmp_path: Path,
) -> None:
    sizes = {"dp": 2, "dp_shard": 2}
    unbroken = run_ranks(_unfreezing, 2, sizes, str(tmp_path / "unbroken"), 5)[0]
    begun = run_ranks(_unfreezing, 2, sizes, str(tmp_path / "begun"), 2)[0]
    shutil.copytree(tmp_path / "begun", tmp_path / "alone")
    assert begun + run_ranks(_unfreezing, 2, sizes, str(tmp_path / "begun"), 5)[0] == unbroken
    for numbers, expected in zip(
        run_ranks(_unfreezing, 1, {}, str(tmp_path / "alone"), 5)[0], unbroken[2:], strict=True
    ):
        assert numbers == pytest.approx(expected, rel=1e-4)


def _history(folder: str) -> list[Any]:
    """What was saved beside the state after two steps; the loop goes on to change it while it is being written."""
    import threefold

    mesh = threefold.init_mesh()
    model = threefold.load_model(config=TINY_LLAMA, mesh=mesh, admission="off")
    history: list[int] = []
    for step in (1, 2):
        history.append(step)
        extra = {"best": {"of": history}}
        saving = threefold.save(folder, model=model, step=step, extra=extra, wait=False)
        history.append(-step)
        saving.wait()
    path = f"{folder}/checkpoints/step-0000000"
    found = [threefold.load(f"{path}{step}", model=model) for step in (1, 2)]
    mesh.close()
    return [each.extra["best"]["of"] for each in found if each is not None]


def test_values_saved_in_the_background_are_those_of_their_step(tmp_path: Path) -> None:
    assert run_ranks(_history, 1, str(tmp_path)) == [[[1], [1, -1, 2]]]


def _groups_of_numbers(folder: str) -> list[Any]:
    """The groups of an optimizer whose numbers numpy and torch have computed, before a save and after its load."""
    import numpy as np
    import torch

    import threefold

    mesh = threefold.init_mesh()
    found = []
    for saves in (True, False):
        model = threefold.load_model(config=TINY_LLAMA, mesh=mesh, admission="off")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
        if saves:
            betas = np.float32(0.5), torch.tensor(0.75)
            optimizer.param_groups[0] |= {"lr": np.float32(0.25), "betas": betas}
            threefold.save(folder, model=model, step=1, optimizer=optimizer)
        else:
            threefold.load(folder, model=model, optimizer=optimizer)
        found.append([optimizer.param_groups[0][name] for name in ("lr", "betas")])
    mesh.close()
    return found


def test_rates_that_are_numbers_of_numpy_are_kept(tmp_path: Path) -> None:
    (saved, loaded), *_ = run_ranks(_groups_of_numbers, 1, str(tmp_path))
    assert saved == loaded == [0.25, (0.5, 0.75)]


def _folder_and_text(sizes: dict[str, int], folder: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    import threefold

    mesh = threefold.init_mesh(**sizes)
    found = []
    for name, lora in (("plain", None), ("adapters", {"r": 2, "target_modules": "all-linear"})):
        model = threefold.load_model(config=TINY_LLAMA, mesh=mesh, admission="off", lora=lora)
        step = threefold.TrainStep(model, lr=1e-2)
        batch = loops.share(loops.batches(1)[0], mesh)
        batch.pop("weights")
        step(batch)
        to = Path(folder) / name
        done = model.save_pretrained(to)
        assert done.verified == "reloaded: equal logits", done
        prompt = torch.arange(4)[None]
        before = torch.get_rng_state()
        written = model.generate(prompt, max_new_tokens=5, do_sample=True, pad_token_id=0)
        assert torch.equal(torch.get_rng_state(), before)
        with torch.no_grad():
            logits = model(input_ids=torch.arange(16)[None])
            reloaded = AutoModelForCausalLM.from_pretrained(to)(
                input_ids=torch.arange(16)[None]
            ).logits
        near = Bound("logits", 1e-4, "roundings of another kernel", relative=False)
        found.append(
            (
                written.tolist(),
                Comparison(compare_tensors(near, {"": logits}, {"": reloaded})).holds,
            )
        )
        assert [*model.state_dict()] == [name for name, _ in model.named_parameters()] or lora
    mesh.close()
    return found


def test_a_model_leaves_any_mesh_as_a_folder_and_as_text(tmp_path: Path) -> None:
    alone = run_ranks(_folder_and_text, 1, {}, str(tmp_path / "alone"))[0]
    split = run_ranks(_folder_and_text, 8, {"dp": 2, "cp": 2, "tp": 2}, str(tmp_path / "split"))
    assert all(each == split[0] for each in split), "ranks disagree"
    for (text, near), (expected, _) in zip(split[0], alone, strict=True):
        assert text == expected
        assert near
    assert sorted(path.name for path in (tmp_path / "split").iterdir()) == ["adapters", "plain"]
