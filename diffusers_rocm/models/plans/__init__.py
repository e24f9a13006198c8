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
from .without_plan import WITHOUT_CONTEXT_PARALLEL_PLAN, WITHOUT_TENSOR_PARALLEL_PLAN


TENSOR_PARALLEL_PLANS: dict[str, TensorParallelPlan] = {}
CONTEXT_PARALLEL_PLANS: dict[str, ContextParallelPlan] = {}

for _file in pkgutil.iter_modules(__path__):
    if any(word in _file.name for word in ("transformer", "controlnet", "nextdit")):
        _family = importlib.import_module(f"{__name__}.{_file.name}")
        TENSOR_PARALLEL_PLANS |= getattr(_family, "TENSOR_PARALLEL_PLANS", {})
        CONTEXT_PARALLEL_PLANS |= getattr(_family, "CONTEXT_PARALLEL_PLANS", {})


def get_tensor_parallel_plan(cls: type[nn.Module]) -> TensorParallelPlan:
    """The plan for this very class, never for one with a similar name.

    Raises:
        ValueError: there is none; says why, where that is known, and names the nearest classes that have one.
    """
    name = cls.__name__
    if name not in TENSOR_PARALLEL_PLANS or not _is_diffusers(cls):
        raise ValueError(f"{name} has no tensor-parallel plan{_instead(name, 'tensor')}")
    return TENSOR_PARALLEL_PLANS[name]


def get_context_parallel_plan(
    cls: type[nn.Module], cp_plan: Mapping[str, Any] | ContextParallelPlan | None = None
) -> ContextParallelPlan:
    """The plan for a model class: ours, else diffusers' `_cp_plan`.

    `cp_plan` takes its place, or, in diffusers' format, the place of its modules.

    Raises:
        ValueError: there is none, or one of diffusers' that is wrong; names the nearest classes that have one.
    """
    name = cls.__name__
    plan = CONTEXT_PARALLEL_PLANS.get(name) if _is_diffusers(cls) else None
    if isinstance(cp_plan, ContextParallelPlan):
        return cp_plan
    if cp_plan is None and plan is None and name not in WITHOUT_CONTEXT_PARALLEL_PLAN:
        cp_plan = getattr(cls, "_cp_plan", None)
    if cp_plan is not None:
        return ContextParallelPlan(cp_plan, ordered=False) if plan is None else replace(plan, modules=cp_plan)
    if plan is None:
        raise ValueError(f"{name} has no context-parallel plan{_instead(name, 'context')}; or pass one as cp_plan=")
    return plan


def _is_diffusers(cls: type[nn.Module]) -> bool:
    """Not another class of the same name."""
    return cls.__module__.partition(".")[0] == "diffusers"


def _instead(name: str, kind: str) -> str:
    """Why a class has no plan of this kind, and which have."""
    reasons, plans = {
        "tensor": (WITHOUT_TENSOR_PARALLEL_PLAN, TENSOR_PARALLEL_PLANS),
        "context": (WITHOUT_CONTEXT_PARALLEL_PLAN, CONTEXT_PARALLEL_PLANS),
    }[kind]
    near = difflib.get_close_matches(name, plans, n=3, cutoff=0.0)
    reason = f": {reasons[name]}" if name in reasons else ""
    return f"{reason}; the nearest classes with one: {', '.join(near)}"
