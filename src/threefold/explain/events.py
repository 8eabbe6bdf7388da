"""What the lines of a log tell of its job: whose it is, how it went on, that it finished. No torch.

An event is a line of an `EventKind`, known by an expression. Whether a log is of a training job is whether it has an
event of a rank: evidence of training, never the absence of something else, a genome, a climate or a solver may be what
is trained on. A run that finished has not failed, and trouble that progress follows was made good: both matter more
than any line that looks like an error.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from enum import StrEnum
from functools import cached_property
from itertools import islice

from threefold.explain.known import anchor
from threefold.explain.log import Log, LogLine


class EventKind(StrEnum):
    """What a line is evidence of."""

    RANK = "only training writes it, and inference with the same libraries"
    LAUNCH = "launchers and scripts that train write it, where no other program shows"
    LEARN = "many programs write it: two tell of training, or one beside a word of the machines"
    MACHINE = "words of the machines that train"
    FOREIGN = "stacks of languages in which nothing trains"
    GROUP = "ranks that meet"
    PROGRESS = "a step, a loss, a container that starts"
    FINISHED = "the job is done"
    MENDED = "another way was found, or a server serves"
    MEASURED = "a loss or a gradient norm, also one that is no number"
    NO_NUMBER = "a loss or a gradient norm that is no number"
    SMALLEST_SCALE = "the loss scale cannot shrink any more, or is no number that scales"
    HANGS = "somebody says that it hangs; layers are frozen, and losses are stuck, in training that goes well"


_VALUE = r"\w*['\"]?\s*[:=]?\s*"
_NO_LOSS = r"^(?!.*[Ll]oss\w*['\"]?\s*[:=]\s*\d).*"  # beside it
_NOT_LEARNT = r"^(?!.*\b(?:loss|accuracy|acc|reward|score|layers?)\b).*"
# Expressions, two spaces or a line between them. Words are whole ones: `accelerate` is not in `accelerated`.
_SIGNS = {
    EventKind.RANK: r"""
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
    """,
    EventKind.LAUNCH: r"""
    train\w*\.(?:py|sh|ya?ml)  [_-]train(?![a-z])  pretrain  finetun  fine-tun  batch_size  local_rank  Trainer\b
    LLMEngine  raylet  ^\[[\d-]+[ ][\d:,]+[ ][A-Z][ ]\d+[ ]\d+\][ ]  -launcher-\d  capabilities: \[\[gpu  GPUs?Quota
    nvidia\.com/gpu
    (?<![A-Za-z])[Tt]rain(?:ing|ed)? (?:pipeline|script|job|run|code|process|loop|model|stage)\b
    (?<![A-Za-z])[Tt]rain(?:ing|ed)? (?:on|my|a|the|with)\b
    """,
    EventKind.LEARN: r"""
    checkpoint  datasets/  [Ee]pochs?(?![a-z])  (?<![A-Za-z])loss(?:es)?(?![A-Za-z]|:? \d+%)  \d%\|.*(?:it/s|s/it)
    [Ee]valuat  [Dd]ataset  [Oo]ptimizer  [Gg]radient  [/_]train[/_.]  \.ckpt  \.pth\b  \.pt\b  ckpt  tokenizer
    inference  [Tt]raining(?![a-z])  kubeflow  omegaconf  hydra[._/]\w  num_workers  DataLoader\b
    """,
    EventKind.MACHINE: r"""
    (?<![A-Za-z])gloo(?![a-z])  (?<![A-Za-z])cuda(?![a-z])  CUDA  GPUs?(?![A-Za-z])  nvidia  slurm  mpirun  numpy
    scipy  -worker-\d  -master-\d  RuntimeError:  cudaGetDeviceCount
    """,
    EventKind.FOREIGN: r"^\tat[ ]  ^\s{4}at[ ]",
    EventKind.GROUP: r"""
    NCCL INFO  init_process_group  torch\.distributed  distributed init  world[_ ]size  torchrun  distributed_backend=
    distributed processes registered
    """,
    EventKind.PROGRESS: rf"""
    \d+%\|.*(?:it/s|s/it)  [Ll]oss{_VALUE}(?:[-+]?\d|nan|inf|NaN)  LOSS{_VALUE}[-+]?\d  [Ii]teration\s+\d+/\s*\d+
    ^[Ss]tep\s+\d+/\d+  ^\s*Normal\s+(?:Scheduled|Started)\b
    """,
    EventKind.FINISHED: r"""
    Finished [Tt]raining  train_runtime  `Trainer\.fit` stopped  WorkerState\.SUCCEEDED  worker group success
    OK \(expected failures  [ ]passed in[ ]  (?:^|INFO threefold: )done: \d+ steps,  ^Status:\s+Succeeded
    ^\s+Reason:\s+Completed  ^\d+\s+\S+\s+COMPLETED\s+0:0  ^=+ .*\d+ passed.* in
    ^\d+ passed\b(?!.*(?:fail|error)).* in [\d.]+s  ^OK(?: \(|$)
    \b[Tt]raining (?:is |has |was )?(?:now )?(?:successfully )?(?:complete|finished|done)
    \b(?:[Jj]ob|[Rr]un|Pod|Task) \S{0,60} ?(?:has )?(?:successfully )?succeeded ?(?:successfully)?(?:[.!]|$)
    \b(?:[Jj]ob|[Rr]un|Pod|Task) \S{0,60} ?(?:has )?(?:successfully )?completed ?(?:successfully)?(?:[.!]|$)
    \b(?:[Jj]ob|[Rr]un|Pod|Task) \S{0,60} ?(?:has )?(?:successfully )?finished ?(?:successfully)?(?:[.!]|$)
    """,
    EventKind.MENDED: r"""
    NET/OFI Selected  Rendezvous complete  [Rr]econnected[ ]  [Rr]econnection successful  [Ff]all(?:ing|s) back to
    [Ff]ell back to  onnection re-established  onnection restored  Application startup complete
    """,
    EventKind.MEASURED: rf"""
    [Ll]oss{_VALUE}(?:(?i:nan)|\d)  LOSS{_VALUE}(?:(?i:nan)|\d)  [Gg]rad(?:ient)?[ _]?[Nn]orm{_VALUE}(?:(?i:nan)|\d)
    """,
    EventKind.NO_NUMBER: rf"""
    {_NO_LOSS}(?:\b|(?<!val)(?<!eval)(?<!test)_)[Ll]oss{_VALUE}(?i:nan)\b  {_NO_LOSS}\bLOSS{_VALUE}(?i:nan)\b
    [Ll]oss is not finite
    [Gg]rad(?:ient)?[ _]?[Nn]orm{_VALUE}(?i:nan)\b  Nan grad norm  \b[Ll]oss is (?i:nan)
    """,
    EventKind.SMALLEST_SCALE: r"""
    loss scale: (?P<scale>\d+(?:\.0)?), reducing to (?P=scale)(?:\.0)?\b
    reducing loss scale to (?:0\.0\b|[\d.]+e-[1-9]\d)
    """,
    EventKind.HANGS: rf"""
    {_NOT_LEARNT}\b[Hh]ang(?:s|ing)?\b  {_NOT_LEARNT}\bhung\b  {_NOT_LEARNT}\b[Ss]tuck\b  {_NOT_LEARNT}\bjam(?:s|med)\b
    {_NOT_LEARNT}\bblocks? forever\b  {_NOT_LEARNT}[Nn]othing happens\b  {_NOT_LEARNT}\bno (?:further )?progress\b
    {_NOT_LEARNT}\bno further output\b  {_NOT_LEARNT}\bnever (?:returns|finishes|ends|starts)\b
    {_NOT_LEARNT}(?:it|training|process|program|script|job|server) (?:just |then )?freezes\b
    {_NOT_LEARNT}(?:it|training|process|program|script|job|server) (?:just |then |is )?froze
    """,
}  # fmt: skip
_PARSERS = {
    kind: [(re.compile(sign), anchor(sign)) for sign in re.split(r"\s{2,}", signs.strip())]
    for kind, signs in _SIGNS.items()
}
_GOES_ON = 2  # lines of progress that show that trouble was made good
_SKIPPED = 3  # steps in a row


class Events:
    """The events of a job in a log, by kind."""

    def __init__(self, log: Log) -> None:
        self.log = log
        self._places: dict[EventKind, list[int]] = {}

    def places(self, kind: EventKind) -> list[int]:
        """Indices of the lines of a kind, in order."""
        if kind not in self._places:
            self._places[kind] = sorted(
                {index for sign in _PARSERS[kind] for index in self._of_sign(*sign)}
            )
        return self._places[kind]

    def kinds(self, kind: EventKind, most: int = 1) -> int:
        """How many of a kind's expressions the log has, up to `most`."""
        seen = (sign for sign in _PARSERS[kind] if self._of_sign(*sign))
        return len(list(islice(seen, most)))

    def _of_sign(self, pattern: re.Pattern[str], literal: str) -> Sequence[int]:
        log = self.log
        return [
            index
            for index in log.indices(literal)
            if pattern.search(log.raw[index]) or pattern.search(log.line(index).text)
        ]

    @cached_property
    def is_training(self) -> bool:
        """Whether a training job wrote the log: by its own words, or by several that it shares with other programs."""
        if self.kinds(EventKind.RANK):
            return True
        learning = self.kinds(EventKind.LEARN, 2)
        shared = (
            self.kinds(EventKind.LAUNCH)
            or learning == 2
            or (learning == 1 and self.kinds(EventKind.MACHINE))
        )
        return bool(shared) and not self.is_foreign

    @cached_property
    def is_foreign(self) -> bool:
        """Whether the log has frames of a language in which nothing trains."""
        return bool(self.kinds(EventKind.FOREIGN))

    def made_good(self, index: int) -> bool:
        """Whether the job went on, found another way or finished after the line at `index`; told by its own file."""
        end = self.log.source_end(index)
        good = self._between(EventKind.FINISHED, index, end) + self._between(
            EventKind.MENDED, index, end
        )
        return good > 0 or self._between(EventKind.PROGRESS, index, end) >= _GOES_ON

    def over(self, index: int) -> bool:
        """Whether the job had finished for good before the line at `index`; told by lines of the same file."""
        place = bisect_left(self.places(EventKind.FINISHED), index)
        end = self.places(EventKind.FINISHED)[place - 1] if place else -1
        return (
            end >= self.log.source_begin(index)
            and self._between(EventKind.PROGRESS, end, index) == 0
        )

    def not_finite(self) -> list[LogLine]:
        """The lines whose loss or gradient norm is not a number, if this is more than one skipped step, or the scale
        of fp16 cannot shrink."""
        bad, scales = self.places(EventKind.NO_NUMBER), self.places(EventKind.SMALLEST_SCALE)
        measured = {*self.places(EventKind.MEASURED), *bad}
        if bad and (max(measured) == bad[-1] or len(bad) * 5 >= len(measured) > 2):
            return [self.log.line(index) for index in bad]
        if len(scales) >= _SKIPPED and max(measured, default=0) <= scales[-1]:
            return [self.log.line(index) for index in scales]
        return []

    def _between(self, kind: EventKind, after: int, before: int) -> int:
        return bisect_left(self.places(kind), before) - bisect_right(self.places(kind), after)
