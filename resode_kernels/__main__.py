"""``python -m resode_kernels info``."""

import argparse

from .info import lines


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m resode_kernels")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("info", help='which backends are built, which run here, what "auto" picks')
    parser.parse_args()
    print("\n".join(lines()))


if __name__ == "__main__":
    main()
