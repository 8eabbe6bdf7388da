"""One error family for users, and the only place that formats it.

Every message has three parts: what is wrong (the user's own key and value), what was expected (and what would have
gone wrong), and how to fix it (text to paste). Several problems found together travel in one error.
"""

import errno
import shlex
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field, replace
from typing import Any

EXIT_FAILED = 1
EXIT_WRONG_REQUEST = 2
EXIT_STOPPED_WITH_CHECKPOINT = 75
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Of an OSError: a full disk, a full quota, a limit on the size of files."""
_NUM_NAMED = 6
# HTTP status codes that may differ on a retry; how many chained causes are followed.
_PASSING, _DEEPEST = (429, 500, 502, 503, 504), 8
# Categories of Unicode: controls, formats, surrogates, private and unassigned ones; separators of lines.
_OBEYED = ("C", "Zl", "Zp")
# Those that texts need: lines, tabs, and the joiners of Persian, Hindi and emoji.
_HARMLESS = "\n\t\u200c\u200d"


def visible(text: str) -> str:
    """Text without anything that a terminal would obey or hide: control characters and the like are spelled out."""

    def shown(character: str) -> str:
        if character in _HARMLESS or not unicodedata.category(character).startswith(_OBEYED):
            return character
        return character.encode("unicode_escape", errors="backslashreplace").decode("ascii")

    return text if text.isprintable() else "".join(map(shown, text))


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong: `what`, what was `expected`, and the `fix` to paste.

    Attributes:
        setting: the key and value that the fix sets, if it sets one, and a remark: programs set it with other syntax.
    """

    what: str
    expected: str
    fix: str
    setting: tuple[str, Any, str] | None = field(default=None, compare=False)

    def __str__(self) -> str:
        return visible(f"{self.what}\n  expected: {self.expected}\n  fix: {self.fix}")


class ThreefoldError(Exception):
    """Base of all errors meant for users; carries one or more problems and the exit code of the command.

    Attributes:
        how: kind of failure, a word of `checkpoint.lineage.Ending`.
        ranks: the ranks concerned, if all ranks raise it; None: the rank that raises it.
        phase, step: where it arose, if that is not where it is raised.
    """

    exit_code = EXIT_FAILED
    how = "error"
    ranks: tuple[int, ...] | None = None
    phase, step = "", 0

    def __init__(self, what: str, *, expected: str, fix: str) -> None:
        super().__init__(what)
        self.problems: tuple[Problem, ...] = (Problem(what, expected, fix),)

    @classmethod
    def of(cls, problems: Iterable[Problem]) -> "ThreefoldError":
        """One error that carries all `problems` (at least one)."""
        first, *others = problems
        error = cls(first.what, expected=first.expected, fix=first.fix)
        error.problems = (first, *others)
        return error

    @classmethod
    def raise_for(cls, problems: Iterable[Problem]) -> None:
        """Raises one error that carries all `problems`, if there are any."""
        if collected := list(problems):
            raise cls.of(collected)

    def for_program(self, write: Callable[[str, Any], str]) -> None:
        """Rewrites each fix that sets a key as a program writes it: `write(key, value)`."""
        problems = list(self.problems)
        for number, problem in enumerate(problems):
            if problem.setting is not None:
                key, value, remark = problem.setting
                problems[number] = replace(
                    problem, fix=write(key, value) + remark, setting=None
                )
        self.problems = tuple(problems)

    def __str__(self) -> str:
        return "\n\n".join(str(problem) for problem in self.problems)

    def __reduce__(self) -> tuple[Any, ...]:
        return self.of, (self.problems,), vars(self)


@contextmanager
def in_program(write: Callable[[str, Any], str]) -> Iterator[None]:
    """Makes errors raised inside show program code instead of command options; also a decorator."""
    try:
        yield
    except ThreefoldError as error:
        error.for_program(write)
        raise


class ConfigError(ThreefoldError):
    """A setting is wrong, or settings contradict one another, the model or the machine."""

    exit_code = EXIT_WRONG_REQUEST


def check_argument(name: str, value: object, right: bool, *, expected: str, fix: str) -> None:
    """ConfigError unless a public function's argument is right; shows a plain value, or the type of an object."""
    if not right:
        plain = value is None or isinstance(value, str | int | float)
        raise ConfigError(
            f"{name} = {value!r}" if plain else f"{name} is a {type(value).__name__}",
            expected=expected,
            fix=fix,
        )


