"""Context-parallel tests of a model: real ranks over Gloo, each comparing with its own single process run."""

import torch
from parameterized import parameterized

from diffusers_rocm import ContextParallelConfig

from ...testing_utils import relative_l2, slow
from .common import BaseModelTesterConfig
from .parallelism import _clone_state, _same_state
from .workers import FLOAT32_BAR, ParallelTesterMixin


# (ring, ulysses, rotate_method)
SPLITS = [(2, 1, "p2p"), (3, 1, "p2p"), (2, 1, "allgather"), (1, 2, "p2p"), (1, 3, "p2p"), (2, 2, "p2p")]


def split_by(split: tuple) -> ContextParallelConfig:
    ring, ulysses, rotate_method = split
    return ContextParallelConfig(ring, ulysses, rotate_method=rotate_method)


def enable(model, split: tuple, **kwargs) -> None:
    model.enable_parallelism(config=split_by(split), **kwargs)


@torch.no_grad()
def parity_worker(config: BaseModelTesterConfig, split: tuple, batch_size: int) -> dict:
    model, inputs = config.get_model(), config.get_inputs(batch_size)
    reference, state = config.get_output(model, inputs), _clone_state(model)
    enable(model, split)
    output = config.get_output(model, inputs)
    with torch.inference_mode():
        again = config.get_output(model, inputs)
    same_weights = _same_state(model, state)
    model.disable_parallelism()
    return {
        "error": relative_l2(output, reference),
        "inference_mode_equal": torch.equal(again, output),
        "weights": same_weights and _same_state(model, state),
        "hooks": sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()),
        "output_restored": torch.equal(config.get_output(model, inputs), reference),
    }


class ContextParallelTesterMixin(ParallelTesterMixin):
    """Add to a `BaseModelTesterConfig` of a class with a context-parallel plan."""

    @parameterized.expand([(split, 1 + index % 2) for index, split in enumerate(SPLITS)])
    def test_parity_and_disable(self, split, batch_size):
        for result in self.ranks(split[0] * split[1], parity_worker, split, batch_size):
            assert result["error"] <= FLOAT32_BAR, result
            assert result["inference_mode_equal"] and result["weights"], result
            assert result["output_restored"] and result["hooks"] == 0, result

    @parameterized.expand([((2, 1, "p2p"),), ((1, 2, "p2p"),)])
    def test_bf16(self, split):
        self.check_bf16(2, split_by(split))

    @parameterized.expand([((3, 1, "p2p"),), ((1, 2, "p2p"),)])
    def test_gradients(self, split):
        self.check_gradients(split[0] * split[1], split_by(split))

    @slow
    def test_compile_repeated_blocks(self):
        self.check_compile(2, split_by((2, 1, "p2p")), whole=False)

    @slow
    def test_compile_whole_model(self):
        self.check_compile(2, split_by((1, 2, "p2p")), whole=True)
