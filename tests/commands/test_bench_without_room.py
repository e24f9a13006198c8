"""A model that one device has no room for is measured by the meshes that split it, and is not checked."""

import unittest
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
from diffusers import ModelMixin

from diffusers_rocm import ParallelConfig
from diffusers_rocm.benchmarks import comm, step
from diffusers_rocm.benchmarks.comm import comm_table, measure_comm
from diffusers_rocm.benchmarks.known_models import KNOWN_MODELS, build
from diffusers_rocm.benchmarks.report import table
from diffusers_rocm.benchmarks.step import ONE, measure_step
from diffusers_rocm.benchmarks.whole_run import Run, measure_runs, runs_table
from diffusers_rocm.distributed.axis import Axis
from diffusers_rocm.pipelines import load

from ..testing_utils import run_ranks
from .test_bench_generate import REQUEST
from .test_bench_step import request
from .test_known_models import SMALL


CPU = torch.device("cpu")
# With one block there is no product of the text's attention, which plans have.
PARTED = SMALL | {"mochi": SMALL["mochi"] | {"num_layers": 2}}


def build_worker(names: list[str]) -> dict[str, bool]:
    """Of each model whether it has the same parameters and buffers built in parts, and sharded when it was whole."""
    found, config = {}, ParallelConfig(tp=Axis.of_all().size)
    for name in names:
        axes = None, config.axes().tp
        models = [build(KNOWN_MODELS[name], PARTED[name], CPU, torch.bfloat16, axis) for axis in axes]
        for model in models:
            model.enable_parallelism(config=config)
        whole, parts = ({**dict(model.named_parameters()), **dict(model.named_buffers())} for model in models)
        alike = [x.dtype == parts[key].dtype and torch.equal(x, parts[key]) for key, x in whole.items()]
        found[name] = whole.keys() == parts.keys() and all(alike)
    return found


def no_room(known: Any, config: Any, device: torch.device, dtype: torch.dtype, tp: Axis | None = None) -> ModelMixin:
    """On the last rank for the whole model."""
    everyone = Axis.of_all()
    if (tp is None or tp.size == 1) and everyone.rank == everyone.size - 1:
        raise torch.OutOfMemoryError("no room for all of it")
    return build(known, config, device, dtype, tp)


def step_worker() -> tuple[list[str], list[bool], str]:
    with mock.patch.object(step, "build", no_room):
        rows = measure_step(request("tp=2", "ulysses=2"))
    return [row.note for row in rows], [row.distance is None for row in rows], table(rows)


def comm_worker() -> tuple[list[tuple[str, str, bool, int]], str]:
    with mock.patch.object(comm, "build", no_room):
        found = measure_comm(request("tp=2", "ulysses=2"))
    said = [(each.note, each.unchecked, each.distance is None, len(each.collectives)) for each in found]
    return said, comm_table(found)


def runs_worker() -> tuple[list[Run], str]:
    sharded_loading = load.sharded_loading

    def of_parts(tp: Axis) -> AbstractContextManager[None]:
        if tp.size == 1 and Axis.of_all().rank == 1:
            raise torch.OutOfMemoryError("no room for all of it")
        return sharded_loading(tp)

    with mock.patch.object(load, "sharded_loading", of_parts):
        runs = measure_runs(REQUEST, ("tp=2", "ulysses=2"), repeats=1)
    return runs, runs_table(runs)


class TestBenchWithoutRoom(unittest.TestCase):
    def test_built_in_parts(self):
        for ranks, names in ((2, [*SMALL]), (3, ["flux", "mochi"])):  # which have heads enough
            for found in run_ranks(ranks, build_worker, names):
                assert all(found.values()) and [*found] == names, found

    def test_step(self):
        for (one, tp, ulysses), unchecked, shown in run_ranks(2, step_worker):
            assert "no room for all of it" in one and "no room for all of it" in ulysses and tp == "", shown
            assert unchecked == [True] * 3 and "unchecked" in shown, shown

    def test_comm(self):
        for ((tp, why, unchecked, count), (ulysses, *_)), shown in run_ranks(2, comm_worker):
            assert tp == "" and "no room for all of it" in why and unchecked and count > 0, shown
            assert "no room for all of it" in ulysses and f"tp=2: unchecked: {ONE} is not run: " in shown, shown

    def test_generate(self):
        for (one, tp, ulysses), shown in run_ranks(2, runs_worker):
            assert "no room for all of it" in one.note and "no room for all of it" in ulysses.note, shown
            assert tp.note == "" and tp.forward is tp.distance is None and tp.picture > 0, shown
            assert tp.as_json()["forward"] is None and one.as_json()["picture"] is None, shown
            assert shown.splitlines()[2].endswith("unchecked"), shown


if __name__ == "__main__":
    unittest.main()
