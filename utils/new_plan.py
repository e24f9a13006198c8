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
from pathlib import Path

import diffusers
import torch
from torch import nn


sys.path.insert(0, str(Path(__file__).parent.parent))

from diffusers_rocm import verify_plan  # noqa: E402
from diffusers_rocm.models.plans import TENSOR_PARALLEL_PLANS, building_blocks  # noqa: E402
from diffusers_rocm.models.plans.plan import TensorParallelPlan, at  # noqa: E402


# The names that the Linears of a feed-forward go by: up and down; gate, up and down.
PAIRS = (
    ("net.0.proj", "net.2"),
    ("linear_1", "linear_2"),
    ("fc1", "fc2"),
    ("proj_in", "proj_out"),
    ("ff_in", "ff_out"),
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


def attention(module: nn.Module, heads: int) -> dict[str, str] | None:
    """The rules of an attention with separate projections."""
    if not all(features(module, name) for name in ("to_q", "to_k", "to_v")):
        return None
    rules = {}
    other_names = {"q_norm?": "head_norm", "k_norm?": "head_norm"}
    for name, style in {**building_blocks.JOINT_ATTENTION, **other_names}.items():
        path = name.removesuffix("?")
        child = module.get_submodule(path) if name and _has(module, path) else None
        if not name and hasattr(module, "heads"):
            rules[name] = style
        elif child is not None and style == "head_norm" and getattr(child, "weight", None) is not None:
            rules[name] = style if child.weight.numel() * heads == features(module, "to_q") else "norm:heads"
        elif child is not None:
            shared = name in ("to_k", "to_v") and features(module, name) < features(module, "to_q")
            rules[name] = "column:kv" if shared else style
    return rules


def _has(module: nn.Module, path: str) -> bool:
    try:
        return isinstance(module.get_submodule(path), nn.Module)
    except AttributeError:
        return False


def draft(model: nn.Module, count: str) -> tuple[dict[str, str], Counter[str]]:
    """Path -> style for every Linear of the model, as far as names and shapes tell; weights of what stays whole."""
    rules: dict[str, str] = {}
    covered: tuple[str, ...] = ()
    whole: Counter[str] = Counter()
    for path, module in model.named_modules():
        if path.startswith(covered):
            continue
        found = attention(module, model.config[count])
        if found is None and path and re.search(r"\.\d+(\.|$)", path):
            found = feed_forward(module)
        if found is not None:
            rules |= at(pattern(model, path), found)
            covered += tuple(f"{path}.{name.removesuffix('?')}" for name in found if name)
        elif isinstance(module, nn.Linear):
            modulates = re.search("norm|mod|ada", path) and module.out_features >= 2 * module.in_features
            rules[pattern(model, path)] = "gather" if modulates else "replicate:TODO"
            if not modulates:
                whole[pattern(model, path)] += module.weight.numel()
    return rules, whole


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
    named = [key for key, value in model.config.items() if key.endswith("heads") and isinstance(value, int)]
    shared = re.compile("kv|key_value")
    count = min(
        named, key=lambda key: (bool(shared.search(key)), "attention_heads" not in key, len(key)), default=None
    )
    if count is None:
        parser.error(f"the config of {args.cls} names no number of heads: {', '.join(model.config)}")
    size = 'config["attention_head_dim"]'
    if "attention_head_dim" not in model.config:
        width = next((m.to_q.out_features for m in model.modules() if features(m, "to_q")), model.config[count])
        key = next(
            (
                f'config["{key}"]'
                for key, value in model.config.items()
                if value == width and re.search("dim|size|channels|width", key)
            ),
            width,
        )
        size = f'{key} // config["{count}"]'
    rules, whole = draft(model, count)
    total = sum(parameter.numel() for parameter in model.parameters())
    heads = f'{{"heads": ("{count}", lambda config: {size})}}'
    fewer = next((key for key in named if shared.search(key)), None)
    if "column:kv" in rules.values() and fewer is not None:
        group = f'config["{count}"] // config["{fewer}"]'
        each = f'"heads": ("{fewer}", lambda config: {group} * ({size})), "kv": ("{fewer}", lambda config: {size})'
        heads = f"{{{each}}}"
    lines = ["TENSOR_PARALLEL_PLANS = {", f'    "{args.cls}": TensorParallelPlan(', "        {"]
    for path, style in rules.items():
        share = f"  # {whole[path] / total:.2%} of the weights" if path in whole else ""
        lines.append(f'            "{path}": "{style}",{share}')
    text = "\n".join([*lines, "        },", f"        heads={heads},", "    )", "}"])
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
