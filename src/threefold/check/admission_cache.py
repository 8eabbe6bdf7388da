"""Cached results, so that a model is probed once for each way in which it is computed.

A result is one file in the cache, named after everything that it depends on: the code of the model and of this package
(`code_digest`), the versions of torch and transformers, the reduced architecture, the config, the mesh and the device.
Only a result that holds is kept.

The code: from the classes of all modules of the model (and their bases) and from the probes, imports are followed
through every package that has one of these classes and through code that is not installed; of other installed packages
the versions count. Every function found there is recorded with the module that it was defined in, so that a patch is
another digest. There is no digest for code without a file (a notebook, standard input), nor for a program's changes to
a package's class.
"""

import hashlib
import json
import os
import platform
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
import transformers
import xxhash
from torch import nn

from threefold.build_id import build_id
from threefold.check.compare import Comparison, Difference
from threefold.check.probes import Subject
from threefold.jsonl import Values, write_whole
from threefold.mesh.environment import cache_folder
from threefold.mesh.mesh import Mesh

# What the probes do not depend on, which a run may change under a kept pass. Everything else in the sections `model`,
# `train` and `mesh` is part of the key.
_IRRELEVANT = {
    # Weights are not probed here; the class is in the code's digest, the architecture itself in the key.
    "model": {"name_or_path", "revision", "init_missing", "config", "admission"},
    "train": {
        # The probes have their own rows and seeds.
        *("steps", "epochs", "global_batch", "micro_batch", "seed"),
        # Of what follows the gradients probed.
        *("grad_clip", "label_smoothing", "z_loss", "objective", "nonfinite"),
        # Of the process.
        *("memory_check", "timeout_s"),
    },
    # The topology and the device are in the key.
    "mesh": {"dp", "dp_shard", "cp", "tp", "device", "timeout_s"},
}


def key_of(subject: Subject, mesh: Mesh, code: str) -> str:
    """Identifies what the probes of a subject depend on; `code` is the digest of what computes them."""
    config = subject.config
    device = torch.cuda.get_device_name(mesh.device) if mesh.on_cuda else platform.machine()
    parts: list[Any] = [
        build_id(),
        torch.__version__,
        transformers.__version__,
        platform.python_version(),
        code,
        mesh.device.type,
        device,
        mesh.topology.sizes,
        vars(subject.mode),
        subject.narrow and subject.narrow.train.compile,
        *(
            getattr(config, name).model_dump(mode="json", exclude=left)
            for name, left in _IRRELEVANT.items()
        ),
        subject.architecture.to_json_string(use_diff=False),
        (config.data.seq_len, subject.longer),
        *(
            (real.architecture.to_json_string(use_diff=False), real.seq_len)
            for real in subject.real
        ),
    ]
    return xxhash.xxh3_128_hexdigest(json.dumps(parts).encode())


def read(key: str) -> list[Difference] | None:
    """The results kept under a key, if they can be read and hold."""
    try:
        values = json.loads((_folder() / f"{key}.json").read_text())
        results = [Difference(**result) for result in values]
        return results if Comparison(results).holds else None
    except (OSError, ValueError, TypeError):
        return None


def keep(key: str, results: list[Difference]) -> None:
    """Keeps results under a key; a cache that cannot be written is left as it is."""
    try:
        _folder().mkdir(parents=True, exist_ok=True)
        content = json.dumps([vars(result) for result in results]).encode()
        write_whole(_folder() / f"{key}.json", [content])
    except OSError:
        return


def _folder() -> Path:
    return cache_folder() / "admission"


_TRUSTED = sys.stdlib_module_names | {"torch", "builtins", "typing_extensions"}
_OURS = __name__.partition(".")[0]
# Added to torch's modules by transformers when it first makes weights.
_ADDED = "Module.smart_apply"
_INSTALLED = tuple({sysconfig.get_paths()[name] for name in ("purelib", "platlib")})


class _UnknownOriginError(Exception):
    """A class or function that no file accounts for."""


class CodeDigest(NamedTuple):
    """Digests of all code that a model computes with; None: some of it is of unknown origin, or patched.

    Attributes:
        classes: of sources and classes, which are the same on every rank.
        whole: also of the contents of registries and modules, and of installed versions.
    """

    classes: str | None
    whole: str | None


def code_digest(model: nn.Module, *rooms: ModuleType) -> CodeDigest:
    """The digests of everything that a model and these modules compute with.

    Args:
        model: may be on the meta device.
        rooms: modules whose code takes part.
    """
    classes = {base for module in model.modules() for base in type(module).__mro__}
    code = _Code(
        {_package(base.__module__) for base in classes}
        | {_package(room.__name__) for room in rooms}
    )
    try:
        for base in classes:
            code.add_class(base)
        for module in model.modules():
            code.add_functions(type(module).__module__, type(module).__qualname__, vars(module))
        for library in (torch, nn.functional):
            code.add_functions("torch", library.__name__, vars(library))
        code.follow(
            [*(base.__module__ for base in classes), *(room.__name__ for room in rooms)]
        )
    except _UnknownOriginError:
        return CodeDigest(None, None)
    if nn.modules.module._global_forward_hooks or nn.modules.module._global_forward_pre_hooks:
        return CodeDigest(None, None)
    return code.digest()


