"""Run loading, offloading, quantisation and LoRA with each way of being parallel, for the table of docs/memory.md.

python utils/run_features.py      some minutes on 2 cores; then utils/make_tables.py writes the table
"""

import json
import sys
from pathlib import Path

import diffusers
import torch
import torchao


ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from tests.models.testing_utils.features import FEATURES, MESHES, PIPELINES, run, table_row  # noqa: E402


def main() -> None:
    rows = []
    for name in (*FEATURES, *PIPELINES):
        rows.append(table_row(name, {mesh: run(name, mesh) for mesh in MESHES}))
        print(rows[-1], flush=True)
    versions = {"torch": torch.__version__, "diffusers": diffusers.__version__, "torchao": torchao.__version__}
    content = {"versions": versions, "meshes": list(MESHES), "rows": rows}
    (ROOT / "docs" / "benchmarks" / "features.json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
