"""`python -m threefold` is the command."""

import logging
import os
import signal
import sys
from traceback import walk_stack
from types import FrameType

# transformers imports torchao wherever it is installed, and it warns of each of its kernels that cannot be loaded, and
# torch of what it registers.
for _name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_name).setLevel(logging.ERROR)


def _interrupted(number: int, frame: FrameType | None) -> None:
    """Ctrl-C. During an import it ends the process: libraries swallow what is raised there, or are broken by it."""
    if any("<frozen importlib" in each.f_code.co_filename for each, _ in walk_stack(frame)):
        os._exit(130)
    raise KeyboardInterrupt


def main() -> None:
    """The entry point of the command `threefold`."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupted)
    # A closed stream's number would be that of the next file, into which libraries would print. Ranks inherit these.
    while (free := os.open(os.devnull, os.O_RDWR)) < 3:
        os.set_inheritable(free, True)
    os.close(free)
    sys.stdout, sys.stderr = sys.stdout or os.fdopen(1, "w"), sys.stderr or os.fdopen(2, "w")
    try:
        from threefold.commands.main import run

        run()
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a second one does not wait for the end
        sys.exit(130)


if __name__ == "__main__":
    main()
