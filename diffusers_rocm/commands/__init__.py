"""The command line: one module a subcommand, each with `add_parser`, `check` and `run`."""

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import NoReturn

from .. import __version__
from ..distributed.launching import under_torchrun
from . import bench, doctor, env, generate, plan, validate
from .ranks import set_up_logging


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {' '.join(message.splitlines())}; --help tells what there is\n")


def make_parser() -> argparse.ArgumentParser:
    parser = Parser("diffusers-rocm", description="Multi-GPU inference for diffusion transformers.")
    parser.add_argument("--version", action="version", version=__version__)
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in (generate, plan, bench, doctor, validate, env):
        command.add_parser(subparsers).set_defaults(check=command.check, run=command.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `diffusers-rocm`. Returns the exit code.

    A command's `check` says in one line, with exit code 2, what the user can mend; what `run` raises is not hidden.
    """
    args = make_parser().parse_args(argv)
    if "log_level" in args:
        set_up_logging(args)
    # Ranks, and those that are started anew, inherit it: "in all" is from here, and what was made since is theirs.
    if not under_torchrun():
        os.environ["DIFFUSERS_ROCM_STARTED"] = str(time.time())
    try:
        request = args.check(args)
    except (ValueError, OSError) as error:
        print("diffusers-rocm:", " ".join(str(error).splitlines()), file=sys.stderr)
        return 2
    try:
        code = args.run(request, args, sys.argv[1:] if argv is None else list(argv))
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # who reads has seen enough: `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left would raise again at exit
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        print("diffusers-rocm: stopped by SIGINT", file=sys.stderr)
        return 130
