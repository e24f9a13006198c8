"""Run loading, offloading, quantisation and LoRA with each way of being parallel, for the table of docs/memory.md.

python utils/run_features.py      some minutes on 2 cores; then utils/make_tables.py writes the table
"""

import json
import math
import sys
import tempfile
from pathlib import Path

import diffusers
import torch
import torchao


ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from tests.models.testing_utils.features import (  # noqa: E402
    CONFIG,
    FEATURES,
    MESHES,
    PIPELINES,
    feature_worker,
    pipeline_worker,
    table_row,
)
from tests.testing_utils import run_ranks  # noqa: E402


def main() -> None:
    rows = []
    for name in (*FEATURES, *PIPELINES):
        by_mesh = {}
        for mesh, degrees in MESHES.items():
            world = math.prod(degrees.values())
            if name in PIPELINES:
                by_mesh[mesh] = run_ranks(world, pipeline_worker, name, degrees)
                continue
            with tempfile.TemporaryDirectory() as folder:
                CONFIG.get_model().save_pretrained(folder)
                by_mesh[mesh] = run_ranks(world, feature_worker, name, degrees, folder)
        rows.append(table_row(name, by_mesh))
        print(rows[-1], flush=True)
    versions = {"torch": torch.__version__, "diffusers": diffusers.__version__, "torchao": torchao.__version__}
    content = {"versions": versions, "meshes": list(MESHES), "rows": rows}
    (ROOT / "docs" / "benchmarks" / "features.json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