class _Code:
    def __init__(self, packages: set[str]) -> None:
        self._packages = packages - _TRUSTED
        self._sources: dict[str, bytes] = {}
        self._of_classes: set[str] = set()
        self._of_modules: set[str] = set()

    def digest(self) -> CodeDigest:
        digest = hashlib.blake2b(digest_size=16)
        for name, content in sorted(self._sources.items()):
            digest.update(f"{name} {len(content)}\n".encode() + content)
        digest.update("\n".join(sorted(self._of_classes)).encode())
        classes = digest.hexdigest()
        digest.update("\n".join([*sorted(self._of_modules), *_distributions()]).encode())
        return CodeDigest(classes, digest.hexdigest())

    def follow(self, names: Iterable[str]) -> None:
        """Reads modules and what they import."""
        waiting = list(names)
        while waiting:
            name = waiting.pop()
            if name in self._sources or _package(name) in _TRUSTED:
                continue
            module = sys.modules.get(name)
            path = _path_of(module)
            if (
                _package(name) not in self._packages
                and path is not None
                and path.startswith(_INSTALLED)
            ):
                continue  # its version counts
            if path is None or not os.path.isfile(path):
                raise _UnknownOriginError(name)
            self._sources[name] = Path(path).read_bytes()
            if hasattr(module, "__path__"):
                continue  # a package names what happens to be loaded of it
            for value in [
                value for own, value in vars(module).items() if own != "__builtins__"
            ]:
                waiting += self._imports(name, value)
                for own in _registered(value):
                    waiting += self._imports(name, own)

    def _imports(self, name: str, value: Any) -> list[str]:
        """The modules that a value of a module leads to."""
        if isinstance(value, type):
            if value.__module__ == name:
                self.add_class(value)
            return [value.__module__]
        if isinstance(value, ModuleType):
            return [value.__name__]
        if not isinstance(value, FunctionType | MethodType):
            return []
        # Our own registrations are known.
        records = set() if _package(value.__module__) == _OURS else self._of_modules
        origins = [
            function.__globals__.get("__name__") for function in _record(records, name, value)
        ]
        return [origin for origin in origins if origin in sys.modules]

    def add_class(self, base: type) -> None:
        self.add_functions(base.__module__, base.__qualname__, vars(base))

    def add_functions(self, module: str, owner: str, values: Values) -> None:
        """Records the functions of a class or an instance, which its own package or an installed one defined."""
        for name, value in values.items():
            if f"{owner}.{name}" == _ADDED:
                continue
            for function in _record(self._of_classes, f"{module} {owner}.{name}", value):
                origin = function.__globals__.get("__name__", "")
                # collections makes the functions of a named tuple in a module that it names so.
                own = _package(origin) in (_package(module), *_TRUSTED) or origin.startswith(
                    "namedtuple_"
                )
                if not own and not (_path_of(sys.modules.get(origin)) or "").startswith(
                    _INSTALLED
                ):
                    raise _UnknownOriginError(f"{owner}.{name} of {origin}")


def _record(records: set[str], place: str, value: Any) -> list[Any]:
    """The functions of a value, of which a line each was added: where it is, and where it was defined."""
    functions = _functions_of(value)
    for function in functions:
        code = function.__code__
        cells = [
            repr(cell.cell_contents) for cell in function.__closure__ or () if _is_plain(cell)
        ]
        records.add(
            f"{place} {function.__globals__.get('__name__')} {code.co_qualname} {code.co_firstlineno} {cells}"
        )
    return functions


def _functions_of(value: Any) -> list[Any]:
    """The Python functions of a value: of a property, a method or a wrapper also those inside."""
    functions = []
    while value is not None:
        if isinstance(value, property):
            value = value.fget
        elif isinstance(value, staticmethod | classmethod | MethodType):
            value = value.__func__
        if not isinstance(value, FunctionType):
            break
        functions.append(value)
        value = value.__dict__.get("__wrapped__")
    return functions


def _registered(value: Any) -> list[Any]:
    """What a dictionary holds, or the dictionaries of an object and of its class, as a registry of functions has."""
    if isinstance(value, dict):
        return list(dict.values(value))
    if isinstance(value, type | ModuleType | FunctionType) or not hasattr(value, "__dict__"):
        return []
    parts = [*vars(value).values(), *vars(type(value)).values()]
    return [own for part in parts if isinstance(part, dict) for own in dict.values(part)]


def _is_plain(cell: Any) -> bool:
    try:
        return isinstance(cell.cell_contents, bool | int | float | str | None)
    except ValueError:  # not filled yet
        return False


def _path_of(module: ModuleType | None) -> str | None:
    return getattr(module, "__file__", None)


def _package(module: str) -> str:
    return module.partition(".")[0]


def _distributions() -> list[str]:
    """Names and versions of everything installed, as its folders name them."""
    folders = [folder for folder in (*sys.path, *_INSTALLED) if os.path.isdir(folder)]
    return sorted(
        {
            name
            for folder in folders
            for name in os.listdir(folder)
            if name.endswith(".dist-info")
        }
    )
