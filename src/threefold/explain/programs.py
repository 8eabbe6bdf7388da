"""Which program wrote a log: a full disk or a lost connection has the same words in all of them. No torch.

What is asked for is evidence of training, never the absence of something else: a genome, a climate or a solver may be
what is trained on. Words are whole ones: `accelerate` is not in `accelerated`, nor `loss` in `lossless`. A word that
other programs write too tells of training only beside another one, and not beside a stack of a language in which
nothing trains.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import islice

from threefold.explain.known import anchor
from threefold.explain.log import Log

_Words = Sequence[tuple[re.Pattern[str], str]]  # each with its literal part


def _words(text: str) -> _Words:
    """The regular expressions of a text, two spaces or a line between them."""
    return [(re.compile(word), anchor(word)) for word in re.split(r"\s{2,}", text.strip())]


# Words that only training writes, and inference with the same libraries.
_TRAINING = _words(r"""
    torch(?!light|wood|ed\b)  _ZN(?:3c10|5torch)  c10d  NCCL  nccl[A-Z]\w  jax\.readthedocs  \[rank\d
    transformers(?:[/._=<>`']|[ ](?:does|version|import|library|requires))(?!js)  [Hh]ugging[Ff]ace  [Dd]eep[Ss]peed
    (?<![A-Za-z])accelerate(?![a-z])  threefold  (?<![a-z])peft(?![a-z])  flash_attn  vllm  mp_size  world[_ ]size
    fairseq  [Mm]egatron  espnet  learning_rate  tensorflow  tensorboard  RayTrain  horovod  safetensors  models--\w
    jaxlib  xformers  bitsandbytes  DataLoader (?:worker|timed)  DataLoaderIter
    dataloaders?[_./\d]  utils/data  grad_norm  mmcv  mmengine  mmdet  nemo[_/.]\w  nn[Uu][Nn]et  cudnn
    (?<![a-z./-])keras(?!\.tar)  diffusers  detectron2  ultralytics  sentence_transformers  sentencepiece  colossalai
    paddlepaddle  mindspore  mxnet  wandb(?![a-z])  pytorch_lightning  lightning[./]pytorch  lightning_logs  webdataset
    apex\.\w  Lo[Rr][Aa](?:Config|_\w)  modeling_\w  ForCausalLM  AutoModel  AutoTokenizer  DynamicCache  llama
    axolotl  unsloth  DTensor  DeviceMesh  aten\.\w  aten::  gloo/transport  TrainingArguments  reported to Coordinator
    PyTorchJob  MPIJob  TrainJob  [Ss]age[Mm]aker  [Tt]raining job  tensor parallel
    \[[EWIF]\d{3,4} \d\d:\d\d:\d\d\.\d{6,9} \w+\.cpp:\d+\]  triton[._/]\w  RuntimeError: CUDA error  TORCH_USE_CUDA_DSA
    CUDA kernel errors might  [Ll]earning rate  [Ll]ibfabric EFA  (?:train|val|eval)/loss  torch_npu  HCCL  RCCL  oneCCL
    mmseg  mmpretrain  mmaction  (?<![a-z])(?:timm|trl|flax)[./]\w  optax  jax/_src  [Pp]addle(?:Seg|Detection|NLP|Clas)
    paddle[./](?:fluid|distributed|nn)  MASTER_ADDR  nproc_per_node  gradient_accumulation  lr_scheduler  model_parallel
    tensor_parallel  pipeline_parallel  train_dataloader  trainer\.(?:train|fit)\(  model\.fit\(  RayJob  TFJob
""")
# Words of launchers and of scripts that train, where no other program shows.
_LAUNCHED = _words(r"""
    train\w*\.(?:py|sh|ya?ml)  [_-]train(?![a-z])  pretrain  finetun  fine-tun  batch_size  local_rank  Trainer\b
    LLMEngine  raylet  ^\[[\d-]+[ ][\d:,]+[ ][A-Z][ ]\d+[ ]\d+\][ ]  -launcher-\d  capabilities: \[\[gpu  GPUs?Quota
    nvidia\.com/gpu
    (?<![A-Za-z])[Tt]rain(?:ing|ed)? (?:pipeline|script|job|run|code|process|loop|model|stage)\b
    (?<![A-Za-z])[Tt]rain(?:ing|ed)? (?:on|my|a|the|with)\b
""")
# Words of many programs: two of learning tell of training, or one of it beside a word of the machines.
_LEARNING = _words(r"""
    checkpoint  datasets/  [Ee]pochs?(?![a-z])  (?<![A-Za-z])loss(?:es)?(?![A-Za-z]|:? \d+%)  \d%\|.*(?:it/s|s/it)
    [Ee]valuat  [Dd]ataset  [Oo]ptimizer  [Gg]radient  [/_]train[/_.]  \.ckpt  \.pth\b  \.pt\b  ckpt  tokenizer
    inference  [Tt]raining(?![a-z])  kubeflow  omegaconf  hydra[._/]\w  num_workers  DataLoader\b
""")
_MACHINES = _words(r"""
    (?<![A-Za-z])gloo(?![a-z])  (?<![A-Za-z])cuda(?![a-z])  CUDA  GPUs?(?![A-Za-z])  nvidia  slurm  mpirun  numpy
    scipy  -worker-\d  -master-\d  RuntimeError:  cudaGetDeviceCount
""")
# Stacks of languages in which nothing trains.
_FRAMES = ("\tat ", "    at ")
# Lines before a launcher's that are its own, a shell's, or what somebody says.
_OF_LAUNCHER = re.compile(
    r"^GPU core dump|nvidia-|NVRM|amdgpu"
    r"|slurm|srun|sbatch|salloc|ssh|[Mm][Pp][Ii]|O[RM]TE|PRTE|OPAL|PMI|UCX|ucx|[Ww]arning|^\W*$"
    r"|^\S*[$#>] |^\[?node|^[*=#+|-]|^\w+: +\S+$"
    r"|\b(?:I|[Ww]e|[Mm]y|[Tt]his|these|following)\b"
)


def is_training(log: Log) -> bool:
    """Whether a training job wrote the log: by its own words, or by several that it shares with other programs."""
    if any(_found(_TRAINING, log)):
        return True
    learning = len(list(islice(_found(_LEARNING, log), 2)))
    told = any(_found(_LAUNCHED, log)) or learning == 2 or (learning == 1 and any(_found(_MACHINES, log)))
    return told and not is_other(log)


def is_other(log: Log) -> bool:
    """Whether the log has frames of a language in which nothing trains."""
    return any(map(log.has, _FRAMES))


def is_of_launcher(line: str) -> bool:
    """Whether a line may stand before a launcher's own: it is no output of the program that was started."""
    return _OF_LAUNCHER.search(line[:300]) is not None


def _found(words: _Words, log: Log) -> Iterator[bool]:
    """True for each word that is in the log."""
    for pattern, literal in words:
        if any(pattern.search(line[-4000:]) for line, _ in log.shapes_containing(literal)):
            yield True
