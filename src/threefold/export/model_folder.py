"""Exports a checkpoint as a Hugging Face folder that reloads to equal logits: one process.

A checkpoint may be untrusted, so none of its code is run. Its config names a model class that transformers has. Code
from elsewhere is loaded only if the caller allows it, whatever the run that saved the checkpoint allowed.
"""

import contextlib
import copy
import os
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from filelock import FileLock, Timeout
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PretrainedConfig
from transformers.core_model_loading import revert_weight_conversion

from threefold.check.compare import SAME_LOGITS, compare_tensors
from threefold.checkpoint import state as run_state
from threefold.checkpoint.checkpoint_folder import Checkpoint, find
from threefold.checkpoint.manifest import (
    read_architecture,
    read_manifest,
    refuse_layers_without_tensors,
    refuse_other_code,
)
from threefold.checkpoint.tensor_index import Index
from threefold.config.loading import validate
from threefold.config.schema import Config
from threefold.errors import CheckpointError, ConfigError, RunError, shell_word
from threefold.export.tokenizer_files import save_tokenizer
from threefold.export.weights import (
    load_with_peft,
    model_with_adapters,
    write_adapter,
    write_weights,
)
from threefold.model import lora
from threefold.model.config_errors import reason_of
from threefold.model.load import outline, own_code
from threefold.progress_bars import Bars

MAX_SHARD_BYTES = 5 * 1000**3
# Config keys that can make transformers fetch code or kernels.
_CODE = (
    "auto_map",
    "attn_implementation",
    "experts_implementation",
    "quantization_config",
    "use_kernels",
)
_PROBE_TOKENS = 32
_NOT_RELOADED = "not reloaded"
# In a folder that is being written. Only an empty one gets it, so everything beside it is the export's.
_MARK = ".threefold-export"


@dataclass(frozen=True)
class Exported:
    """The result: the checkpoint's step, the number of parameters, the weight files, and the result of reloading."""

    step: int
    num_parameters: int
    files: tuple[str, ...]
    verified: str


def export(
    run: Path,
    to: Path,
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    verify: bool | None = None,
    trust_remote_code: bool = False,
    adapter: bool = False,
    with_tokenizer: bool = True,
    ema: bool = False,
) -> Exported:
    """Writes the checkpoint of a run (or a checkpoint itself) to a new folder, and removes the folder on failure.

    For a run that trained adapters, writes the complete model, with the adapters merged.

    Args:
        adapter: write only the adapters, in peft's form.
        with_tokenizer: write the run's tokenizer too.
        verify: reload and compare logits; None: only if the model fits into the free memory.
        ema: write the moving average of the weights (optimizer.ema).

    Raises:
        CheckpointError: there is no complete checkpoint, or it is damaged. ConfigError: the folder is not empty.
        RunError: the folder reloads to different logits.
    """
    if not (to / _MARK).exists():  # which a killed export has left
        refuse_filled(to)
    transformers.utils.logging.disable_progress_bar()
    checkpoint = find(run)
    checkpoint.refuse_damage()
    config, architecture = described(checkpoint, trust_remote_code)
    if adapter and not config.model.lora.r:
        raise ConfigError(
            f"{run} has no adapters",
            expected="a run with model.lora.r above 0",
            fix="omit --adapter to write the complete model",
        )
    index = run_state.index_of(checkpoint, ema=ema)
    work = _Export(
        checkpoint, index, to, config, architecture, max_shard_bytes, verify, with_tokenizer
    )
    with unfinished(to):
        return (
            work.adapter()
            if adapter
            else work.merged()
            if config.model.lora.r
            else work.weights()
        )


def refuse_filled(to: Path) -> None:
    """ConfigError for a file, or a folder that is not empty."""
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise ConfigError(
            f"{to} is not empty",
            expected="a new or empty folder, so that no other model's files are mixed in",
            fix=f"another folder, such as {shell_word(f'{to}-2')}",
        )


