"""Errors of what is installed and of what is fetched: CUDA, compilers, kernels, the Hub and its files."""

from __future__ import annotations

from threefold.explain import facts
from threefold.explain.known import KnownError, Tier

INSTALL = (
    KnownError(
        "cuda-assert",
        "an index was out of range in a CUDA kernel",
        (
            r"device-side assert triggered",
            r"Assertion `(?:srcIndex < srcSelectDimSize|t >= 0 && t < n_classes|[^`]*index out of bounds[^`]*)",
            r"IndexError: index out of range in self",
        ),
        "An embedding, a gather or a loss got an index outside of its table: a token id at or above the model's "
        "vocabulary, a label outside of the classes, or a position past the longest. The traceback of the CUDA error "
        "stands at a later call.",
        (
            "compare tokenizer and model: len(tokenizer) <= model.config.vocab_size, and the pad token's id",
            "compare the row's length with max_position_embeddings",
            "labels to be left out are -100, not -1 or the vocabulary's size",
            "for the true line: CUDA_LAUNCH_BLOCKING=1, or one step on the CPU",
        ),
        "RuntimeError: CUDA error: device-side assert triggered",
        facts=facts.ranks,
    ),
    KnownError(
        "illegal-memory-access",
        "a CUDA kernel touched memory that is not its own",
        (
            r"an illegal memory access was encountered",
            r"CUDA error: (?:misaligned address|unspecified launch failure|invalid program counter)",
        ),
        "A kernel is wrong for these inputs or was built for another torch, or the GPU's memory is faulty. The "
        "traceback stands at a later call, often in NCCL's watchdog.",
        (
            "CUDA_LAUNCH_BLOCKING=1 shows the call; compute-sanitizer python script.py shows the kernel",
            "without own kernels: attention 'sdpa' or 'eager' instead of flash attention, no torch.compile",
            "always on the same GPU: dmesg | grep Xid, and take it out of the job",
        ),
        "RuntimeError: CUDA error: an illegal memory access was encountered",
        facts=facts.ranks,
    ),
    KnownError(
        "gpu-fault",
        "a GPU has failed",
        (
            r"uncorrectable ECC error",
            r"NVRM: Xid",
            r"GPU has fallen off the bus",
            r"Unable to determine the device handle for",
            r"CUDA error: (?:the launch timed out|unknown error|hardware)",
        ),
        "The driver reports a fault of the hardware. Runs on this GPU will fail again or, worse, compute wrongly.",
        (
            "nvidia-smi -q -d ECC,ROW_REMAPPER and dmesg | grep Xid on that host; give it to who runs the machine",
            "go on without it: the newest checkpoint on other hosts",
        ),
        "RuntimeError: CUDA error: uncorrectable ECC error encountered",
        facts=facts.ranks,
    ),
    KnownError(
        "no-kernel-image",
        "torch or an extension was not built for this GPU",
        (r"no kernel image is available for execution", r"is not compatible with the current PyTorch installation"),
        "The binaries hold code for other generations of GPUs than this one.",
        (
            "install torch for this GPU's generation: pytorch.org/get-started; torch.cuda.get_arch_list() shows what "
            "it has",
            "an extension: build it again with TORCH_CUDA_ARCH_LIST set to this GPU's capability",
        ),
        "RuntimeError: CUDA error: no kernel image is available for execution on the device",
    ),
    KnownError(
        "old-driver",
        "the NVIDIA driver is older than torch's CUDA",
        (
            r"NVIDIA driver on your system is too old",
            r"CUDA driver version is insufficient for CUDA runtime version",
            r"forward compatibility was attempted on non supported HW",
        ),
        "torch brings its own CUDA, which needs a driver of at least that version.",
        (
            "install torch for an older CUDA (pytorch.org/get-started): nvidia-smi shows the newest one that the "
            "driver takes",
            "or a newer driver",
        ),
        "RuntimeError: The NVIDIA driver on your system is too old (found version 11040).",
    ),
    KnownError(
        "no-cuda",
        "torch sees no GPU",
        (
            r"Torch not compiled with CUDA enabled",
            r"Found no NVIDIA driver on your system",
            r"No CUDA GPUs are available",
            r"no CUDA-capable device is detected",
            r"mesh\.device = cuda, but torch sees no CUDA device",
        ),
        "torch is a build for CPUs, the driver is missing, or CUDA_VISIBLE_DEVICES or the container hides the GPUs.",
        (
            "python -c 'import torch; print(torch.__version__, torch.version.cuda)': +cpu or None is a CPU build",
            "nvidia-smi -L in the same container; docker run --gpus all",
            "echo $CUDA_VISIBLE_DEVICES: empty hides all",
            "for the CPU: --mesh.device cpu, and the backend gloo",
        ),
        "AssertionError: Torch not compiled with CUDA enabled",
        facts=facts.ranks,
    ),
    KnownError(
        "device-ordinal",
        "a rank asked for a GPU that is not there",
        (r"invalid device ordinal",),
        "More ranks were started on this machine than GPUs are visible, or CUDA_VISIBLE_DEVICES leaves fewer than the "
        "local rank counts.",
        (
            "torchrun --nproc-per-node=gpu, or the number that nvidia-smi -L shows",
            "under Slurm with one GPU a task (--gpus-per-task=1) each rank sees one: take cuda:0 there",
        ),
        "RuntimeError: CUDA error: invalid device ordinal",
        facts=facts.ranks,
    ),
    KnownError(
        "forked-cuda",
        "CUDA was used before a process was forked",
        (r"Cannot re-initialize CUDA in forked subprocess",),
        "A loader's worker or a child used CUDA, and its parent had used it before the fork.",
        (
            "datasets and collate functions stay on the CPU; batches are moved in the loop",
            "or DataLoader(..., multiprocessing_context='forkserver')",
            "own processes: torch.multiprocessing.get_context('spawn'); or nothing of CUDA before the fork",
        ),
        "RuntimeError: Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must use "
        "the 'spawn' start method",
        facts=facts.ranks,
    ),
    KnownError(
        "cublas",
        "a matrix product could not begin",
        (r"CUBLAS_STATUS_(?:NOT_INITIALIZED|ALLOC_FAILED|EXECUTION_FAILED|INTERNAL_ERROR)",),
        "cuBLAS had no memory for its workspace, or an earlier kernel had failed (an index out of range, mostly).",
        (
            "look at memory first: nvidia-smi at that moment, a smaller micro-batch",
            "then at indices: one step on the CPU, or CUDA_LAUNCH_BLOCKING=1",
        ),
        "RuntimeError: CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
        Tier.SYMPTOM,
        facts.ranks,
    ),
    KnownError(
        "no-compiler",
        "torch.compile or an extension found no compiler",
        (
            r"Cannot find a working triton installation",
            r"TritonMissing",
            r"InvalidCxxCompiler",
            r"No working C\+\+ compiler found",
            r"Failed to find C compiler",
            r"fatal error: Python\.h: No such file",
            r"CUDA_HOME environment variable is not set",
            r"Ninja is required to load C\+\+ extensions",
        ),
        "torch.compile needs triton on a GPU and a C++ compiler everywhere; extensions that are built at the first use "
        "need nvcc, ninja and Python's headers too.",
        (
            "apt-get install build-essential python3-dev; CXX names another compiler",
            "triton comes with torch's CUDA builds for Linux: pip install triton where it is missing",
            "without it: --train.compile false, TORCH_COMPILE_DISABLE=1",
            "nvcc: install the CUDA toolkit of torch.version.cuda and set CUDA_HOME",
        ),
        "torch._inductor.exc.InductorError: InvalidCxxCompiler: No working C++ compiler found",
        facts=facts.ranks,
    ),
    KnownError(
        "flash-attention",
        "flash attention is missing or built for another torch",
        (
            r"[Ff]lash ?[Aa]ttention ?\d?.*(?:not (?:be )?(?:installed|used|available)|cannot be used)",
            r"flash_attn.*(?:seems to be not installed|not installed|undefined symbol)",
            r"No module named 'flash_attn",
            r"flash_attn\S*\.so: undefined symbol",
        ),
        "flash-attn is a package of compiled kernels: one build fits one torch, one CUDA and one Python.",
        (
            "without it: attn_implementation='sdpa', which uses torch's own flash kernels where they fit",
            "pip install flash-attn --no-build-isolation, after torch, and again after each change of torch",
            "it needs a GPU of Ampere or later and bfloat16 or float16",
        ),
        "ImportError: flash_attn_2_cuda.cpython-310-x86_64-linux-gnu.so: undefined symbol: _ZN3c104cuda9SetDeviceEi",
        facts=facts.ranks,
    ),
    KnownError(
        "hub-access",
        "the Hub does not let this account read the repository",
        (
            r"GatedRepoError",
            r"[Yy]ou are trying to access a gated repo",
            r"Cannot access gated repo",
            r"40[13] (?:Client Error|Forbidden|Unauthorized)",
            r"Invalid (?:user token|username or password)",
        ),
        "The repository is private or gated, and the token is missing, expired, or of an account without access.",
        (
            "ask for access on the repository's page with the account of the token",
            "hf auth login, or HF_TOKEN on every machine of the job (a launcher may not pass it on); hf auth whoami",
            "a fine-grained token needs the right to read gated repositories",
        ),
        "huggingface_hub.errors.GatedRepoError: 401 Client Error.",
        facts=facts.repository,
    ),
    KnownError(
        "hub-not-found",
        "the repository, revision or file is not on the Hub",
        (
            r"RepositoryNotFoundError|RevisionNotFoundError|RemoteEntryNotFoundError",
            r"is not a local folder and is not a valid model identifier",
            r"Repo id must be in the form",
        ),
        "The name is misspelt, was meant as a folder that is not there, or is private (the Hub hides those without a "
        "token).",
        (
            "compare the name with the Hub's page; a folder: ls it on every machine",
            "private: hf auth login, or HF_TOKEN",
        ),
        "OSError: meta-llama/Llama-9 is not a local folder and is not a valid model identifier",
        facts=facts.repository,
    ),
    KnownError(
        "hub-rate-limit",
        "the Hub was asked too often",
        (r"429 (?:Client Error|Too Many Requests)", r"HfHubHTTPError.*429"),
        "Every rank asks the Hub for the same files, and all share one address.",
        (
            "download once before the job: hf download REPO; then HF_HUB_OFFLINE=1",
            "a shared HF_HOME; one rank a machine downloads, the others wait (threefold train does)",
            "with a token the limit is higher: HF_TOKEN",
        ),
        "huggingface_hub.errors.HfHubHTTPError: 429 Client Error: Too Many Requests",
        facts=facts.repository,
    ),
    KnownError(
        "hub-offline",
        "the Hub cannot be reached, and the files are not in the cache",
        (
            r"[Ww]e couldn't connect to '?https?://\S+'? to load",
            r"OfflineModeIsEnabled",
            r"LocalEntryNotFoundError",
            r"outgoing traffic has been disabled",
            r"Cannot find the requested files in the (?:disk|local) cache",
        ),
        "HF_HUB_OFFLINE is set or compute nodes have no way out, and this machine's cache does not hold the files.",
        (
            "fetch them where there is a network: hf download REPO, with the HF_HOME that the job uses",
            "or copy the folder and give its path as the name",
            "env | grep -E 'HF_|TRANSFORMERS_OFFLINE|_proxy'",
        ),
        "OSError: We couldn't connect to 'https://huggingface.co' to load the files",
        Tier.SYMPTOM,
        facts.repository,
    ),
    KnownError(
        "unknown-architecture",
        "transformers does not know the model's architecture",
        (r"Transformers does not recognize this architecture", r"Unrecognized (?:configuration class|model in)"),
        "The model is newer than the installed transformers, brings code of its own, or its config.json has no "
        "model_type.",
        (
            "pip install -U transformers (on every machine)",
            "a model with code of its own: trust_remote_code, after reading that code",
        ),
        "ValueError: The checkpoint you are trying to load has model type `qwen9` but Transformers does not recognize "
        "this architecture.",
    ),
    KnownError(
        "broken-weights",
        "a file of weights is damaged or no weights at all",
        (
            r"SafetensorError",
            r"Error while deserializing header",
            r"HeaderTooLarge|InvalidHeaderDeserialization|MetadataIncompleteBuffer",
            r"git-lfs\.github\.com/spec",
            r"PytorchStreamReader failed (?:reading|finding)",
        ),
        "The file was cut off while it was copied or downloaded, or is the pointer that git leaves without git-lfs.",
        (
            "ls -l: a file of about 130 bytes is a pointer; git lfs pull, or hf download",
            "compare sizes or checksums with the source, on each machine; download again",
        ),
        "safetensors_rust.SafetensorError: Error while deserializing header: header too large",
        facts=facts.ranks,
    ),
)
