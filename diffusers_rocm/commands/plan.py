"""`diffusers-rocm plan`: what a rank will hold, before anything is loaded."""

import argparse

import diffusers
import torch

from ..models.plans.verify import verify_plan
from ..pipelines.model_folder import ModelFolder


def add_parser(subparsers) -> argparse.ArgumentParser:
    parser = subparsers.add_parser("plan", help="what each rank of a tensor-parallel model will hold")
    parser.add_argument("--model", required=True, help="a pipeline: a local folder or a Hub id")
    parser.add_argument("--tp", type=int, default=2, help="ranks to shard over")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--explain", action="store_true", help="also what is replicated, and why")
    return parser


def check(args: argparse.Namespace) -> str:
    """The report. Raises ValueError."""
    folder = ModelFolder(args.model)
    cls = getattr(diffusers, folder.denoiser_class)
    with torch.device("meta"):
        model = cls.from_config(folder.denoiser_config()).to(getattr(torch, args.dtype))
    report = str(verify_plan(model, args.tp))
    return report if args.explain else report.splitlines()[0]


def run(report: str, args: argparse.Namespace, argv: list[str]) -> int:
    print(report)
    return 0
