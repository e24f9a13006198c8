"""Run loading, offloading, quantisation and LoRA with each way of being parallel, for the table of docs/memory.md.

python utils/run_features.py          some minutes on 2 cores; then utils/make_tables.py writes the table
python utils/run_features.py --gpus   the rows that need two GPUs, in bfloat16
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import diffusers
import torch
import torchao


ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from tests.loaders.test_quantization import accelerator_worker  # noqa: E402
from tests.models.testing_utils.features import FEATURES, MESHES, PIPELINES, run, table_row  # noqa: E402
from tests.testing_utils import run_ranks  # noqa: E402


def on_cpu() -> Iterator[dict[str, Any]]:
    for name in (*FEATURES, *PIPELINES):
        yield table_row(name, {mesh: run(name, mesh) for mesh in MESHES})


def on_gpus() -> Iterator[dict[str, Any]]:
    for when, name in (("before", "fp8 dynamic, then parallel"), ("after", "parallel, then fp8 dynamic")):
        row: dict[str, Any] = {"name": name, "of_pipeline": True, "rounds": True}
        for mesh in ("TP 2", "Ulysses 2"):
            results = run_ranks(2, accelerator_worker, "fp8 dynamic", MESHES[mesh], when, device="cuda")
            row[mesh] = max(result["error"] / result["own"] for result in results)
        yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", action="store_true", help="the rows that need GPUs alone")
    parser.add_argument("--json", type=Path, help="default: in docs/benchmarks")
    args = parser.parse_args()
    rows = []
    for row in on_gpus() if args.gpus else on_cpu():
        rows.append(row)
        print(row, flush=True)
    versions = {"torch": torch.__version__, "diffusers": diffusers.__version__, "torchao": torchao.__version__}
    if args.gpus:
        versions["device"] = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    content = {"versions": versions, "meshes": list(MESHES), "rows": rows}
    file = args.json or ROOT / "docs" / "benchmarks" / ("features_gpus.json" if args.gpus else "features.json")
    file.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
