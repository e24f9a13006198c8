"""Ranks that are slower than the others are named."""

import logging
import unittest

import torch
from parameterized import parameterized

from diffusers_rocm.distributed.axis import Axis
from diffusers_rocm.pipelines.pace import compare_paces, stragglers, time_product

from ..testing_utils import run_ranks


def logged_worker(steps_by_rank: list[list[float]]) -> list[str]:
    """What a rank logs at the end of a run with these seconds a step."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(f"{record.levelname}: {record.getMessage()}")
    logger = logging.getLogger("diffusers_rocm.pipelines.pace")
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.INFO)
    axis = Axis.of_all()
    try:
        compare_paces(steps_by_rank[axis.rank], torch.device("cpu"), axis)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    return lines


class TestPace(unittest.TestCase):
    def test_a_slow_replica_is_named_by_rank_0(self):
        first, *others = run_ranks(3, logged_worker, [[0.010, 0.012, 0.050], [0.010, 0.010], [0.030, 0.025, 0.024]])
        assert [line.partition(" (")[0] for line in first[:3]] == [
            "INFO: rank 0: 12.00 ms a step",
            "INFO: rank 1: 10.00 ms a step",
            "INFO: rank 2: 25.00 ms a step",
        ]
        assert "(slowest 50.00)" in first[0]
        wanted = "WARNING: rank 2 is a straggler: a step takes 2.08 times the median (25.00 and 12.00 ms)"
        assert first[3:] == [wanted] and others == [[], []], first

    def test_ranks_alike_and_ranks_without_steps(self):
        assert not [line for line in run_ranks(2, logged_worker, [[0.010], [0.0115]])[0] if "WARNING" in line]
        assert not [line for line in run_ranks(2, logged_worker, [[], []])[0] if "WARNING" in line]

    @parameterized.expand(
        [
            ([1.0, 1.0, 1.0, 1.3], {3: 1.3}),
            ([1.0, 1.0, 1.0, 1.19], {}),
            ([1.0, 1.5], {1: 1.5}),
            ([1.0, 1.0, 1.5, 1.5], {2: 1.5, 3: 1.5}),
            ([0.0, 0.0], {}),
            ([5.0], {}),
        ]
    )
    def test_over_1_2_times_the_median(self, seconds, wanted):
        assert stragglers(seconds) == wanted

    def test_the_product_is_measured(self):
        assert 1e-5 < time_product(torch.device("cpu")) < 1.0


if __name__ == "__main__":
    unittest.main()
