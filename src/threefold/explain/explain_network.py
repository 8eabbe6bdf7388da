"""Errors of the network: NCCL, gloo, and the place where ranks meet."""

from __future__ import annotations

from threefold.explain import facts
from threefold.explain.known import KnownError, Tier

NETWORK = (
    KnownError(
        "nccl-duplicate-gpu",
        "two ranks use the same GPU",
        (r"Duplicate GPU detected",),
        "Each rank of an NCCL group needs a GPU of its own. Ranks that do not choose one by their local rank all take "
        "cuda:0; or more ranks were started than GPUs are visible.",
        (
            "call torch.cuda.set_device(int(os.environ['LOCAL_RANK'])) before the first CUDA operation",
            "start as many ranks a machine as nvidia-smi -L shows GPUs: torchrun --nproc-per-node=gpu",
            "look for a device that is written down in the program: 'cuda:0', 'cuda', device_map",
        ),
        "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 10",
        facts=facts.ranks,
    ),
    KnownError(
        "nccl-system-error",
        "NCCL could not use the network or shared memory of a machine",
        (
            r"unhandled system error",
            r"ncclSystemError",
            r"NCCL WARN Bootstrap : no socket interface found",
            r"NCCL WARN .*Call to connect (?:to \S+ )?.*failed",
        ),
        "A system call of NCCL failed: no usable network interface, a connection that is refused or filtered, a full "
        "/dev/shm, or a limit on locked memory with InfiniBand. NCCL's own lines say which.",
        (
            "start once with NCCL_DEBUG=INFO: the first NCCL WARN line names the call, the interface and the peer",
            "name the interface that the machines share: NCCL_SOCKET_IFNAME=eth0 (threefold doctor lists them)",
            "in a container: --shm-size=8g, --ulimit memlock=-1, --network=host",
            "open all ports between the machines of the job, not only the master's",
            "to see whether InfiniBand is the cause: NCCL_IB_DISABLE=1",
        ),
        "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.",
        Tier.SYMPTOM,
        facts.ranks,
    ),
    KnownError(
        "nccl-cuda-error",
        "NCCL met an error of CUDA",
        (r"unhandled cuda error", r"ncclUnhandledCudaError"),
        "CUDA failed inside of NCCL: a driver that is older than what NCCL was built for, memory of the GPU that is "
        "used up, GPUs that cannot reach one another, or an error of an earlier kernel.",
        (
            "start once with NCCL_DEBUG=INFO: the line `Cuda failure '...'` is the error",
            "out of memory: leave NCCL room, about 1 GiB for each group of ranks",
            "an old driver: threefold doctor compares driver, torch and NCCL",
            "GPUs that cannot reach one another (some consumer cards, some virtual machines): NCCL_P2P_DISABLE=1",
        ),
        "ncclUnhandledCudaError: Call to CUDA function failed.",
        Tier.SYMPTOM,
        facts.ranks,
    ),
    KnownError(
        "nccl-timeout",
        "a collective ran into its time limit: a rank did not come",
        (
            r"Watchdog caught collective operation timeout",
            r"Some NCCL operations have failed or timed out",
            r"Exception \(either an error or timeout\) detected by watchdog",
            r"NCCL communicator was aborted on rank",
        ),
        "The other ranks waited for one that was late, had left, or was in another collective. The ranks that report "
        "the timeout are those that waited; the cause is mostly on the one that does not.",
        (
            "look at the rank that reports nothing, or another operation: its last lines say where it stood",
            "at the end of an epoch: the ranks have uneven numbers of batches; threefold.distribute(loader) evens them",
            "only rank 0 evaluates, saves or downloads: let the others wait at a barrier of a group with a longer "
            "limit, or do it on all ranks",
            "a collective inside `if rank == 0`, or of another shape on one rank: run once with "
            "TORCH_DISTRIBUTED_DEBUG=DETAIL",
            "it was only slow: a larger timeout= of init_process_group, --mesh.timeout_s here; threefold train names "
            "the late rank and shows its stack",
        ),
        "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1580, OpType=ALLREDUCE, ...)",
        Tier.SYMPTOM,
        facts.nccl_timeout,
    ),
    KnownError(
        "collective-mismatch",
        "the ranks called different collectives, or with different shapes",
        (
            r"Detected mismatch between collectives on ranks",
            r"Error when verifying shape tensors for collective",
            r"Collective mismatch",
        ),
        "Every rank of a group must call the same collectives in the same order with the same shapes. One took "
        "another way: an `if` that depends on the rank or on the data, or a tensor of another size.",
        (
            "compare the two collectives that the line names, and find the branch that leads to each",
            "make conditions equal on all ranks: reduce the flag first, then decide",
            "gathering tensors of different sizes: pad them, or all_gather_object",
        ),
        "RuntimeError: Detected mismatch between collectives on ranks. Rank 0 is running collective: ...",
    ),
    KnownError(
        "monitored-barrier",
        "a rank did not reach a barrier in time",
        (r"failed to pass monitoredBarrier", r"monitoredBarrier"),
        "The barrier names the ranks that did not come. They are late, have ended, or wait in another collective.",
        (
            "read the last lines of the ranks that it names",
            "where they were only slow: monitored_barrier(timeout=...)",
        ),
        "[Rank 0]: Rank 1 failed to pass monitoredBarrier in 2000 ms",
        Tier.SYMPTOM,
    ),
    KnownError(
        "gloo-timeout",
        "a gloo collective ran into its time limit: a rank did not come",
        (r"Timed out waiting \d+ms for (?:recv|send|unbound)", r"gloo.*Timed out"),
        "The others waited for a rank that was late, had left, or was in another collective.",
        (
            "read the last lines of the rank that does not report this",
            "at the end of an epoch: uneven numbers of batches; threefold.distribute(loader) evens them",
            "it was only slow: init_process_group(timeout=...), --mesh.timeout_s here",
        ),
        "RuntimeError: [...] Timed out waiting 3000ms for recv operation to complete",
        Tier.SYMPTOM,
        facts.ranks,
    ),
    KnownError(
        "gloo-connect",
        "gloo ranks cannot reach one another",
        (
            r"Gloo connectFullMesh failed",
            r"gloo.*connect.*(?:timed? ?out|refused|No route)",
            r"Unable to (?:find|resolve).*(?:address|hostname).*\(local\)|Unable to find address for:",
            r"Unable to find interface for",
        ),
        "Ranks met at the master, exchanged addresses, and could not connect: one has offered an address that only its "
        "own machine can reach (127.0.0.1 from /etc/hosts, a container's bridge), an interface that is not there, or "
        "a firewall lets only the master's port through.",
        (
            "name the interface that the machines share, on all of them: GLOO_SOCKET_IFNAME=eth0",
            "look at what the hostname stands for: getent hosts $(hostname) must not give 127.0.x.x",
            "open all ports between the machines of the job",
            "threefold doctor shows the interfaces and which one would be taken",
        ),
        "RuntimeError: Gloo connectFullMesh failed with [...] Connection refused",
        facts=facts.port,
    ),
    KnownError(
        "peer-gone",
        "a rank lost its connection: another rank has ended",
        (
            r"Connection closed by peer",
            r"Connection reset by peer",
            r"Broken pipe",
            r"ncclRemoteError",
            r"remote process exited or there was a network error",
            r"socketProgress: Connection closed by remote peer",
            r"Connection closed by remote peer",
            r"Failed to recv, got 0 bytes",
            r"failed to recv, got \d+ bytes",
        ),
        "This rank was waiting for one that is no longer there. It ended with an error of its own, was killed, or was "
        "done before the others: uneven numbers of batches do that at the end of an epoch.",
        (
            "find the rank that ended first; where its log says nothing, it was killed: dmesg on its host",
            "ranks that end at different steps without an error: threefold.distribute(loader), or Join around the loop",
            "between machines: look for a host that was restarted or preempted",
        ),
        "RuntimeError: [...] Connection closed by peer [127.0.0.1]:45678",
        Tier.CONSEQUENCE,
        facts.lost_peer,
    ),
    KnownError(
        "uneven-inputs",
        "the ranks have uneven numbers of batches",
        (r"at least one rank has exhausted inputs", r"Rank \d+ (?:has )?exhausted (?:all )?inputs"),
        "One rank was through its data while others still had batches: each of those waits for a partner that never "
        "comes. It shows at the end of an epoch.",
        (
            "give all ranks the same number of batches: threefold.distribute(loader), or DistributedSampler",
            "count steps and not epochs where the data is a stream",
            "where uneven data is meant: with Join([model]) around the loop, without throw_on_early_termination",
        ),
        "RuntimeError: Detected at least one rank has exhausted inputs. Throwing across all ranks.",
    ),
    KnownError(
        "address-in-use",
        "the port is taken",
        (r"EADDRINUSE", r"[Aa]ddress already in use", r"errno: 98\b"),
        "Another process listens on the port where the ranks were to meet: an earlier run that has not ended, another "
        "job on the same machine, or two ranks that both believe to be rank 0.",
        (
            "let torchrun choose: torchrun --standalone --nproc-per-node=N ...; threefold train does so by itself",
            "or take another: --master-port 29501",
            "who has it: ss -ltnp 'sport = :29500'; end what is left of an earlier run",
        ),
        "The server socket has failed to bind to [::]:29500 (errno: 98 - Address already in use).",
        facts=facts.port,
    ),
    KnownError(
        "unknown-host",
        "the master's name cannot be resolved",
        (
            r"gai error: -?\d+ - ",
            r"Name or service not known",
            r"Temporary failure in name resolution",
            r"No address associated with hostname",
        ),
        "MASTER_ADDR, or the host of --rdzv-endpoint, is a name that this machine does not know.",
        (
            "try it on each machine: getent hosts NAME",
            "give the address instead of the name",
            "in Kubernetes: a headless service for the pods; in Slurm: scontrol show hostnames $SLURM_JOB_NODELIST",
        ),
        "The IPv4 network addresses of (node-1, 29500) cannot be retrieved (gai error: -2 - Name or service not known)",
        facts=facts.port,
    ),
    KnownError(
        "rendezvous-refused",
        "nobody answers where the ranks were to meet",
        (
            r"The client socket has (?:failed to connect|timed out)",
            r"connection to the C10d store has failed",
            r"RendezvousConnectionError",
            r"failed to connect to .*\(errno: 111",
            r"TCP client failed to connect/validate to host",
        ),
        "Rank 0's store does not listen at MASTER_ADDR:MASTER_PORT: rank 0 is not started yet or has ended, the "
        "address is another machine's, or a firewall is between.",
        (
            "look whether rank 0 (the machine with --node-rank 0) runs, and what its log says first",
            "the same --master-addr and --master-port, or --rdzv-endpoint, on every machine",
            "from another machine: nc -vz MASTER_ADDR MASTER_PORT",
        ),
        "The client socket has timed out after 4000ms while trying to connect to (localhost, 29500).",
        Tier.SYMPTOM,
        facts.port,
    ),
    KnownError(
        "rendezvous-timeout",
        "not all ranks came to the meeting",
        (
            r"Timed out after \d+ seconds waiting for clients",
            r"RendezvousTimeoutError",
            r"RendezvousClosedError",
            r"wait timeout after \d+ms, keys?:",
            r"Socket Timeout",
            r"Timed out initializing process group in store based barrier",
        ),
        "The number of ranks that was announced did not come in time: a machine was not started, has failed at the "
        "start, or was told another number of machines or another job id.",
        (
            "see which machine is missing: each must have been started with the same --nnodes and --rdzv-id",
            "read the beginning of the missing machine's log",
            "machines that start late: --rdzv-conf join_timeout=1800, or a larger timeout= of init_process_group",
        ),
        "torch.distributed.DistStoreError: Timed out after 5 seconds waiting for clients. 1/2 clients joined.",
        Tier.SYMPTOM,
        facts.port,
    ),
    KnownError(
        "backend-device",
        "the process group has no backend for the tensor's device",
        (
            r"No backend type associated with device type",
            r"Tensors must be CUDA and dense",
        ),
        "A collective got a tensor on the CPU while the group has NCCL only, or one on the GPU while it has gloo only.",
        (
            "move the tensor to the rank's device before the collective",
            'or make the group with both: init_process_group("cpu:gloo,cuda:nccl")',
            "an optimizer's state that was offloaded to the CPU needs a group with gloo for saving",
        ),
        "RuntimeError: No backend type associated with device type cpu",
    ),
)
