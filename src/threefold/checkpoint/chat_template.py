"""The chat template with which a run renders conversations, kept in its folder for `sample --chat` and exports.

`RUN/chat_template.jinja`; its hash is in each checkpoint's manifest and in the journal's starts. Runs that render no
conversation have none.
"""

from pathlib import Path

from threefold.checkpoint.checkpoint_folder import Checkpoint
from threefold.config.schema import Config
from threefold.data.chat.labeller import template_file
from threefold.data.text.known_bytes import content_digest
from threefold.errors import CheckpointError, shell_word
from threefold.jsonl import Values, write_whole

FILE = "chat_template.jinja"
KEY = "chat_template"
"""of the manifest and of a start in the journal."""


def digest_of(template: str | None) -> str | None:
    """Equal for equal templates; None without one."""
    return content_digest(template) if template is not None else None


def keep(template: str, run: Path) -> None:
    """Writes the template into a run's folder."""
    write_whole(run / FILE, [template.encode()])


def template_of(checkpoint: Checkpoint, config: Config) -> str | None:
    """The template of a checkpoint's run: its copy, or the file that its config names; None: the tokenizer's own.

    Raises:
        CheckpointError: neither is the template that the run was trained with.
    """
    recorded, copy = checkpoint.manifest().get(KEY), checkpoint.path.resolve().parents[1] / FILE
    template = (
        copy.read_text(encoding="utf-8") if copy.is_file() and recorded is not None else None
    )
    if template is None and config.data.chat_template is not None:
        template = template_file(config.data.chat_template)
    if recorded is not None and template is not None and digest_of(template) != recorded:
        where = copy if copy.is_file() else config.data.chat_template
        raise CheckpointError(
            f"{where} is not the chat template that {checkpoint.path} was trained with",
            expected="the template of the run: the model knows no other form of conversation",
            fix=f"restore {copy} from a copy of the run",
        )
    return template


def refuse_other(
    manifest: Values, template: str | None, config: Config, checkpoint: Checkpoint
) -> None:
    """Raises CheckpointError if a run is resumed with another template than it was trained with."""
    recorded = manifest.get(KEY)
    if recorded is None or recorded == digest_of(template):
        return
    name = (
        config.data.chat_template
        or f"of the tokenizer {config.data.tokenizer or config.model.name_or_path}"
    )
    kept = checkpoint.path.resolve().parents[1] / FILE
    raise CheckpointError(
        f"the chat template {name} has changed since {checkpoint.path} was saved"
        + (" (there is none now)" if template is None else ""),
        expected=f"the template of the run, which it has kept in {kept}: another one turns the same conversations "
        "into other tokens",
        fix=f"--data.chat_template {shell_word(kept)}   (or --log.dir ANOTHER_FOLDER for a new run)",
    )
