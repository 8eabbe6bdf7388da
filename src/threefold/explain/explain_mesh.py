"""Errors of a model on several ranks: sizes that do not fit, tensors of different kinds, DDP's rules."""

from __future__ import annotations

from threefold.explain import facts
from threefold.explain.known import KnownError, Tier

MESH = (
    KnownError(
        "world-size",
        "the mesh does not fit the number of ranks",
        (
            r"[Ww]orld[_ ]size.{0,40}\b(?:must|should|needs to) (?:be )?equal",
            r"[Ww]orld[_ ]size.{0,60}(?:is not divisible by|must be divisible by|not a multiple of)",
            r"Mesh should not be bigger than default world size",
            r"Invalid parallel dims",
            r"mesh\.dp x mesh\.cp x mesh\.tp = .* ranks were started",
            r"[Ww]orld size .{0,40} != .{0,40}(?:[tTdDcCpP][pP])",
            r"ParallelismConfig.*(?:does not|doesn't) match.*world|total size .*does not match.*(?:world|processes)",
        ),
        "The number of ranks that were started is not the product of the parallel sizes that were asked for.",
        (
            "start dp x cp x tp (x pp) ranks: --nproc-per-node times --nnodes must be that product",
            "or let one size follow from the rest: --mesh.dp auto here; elsewhere leave the data-parallel size out",
            "look for sizes that come from the environment: env | grep -E '(TP|CP|DP)_SIZE|PARALLELISM_CONFIG'",
        ),
        "AssertionError: World size must equal TP * DP * CP",
        facts=facts.ranks,
    ),
    KnownError(
        "tp-divisibility",
        "tensor parallelism does not divide the model's sizes",
        (
            r"(?:heads|num_query_groups|hidden[_ ]size|vocab_size)\b.{0,60}(?:divisible by|be divided|divides)"
            r".{0,60}(?:tp|TP|mp_size|[Tt]ensor|[Ww]orld|[Mm]odel[_ -][Pp]arallel)",
        ),
        "Each tp rank takes whole heads and an equal part of each split dimension, so tp must divide the number of "
        "attention heads and of key and value heads.",
        (
            "take a tp that divides num_key_value_heads of the model's config.json",
            "use the other ranks for data or context: --mesh.dp, --mesh.cp",
        ),
        "ValueError: Total number of attention heads (25) must be divisible by tensor parallel size (4).",
    ),
    KnownError(
        "mixed-dtensor",
        "a plain tensor met a distributed one",
        (r"got mixed torch\.Tensor and DTensor",),
        "An operation got a DTensor (a parameter split by FSDP2 or tensor parallelism) and a plain tensor. torch does "
        "not guess how the plain one is spread.",
        (
            "a weight used outside its module's forward (tied heads, EMA, penalties): use it inside, or through "
            "weight.full_tensor() or weight.to_local()",
            "a plain tensor that is equal on all ranks: DTensor.from_local(x, mesh, [Replicate()])",
            "clip_grad_norm_ over parameters of which only some are split: group them by mesh, combine the norms",
            "DDP around a model with tensor parallelism: use FSDP2 on a mesh with a dp axis instead",
        ),
        "RuntimeError: aten.mm.default got mixed torch.Tensor and DTensor, need to convert all torch.Tensor to DTensor",
        facts=facts.ranks,
    ),
    KnownError(
        "different-meshes",
        "distributed tensors of different meshes met",
        (
            r"must have the same mesh",
            r"cross-mesh",
            r"different (?:device )?mesh(?:es)?\b",
        ),
        "Parameters of one model live on different meshes, say (dp, tp) for the layers and tp alone for a norm, and an "
        "operation took them together: mostly clip_grad_norm_, or a foreach optimizer.",
        (
            "gradient norms: get_total_norm for each mesh, combine, clip_grads_with_norm_ for each",
            "optimizers: foreach=False, or one parameter group for each mesh",
            "or put every parameter on the whole mesh: apply FSDP2 to the root module too",
        ),
        "RuntimeError: aten.stack.default must have the same mesh",
        facts=facts.ranks,
    ),
    KnownError(
        "device-mismatch",
        "tensors on different devices met",
        (
            r"Expected all tensors to be on the same device",
            r"Input type \(torch\.\S+\) and weight type \(torch\.\S+\) should be the same",
        ),
        "A batch or a buffer stayed on the CPU or on another GPU while the model is on this rank's GPU.",
        (
            "move each batch to the rank's device: device = torch.device('cuda', int(os.environ['LOCAL_RANK']))",
            "tensors made in forward: device=x.device; constants of a module: register_buffer",
            "one GPU a rank: no device_map='auto' under torchrun, no 'cuda:0' in the program",
        ),
        "RuntimeError: Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!",
        facts=facts.devices,
    ),
    KnownError(
        "dtype-mismatch",
        "tensors of different types met",
        (
            r"must have the same dtype, but got",
            r"expected (?:m1 and m2|mat1 and mat2|scalar type \w+).{0,40}(?:but found|same dtype)",
            r"Must flatten tensors with uniform dtype",
        ),
        "Weights and activations have different types: weights in bfloat16 with inputs in float32, or an adapter in "
        "float32 on a model in bfloat16.",
        (
            "run the forward under torch.autocast('cuda', dtype=torch.bfloat16), or cast the inputs",
            "FSDP: give all parameters of a wrapped module one type before it is wrapped; mixed precision is its own "
            "setting (--model.dtype bfloat16 here keeps the weights in float32)",
        ),
        "RuntimeError: mat1 and mat2 must have the same dtype, but got Float and BFloat16",
        facts=facts.ranks,
    ),
    KnownError(
        "ddp-unused-parameters",
        "DDP waits for gradients that do not come",
        (r"Expected to have finished reduction in the prior iteration",),
        "Some parameters took no part in the loss of the step before, so their gradients were never ready; or the "
        "model was called in another way than through DDP's forward.",
        (
            "freeze what is not used: parameter.requires_grad_(False) before DDP",
            "a branch that only some steps take: DistributedDataParallel(model, find_unused_parameters=True)",
            "call the DDP module itself, not model.module, in training",
            "TORCH_DISTRIBUTED_DEBUG=INFO names the parameters",
        ),
        "RuntimeError: Expected to have finished reduction in the prior iteration before starting a new one.",
        facts=facts.ranks,
    ),
    KnownError(
        "ddp-different-models",
        "the ranks built different models",
        (
            r"DDP expects same model across all ranks",
            r"params? .*has inconsistent \d+ params",
            r"appears not to match (?:sizes|strides) of the same param",
        ),
        "DDP found other numbers or shapes of parameters on another rank: a config, a checkpoint or a vocabulary that "
        "differs between the machines, or code that depends on the rank.",
        (
            "print sum(p.numel() for p in model.parameters()) on each rank",
            "the same files on every machine: compare the checkpoint's and the tokenizer's checksums",
            "threefold doctor, under the launcher, compares the ranks' versions",
        ),
        "RuntimeError: DDP expects same model across all ranks, but Rank 0 has 2 params, while rank 1 has inconsistent "
        "1 params.",
    ),
    KnownError(
        "ddp-ready-twice",
        "a gradient was ready twice in one backward",
        (r"Expected to mark a variable ready only once",),
        "A parameter was used in two reentrant checkpoints, or the DDP module's forward was called several times "
        "before one backward.",
        (
            "checkpoint(..., use_reentrant=False)",
            "one forward a backward; or static_graph=True where every step takes the same way",
        ),
        "RuntimeError: Expected to mark a variable ready only once.",
        facts=facts.ranks,
    ),
    KnownError(
        "in-place",
        "a tensor that backward needs was overwritten",
        (r"one of the variables needed for gradient computation has been modified by an inplace operation",),
        "Between forward and backward something wrote into a saved tensor. Under DDP it is mostly DDP itself: a second "
        "forward broadcasts the buffers (batch norm's statistics) again.",
        (
            "several forwards before a backward: DDP's broadcast_buffers=False, or SyncBatchNorm",
            "x = x + y in place of x += y where x is used again",
            "torch.autograd.set_detect_anomaly(True) shows the forward call",
        ),
        "RuntimeError: one of the variables needed for gradient computation has been modified by an inplace operation",
        facts=facts.ranks,
    ),
    KnownError(
        "state-dict-prefix",
        "the checkpoint's names have a wrapper's prefix, or lack it",
        (
            r"Unexpected key\(s\) in state_dict: \"(?:module|_orig_mod|_fsdp_wrapped_module)\.",
            r"Missing key\(s\) in state_dict: \"(?:module|_orig_mod|_fsdp_wrapped_module)\.",
        ),
        "DDP puts `module.` before every name, torch.compile `_orig_mod.`; the weights were saved from the wrapper and "
        "loaded into the model, or the other way round.",
        (
            "save model.module.state_dict(), or torch.distributed.checkpoint.state_dict.get_model_state_dict(model)",
            "for a file that exists: torch.nn.modules.utils.consume_prefix_in_state_dict_if_present(state, 'module.')",
        ),
        'Unexpected key(s) in state_dict: "module.weight", "module.bias".',
    ),
    KnownError(
        "state-dict-sizes",
        "the checkpoint belongs to a model of other sizes",
        (r"size mismatch for \S+: copying a param with shape",),
        "A weight in the file has another shape than the model's: another config, another vocabulary, or the file of "
        "one rank of a split model.",
        (
            "build the model from the checkpoint's own config",
            "a vocabulary that has grown: model.resize_token_embeddings(len(tokenizer)) before loading",
            "files of one rank each: join them with the tool that has written them, or load through "
            "torch.distributed.checkpoint",
        ),
        "size mismatch for weight: copying a param with shape torch.Size([4, 8]) from checkpoint, the shape in current "
        "model is torch.Size([4, 4]).",
    ),
    KnownError(
        "no-gradient",
        "backward found nothing that needs a gradient",
        (r"element \d+ of tensors does not require grad and does not have a grad_fn",),
        "All parameters are frozen, the forward ran under no_grad, or reentrant checkpointing got inputs without "
        "gradients (frozen embeddings with adapters do that).",
        (
            "checkpoint(..., use_reentrant=False); in transformers: gradient_checkpointing_kwargs",
            "or model.enable_input_require_grads()",
            "look whether any parameter has requires_grad",
        ),
        "RuntimeError: element 0 of tensors does not require grad and does not have a grad_fn",
        Tier.CAUSE,
        facts.ranks,
    ),
)
