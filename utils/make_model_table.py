"""Run every class that has plans in every way of being parallel, and write docs/models.md from what came out.

python utils/make_model_table.py --run      runs all cases on real ranks (some minutes), then writes
python utils/make_model_table.py            writes docs/models.md from the last run
python utils/make_model_table.py --check    fails if plans, tests or the page have changed since the last run
"""

import argparse
import ast
import functools
import hashlib
import inspect
import json
import math
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path

import diffusers
import torch
from diffusers import ModelMixin
from torch.utils._pytree import tree_map_only


ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from diffusers_rocm import verify_plan  # noqa: E402
from diffusers_rocm.models.plans import (  # noqa: E402
    CONTEXT_PARALLEL_PLANS,
    TENSOR_PARALLEL_PLANS,
    WITHOUT_CONTEXT_PARALLEL_PLAN,
    WITHOUT_TENSOR_PARALLEL_PLAN,
)
from diffusers_rocm.models.plans.context_plan import Refused  # noqa: E402
from tests.models.testing_utils.common import BaseModelTesterConfig  # noqa: E402
from tests.models.testing_utils.parallelism import FLOAT32_BAR  # noqa: E402
from tests.models.testing_utils.plans import STRATEGIES, parity_worker  # noqa: E402
from tests.models.testing_utils.variants import by_class, variants  # noqa: E402
from tests.testing_utils import run_ranks  # noqa: E402


RUN = ROOT / "docs" / "benchmarks" / "models.json"
PAGE = ROOT / "docs" / "models.md"


def real_model(config: BaseModelTesterConfig) -> torch.nn.Module:
    """The class's default model, of real size."""
    with torch.device("meta"):
        return config.model_class(**config.real_init_dict)


def digest(name: str, configs: list[BaseModelTesterConfig]) -> str:
    """Of what the plans of a class say, of the code in their files, and of how they are run."""
    said: list[object] = [STRATEGIES]
    model = real_model(configs[0])
    if plan := TENSOR_PARALLEL_PLANS.get(name):
        blocks = {block: plan.head_shard(block, model.config) for block in plan.heads}
        said += [dict(plan.rules), blocks, plan.embedding_path(model.config), plan.activated]
    if plan := CONTEXT_PARALLEL_PLANS.get(name):
        said.append(plan)
    for file in sorted((ROOT / "diffusers_rocm" / "models" / "plans").glob("*.py")):
        if f'"{name}"' in (source := file.read_text()):
            said.append(ast.dump(ast.parse(source)))
    for config in configs:
        said += [config.get_init_dict(), tree_map_only(torch.Tensor, describe, config.get_inputs(2))]
        said += [code_of(cls) for cls in type(config).__mro__ if issubclass(cls, BaseModelTesterConfig)]
    without_addresses = re.sub(r" at 0x\w+", "", repr(said))
    return hashlib.sha256(without_addresses.encode()).hexdigest()[:16]