@contextlib.contextmanager
def unfinished(to: Path) -> Iterator[None]:
    """Makes a folder, marked as unfinished and locked meanwhile; after an error it is as before: empty, or not there.

    What an export left in it that was killed is removed.
    """
    made = not to.exists()
    try:
        to.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{to} cannot be made: {error.strerror}",
            expected="a folder that this user can write",
            fix="--to ANOTHER_FOLDER",
        ) from error
    lock = FileLock(to / _MARK)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise ConfigError(
            f"another process is writing to {to}",
            expected="one at a time for each folder",
            fix="--to ANOTHER_FOLDER   (or wait until it has ended)",
        ) from None
    try:
        for left in to.iterdir():
            if left.is_dir() and not left.is_symlink():
                shutil.rmtree(left)
            elif left.name != _MARK:
                left.unlink()
        yield
        (to / _MARK).unlink()
    except BaseException:
        shutil.rmtree(to, ignore_errors=True)
        if not made:
            to.mkdir()
        raise
    finally:
        lock.release()


@dataclass(frozen=True)
class _Export:
    """One export: of all weights, of the adapters alone, or of the adapters merged into their base."""

    checkpoint: Checkpoint
    index: Index
    to: Path
    config: Config
    architecture: PretrainedConfig
    max_shard_bytes: int
    verify: bool | None
    with_tokenizer: bool

    def weights(self) -> Exported:
        state, index = self.checkpoint.state, self.index
        trusted = self.config.model.trust_remote_code
        model = outline(self.architecture, self.config.model)
        tensors = run_state.model_state(model)
        run_state.fit(tensors, index)
        files = write_weights(
            state,
            index,
            [name.removeprefix("model.") for name in tensors],
            self.to,
            max_shard_bytes=self.max_shard_bytes,
            convert=lambda layer: revert_weight_conversion(model, layer),
        )
        self._save_descriptions(model)
        num_bytes = sum(index.entries[name].num_bytes for name in tensors)
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if self.verify is None and num_bytes * 1.5 > free:
            verified = "not reloaded: the model does not fit into the free memory"
        else:
            with Bars().show("reloading, to compare logits"):
                verified = self._reloaded(
                    lambda: load_whole(self.checkpoint, trust_remote_code=trusted, index=index)[
                        0
                    ]
                )
        return self._exported(model.parameters(), files, verified)

    def adapter(self) -> Exported:
        model = model_with_adapters(self.checkpoint, self.config, self.architecture, self.index)
        files, verified = write_adapter(model, self.config, self.to), _NOT_RELOADED
        save_tokenizer(self.checkpoint, self.config, self.to)
        if self.verify is not False:
            _compare(
                model,
                load_with_peft(self.config, self.architecture, self.to),
                self.to,
                trained="the run",
            )
            verified = "reloaded by peft: equal logits"
        return self._exported(
            (p for p in model.parameters() if p.requires_grad), files, verified
        )

    def merged(self) -> Exported:
        model = model_with_adapters(self.checkpoint, self.config, self.architecture, self.index)
        lora.merge(model)
        with warnings.catch_warnings():
            # Transformers' own warning, about an internal name.
            warnings.simplefilter("ignore", FutureWarning)
            model.save_pretrained(self.to, max_shard_size=self.max_shard_bytes)
        self._save_descriptions(model)
        files = sorted(path.name for path in self.to.glob("*.safetensors"))
        return self._exported(model.parameters(), files, self._reloaded(lambda: model))

    def _exported(
        self, parameters: Iterable[Tensor], files: list[str], verified: str
    ) -> Exported:
        return Exported(
            self.checkpoint.step, sum(p.numel() for p in parameters), tuple(files), verified
        )

    def _reloaded(self, trained: Callable[[], Any]) -> str:
        if self.verify is False:
            return _NOT_RELOADED
        model, trusted = trained(), self.config.model.trust_remote_code
        reloaded: Any = AutoModelForCausalLM.from_pretrained(
            self.to, dtype=torch.float32, attn_implementation="eager", trust_remote_code=trusted
        )
        _compare(model, reloaded, self.to, trained=str(self.checkpoint.path))
        return "reloaded: equal logits"

    def _save_descriptions(self, model: Any) -> None:
        """Writes the model's config and code, its generation config and the run's tokenizer."""
        to, settings = self.to, self.config.model
        # For the text part alone of a few models (Emu3) transformers finds no class; the whole config names it.
        part = (
            type(model.config) is not type(self.architecture)
            and type(model.config) not in AutoModelForCausalLM._model_mapping
        )
        described = copy.deepcopy(self.architecture) if part else model.config
        described.architectures = [type(model).__name__]
        described.dtype = "float32"
        described.save_pretrained(to)
        if model.is_remote_code():
            transformers.dynamic_module_utils.custom_object_save(model, to, config=model.config)
        ends = save_tokenizer(self.checkpoint, self.config, to) if self.with_tokenizer else []
        if not model.can_generate():
            return
        generation = model.generation_config
        if settings.name_or_path is not None:
            with contextlib.suppress(OSError):  # the model has none, or no longer exists
                generation = GenerationConfig.from_pretrained(
                    settings.name_or_path, revision=settings.revision
                )
        elif ends:  # those of its class are ids of another vocabulary
            generation.bos_token_id = generation.eos_token_id = None
        end_ids = generation.eos_token_id
        end_ids = end_ids if isinstance(end_ids, list) else [end_ids] * (end_ids is not None)
        generation.eos_token_id = list(dict.fromkeys((*end_ids, *ends))) or None
        generation.save_pretrained(to)


