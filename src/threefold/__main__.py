"""`python -m threefold` is the command."""

from __future__ import annotations

import logging

# transformers imports torchao wherever it is installed, and it warns of each of its kernels that cannot be loaded, and
# torch of what it registers.
for _name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_name).setLevel(logging.ERROR)


def main() -> None:
    """The entry point of the command `threefold`."""
    from threefold.commands.main import run

    run()


if __name__ == "__main__":
    main()
