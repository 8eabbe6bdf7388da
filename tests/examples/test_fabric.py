"""The loop of Lightning Fabric as its page starts it, and why its loader is not passed through Fabric."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip(
    "lightning_fabric", reason="pip install lightning-fabric   (make test-examples does)"
)

from examples.test_loops import run
from examples.test_referee_programs import REFEREE, TORCHRUN
from examples.test_referee_programs import run as judge
from threefold.errors import ConfigError

pytestmark = pytest.mark.examples


def test_fabric_loop_resumes_on_other_ranks(tmp_path: Path) -> None:
    stopped = run(tmp_path, "fabric_loop.py", "--stop_after", "7", ranks=2)
    assert "stopped after 7 steps at 56 rows" in stopped
    resumed = run(tmp_path, "fabric_loop.py", "--rows", "2", ranks=4)
    assert "4 ranks, 69 steps: " in resumed
    alone = run(tmp_path, "fabric_loop.py", "--rows", "8", "--state", "runs/alone")
    losses = [
        float(re.findall(r"evaluation loss ([0-9.]+)", text)[-1]) for text in (resumed, alone)
    ]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


def test_the_referee_sees_the_model_below_fabrics_wrapper(tmp_path: Path) -> None:
    program = str(Path(__file__).parents[2] / "examples" / "fabric_loop.py")
    watched = judge(tmp_path, *REFEREE, "--", *TORCHRUN, program, "--stop_after", "4")
    assert (
        "each of 21 parameters has the gradient of the mean over all targets (240 in step 1)"
        in watched.stdout
    )
    assert (
        "of 2 data ranks in one of 4 steps (32 reads; DistributedDataParallel shows the data ranks)"
        in watched.stdout
    )


def test_fabrics_wrapper_would_read_the_first_epoch_again_and_is_refused() -> None:
    from lightning_fabric import Fabric
    from torch.utils.data import DataLoader

    import threefold

    class OneRank:
        dp_size, dp_rank = 1, 0

    def loader() -> threefold.data.sampling.distribute.DistributedLoader:
        made = threefold.distribute(
            DataLoader(range(12), batch_size=4, shuffle=True), OneRank(), seed=1
        )
        made.load_state_dict({**made.state_dict(), "epoch": 1, "position": 4})
        return made

    own = [row for batch in loader() for row in batch.tolist()]
    wrapped = Fabric(accelerator="cpu", devices=1).setup_dataloaders(
        loader(), use_distributed_sampler=False
    )
    assert len(own) == 8
    with pytest.raises(ConfigError, match="after a state of epoch 1 was loaded"):
        next(iter(wrapped))
