"""Plans, one file per model family, named as upstream's model files."""

import difflib
import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from .context_plan import ContextParallelPlan
from .plan import TensorParallelPlan


TENSOR_PARALLEL_PLANS: dict[str, TensorParallelPlan] = {}
CONTEXT_PARALLEL_PLANS: dict[str, ContextParallelPlan] = {}

for _file in pkgutil.iter_modules(__path__):
    if "transformer" in _file.name or "controlnet" in _file.name:
        _family = importlib.import_module(f"{__name__}.{_file.name}")
        TENSOR_PARALLEL_PLANS |= getattr(_family, "TENSOR_PARALLEL_PLANS", {})
        CONTEXT_PARALLEL_PLANS |= getattr(_family, "CONTEXT_PARALLEL_PLANS", {})


# diffusers' own plans that cannot be used, and why.
REFUSED_CONTEXT_PARALLEL_PLANS = {
    "LTX2VideoTransformer3DModel": "it splits the text, to which audio attends too (huggingface/diffusers#14316)",
}


def get_tensor_parallel_plan(model: nn.Module) -> TensorParallelPlan:
    """The plan for the model's very class, never for one with a similar name.

    Raises:
        ValueError: there is none; names the nearest classes that have one.
    """
    name = type(model).__name__
    if name not in TENSOR_PARALLEL_PLANS:
        near = difflib.get_close_matches(name, TENSOR_PARALLEL_PLANS, n=3, cutoff=0.0)
        raise ValueError(f"{name} has no tensor-parallel plan; the nearest classes with one: {', '.join(near)}")
    return TENSOR_PARALLEL_PLANS[name]


def get_context_parallel_plan(
    model: nn.Module, cp_plan: Mapping[str, Any] | ContextParallelPlan | None = None
) -> ContextParallelPlan:
    """The plan for the model's class: ours, else diffusers' `_cp_plan`.

    `cp_plan` takes its place, or, in diffusers' format, the place of its modules.

    Raises:
        ValueError: there is none, or one of diffusers' that is wrong; names the nearest classes that have one.
    """
    name = type(model).__name__
    if isinstance(cp_plan, ContextParallelPlan):
        return cp_plan
    if cp_plan is None and name in REFUSED_CONTEXT_PARALLEL_PLANS:
        reason = REFUSED_CONTEXT_PARALLEL_PLANS[name]
        raise ValueError(
            f"diffusers' context-parallel plan of {name} is wrong: {reason}; pass a right one as cp_plan="
        )
    cp_plan = cp_plan or (None if name in CONTEXT_PARALLEL_PLANS else getattr(model, "_cp_plan", None))
    plan = CONTEXT_PARALLEL_PLANS.get(name)
    if cp_plan is not None:
        return ContextParallelPlan(cp_plan, ordered=False) if plan is None else replace(plan, modules=cp_plan)
    if plan is None:
        near = difflib.get_close_matches(name, CONTEXT_PARALLEL_PLANS, n=3, cutoff=0.0)
        raise ValueError(
            f"{name} has no context-parallel plan; pass cp_plan=, or use one of the nearest classes that have one: "
            f"{', '.join(near)}"
        )
    return plan
