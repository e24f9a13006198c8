"""Tests of a model under several ways of being parallel at once: real ranks over Gloo."""

import math

import torch
from parameterized import parameterized

from diffusers_rocm import ParallelConfig

from ...testing_utils import relative_l2, slow
from .common import BaseModelTesterConfig
from .parallelism import _clone_state, _same_state
from .workers import FLOAT32_BAR, ParallelTesterMixin


# (ring, ulysses, tp)
HYBRIDS = [(1, 2, 2), (2, 1, 2), (2, 2, 2), (3, 1, 2), (2, 1, 3)]


def hybrid(shape: tuple[int, int, int], **changes) -> ParallelConfig:
    return ParallelConfig(**dict(zip(("ring", "ulysses", "tp"), shape, strict=True)), **changes)


@torch.no_grad()
def parity_worker(config: BaseModelTesterConfig, shape: tuple, batch_size: int, rotate_method: str) -> dict:
    model, inputs = config.get_model(), config.get_inputs(batch_size)
    reference, state = config.get_output(model, inputs), _clone_state(model)
    model.enable_parallelism(config=hybrid(shape, rotate_method=rotate_method))
    output = config.get_output(model, inputs)
    model.disable_parallelism()
    return {
        "error": relative_l2(output, reference),
        "restored": _same_state(model, state),
        "hooks": sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()),
        "output_restored": torch.equal(config.get_output(model, inputs), reference),
    }


class AnyMeshTesterMixin(ParallelTesterMixin):
    """Add to a `BaseModelTesterConfig` of a class with both plans."""

    @parameterized.expand([(shape, 1 + index % 2) for index, shape in enumerate(HYBRIDS[:3])])
    def test_parity_and_disable(self, shape, batch_size):
        self.check_parity(shape, batch_size)

    @parameterized.expand([(shape, 1 + index % 2) for index, shape in enumerate(HYBRIDS[3:])])
    @slow
    def test_parity_and_disable_uneven(self, shape, batch_size):
        self.check_parity(shape, batch_size)

    def check_parity(self, shape, batch_size):
        for method in ("p2p", "allgather")[: 1 + (shape[0] > 1)]:
            for result in self.ranks(math.prod(shape), parity_worker, shape, batch_size, method):
                assert result["error"] <= FLOAT32_BAR, result
                assert result["restored"] and result["output_restored"] and result["hooks"] == 0, result

    def test_bf16(self):
        self.check_bf16(4, hybrid((1, 2, 2)))

    def test_gradients(self):
        self.check_gradients(4, hybrid((2, 1, 2)))

    def test_compile(self):
        self.check_compile(4, hybrid((1, 2, 2)), whole=False)
