"""Why transformers does not read a model's config, and what helps."""

import difflib
import re
from pathlib import Path

import transformers
from transformers import CONFIG_MAPPING

from threefold.config.paths import MODEL_FOLDER, near_folder
from threefold.errors import ConfigError, first_line

_NEWER = "pip install -U transformers   (a later release may have it)"


def reason_of(text: str) -> str:
    """What transformers says, in one line, without its list of all architectures."""
    words = " ".join(text.split())
    return re.split(r"(\.|, or) (Should )?contain one of", words, maxsplit=1)[0]


def unreadable(name: str, error: Exception) -> ConfigError:
    """The error for a model that transformers or the Hub's client could not read."""
    expected, fix = MODEL_FOLDER, "check the path"
    if "trust_remote_code" in str(error):
        expected = "your consent to run its code, with your rights, on every rank"
        fix = (
            "--model.trust_remote_code true   (if you have read that code, or trust its author)"
        )
    elif "does not recognize this architecture" in str(error):
        expected, fix = f"an architecture of transformers {transformers.__version__}", _NEWER
    elif not Path(name).is_dir():
        expected = "a local folder, or a Hub id that can be reached"
        fix = "check the name, your connection, and `hf auth login` for gated models"
        if near := near_folder(Path(name)):
            fix = f"did you mean the folder {near}? Otherwise {fix}"
    return ConfigError(
        f"model.name_or_path = {name!r} cannot be read: {reason_of(first_line(error))}",
        expected=expected,
        fix=fix,
    )


def refused(what: str, error: Exception, expected: str) -> ConfigError:
    """The error for keys or values that an architecture's config does not take."""
    reason = reason_of(str(error))
    fix = "see the architecture's config page in the transformers documentation"
    if re.search(r"expected (int|float), got str", reason):
        fix = "write the number without quotes"
    return ConfigError(
        f"{what} is refused by transformers: {reason}", expected=expected, fix=fix
    )


def unknown_type(model_type: str) -> ConfigError:
    near = difflib.get_close_matches(str(model_type), CONFIG_MAPPING.keys(), n=1)
    return ConfigError(
        f"model.config has model_type {model_type!r}, which transformers {transformers.__version__} does not know",
        expected="one of its architectures, as llama, qwen3 and gemma3_text are",
        fix=f"did you mean {near[0]}?" if near else _NEWER,
    )
