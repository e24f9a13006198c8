"""Hold the planner against what was measured: compiled rows of `bench step` in docs/benchmarks, beside predictions.

Prints a table; `--write` puts it into docs/planning.md. Exits with 1 where a row is off by more than a fifth, or where
the mesh that the planner would have chosen of a run's was more than some percent slower than the fastest.
"""

import argparse
import functools
import json
import re
import sys
from pathlib import Path
from typing import Any

import torch

from diffusers_rocm.benchmarks.known_models import KNOWN_MODELS, Size
from diffusers_rocm.benchmarks.step import ONE, parse_mesh
from diffusers_rocm.distributed.links import FAST
from diffusers_rocm.planner.cost import predict
from diffusers_rocm.planner.hardware import Links, find_gpu
from diffusers_rocm.planner.rehearsal import Ledger, rehearse


DOCS = Path(__file__).parent.parent / "docs"
RUNS, PAGE = DOCS / "benchmarks", DOCS / "planning.md"
# Those that the host did not hold up: as graphs where a run has them, and of long sequences.
FILES = (
    "step_flux_graphs_4xh100",
    "step_flux_graphs_4xh200",
    "step_flux_4xh200",
    "step_flux_2048_graphs_4xh100",
    "step_flux_2048_graphs_4xh200",
    "step_flux_2048_4xh200",
    "step_flux_65k_4xh100",
    "step_flux_65k_4xh200",
    "step_flux_graphs_4xh100_p2p_off",
    "step_flux_graphs_4xh200_p2p_off_by_group",
    "step_flux_65k_4xh100_p2p_off",
    "step_flux_65k_4xh200_p2p_off",
    "step_hunyuan_video_4xh200",
    "step_flux_graphs_2xh200",
    "step_flux_graphs_2xh200_p2p_off_by_group",
    "step_flux_2048_2xh100",
    "step_flux_2048_2xh100_p2p_off",
    "step_flux_65k_2xh100",
    "step_flux_65k_2xh100_p2p_off",
    "step_sd35_2xh100",
    "step_wan_2xh200",
    "step_wan_2xh200_p2p_off",
)
# Bytes a second that a GPU sends: by collectives of 28 MB, and without P2P, of so many GPUs, by the sums of a step.
NVLINK, THROUGH_HOST = 310e9, {("H200", 4): 27e9, ("H100", 4): 22e9, ("H100", 2): 31e9, ("H200", 2): 32e9}
OFF, REGRET = 0.2, 0.03
Items = tuple[tuple[str, Any], ...]  # of a dict


@functools.cache
def read(file: str) -> dict:
    return json.loads((RUNS / f"{file}.json").read_text())


@functools.cache
def rehearsed(
    model: str, size: Size, shared: Items, config: Items, dtype: str, rotate_method: str, slow: bool
) -> Ledger:
    """Of runs on several machines the same."""
    known = KNOWN_MODELS[model]
    return rehearse(known, size, dict(shared), dict(config), getattr(torch, dtype), rotate_method, slow)


def predicted(file: str, mesh: str) -> float:
    """ms of a step."""
    request, environment = (read(file)[part] for part in ("request", "environment"))
    degrees = {} if mesh == ONE else parse_mesh(mesh)
    rotate_method = degrees.pop("rotate_method", "p2p")
    gpu, count = environment["gpus"][0]["name"].split()[1], len(environment["gpus"])
    rate = THROUGH_HOST[gpu, count] if environment["environment"].get("NCCL_P2P_DISABLE") == "1" else NVLINK
    shared = tuple((axis, size) for axis, size in degrees.items() if axis != "cfg")
    config, size = tuple(request["config"].items()), Size(**request["size"])
    ledger = rehearsed(request["model"], size, shared, config, request["dtype"], rotate_method, rate < FAST)
    seconds = predict(ledger, degrees, find_gpu(gpu), Links(rate, rate), 8).total
    return seconds * 1e3 * (1 + request["guidance"]) / degrees.get("cfg", 1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", nargs="+", default=FILES, choices=FILES)
    parser.add_argument("--write", action="store_true", help="the table of all files into docs/planning.md")
    args = parser.parse_args()
    lines = ["| run | mesh | measured, ms | predicted, ms | off |", "|---|---|---|---|---|"]
    wrong, regrets, count, squares = [], [], 0, 0.0
    for file in args.files:
        rows = []
        request = read(file)["request"]
        exact = [mesh for mesh in (ONE, *request["meshes"]) if "int8" not in mesh]
        mode = "compile+graph" if "compile+graph" in request["modes"] else "compile"
        for row in read(file)["rows"]:
            if row["name"] not in exact or row["mode"] != mode or row["note"]:
                continue
            mesh, ms = row["name"], row["ms"]
            guess = predicted(file, mesh)
            off = guess / ms - 1
            lines.append(f"| {file} | `{mesh}` | {ms:.1f} | {guess:.1f} | {off:+.0%} |")
            if mesh != ONE:
                rows.append((guess, ms, mesh))
            count, squares = count + 1, squares + off**2
            if abs(off) > OFF:
                wrong.append(f"{file}, {mesh}: off by {off:+.0%}")
        (_, chosen, mesh), fastest = min(rows), min(ms for _, ms, _ in rows)
        regrets.append(chosen / fastest - 1)
        if regrets[-1] > REGRET:
            wrong.append(f"{file}: {mesh} would be chosen, and took {regrets[-1]:+.0%} longer than the fastest")
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
