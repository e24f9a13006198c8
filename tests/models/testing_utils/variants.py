"""All the tiny models that plans are tested with."""

import importlib
import pkgutil

import pytest

from .. import controlnets, transformers
from .common import BaseModelTesterConfig
from .plans import STRATEGIES, PlanTesterMixin


def variants() -> dict[str, tuple[BaseModelTesterConfig, list[str]]]:
    """By the name of the test: the config of each test of plans, and the strategies that it can have."""
    found = {}
    for package in (transformers, controlnets):
        for module in pkgutil.iter_modules(package.__path__):
            try:
                names = vars(importlib.import_module(f"{package.__name__}.{module.name}"))
            except pytest.skip.Exception:
                continue
            for name, each in names.items():
                if isinstance(each, type) and issubclass(each, PlanTesterMixin) and each is not PlanTesterMixin:
                    strategies = [strategy for strategy in STRATEGIES if strategy not in each.cannot]
                    found[name.removeprefix("Test")] = each().config, strategies
    return found


def by_class(tested: dict[str, tuple[BaseModelTesterConfig, list[str]]]) -> dict[str, list[BaseModelTesterConfig]]:
    """Name of a model class -> its configs."""
    found: dict[str, list[BaseModelTesterConfig]] = {}
    for config, _ in tested.values():
        found.setdefault(config.model_class.__name__, []).append(config)
    return found
