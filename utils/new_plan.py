"""Draft the tensor-parallel plan of a class, and print what `verify_plan` still says of it.

    python utils/new_plan.py SD3Transformer2DModel [--tp 2] [--config '{"sample_size": 64}']

It looks at names and shapes of the default config, on the meta device; what the forward does is for you to check.
Exits with 1 where the draft does not add up.
"""

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import diffusers
import torch
from torch import nn


sys.path.insert(0, str(Path(__file__).parent.parent))

from diffusers_rocm import verify_plan  # noqa: E402
from diffusers_rocm.models.plans import TENSOR_PARALLEL_PLANS  # noqa: E402
from diffusers_rocm.models.plans.plan import TensorParallelPlan, at  # noqa: E402


# The names that queries and keys are projected by, and that an attention's number of heads goes by.
QUERIES = ("to_q", "to_query", "q_proj")
KEYS = ("to_k", "to_key", "k_proj")
COUNTS = ("heads", "num_heads", "num_attention_heads")
SHARED = re.compile("kv|key_value")
# Name of a block -> its number of key heads, how many query heads share each, and elements per head.
Blocks = dict[str, tuple[int, int, int]]

# The names that the Linears of a feed-forward go by: up and down; gate, up and down.
PAIRS = (
    ("net.0.proj", "net.2"),
    ("linear_1", "linear_2"),
    ("fc1", "fc2"),
    ("proj_in", "proj_out"),
    ("ff_in", "ff_out"),
    ("in_layer", "out_layer"),
    ("ff.0", "ff.3"),
)
GATED = (
    ("w1", "w3", "w2"),
    ("linear_1", "linear_3", "linear_2"),
    ("gate_proj", "up_proj", "down_proj"),
    ("gate", "up", "down"),
    ("gate_layer", "proj", "out"),
)


def pattern(model: nn.Module, path: str) -> str:
    """The path with `*` for what is in a list."""
    parts = path.split(".")
    lists = (nn.ModuleList, nn.ModuleDict)
    within = [isinstance(model.get_submodule(".".join(parts[:depth])), lists) for depth in range(len(parts))]
    return ".".join("*" if listed else part for part, listed in zip(parts, within, strict=True))


def features(module: nn.Module, path: str) -> int | None:
    """Output features of the Linear at `path` in the module, if there is one."""
    try:
        linear = module.get_submodule(path)
    except AttributeError:
        return None
    return linear.out_features if isinstance(linear, nn.Linear) else None


def feed_forward(module: nn.Module) -> dict[str, str] | None:
    """The rules of a feed-forward by the names that its Linears go by."""
    for gate, up, down in GATED:
        if all(features(module, name) for name in (gate, up, down)):
            return {gate: "column:mlp", up: "column:mlp", down: "row:mlp"}
    if features(module, "proj_mlp") and features(module, "proj_out"):
        if (
            module.proj_out.in_features > module.proj_mlp.out_features
        ):  # attention's output comes before the inner part
            return {"proj_mlp": "column:mlp", "proj_out": "row:heads+mlp"}
    for up, down in PAIRS:
        wide, linear = features(module, up), features(module, down)
        if wide and linear:
            inner = module.get_submodule(down).in_features
            if wide in (inner, 2 * inner):
                return {up: "column:mlp" if wide == inner else "column:mlp+mlp", down: "row:mlp"}
    return None


