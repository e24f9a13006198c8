"""What is measured of this machine: of the right order, and what a step is predicted by."""

import unittest

import torch

from diffusers_rocm.distributed.axis import Axis
from diffusers_rocm.planner import measure

from ..testing_utils import run_ranks


def link_of_ranks() -> float:
    return measure._link(torch.device("cpu"), Axis.of_all())


class TestMeasure(unittest.TestCase):
    def test_a_cpu(self):
        found = measure._of_device(torch.device("cpu"))
        assert found.name == "CPU"
        # Any CPU of this century; seconds taken for milliseconds would be out of these.
        for rate in (found.matmul, found.attention, found.masked_attention):
            assert 1e9 < rate < 2e13, found
        assert 2e8 < found.copy < 2e12 and 1e-7 < found.launch < 1e-3, found
        assert found.gpu().measured and found.gpu().matmul < found.matmul

    def test_links(self):
        for link in run_ranks(2, link_of_ranks):
            assert 1e6 < link < 1e11, link
