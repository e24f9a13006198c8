"""Hold the planner against what was measured: the compiled rows of the runs in docs/benchmarks, beside predictions.

Prints a table; `--write` puts it into docs/planning.md. Exits with 1 where a row is off by more than a fifth, or where
the mesh that the planner would have chosen of a run's was more than some percent slower than the fastest.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from diffusers_rocm.benchmarks.known_models import KNOWN_MODELS
from diffusers_rocm.distributed.links import FAST
from diffusers_rocm.planner.cost import predict
from diffusers_rocm.planner.hardware import GPUS, Links
from diffusers_rocm.planner.rehearsal import Ledger, rehearse


DOCS = Path(__file__).parent.parent / "docs"
RUNS, PAGE = DOCS / "benchmarks", DOCS / "planning.md"
# All but flux_1024_4xh200, whose host was so busy that it is the host that was timed: the same meshes as graphs, where
# the host has nothing to do, took half the time on the same machine.
FILES = (
    "flux_1024_graphs_4xh200",
    "flux_1024_graphs_2xh200",
    "flux_1024_2xh200",
    "flux_1024_int8_2xh200_p2p_off",
    "flux_tp4_4xh200",
    "flux_2048_4xh200",
    "flux_2048_2xh200",
    "flux_65k_4xh200",
    "flux_65k_2xh200",
    "flux_65k_4xh200_p2p_off",
    "flux_65k_2xh200_p2p_off",
    "hunyuan_video_compiled_2xh200",
    "wan_480_compiled_4xh200",
    "wan_480_compiled_2xh200",
)
# Measured before Ulysses hid its messages where links are slow.
AT_ONCE = ("flux_65k_4xh200_p2p_off", "flux_65k_2xh200_p2p_off")
# Bytes a second that a GPU sends, by collectives of 28 MB.
NVLINK, THROUGH_HOST = 310e9, 29e9
MODE = re.compile(r"(single|tp|(?:(?:cfg|ring|ulysses|tp)\d+)+)(-allgather)?(?:\+c(?:\+g)?)")
OFF, REGRET = 0.2, 0.03


def measured(file: str) -> Iterator[tuple[str, dict[str, int], str, float]]:
    """`(mode, degrees, rotate method, ms of a step)` of the rows that the planner speaks of."""
    run = json.loads((RUNS / f"{file}.json").read_text())
    world = int(run["versions"]["device"].split()[0])
    for row in run["rows"]:
        match = MODE.fullmatch(row["mode"])
        if match is None:
            continue
        degrees = {axis: int(size) for axis, size in re.findall(r"(cfg|ring|ulysses|tp)(\d+)", match[1])}
        if match[1] == "tp":
            degrees = {"tp": world}
        yield row["mode"], degrees, "allgather" if match[2] else "p2p", row["ms"]


_ledgers: dict[tuple, Ledger] = {}


def predicted(file: str, degrees: dict[str, int], rotate_method: str) -> float:
    """ms of a step."""
    run = json.loads((RUNS / f"{file}.json").read_text())
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="flux")
    parser.add_argument("--resolution", type=int)
    parser.add_argument("--double", type=int)
    parser.add_argument("--single", type=int)
    parser.add_argument("--guidance", action="store_true")
    args, _ = parser.parse_known_args(run["command"].split())
    known = KNOWN_MODELS[args.model]
    config = {"num_layers": args.double, "num_single_layers": args.single}
    config = {name: count for name, count in config.items() if count is not None}
    shared = {axis: size for axis, size in degrees.items() if axis != "cfg"}
    rate = THROUGH_HOST if run["versions"]["NCCL_P2P_DISABLE"] == "1" else NVLINK
    slow = rate < FAST and file not in AT_ONCE
    key = (args.model, args.resolution, *config.items(), *shared.items(), rotate_method, slow)
    if key not in _ledgers:
        size = known.sized(args.resolution, None, None)
        _ledgers[key] = rehearse(known, size, shared, config, torch.bfloat16, rotate_method, slow)
    seconds = predict(_ledgers[key], degrees, GPUS["H200"], Links(rate, rate), 8).total
    return seconds * 1e3 * (1 + args.guidance) / degrees.get("cfg", 1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", nargs="+", default=FILES, choices=FILES)
    parser.add_argument("--write", action="store_true", help="the table of all files into docs/planning.md")
    args = parser.parse_args()
    lines = ["| run | mode | measured, ms | predicted, ms | off |", "|---|---|---|---|---|"]
    wrong, regrets, count, squares = [], [], 0, 0.0
    for file in args.files:
        rows = []
        for mode, degrees, rotate_method, ms in measured(file):
            guess = predicted(file, degrees, rotate_method)
            off = guess / ms - 1
            lines.append(f"| {file} | `{mode}` | {ms:.1f} | {guess:.1f} | {off:+.0%} |")
            if degrees:
                rows.append((guess, ms, mode))
            count, squares = count + 1, squares + off**2
            if abs(off) > OFF:
                wrong.append(f"{file}, {mode}: off by {off:+.0%}")
        (_, chosen, mode), fastest = min(rows), min(ms for _, ms, _ in rows)
        regrets.append(chosen / fastest - 1)
        if regrets[-1] > REGRET:
            wrong.append(f"{file}: {mode} would be chosen, and took {regrets[-1]:+.0%} longer than the fastest")
    lines += [
        "",
        f"{count} rows, off by {(squares / count) ** 0.5:.1%} (root mean square). The mesh that is predicted to be "
        f"the fastest of a run took at most {max(regrets):.1%} longer than the one that was.",
    ]
    print("\n".join(lines))
    if args.write:
        between = re.compile(r"(<!-- measured -->\n).*?(<!-- end -->)", re.DOTALL)
        PAGE.write_text(between.sub(lambda match: match[1] + "\n".join(lines) + "\n" + match[2], PAGE.read_text()))
    print("\n".join(wrong), file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