@torch.no_grad()
def _compare(model: Any, reloaded: Any, to: Path, *, trained: str) -> None:
    vocabulary = model.config.get_text_config().vocab_size
    ids = torch.randint(
        vocabulary, (1, _PROBE_TOKENS), generator=torch.Generator().manual_seed(0)
    )
    expected, actual = (
        each.eval()(input_ids=ids, use_cache=False).logits for each in (model, reloaded)
    )
    (difference,) = compare_tensors(SAME_LOGITS, {"": actual}, {"": expected})
    if not difference.holds:
        reason = f": {difference.detail}" if difference.detail else ""
        raise RunError(
            f"{to} reloads to logits that differ from those of {trained} by up to {difference.figure:.3g}{reason}",
            expected="equal logits; the folder has been removed",
            fix="report it with the model's config; threefold export --no-verify keeps the folder",
        )


def load_whole(
    checkpoint: Checkpoint, *, trust_remote_code: bool = False, index: Index | None = None
) -> tuple[Any, Config]:
    """Returns the checkpoint's complete model on the CPU, and its training's config; `index`: of its weights."""
    index = index or run_state.index_of(checkpoint)
    config, architecture = described(checkpoint, trust_remote_code)
    if config.model.lora.r:
        model: Any = model_with_adapters(checkpoint, config, architecture, index)
    else:
        model = AutoModelForCausalLM.from_config(
            architecture,
            dtype=torch.float32,
            attn_implementation="eager",
            trust_remote_code=trust_remote_code,
        )
        run_state.read_weights(model, checkpoint.state, index)
    refuse_other_code(read_manifest(checkpoint), own_code(model), config, checkpoint)
    return model.eval(), config


def described(
    checkpoint: Checkpoint, trust_remote_code: bool
) -> tuple[Config, PretrainedConfig]:
    """Returns the run's config and the model's, as in the manifest; whether code is trusted is the caller's to say."""
    manifest = read_manifest(checkpoint)
    values = manifest["config"]
    config = validate(
        {**values, "model": {**values["model"], "trust_remote_code": trust_remote_code}}
    )
    values = _without_code(manifest["architecture"])
    try:
        if trust_remote_code and config.model.name_or_path is not None:
            architecture = AutoConfig.from_pretrained(
                config.model.name_or_path,
                revision=config.model.revision,
                trust_remote_code=True,
            )
        else:
            architecture = read_architecture(values)
    except Exception as error:  # transformers validates with exceptions of several families
        raise CheckpointError(
            f"transformers has no model for {checkpoint.path}: {reason_of(str(error))}",
            expected="an architecture that the installed transformers supports",
            fix="install the transformers release that trained it; or, if you trust the code of its model's "
            "repository, --trust-remote-code",
        ) from error
    if not config.model.lora.r:
        refuse_layers_without_tensors(
            architecture, len(Index.read(checkpoint.state).entries), checkpoint
        )
    return config, architecture


def _without_code(values: Any) -> Any:
    if not isinstance(values, dict):
        return values
    return {
        key: _without_code(value)
        for key, value in values.items()
        if key.lstrip("_") not in _CODE
    }
