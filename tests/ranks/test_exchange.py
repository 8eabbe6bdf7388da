"""Plain values and errors, told over the rendezvous store."""

from __future__ import annotations

from typing import Any

from ranks.spawn import run_ranks


def _tell() -> list[Any]:
    from threefold.errors import ThreefoldError
    from threefold.mesh.mesh import init_mesh

    mesh = init_mesh(2, device="cpu")
    values = [
        mesh.share("a value", lambda: {"loss": 0.1, "step": (1, None)}),
        mesh.decide("parts", mesh.rank, lambda parts: parts),
        mesh.decide("parts", mesh.rank + 10, lambda parts: sum(parts)),
    ]
    for name in ("DataError", "CheckpointError", "RendezvousError", "RunError", "ConfigError"):
        try:
            mesh.share(name, lambda name=name: _fail(name))
        except ThreefoldError as error:
            values.append([type(error).__name__, str(error), error.exit_code])
    try:
        mesh.decide("not for users", None, lambda parts: 1 / 0)
    except (ThreefoldError, ZeroDivisionError) as error:
        values.append(str(error).partition("\n")[0])
    return values


def _fail(name: str) -> None:
    from threefold import errors
    from threefold.errors import Problem
    from threefold.mesh import rendezvous_errors

    family = getattr(errors, name, None) or getattr(rendezvous_errors, name)
    raise family.of([Problem("first", "a", "b"), Problem("second", "c", "d")])


def test_values_and_the_class_of_an_error_reach_every_rank() -> None:
    first, second = run_ranks(_tell, 2)
    assert first[:-1] == second[:-1]
    assert first[:3] == [{"loss": 0.1, "step": [1, None]}, [0, 1], 21]
    text = "first\n  expected: a\n  fix: b\n\nsecond\n  expected: c\n  fix: d"
    assert second[3:-1] == [
        ["DataError", text, 2],
        ["CheckpointError", text, 2],
        ["RendezvousError", text, 1],
        ["RunError", text, 1],
        ["ConfigError", text, 2],
    ]
    assert first[-1] == "division by zero"
    assert (
        second[-1]
        == "another rank failed in 'decide/not for users': ZeroDivisionError: division by zero"
    )


def _gathered_by_the_device() -> Any:
    """What a mesh gathers whose group has NCCL alone; the device of this process stands for the GPU that it has not."""
    import numpy as np
    import torch.distributed as dist
    from torch.overrides import TorchFunctionMode

    from threefold.mesh.mesh import init_mesh

    moved = []

    class HasGpu(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            kwargs = kwargs or {}
            moved.extend(
                func.__name__
                for each in (*args, *kwargs.values())
                if isinstance(each, str) and each == "cuda"
            )
            args = [
                "cpu" if isinstance(each, str) and each == "cuda" else each for each in args
            ]
            kwargs = {
                key: "cpu" if isinstance(each, str) and each == "cuda" else each
                for key, each in kwargs.items()
            }
            return func(*args, **kwargs)

    mesh = init_mesh(2, device="cpu")
    dist.get_backend = lambda group=None: "nccl"
    with HasGpu():
        gathered = mesh.gather(np.array([mesh.rank, 7], np.int64))
    return gathered.tolist(), moved


def test_group_that_cannot_send_from_the_cpu_gathers_by_the_device() -> None:
    for gathered, moved in run_ranks(_gathered_by_the_device, 2):
        assert gathered == [[0, 7], [1, 7]] and moved == ["empty", "to"]
