"""Programs that fail, each in a way of the field: `python failing.py NAME`, started by collect.py as its table says.

They are small, but what fails in them is the real thing: torch, gloo, the kernel, the Hub's client.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

PROGRAMS: dict[str, Callable[[], Any]] = {}


def program(function: Callable[[], Any]) -> Callable[[], Any]:
    PROGRAMS[function.__name__.replace("_", "-")] = function
    return function


def rank() -> int:
    return int(os.environ.get("RANK", 0))


def join(timeout_s: float = 20.0) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))


def train_steps(steps: int, module: nn.Module | None = None) -> None:
    model = nn.parallel.DistributedDataParallel(module or nn.Linear(4, 4))
    for _ in range(steps):
        model(torch.randn(2, 4)).sum().backward()


# ---- the network


@program
def joins() -> None:
    join(8)
    dist.all_reduce(torch.ones(1))


@program
def gloo_timeout() -> None:
    join(3)
    if rank() == 1:
        time.sleep(8)
    dist.all_reduce(torch.ones(3))


@program
def peer_gone() -> None:
    join()
    if rank() == 1:
        os._exit(0)
    for _ in range(100):
        dist.all_reduce(torch.ones(3))


@program
def uneven_epoch() -> None:
    join()
    train_steps(3 if rank() == 1 else 2)


@program
def join_exhausted() -> None:
    from torch.distributed.algorithms.join import Join

    join()
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
    with Join([model], throw_on_early_termination=True):
        for _ in range(3 if rank() == 1 else 2):
            model(torch.randn(2, 4)).sum().backward()


@program
def waits_for_server() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=4))


@program
def occupied_port() -> None:
    import socket

    with socket.socket() as holder:
        holder.bind(("", 0))
        holder.listen()
        os.environ.update(
            RANK="0",
            WORLD_SIZE="2",
            MASTER_ADDR="localhost",
            MASTER_PORT=str(holder.getsockname()[1]),
        )
        dist.init_process_group("gloo", timeout=timedelta(seconds=4))


@program
def no_variables() -> None:
    dist.init_process_group("gloo")


@program
def half_of_variables() -> None:
    dist.init_process_group("gloo")


@program
def not_initialized() -> None:
    dist.all_reduce(torch.ones(1))


@program
def initialized_twice() -> None:
    join()
    join()


@program
def backend_of_one_device() -> None:
    dist.init_process_group("cuda:gloo", timeout=timedelta(seconds=20))
    dist.all_reduce(torch.ones(1))


@program
def collective_mismatch() -> None:
    join()
    if rank() == 0:
        dist.all_reduce(torch.ones(3))
    else:
        dist.broadcast(torch.ones(3), 0)


@program
def shape_mismatch() -> None:
    join()
    dist.all_reduce(torch.ones(3 + rank()))


@program
def monitored_barrier() -> None:
    join()
    if rank() == 1:
        time.sleep(6)
    dist.monitored_barrier(timeout=timedelta(seconds=2))


# ---- the mesh


@program
def world_size_assertion() -> None:
    join()
    tp, dp, cp = 2, 2, 1
    assert dist.get_world_size() == tp * dp * cp, "World size must equal TP * DP * CP"


@program
def mesh_too_big() -> None:
    from torch.distributed.device_mesh import init_device_mesh

    join()
    init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


@program
def mixed_dtensor() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    join()
    mesh = init_device_mesh("cpu", (2,))
    weight = distribute_tensor(torch.randn(4, 4), mesh, [Shard(0)])
    torch.nn.functional.linear(torch.randn(2, 4), weight)


@program
def clip_over_meshes() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    join()
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    parameters = []
    for part in (mesh["tp"], mesh):
        parameter = nn.Parameter(
            distribute_tensor(torch.randn(4, 4), part, [Shard(0)] * part.ndim)
        )
        parameter.grad = parameter.detach().clone()
        parameters.append(parameter)
    torch.nn.utils.clip_grad_norm_(parameters, 1.0)


@program
def unused_parameters() -> None:
    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.spare = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, values: torch.Tensor) -> torch.Tensor:
            return self.used(values)

    join()
    train_steps(2, Branch())


@program
def other_model() -> None:
    join()
    train_steps(1, nn.Linear(4, 4, bias=rank() == 0))


@program
def ready_twice() -> None:
    from torch.utils.checkpoint import checkpoint

    join()
    layer = nn.Linear(4, 4)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(layer))
    values = torch.randn(2, 4, requires_grad=True)
    loss = (
        checkpoint(layer, values, use_reentrant=True).sum()
        + checkpoint(layer, values, use_reentrant=True).sum()
    )
    (loss + model(values).sum()).backward()


@program
def in_place() -> None:
    join()
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.Sigmoid()))
    out = model(torch.randn(3, 4))
    out += 1
    out.sum().backward()


@program
def frozen() -> None:
    join()
    nn.Linear(4, 4).requires_grad_(False)(torch.randn(2, 4)).sum().backward()


@program
def module_prefix() -> None:
    join()
    saved = nn.parallel.DistributedDataParallel(nn.Linear(4, 4)).state_dict()
    nn.Linear(4, 4).load_state_dict(saved)


@program
def other_sizes() -> None:
    nn.Linear(4, 4).load_state_dict(nn.Linear(8, 4).state_dict())


@program
def dtype_mismatch() -> None:
    nn.Linear(4, 4, dtype=torch.bfloat16)(torch.randn(2, 4))


@program
def index_out_of_range() -> None:
    nn.Embedding(10, 4)(torch.tensor([3, 11]))


# ---- memory and processes


@program
def cpu_memory() -> None:
    torch.empty(2**50)


@program
def killed_by_memory() -> None:
    join()
    hoard = []
    while rank() == 1:
        hoard.append(torch.ones(2**22))
    dist.barrier()


@program
def killed_in_spawn() -> None:
    torch.multiprocessing.spawn(kill_second, nprocs=2)


def kill_second(number: int) -> None:
    import signal

    if number == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(20)


class Large(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        if os.environ.get("KILL_WORKER") and index == 5:
            os.kill(os.getpid(), 9)
        return torch.zeros(2**20)


@program
def shared_memory() -> None:
    for _ in torch.utils.data.DataLoader(Large(), batch_size=4, num_workers=1):
        time.sleep(0.1)


@program
def killed_worker() -> None:
    os.environ["KILL_WORKER"] = "1"
    for _ in torch.utils.data.DataLoader(Large(), batch_size=4, num_workers=1):
        pass


@program
def open_files() -> None:
    kept = list(torch.utils.data.DataLoader(Large(), batch_size=1, num_workers=1))
    print(len(kept))


@program
def full_disk() -> None:
    torch.save(torch.zeros(2**22), "checkpoint.pt")


@program
def segmentation_fault() -> None:
    import ctypes

    join()
    if rank() == 1:
        ctypes.string_at(0)
    dist.barrier()


@program
def silent_exit() -> None:
    if rank() == 1:
        sys.exit(3)
    time.sleep(20)


@program
def own_error() -> None:
    join()
    if rank() == 1:
        raise KeyError("input_ids")
    train_steps(2)


@program
def stopped() -> None:
    join()
    time.sleep(60)


@program
def unguarded_spawn() -> None:
    import subprocess
    import tempfile

    with tempfile.NamedTemporaryFile("w", suffix=".py") as script:
        script.write("import torch.multiprocessing as mp\nmp.spawn(print, nprocs=2)\n")
        script.flush()
        sys.exit(subprocess.run([sys.executable, script.name]).returncode)


# ---- what is installed, and the Hub


@program
def no_compiler() -> None:
    torch.compile(lambda values: values.sin() + 1)(torch.randn(2, 4))


@program
def no_cuda() -> None:
    torch.zeros(1).cuda()


@program
def no_flash_attention() -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    AutoModelForCausalLM.from_config(
        config, attn_implementation="flash_attention_2", dtype=torch.bfloat16
    )


@program
def hub_offline() -> None:
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained("meta-llama/Llama-3.2-1B")


def _hub_that_answers(status: int, code: str, message: str) -> None:
    """A server with the Hub's answer; what fails is the Hub's own client."""
    import http.server
    import threading

    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            for name, value in (
                ("X-Error-Code", code),
                ("X-Error-Message", message),
                ("Content-Length", "0"),
            ):
                if value:
                    self.send_header(name, value)
            self.end_headers()

        do_HEAD = do_GET

        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("localhost", 0), Answer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    os.environ["HF_ENDPOINT"] = f"http://localhost:{server.server_port}"
    from transformers import AutoConfig

    AutoConfig.from_pretrained("meta-llama/Llama-3.2-1B")


@program
def hub_gated() -> None:
    _hub_that_answers(
        401, "GatedRepo", "Access to model meta-llama/Llama-3.2-1B is restricted."
    )


@program
def hub_not_found() -> None:
    _hub_that_answers(401, "RepoNotFound", "Repository not found")


@program
def hub_forbidden() -> None:
    _hub_that_answers(403, "", "")


@program
def hub_rate_limit() -> None:
    _hub_that_answers(429, "", "")


def _model_folder(config: str, weights: bytes = b"") -> str:
    import tempfile
    from pathlib import Path

    folder = Path(tempfile.mkdtemp(prefix="model-"))
    (folder / "config.json").write_text(config)
    if weights:
        (folder / "model.safetensors").write_bytes(weights)
    return str(folder)


@program
def unknown_architecture() -> None:
    from transformers import AutoConfig

    AutoConfig.from_pretrained(_model_folder('{"model_type": "qwen9"}'))


@program
def pointer_instead_of_weights() -> None:
    from transformers import AutoModelForCausalLM

    config = '{"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, '
    config += (
        '"intermediate_size": 32, "vocab_size": 64, "architectures": ["LlamaForCausalLM"]}'
    )
    pointer = (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:"
        + b"0" * 64
        + b"\nsize 1234567890\n"
    )
    AutoModelForCausalLM.from_pretrained(_model_folder(config, pointer))


if __name__ == "__main__":
    PROGRAMS[sys.argv[1]]()