@functools.cache
def code_of(cls: type) -> str:
    """A class without its docstrings and comments."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    for node in ast.walk(tree):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            node.body = node.body[1:]
    return ast.dump(tree)


def describe(tensor: torch.Tensor) -> tuple[str, list[int]]:
    return str(tensor.dtype), list(tensor.shape)


def run() -> dict:
    rows: dict[str, dict] = {}
    tested = variants()
    for cls, configs in by_class(tested).items():
        model = real_model(configs[0])
        rows[cls] = {"digest": digest(cls, configs), "parameters": model.num_parameters(), "errors": {}}
        if cls in TENSOR_PARALLEL_PLANS:
            report = verify_plan(model, 4)
            rows[cls]["replicated"] = report.replicated_bytes / report.full_bytes
            rows[cls]["heads"] = min(TENSOR_PARALLEL_PLANS[cls].head_counts(model.config).values())
    for name, (config, strategies) in tested.items():
        cls = config.model_class.__name__
        errors = rows[cls]["errors"][name] = {}
        for strategy in strategies:
            degrees, batch_size = STRATEGIES[strategy]
            results = run_ranks(math.prod(degrees.values()), parity_worker, config, degrees, batch_size)
            errors[strategy] = max(result["error"] for result in results)
        print(name, *(f"{strategy}: {error:.1e}" for strategy, error in errors.items()), sep="  ", flush=True)
    versions = {"torch": torch.__version__, "diffusers": diffusers.__version__, "device": "CPU, Gloo"}
    return {"versions": versions, "classes": dict(sorted(rows.items()))}


def page(run: dict) -> str:
    rows = run["classes"]
    both = [name for name in rows if name in TENSOR_PARALLEL_PLANS and name in CONTEXT_PARALLEL_PLANS]
    cases = sum(len(errors) for row in rows.values() for errors in row["errors"].values())
    lines = [
        "# Models",
        "",
        f"{len(rows)} transformer and ControlNet classes of diffusers {run['versions']['diffusers']} have plans, "
        f"{len(both)} of them for tensor and for context parallelism. Each figure is the worst relative L2 error of "
        "the whole forward, over all ranks and all tested variants of the class, in float32 against one process "
        f"(the bar is {FLOAT32_BAR:.0e}): tiny models with random weights, real processes over Gloo, odd sequence "
        f"lengths, 5 heads or another number that the ranks do not divide. {cases} cases in all. *Replicated* is the "
        "part of the weights that each of 4 ranks holds whole, of the class's default config; `diffusers-rocm plan "
        "--explain` says what and why. `tp` can be any number up to the last column, the key heads of that config.",
        "",
        "| class | variants | " + " | ".join(STRATEGIES) + " | replicated at `tp=4` | `tp` up to |",
        "|---|---|" + "---|" * len(STRATEGIES) + "---|---|",
    ]
    for name, row in rows.items():
        figures = []
        for strategy in STRATEGIES:
            errors = [errors[strategy] for errors in row["errors"].values() if strategy in errors]
            figures.append(f"{max(errors):.1e}" if errors else "no")
        share = f"{row['replicated']:.1%}" if "replicated" in row else "no plan"
        lines.append(f"| `{name}` | {len(row['errors'])} | {' | '.join(figures)} | {share} | {row.get('heads', '')} |")
    notes = {name: config.note for name, (config, _) in variants().items() if config.note is not None}
    lines += ["", *(f"- `{name}`: {note}." for name, note in sorted(notes.items()))]
    lines += [
        "",
        f"`python utils/make_model_table.py --run`; {run['versions']['device']}, torch {run['versions']['torch']}, "
        f"diffusers {run['versions']['diffusers']} (`docs/benchmarks/models.json`).",
        "",
        "## Without a plan",
        "",
        "What diffusers exports and what is refused, with the reason:",
        "",
        "| class | tensor parallelism | context parallelism |",
        "|---|---|---|",
    ]
    reasons = WITHOUT_TENSOR_PARALLEL_PLAN, WITHOUT_CONTEXT_PARALLEL_PLAN
    for name in sorted(reasons[0].keys() | reasons[1].keys()):
        tensor, context = (of_kind.get(name, "has a plan") for of_kind in reasons)
        lines.append(f"| `{name}` | {tensor} | {'the same' if context == tensor else context} |")
    lines += [
        "",
        "## Refused in part",
        "",
        "What a class with plans is refused, with an error that says so: tensor parallelism of models of some "
        "configs, context parallelism of models with certain modules, or of forwards with certain arguments.",
        "",
        "| class | | what, and why |",
        "|---|---|---|",
    ]
    for name in rows:
        for kind, why in refused(name):
            lines.append(f"| `{name}` | {kind} | {why} |")
    return "\n".join(lines) + "\n"


def refused(name: str) -> Iterator[tuple[str, str]]:
    """What the plans of a class do not take."""
    if name in TENSOR_PARALLEL_PLANS:
        for reason in TENSOR_PARALLEL_PLANS[name].impossible:
            yield "tensor", reason
    if name in CONTEXT_PARALLEL_PLANS:
        plan = CONTEXT_PARALLEL_PLANS[name]
        for path, reason in plan.impossible.items():
            yield "context", f"`{path}`: {reason}"
        for how in plan.modules.values():
            for key, rule in how.items() if isinstance(how, Mapping) else ():
                if isinstance(rule, Refused):
                    yield "context", f"`{key.removesuffix('?')}`: {rule.reason}"


def exported() -> Iterator[str]:
    """The transformer and ControlNet classes that diffusers exports."""
    for name in dir(diffusers):
        each = getattr(diffusers, name)
        if isinstance(each, type) and issubclass(each, ModelMixin):
            if each.__module__.startswith(("diffusers.models.transformers.", "diffusers.models.controlnets.")):
                yield name


def complaints(run: dict) -> Iterator[str]:
    tested = variants()
    configs = by_class(tested)
    planned = TENSOR_PARALLEL_PLANS.keys() | CONTEXT_PARALLEL_PLANS.keys()
    for name in sorted(planned & set(exported())):
        if name not in run["classes"]:
            yield f"{name} has a plan and was not run"
        elif name in configs and run["classes"][name]["digest"] != digest(name, configs[name]):
            yield f"the plans or the tiny models of {name} have changed since the run"
    ran = {name: set(errors) for row in run["classes"].values() for name, errors in row["errors"].items()}
    for name, (_, strategies) in tested.items():
        if ran.get(name) != set(strategies):
            yield f"the run lacks some cases of {name}"
    for name in ran.keys() - tested.keys():
        yield f"{name} is in the run, and no test any more"
    for row in run["classes"].values():
        for name, errors in row["errors"].items():
            if max(errors.values()) > FLOAT32_BAR:
                yield f"{name} is over the bar: {errors}"
    for kind, plans, reasons in (
        ("tensor", TENSOR_PARALLEL_PLANS, WITHOUT_TENSOR_PARALLEL_PLAN),
        ("context", CONTEXT_PARALLEL_PLANS, WITHOUT_CONTEXT_PARALLEL_PLAN),
    ):
        for name in exported():
            if (name in plans) == (name in reasons):
                yield f"{name} must have either a {kind}-parallel plan or a reason for having none"
    if not PAGE.exists() or PAGE.read_text() != page(run):
        yield f"{PAGE.relative_to(ROOT)} is stale"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", action="store_true", help="run all cases first")
    parser.add_argument("--check", action="store_true", help="change nothing; fail if stale")
    args = parser.parse_args()
    if args.check:
        found = list(complaints(json.loads(RUN.read_text())))
        for complaint in found:
            print(complaint)
        return 1 if found else 0
    if args.run:
        RUN.write_text(json.dumps(run(), indent=1) + "\n")
    PAGE.write_text(page(json.loads(RUN.read_text())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
