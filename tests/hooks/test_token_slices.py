"""Tokens in slices between the products of tensor parallelism; files stand in for memory that all ranks reach."""

import contextlib
import tempfile
import unittest
from collections.abc import Iterator
from unittest import mock

import torch
from parameterized import parameterized

from diffusers_rocm import ParallelConfig
from diffusers_rocm.hooks import step_graph, token_slices
from diffusers_rocm.hooks.step_graph import WARM_UP, StepGraph

from ..distributed.test_peer_memory import Even, Replayed, mapped_memory
from ..models.testing_utils.parallelism import FLOAT32_BAR
from ..testing_utils import relative_l2, run_ranks
from .test_step_graph import steps_of


OURS = "gather_slices", "multiply", "multiply_and_scatter"


@contextlib.contextmanager
def reached(folder: str) -> Iterator[None]:
    """As if ranks reached each other's memory over fast links, and steps were graphs."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.multiple(token_slices, reaches_memory=bool, links_are_slow=lambda _: False))
        stack.enter_context(mock.patch.object(step_graph, "record", Replayed()))
        stack.enter_context(mapped_memory(folder))
        yield


@torch.no_grad()
def flux_worker(folder: str, degrees: dict[str, int], compiled: bool, batch: int) -> tuple[float, dict[str, int]]:
    """The largest error of FLUX as a graph, and how many of our operations a replay does."""
    config = Even()
    model, steps = config.get_model(), steps_of(config.get_inputs(batch), WARM_UP + 2)
    wanted = [config.get_output(model, each) for each in steps]
    with reached(folder):
        model.enable_parallelism(config=ParallelConfig(**degrees))
        graph = StepGraph(model)
        if compiled:
            model.compile_repeated_blocks(fullgraph=True)
        outputs = [config.get_output(model, each) for each in steps]
        with torch.profiler.profile() as profile:
            outputs.append(config.get_output(model, steps[0]))
        graph.remove()
        outputs.append(config.get_output(model, steps[0]))
    names = [event.name for event in profile.events()]
    found = {name: names.count(f"diffusers_rocm::{name}") for name in OURS}
    return max(map(relative_l2, outputs, [*wanted, wanted[0], wanted[0]])), found


class TestTokenSlices(unittest.TestCase):
    @parameterized.expand(
        [
            ("two", {"tp": 2}, False, 1),
            ("two, of two items", {"tp": 2}, False, 2),
            ("two, compiled", {"tp": 2}, True, 1),
            ("four", {"tp": 4}, False, 1),
        ]
    )
    def test_flux(self, name, degrees, compiled, batch):
        # Of two blocks of two streams, and two of one.
        wanted = {"gather_slices": 2 * 3 + 2, "multiply": 2 * (2 + 2) + 2, "multiply_and_scatter": 2 * 3 + 2}
        with tempfile.TemporaryDirectory() as folder:
            for error, found in run_ranks(next(iter(degrees.values())), flux_worker, folder, degrees, compiled, batch):
                self.assertLessEqual(error, FLOAT32_BAR)
                self.assertEqual(found, wanted)
