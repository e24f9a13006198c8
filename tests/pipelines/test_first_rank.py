"""What one rank computes for all."""

import unittest

import torch

from diffusers_rocm.distributed.axis import Axis
from diffusers_rocm.pipelines.first_rank import answer_of_first_rank

from ..testing_utils import run_ranks


def without_tensors_worker() -> list[float]:
    def count(start: int) -> torch.Tensor:
        return torch.arange(start, start + 3.0)

    return answer_of_first_rank("count", count, (), {"start": 2}, Axis.of_all()).tolist()


class TestFirstRank(unittest.TestCase):
    def test_a_call_without_tensors(self):
        assert run_ranks(2, without_tensors_worker) == [[2.0, 3.0, 4.0]] * 2


if __name__ == "__main__":
    unittest.main()
