"""`python -m threefold` is the command."""

from __future__ import annotations


def main() -> None:
    """The entry point of the command `threefold`."""
    from threefold.commands.main import run

    run()


if __name__ == "__main__":
    main()