def attention(module: nn.Module, config: Mapping[str, Any], blocks: Blocks) -> dict[str, str] | None:
    """The rules of an attention with separate projections, by its names and their shapes; its heads join `blocks`."""
    queries, keys = (next(filter(None, (features(module, name) for name in names)), None) for names in (QUERIES, KEYS))
    if not queries or not keys:
        return None
    own = next((name for name in COUNTS if isinstance(getattr(module, name, None), int)), None)
    count = getattr(module, own) if own else config[count_key(config)]
    size = queries // count
    heads = _block(blocks, "heads", (keys // size, count // (keys // size), size))
    kv = _block(blocks, "kv", (keys // size, 1, size)) if keys < queries else heads
    counted = [(name, getattr(module, name, None)) for name in (*COUNTS, "num_key_value_heads", "kv_heads")]
    local = [f"{name}={heads if value == count else kv}" for name, value in counted if value in (count, keys // size)]
    rules = {"": f"local:{','.join(local)}"} if local else {}
    for name, child in module.named_modules():
        if isinstance(child, nn.Linear):
            if "out" in name and child.in_features == queries:
                rules[name] = f"row:{heads}"
            elif child.out_features in (queries, keys):
                rules[name] = f"column:{heads if child.out_features == queries else kv}"
            else:
                rules[name] = "replicate:TODO"
        elif isinstance(getattr(child, "weight", None), nn.Parameter):
            over_all = {queries: heads, keys: kv}.get(child.weight.numel())
            rules[name] = "head_norm" if child.weight.numel() == size else f"norm:{over_all or 'TODO'}"
    return rules


def count_key(config: Mapping[str, Any]) -> str:
    """The key of the config that holds the number of (query) heads."""
    named = [key for key, value in config.items() if key.endswith("heads") and isinstance(value, int)]
    if not named:
        raise ValueError(f"the config names no number of heads: {', '.join(config)}")
    return min(named, key=lambda key: (bool(SHARED.search(key)), "attention_heads" not in key, len(key)))


def _block(blocks: Blocks, name: str, shape: tuple[int, int, int]) -> str:
    same = next((known for known, other in blocks.items() if other == shape and known.startswith(name)), None)
    if same is None:
        same = name if name not in blocks else f"{name}_{shape[0]}x{shape[1] * shape[2]}"
        blocks[same] = shape
    return same


def block_sizes(shape: tuple[int, int, int], config: Mapping[str, Any]) -> str:
    """A block's number of heads and elements per head, by the keys of the config where it has them."""
    count, group, size = shape

    def key(value: int, pattern: str) -> str:
        """The first key with this value."""
        found = (key for key, other in config.items() if other == value and re.search(pattern, key))
        return next((f'config["{key}"]' for key in found), "")

    heads = key(count * group, "heads$") or str(count * group)
    keys = heads if group == 1 else key(count, "heads$") or str(count)
    width = key(count * group * size, "dim|size|channels|width")
    each = key(size, "head_dim") or (f"{width} // {heads}" if width else str(size))
    if group > 1:
        each = f"{heads} // {keys} * ({each})"
    alone = re.compile(r'config\[("\w+")\]')
    sizes = (alone.sub(r"\1", said) if alone.fullmatch(said) else said for said in (keys, each))
    return ", ".join(f"lambda config: {said}" if "config" in said else said for said in sizes)


def draft(model: nn.Module) -> tuple[dict[str, str], Blocks, Counter[str]]:
    """Path -> style for every Linear of the model, as far as names and shapes tell; the heads' blocks; weights of what
    stays whole."""
    rules: dict[str, str] = {}
    blocks: Blocks = {}
    covered: tuple[str, ...] = ()
    whole: Counter[str] = Counter()
    for path, module in model.named_modules():
        if path.startswith(covered):
            continue
        found = attention(module, model.config, blocks)
        if found is None and path and re.search(r"\.\d+(\.|$)", path):
            found = feed_forward(module)
        if found is None and isinstance(module, nn.Linear):
            modulates = re.search("norm|mod|ada", path) and module.out_features >= 2 * module.in_features
            found = {"": "gather" if modulates else "replicate:TODO"}
        if found is not None:
            rules |= at(pattern(model, path), found)
            covered += tuple(f"{path}.{name}" for name in found if name)
            for name, style in found.items():
                if style == "replicate:TODO":
                    left = module.get_submodule(name)
                    whole[pattern(model, f"{path}.{name}".rstrip("."))] += left.weight.numel()
    return rules, blocks or {"heads": (model.config[count_key(model.config)], 1, 1)}, whole


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cls", metavar="CLASS", help="a transformer class that diffusers exports")
    parser.add_argument("--tp", type=int, default=2, help="ranks for verify_plan")
    parser.add_argument(
        "--config", type=json.loads, default={}, help="JSON: arguments of the class, beside its defaults"
    )
    args = parser.parse_args()
    cls = getattr(diffusers, args.cls, None)
    if cls is None:
        parser.error(f"diffusers {diffusers.__version__} exports no {args.cls}")
    try:
        with torch.device("meta"):
            model = cls(**args.config)
    except Exception as error:
        parser.error(f"this config of {args.cls} builds no model: {type(error).__name__}: {error}; try --config")
    try:
        rules, blocks, whole = draft(model)
    except ValueError as error:
        parser.error(f"{args.cls}: {error}")
    total = sum(parameter.numel() for parameter in model.parameters())
    heads = ", ".join(f'"{name}": ({block_sizes(shape, model.config)})' for name, shape in blocks.items())
    lines = ["TENSOR_PARALLEL_PLANS = {", f'    "{args.cls}": TensorParallelPlan(', "        {"]
    for path, style in rules.items():
        share = f"  # {whole[path] / total:.2%} of the weights" if path in whole else ""
        lines.append(f'            "{path}": "{style}",{share}')
    text = "\n".join([*lines, "        },", f"        heads={{{heads}}},", "    )", "}"])
    print(text + "\n")
    written = {"TensorParallelPlan": TensorParallelPlan}
    exec(text, written)
    TENSOR_PARALLEL_PLANS.update(written["TENSOR_PARALLEL_PLANS"])
    try:
        print(f"{verify_plan(model, args.tp)}\nTODO: {sum(whole.values()) / total:.2%} of the weights")
    except ValueError as error:
        print(f"this draft does not add up: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
