"""The kinds of lines that are evidence of a job, each recognized by its expressions. No torch."""

import re
from collections.abc import Iterator
from enum import Enum

from threefold.explain.log import Log

# Parts of a regular expression that are no literal text: groups, classes, escapes, repeated characters.
_NO_LITERAL = re.compile(
    r"\((?:[^()\\]|\\.|\((?:[^()\\]|\\.)*\))*\)[?*+]?|\[(?:[^\]\\]|\\.)*\][?*+]?(?:\{[\d,]*\})?|\\[A-Za-z][?*+]?(?:\{[\d,]*\})?|.[?*+]|.\{[\d,]*\}|[.^$]"
)


_VALUE = r"\w*['\"]?\s*[:=]?\s*"
_NO_LOSS = r"^(?!.*[Ll]oss\w*['\"]?\s*[:=]\s*\d).*"  # next to it


class EventKind(Enum):
    """What a line is evidence of, and its expressions, two spaces or a line between them.

    Words are whole ones: `accelerate` is not in `accelerated`.
    """

    # only training and its launchers write it, and inference with the same libraries
    RANK = r"""
    torch(?!light|wood|ed\b)  _ZN(?:3c10|5torch)  c10d  NCCL  nccl[A-Z]\w  jax\.readthedocs  \[rank\d
    transformers(?:[/._=<>`']|[ ](?:does|version|import|library|requires))(?!js)  [Hh]ugging[Ff]ace  [Dd]eep[Ss]peed
    (?<![A-Za-z])accelerate(?![a-z])  threefold  (?<![a-z])peft(?![a-z])  flash_attn  vllm  mp_size  world[_ ]size
    fairseq  [Mm]egatron  espnet  learning_rate  tensorflow  tensorboard  RayTrain  horovod  safetensors  models--\w
    jaxlib  xformers  bitsandbytes  DataLoader (?:worker|timed)  DataLoaderIter
    dataloaders?[_./\d]  utils/data  grad_norm  mmcv  mmengine  mmdet  nemo[_/.]\w  nn[Uu][Nn]et  (?<!-)cudnn
    (?<![a-z./-])keras(?!\.tar)  diffusers  detectron2  ultralytics  sentence_transformers  sentencepiece  colossalai
    paddlepaddle  mindspore  mxnet  wandb(?![a-z])  pytorch_lightning  lightning[./]pytorch  lightning_logs  webdataset
    apex\.\w  Lo[Rr][Aa](?:Config|_\w)  modeling_\w  ForCausalLM  AutoModel  AutoTokenizer  DynamicCache
    axolotl  unsloth  DTensor  DeviceMesh  aten\.\w  aten::  gloo/transport  TrainingArguments  reported to Coordinator
    PyTorchJob  MPIJob  TrainJob  [Ss]age[Mm]aker  [Tt]raining job  tensor parallel
    \[[EWIF]\d{3,4} \d\d:\d\d:\d\d\.\d{6,9} \w+\.cpp:\d+\]  RuntimeError: CUDA error  TORCH_USE_CUDA_DSA
    CUDA kernel errors might  [Ll]earning rate  [Ll]ibfabric EFA  (?:train|val|eval)/\w*[Ll]oss  torch_npu  HCCL  RCCL
    mmseg  mmpretrain  mmaction  (?<![a-z])(?:timm|trl|flax)[./]\w  optax  jax/_src  [Pp]addle(?:Seg|Detection|NLP|Clas)
    paddle[./](?:fluid|distributed|nn)  MASTER_ADDR  nproc_per_node  gradient_accumulation  lr_scheduler  model_parallel
    (?<![a-z])(?:verl|xtuner|nanotron|nemo_rl|torchtune|torchtitan)[./]\w  openrlhf  llamafactory  (?<![A-Za-z])GRPO
    (?<!o)llama(?! runner)  oneCCL  (?<![a-z])trainer[._/]\w
    grpo_  tensor_parallel  pipeline_parallel  train_dataloader  trainer\.(?:train|fit)\(  model\.fit\(  RayJob  TFJob
    train\w*\.(?:py|sh|ya?ml)  [_-]train(?![a-z]|\.[cjt])  pretrain(?!ed)  pt_main_thread
    finetun  fine-tun  batch_size  local_rank  Trainer\b
    LLMEngine  raylet  ^\[[\d-]+[ ][\d:,]+[ ][A-Z][ ]\d+[ ]\d+\][ ]  -launcher-\d  capabilities: \[\[gpu  GPUs?Quota
    nvidia\.com/gpu  FSDP  (?<![A-Za-z])DDP(?![A-Za-z])  TensorDict  XlaRuntimeError
    (?<![A-Za-z])[Tt]rain(?:ing|ed)? (?:pipeline|script|job|run|code|process|loop|model|stage)\b
    (?<![A-Za-z])[Tt]rain(?:ing|ed)? (?:on|my|a|the|with)\b
    """
    # many programs write it: two are evidence of training, or one with a word of the machines
    LEARN = r"""
    checkpoint  datasets/  [Ee]pochs?(?![a-z])  (?<![A-Za-z])loss(?:es)?(?![A-Za-z]|:? \d+%)  \d%\|.*(?:it/s|s/it)
    [Ee]valuat  [Dd]ataset  [Oo]ptimizer  [Gg]radient  [/_]train[/_.]  \.ckpt  \.pth\b  \.pt\b  ckpt  tokenizer
    num_epochs  multiprocessing/spawn  mnist  MNIST  [Ii]mage[Nn]et  cifar  CIFAR  [Rr]es[Nn]et  yolo  YOLO  hvd
    inference  [Tt]raining(?![a-z])  kubeflow  omegaconf  executing job with overrides  hydra[._/]\w  DataLoader\b
    """
    # words of the machines that train
    MACHINE = r"""
    (?<![A-Za-z])gloo(?![a-z])  (?<![A-Za-z])cuda(?![a-z])  CUDA  GPUs?(?![A-Za-z])  nvidia  slurm  mpirun  numpy
    -worker-\d  -master-\d  RuntimeError:  cudaGetDeviceCount  triton[._/]\w
    """
    # stacks of languages in which nothing trains, and reports of tests
    FOREIGN = r"""
    ^\tat[ ]  ^\s{4}at[ ]
    ^-+ Captured \w+ (?:call|setup)  ^=+ (?:FAILURES|ERRORS|warnings summary|test session)  ^(?:FAILED|ERROR) \S+\.py::
    """
    # what only runs models writes it, or builds
    SERVING = r"""
    api_server(?:\.py|[ ])  APIServer pid  vllm serve  text.generation.(?:launcher|server)  sglang\.launch_server
    ServerArgs\(  tritonserver  TRITONBACKEND  lmdeploy  [Oo]llama[ /:]  ggml_  llama_model_load  ComfyUI.execution
    ComfyUI-Manager  ComfyUI startup  custom_nodes
    To see the GUI go to  Running on local URL  gradio/  streamlit/  [Tt]ensor[Rr][Tt]-LLM
    pytorch\.serve  MODEL_LOG  ServeController  ServeReplica  Bento[SM]  bentoml  \bLLM\(model
    ^Step \d+/\d+ : (?:RUN|FROM|COPY|ENV|ADD|ARG|WORKDIR)[ ]  ^#\d+ \[\S+ +\d+/\d+\]  ##\[(?:group|error)\]
    Process completed with exit code
    """
    # what trains writes it, and no other program that runs models
    TRAINS = r"""
    train\w*\.(?:py|sh|ya?ml)  [_-]train(?![a-z])  pretrain(?!ed)  [Ff]ine-?tun  Trainer\b  [Ee]poch  grad_norm
    [Ll]oss(?![a-z])  [Oo]ptimizer  backward  torchrun  [Tt]raining  [Rr]ollout  (?<![A-Za-z])GRPO  (?<![a-z])verl\b
    (?<![a-z])trl\b  openrlhf  [Tt]rainable  RayTrain  WorkerDict  trainer[._/]  \.fit\(  train_\w  in train\b
    [Mm]egatron  nemo_rl  torchtitan  torchtune  llamafactory  axolotl  fairseq  mmengine  detectron2  pytorch_lightning
    apex[./-]  FSDP  (?<![A-Za-z])DDP(?![A-Za-z])  mm(?:det|seg)\w*/apis  pcdet
    wandb  learning_rate  lr_scheduler  num_epochs  DistributedDataParallel  DataLoader
    """
    # a step, a loss, a container that starts
    PROGRESS = rf"""
    \d+%\|.*(?:it/s|s/it)  [Ll]oss{_VALUE}(?:[-+]?\d|nan|inf|NaN)  LOSS{_VALUE}[-+]?\d  [Ii]teration\s+\d+/\s*\d+
    ^[Ss]tep\s+\d+/\d+  ^\s*Normal\s+(?:Scheduled|Started)\b
    """
    # the job is done
    FINISHED = r"""
    Finished [Tt]raining  train_runtime  `Trainer\.fit` stopped  WorkerState\.SUCCEEDED  worker group success
    [Tt]raining Progress: 100%\|
    OK \(expected failures  [ ]passed in[ ]  (?:^|INFO threefold: )done: \d+ steps,  ^Status:\s+Succeeded
    ^\s+Reason:\s+Completed  ^\d+\s+\S+\s+COMPLETED\s+0:0  ^=+ .*\d+ passed.* in
    \|±[ ]  ^\d+ passed\b(?!.*(?:fail|error)).* in [\d.]+s  ^OK(?: \(|$)
    \b[Tt]raining (?:is |has |was )?(?:now )?(?:successfully )?(?:complete|finished|done)
    \b(?:[Jj]ob|[Rr]un|Pod|Task) \S{0,60} ?(?:has )?(?:successfully )?succeeded ?(?:successfully)?(?:[.!]|$)
    \b(?:[Jj]ob|[Rr]un|Pod|Task) \S{0,60} ?(?:has )?(?:successfully )?completed ?(?:successfully)?(?:[.!]|$)
    \b(?:[Jj]ob|[Rr]un|Pod|Task) \S{0,60} ?(?:has )?(?:successfully )?finished ?(?:successfully)?(?:[.!]|$)
    """
    # another way was found, or a server serves
    MENDED = r"""
    NET/OFI Selected  Rendezvous complete  [Rr]econnected[ ]  [Rr]econnection successful  [Ff]all(?:ing|s) back to
    [Ff]ell back to  onnection re-established  onnection restored  Application startup complete  module for custom nodes
    Fetching \d+ files: 100%
    """
    # a loss or a gradient norm, also one that is no number
    MEASURED = rf"""
    [Ll]oss{_VALUE}(?:(?i:nan)|\d)  LOSS{_VALUE}(?:(?i:nan)|\d)  [Gg]rad(?:ient)?[ _]?[Nn]orm{_VALUE}(?:(?i:nan)|\d)
    """
    # a loss or a gradient norm that is no number
    NO_NUMBER = rf"""
    {_NO_LOSS}(?:\b|(?<!val)(?<!eval)(?<!test)_)[Ll]oss{_VALUE}(?i:nan)\b  {_NO_LOSS}\bLOSS{_VALUE}(?i:nan)\b
    [Ll]oss is not finite
    [Gg]rad(?:ient)?[ _]?[Nn]orm{_VALUE}(?i:nan)\b  Nan grad norm  \b[Ll]oss is (?i:nan)
    """
    # the loss scale cannot shrink any more, or is no number that scales
    SMALLEST_SCALE = r"""
    loss scale: (?P<scale>\d+(?:\.0)?), reducing to (?P=scale)(?:\.0)?\b
    reducing loss scale to (?:0\.0\b|[\d.]+e-[1-9]\d)
    """


def anchor(sign: str) -> str:
    """The longest literal part of a sign without digits at its ends, which a line must contain to have the sign."""
    masked = _NO_LITERAL.sub(
        "\0", re.sub(r"\\([^A-Za-z0-9])", lambda match: chr(0xE000 + ord(match[1])), sign)
    )
    if "|" in masked:
        return ""
    plain = re.sub("[\ue000-\uefff]", lambda match: chr(ord(match[0]) - 0xE000), masked)
    return max(re.split(r"\0|\d+", plain), key=len)


_PARSERS = {
    kind: [(re.compile(sign), anchor(sign)) for sign in re.split(r"\s{2,}", kind.value.strip())]
    for kind in EventKind
}


def each_sign(log: Log, kind: EventKind) -> Iterator[list[int]]:
    """Of every expression of a kind that the log has, where."""
    for pattern, literal in _PARSERS[kind]:
        places = [
            index
            for index in log.indices(literal)
            if pattern.search(log.raw[index])
            or ("^" in pattern.pattern and pattern.search(log.line(index).text))
        ]
        if places:
            yield places
