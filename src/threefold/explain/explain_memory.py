"""Errors of memory and of processes: what was used up or killed, how ranks are started, how they end."""

from __future__ import annotations

from threefold.explain import facts
from threefold.explain.known import KnownError, Tier

MEMORY = (
    KnownError(
        "out-of-memory",
        "a GPU's memory is used up",
        (
            r"CUDA out of memory",
            r"torch\.(?:cuda\.)?OutOfMemoryError",
            r"HIP out of memory",
            r"CUDA error: out of memory",
        ),
        "Weights, gradients, optimizer state, activations and the allocator's reserve together are more than the GPU "
        "has. The line says what was asked for and what was free.",
        (
            "pieces: PYTORCH_ALLOC_CONF=expandable_segments:True; helps where much is reserved but unallocated",
            "halve the micro-batch (--train.micro_batch), which halves the activations; the global batch may stay",
            "recompute activations: --train.activation_checkpointing selective, then full; up to a third more time",
            "share the state over the data ranks: --mesh.dp_shard = dp (FSDP); weights, gradients and AdamW's state in "
            "float32 are 16 bytes a parameter, divided by that number",
            "long rows: --mesh.cp 2 halves the activations of a row, and --mesh.tp 2 the layers too; or a shorter "
            "--data.seq_len",
            "not the model's: nvidia-smi shows other processes on the GPU",
        ),
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 22.00 MiB. GPU 0 has a total capacity of "
        "23.65 GiB of which 11.06 MiB is free.",
        facts=facts.gpu_memory,
    ),
    KnownError(
        "host-memory",
        "the machine's memory is used up",
        (
            r"DefaultCPUAllocator: (?:can't allocate|not enough) memory",
            r"Cannot allocate memory",
            r"std::bad_alloc",
            r"\bMemoryError\b",
        ),
        "An allocation on the CPU was refused: a tensor of a wrong size, every rank of a machine loading the whole "
        "model at once, or a limit of the container.",
        (
            "look at the size in the line: an absurd one is a wrong shape, not too little memory",
            "loading: build on the meta device, read shards (threefold train does); fewer ranks a machine",
            "fewer loader workers: each has a copy of what the dataset holds in Python objects",
            "a container's limit: cat /sys/fs/cgroup/memory.max",
        ),
        "RuntimeError: [enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory",
        facts=facts.ranks,
    ),
    KnownError(
        "shared-memory",
        "the shared memory of the machine (/dev/shm) is full",
        (
            r"is killed by signal: Bus error",
            r"dataloader's workers are out of shared memory",
            r"unable to (?:write to|allocate|resize) (?:file|shared memory).*(?:/torch_|shm)",
            r"No space left on device.*/dev/shm|/dev/shm.*No space left on device",
            r"SIGBUS",
        ),
        "Loader workers hand batches over in /dev/shm, and so do NCCL and some checkpoint savers. A container has 64 "
        "MiB of it unless told otherwise; writing past its end is a bus error.",
        (
            "docker run --shm-size=8g, or --ipc=host; Kubernetes: an emptyDir with medium: Memory at /dev/shm",
            "less of it: fewer --data.num_workers, a smaller prefetch_factor",
            "without it: torch.multiprocessing.set_sharing_strategy('file_system') uses files instead of descriptors",
            "what fills it: df -h /dev/shm; ls -l /dev/shm; files of dead runs may be removed",
        ),
        "RuntimeError: DataLoader worker (pid 4243) is killed by signal: Bus error. It is possible that dataloader's "
        "workers are out of shared memory.",
    ),
    KnownError(
        "loader-worker",
        "a loader's worker has ended",
        (r"DataLoader worker \(pid(?:\(s\))? [\d, ]+\) (?:exited unexpectedly|is killed by signal)",),
        "A process that reads data was killed, mostly by the kernel for want of memory, or crashed in a library.",
        (
            "dmesg on that host, for `Out of memory`: fewer workers, or less kept in the dataset's Python objects",
            "num_workers=0 once: an error in the dataset then shows with its own traceback",
        ),
        "RuntimeError: DataLoader worker (pid 4243) is killed by signal: Killed.",
        facts=facts.ranks,
    ),
    KnownError(
        "killed",
        "a process was killed (SIGKILL)",
        (
            r"Signal 9 \(SIGKILL\)",
            r"exitcode *: -9\b",
            r"terminated with signal SIGKILL",
            r"died with <Signals\.SIGKILL",
            r"oom[-_]kill",
            r"Out of memory: Killed process",
            r"returned non-zero exit status 137",
            r"OOMKilled",
        ),
        "SIGKILL comes from outside and leaves no traceback. It is mostly the kernel, because the machine or the "
        "container was out of memory; else a scheduler at its time limit, or a person.",
        (
            "dmesg -T | grep -i 'killed process' on that host; in Kubernetes: kubectl describe pod (OOMKilled)",
            "less host memory: fewer loader workers, fewer ranks a machine, no copy of the whole model on each rank",
            "a larger limit: --mem of Slurm, memory of the pod",
            "not memory: look at the job's time limit, and whether the host was preempted",
            "threefold train goes on from its newest checkpoint; --max-restarts N does so by itself",
        ),
        "Signal 9 (SIGKILL) received by PID 4243",
        Tier.SYMPTOM,
        facts.first_failure,
    ),
    KnownError(
        "segmentation-fault",
        "a process crashed in native code",
        (
            r"Signal 11 \(SIGSEGV\)",
            r"exitcode *: -11\b",
            r"[Ss]egmentation fault",
            r"Signal 6 \(SIGABRT\)",
            r"terminated with signal SIG(?:SEGV|ABRT)",
        ),
        "An extension crashed: one that was built for another torch or CUDA, two copies of one library in a process, "
        "or broken memory. There is no Python traceback of it.",
        (
            "PYTHONFAULTHANDLER=1 shows where Python was",
            "build extensions again for this torch: flash-attn, apex, deepspeed, bitsandbytes",
            "a clean environment: conda's and pip's copies of one library do not mix",
        ),
        "Signal 11 (SIGSEGV) received by PID 4243",
        Tier.SYMPTOM,
        facts.first_failure,
    ),
    KnownError(
        "stopped",
        "the run was told to stop (SIGTERM or SIGINT)",
        (
            r"SignalException: Process \d+ got signal: (?:15|2|1)\b",
            r"Received (?:Signals\.)?SIG(?:TERM|INT|HUP) death signal",
            r"DUE TO TIME LIMIT|DUE to PREEMPTION|CANCELLED AT",
        ),
        "Somebody asked the launcher to end: the scheduler at a time limit or a preemption, a closed terminal, "
        "or a person. It is no fault of the program.",
        (
            "the scheduler's record says why: sacct -j JOB, kubectl describe pod",
            "a closed terminal: start in tmux, or with nohup",
            "threefold train saves on SIGTERM and leaves with 75, which a scheduler may requeue",
        ),
        "torch.distributed.elastic.multiprocessing.api.SignalException: Process 4243 got signal: 15",
        Tier.SYMPTOM,
    ),
    KnownError(
        "open-files",
        "too many files are open",
        (r"Too many open files", r"received 0 items of ancdata"),
        "Each tensor that a loader's worker hands over keeps a file descriptor open, and so does every connection: "
        "many ranks, many workers, or a list that collects batches.",
        (
            "raise the limit: ulimit -n 65536 (docker: --ulimit nofile=65536)",
            "do not keep batches; copy what you keep: tensor.clone()",
            "or torch.multiprocessing.set_sharing_strategy('file_system')",
        ),
        "OSError: [Errno 24] Too many open files",
        facts=facts.ranks,
    ),
    KnownError(
        "disk-full",
        "the disk is full",
        (
            r"No space left on device",
            r"Disk quota exceeded",
            r"PytorchStreamWriter failed writing file",
            r"unexpected pos \d+ vs \d+",
        ),
        "A checkpoint, a cache or a log could not be written.",
        (
            "df -h and df -i of the folder that the line names, and of $HF_HOME, $TMPDIR and ~/.cache",
            "keep fewer checkpoints: --checkpoint.keep 2; AdamW's state makes one three times the float32 weights",
            "what was being written may be incomplete; threefold skips checkpoints that are",
        ),
        "RuntimeError: PytorchStreamWriter failed writing file data/0: file write failed",
        facts=facts.ranks,
    ),
    KnownError(
        "missing-variables",
        "a rank was started without a launcher",
        (
            r"environment variable \w+ expected, but not set",
            r"RANK set, but .* not",
        ),
        "init_process_group reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT from the environment, and a launcher "
        "sets them.",
        (
            "torchrun --nproc-per-node=N script.py instead of python script.py",
            "under Slurm without torchrun: set all four from SLURM_PROCID, SLURM_NTASKS and the first host",
            "in a notebook or for a test of one process: os.environ.update(RANK='0', WORLD_SIZE='1', "
            "MASTER_ADDR='localhost', MASTER_PORT='29500')",
        ),
        "ValueError: Error initializing torch.distributed using env:// rendezvous: environment variable RANK expected, "
        "but not set",
    ),
    KnownError(
        "not-initialized",
        "there is no process group",
        (r"Default process group has not been initialized",),
        "A collective, a DeviceMesh or a distributed sampler was used before init_process_group, after "
        "destroy_process_group, or in a process that is no rank, such as a loader's worker.",
        (
            "call dist.init_process_group(...) first; threefold.init_mesh() does, and works in a single process too",
            "in code that also runs alone: if dist.is_initialized(): ...",
            "in a dataset or a collate function: pass rank and size in; workers are no ranks",
        ),
        "ValueError: Default process group has not been initialized, please make sure to call init_process_group.",
    ),
    KnownError(
        "initialized-twice",
        "the process group was made twice",
        (r"trying to initialize the default process group twice",),
        "Two libraries, or two parts of the program, each called init_process_group.",
        (
            "call it once, or guard it: if not dist.is_initialized(): ...",
            "accelerate, Lightning and Trainer make it themselves; threefold.init_mesh() uses one that exists",
        ),
        "ValueError: trying to initialize the default process group twice!",
    ),
    KnownError(
        "unguarded-main",
        "a script starts itself again in its own child processes",
        (r"An attempt has been made to start a new process before the",),
        "With the start methods spawn and forkserver each child imports the script; what stands at its top level then "
        "runs again in every child.",
        ('put what starts processes below `if __name__ == "__main__":`', "or start it with torchrun"),
        "RuntimeError: An attempt has been made to start a new process before the current process has finished its "
        "bootstrapping phase.",
    ),
    KnownError(
        "child-failed",
        "a rank ended without saying why",
        (r"ChildFailedError", r"exitcode *: \d+", r"returned non-zero exit status \d+"),
        "The launcher reports that a rank ended with an error code, and no rank's own error is in this log: its output "
        "went elsewhere, or it left with sys.exit.",
        (
            "look at the first failure that the launcher names; its output: torchrun --tee 3 --log-dir logs ...",
            "put @torch.distributed.elastic.multiprocessing.errors.record above main: the launcher then shows the "
            "traceback",
            "exit code 75 of threefold train: stopped by a signal with a checkpoint saved; 2: the request was wrong",
        ),
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:",
        Tier.CONSEQUENCE,
        facts.first_failure,
    ),
)
