"""The command line: one module a subcommand, each with `add_parser` and `run`."""

import argparse
import sys
from collections.abc import Sequence

from .. import __version__
from . import generate, plan


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `diffusers-rocm`. Returns the exit code: 2 for what the user can mend, told in one line."""
    parser = argparse.ArgumentParser("diffusers-rocm", description="Multi-GPU inference for diffusion transformers.")
    parser.add_argument("--version", action="version", version=__version__)
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in (generate, plan):
        command.add_parser(subparsers).set_defaults(run=command.run)
    args = parser.parse_args(argv)
    try:
        return args.run(args, sys.argv[1:] if argv is None else list(argv))
    except (ValueError, OSError) as error:
        print(f"diffusers-rocm: {error}", file=sys.stderr)
        return 2
