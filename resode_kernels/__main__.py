"""``python -m resode_kernels``: the command line."""

from __future__ import annotations

import argparse
import os
import sys

from . import __version__
from .info import lines


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m resode_kernels",
        description="Train residual networks of any depth in constant memory.",
    )
    parser.add_argument("--version", action="version", version=f"resode_kernels {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command")
    commands.add_parser("info", help='which backends are built, which run here, what "auto" picks')
    if parser.parse_args().command is None:
        parser.print_help()
        return
    try:
        print("\n".join(lines()), flush=True)
    except BrokenPipeError:  # the reader has seen enough, as in `info | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main()