class DataError(ThreefoldError):
    """The data cannot be read as requested: missing, empty, unparsable, or not the data that a run began with."""

    exit_code, how = EXIT_WRONG_REQUEST, "data"


class CheckpointError(ThreefoldError):
    """A checkpoint is missing, damaged, or belongs to another run."""

    exit_code = EXIT_WRONG_REQUEST


class RunError(ThreefoldError):
    """The run began and failed."""


class OtherRankError(RunError):
    """Another rank failed, and not with an error for users: the output of that rank shows why."""


def described_error(error: BaseException) -> dict[str, Any]:
    """An error as JSON values, for another process to raise (`error_of`)."""
    if not isinstance(error, ThreefoldError):
        return {
            "class": None,
            "text": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}",
        }
    return {
        "class": type(error).__name__,
        "problems": [astuple(problem) for problem in error.problems],
    }


def error_of(described: dict[str, Any], name: str) -> ThreefoldError:
    """The error that another process described, of the same class, which it had in `name`."""
    if described["class"] is None:
        return OtherRankError(
            f"another rank failed in {name!r}: {described['text']}",
            expected="its result",
            fix="see that rank's traceback",
        )
    classes = {cls.__name__: cls for cls in _family(ThreefoldError)}
    return classes.get(described["class"], RunError).of(
        Problem(*problem) for problem in described["problems"]
    )


def _family(cls: type[ThreefoldError]) -> Iterator[type[ThreefoldError]]:
    yield cls
    for derived in cls.__subclasses__():
        yield from _family(derived)


def full_disk(error: BaseException) -> RunError | None:
    """The user's error for a full disk; None for any other error."""
    # Not an OSError, but its text has the number.
    safetensors = type(error).__name__ == "SafetensorError"
    if getattr(error, "errno", None) not in NO_SPACE and not (
        safetensors and any(f"(os error {number})" in str(error) for number in NO_SPACE)
    ):
        return None
    return RunError(
        f"a disk is full: {error}",
        expected="enough free space for what is written",
        fix="free space (`df -h` of the folders that it names), then the same command again",
    )


def refused_path(error: BaseException) -> ConfigError | None:
    """The user's error for a path that the system denies to a command; None for an error that names no path."""
    if not isinstance(error, OSError) or error.filename is None:
        return None
    return ConfigError(
        f"{error.filename}: {error.strerror}",
        expected="an existing path that this user may reach, read and write",
        fix=f"another path, or what is missing:   namei -l {shell_word(error.filename)}   shows each part of it",
    )


def shell_word(path: object) -> str:
    """A path as a shell reads it, whole: for the fix of an error."""
    return shlex.quote(str(path))


def first_line(error: BaseException) -> str:
    """The first line of an error, or its class if it has no text; and `passing`."""
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    return f"{line}{passing(error)}"


def passing(error: BaseException | None) -> str:
    """` (HTTP 503, ...)` for an error caused by a server's answer that may differ on a retry; else nothing."""
    for _ in range(_DEEPEST):
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status in _PASSING:
            return f" (HTTP {status}, which is temporary: run the same command again later)"
        error = error and (error.__cause__ or error.__context__)
    return ""


def ranks_text(ranks: Iterable[int]) -> str:
    """`rank 3`, `ranks 0 to 3`, `ranks 0, 2 and 5`."""
    numbers = sorted(ranks)
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    if len(numbers) > 2 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"ranks {numbers[0]} to {numbers[-1]}"
    return f"ranks {', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"


def rows_text(rows: Iterable[int]) -> str:
    """`row 7`, `rows 7, 12, 3`; if there are many, the first ones and how many more."""
    if not (numbers := [int(row) for row in rows if row >= 0]):
        return "no row"
    named = ", ".join(map(str, numbers[:_NUM_NAMED]))
    more = f" and {len(numbers) - _NUM_NAMED:,} more" if len(numbers) > _NUM_NAMED else ""
    return f"{'row' if len(numbers) == 1 else 'rows'} {named}{more}"


def size_text(num_bytes: float) -> str:
    """`8 GiB`, `11.06 MiB`, `512 bytes`: four digits, in the largest unit that it fills."""
    for unit, factor in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.4g} {unit}"
    return f"{num_bytes:.4g} bytes"
