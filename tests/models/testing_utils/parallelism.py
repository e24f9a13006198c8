"""Tensor-parallel tests of a model: real ranks over Gloo, each comparing with its own single process run."""

import tempfile
from pathlib import Path

import torch
from parameterized import parameterized

import diffusers_rocm
from diffusers_rocm import TensorParallelConfig
from diffusers_rocm.hooks.tensor_parallel import sharded_modules

from ...testing_utils import relative_l2, slow
from .common import BaseModelTesterConfig
from .workers import FLOAT32_BAR, ParallelTesterMixin


def _same_state(model, state: dict[str, torch.Tensor]) -> bool:
    now = model.state_dict()
    return now.keys() == state.keys() and all(torch.equal(now[name], value) for name, value in state.items())


def _clone_state(model) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


@torch.no_grad()
def parity_worker(config: BaseModelTesterConfig, tp: int, batch_size: int) -> dict:
    """Float32 error of the sharded forward, and whether disabling restores the model bit by bit."""
    model, inputs = config.get_model(), config.get_inputs(batch_size)
    reference, state = config.get_output(model, inputs), _clone_state(model)
    classes = [type(module) for module in model.modules()]
    planned = diffusers_rocm.verify_plan(model, tp).rank_bytes

    model.enable_parallelism(config=TensorParallelConfig(tp=tp))
    output = config.get_output(model, inputs)
    with torch.inference_mode():
        in_inference_mode = config.get_output(model, inputs)
    rank = model.parallelism.axes.tp.rank
    held = [*model.parameters(), *(b for name, b in model.named_buffers() if "modulation_order" not in name)]
    local = sum(tensor.numel() * tensor.element_size() for tensor in held)

    model.disable_parallelism()
    return {
        "error": relative_l2(output, reference),
        "inference_mode_equal": torch.equal(in_inference_mode, output),
        "bytes": (local, planned[rank]),
        "restored": _same_state(model, state) and [type(module) for module in model.modules()] == classes,
        "hooks": sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()),
        "output_restored": torch.equal(config.get_output(model, inputs), reference),
    }


@torch.no_grad()
def save_worker(config: BaseModelTesterConfig, tp: int, folder: str, max_shard_size: str) -> bool:
    """Save sharded; load with plain diffusers: is every weight bit-equal?"""
    model = config.get_model()
    state = _clone_state(model)
    model.enable_parallelism(config=TensorParallelConfig(tp=tp))
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    loaded = config.model_class.from_pretrained(folder).to(config.device)
    sharded = config.model_class.from_pretrained(folder, parallel_config=TensorParallelConfig(tp=tp))
    sharded.to(config.device)
    is_sharded = next(sharded_modules(sharded), None) is not None
    sharded.disable_parallelism()
    return _same_state(loaded, state) and is_sharded and _same_state(sharded, state)


@torch.no_grad()
def different_weights_worker(config: BaseModelTesterConfig, tp: int) -> tuple[float, torch.Tensor]:
    """Ranks that start from different weights: the error against the first rank's model."""
    from torch.distributed import get_rank

    inputs = config.get_inputs(1)
    reference = config.get_output(config.get_model(seed=0), inputs)
    model = config.get_model(seed=get_rank())
    model.enable_parallelism(config=TensorParallelConfig(tp=tp))
    return relative_l2(config.get_output(model, inputs), reference)


class TensorParallelTesterMixin(ParallelTesterMixin):
    """Add to a `BaseModelTesterConfig` of a class with a plan."""

    @parameterized.expand([(tp, batch_size) for tp in (2, 3, 4) for batch_size in (1, 2)])
    def test_parity_and_disable(self, tp, batch_size):
        for result in self.ranks(tp, parity_worker, tp, batch_size):
            assert result["error"] <= FLOAT32_BAR, result
            assert result["inference_mode_equal"], result
            assert result["bytes"][0] == result["bytes"][1], result
            assert result["restored"] and result["output_restored"] and result["hooks"] == 0, result

    @parameterized.expand([(2, False), (4, False), (2, True)])
    def test_bf16(self, tp, autocast):
        self.check_bf16(tp, TensorParallelConfig(tp=tp), autocast)

    @parameterized.expand([(2,), (3,)])
    def test_gradients(self, tp):
        self.check_gradients(tp, TensorParallelConfig(tp=tp))

    @slow
    def test_compile_repeated_blocks(self):
        self.check_compile(2, TensorParallelConfig(tp=2), whole=False, backend="inductor")

    @slow
    def test_compile_whole_model(self):
        # Inductor's own float32 error on a whole FLUX is above the bar, in a single process too.
        self.check_compile(3, TensorParallelConfig(tp=3), whole=True)

    @parameterized.expand([(2, "10GB"), (3, "100KB")])
    def test_save_pretrained(self, tp, max_shard_size):
        with tempfile.TemporaryDirectory() as folder:
            assert all(self.ranks(tp, save_worker, tp, folder, max_shard_size))
            files = sorted(file.name for file in Path(folder).iterdir())
            sharded = any("-of-" in name for name in files)
            assert sharded == (max_shard_size == "100KB"), files
            assert not any(name.endswith(".partial") for name in files), files

    def test_ranks_that_start_from_different_weights(self):
        for error in self.ranks(2, different_weights_worker, 2):
            assert error <= FLOAT32_BAR, error

    def test_plan_leaves_nothing_unexplained(self):
        with torch.device("meta"):
            model, real = self.model_class(**self.get_init_dict()), self.model_class()
        report = diffusers_rocm.verify_plan(model, 2)
        assert not report.unused_rules and not report.unsharded_linears, str(report)
        report = diffusers_rocm.verify_plan(real, 2)
        assert report.unexplained_bytes <= 0.01 * report.full_bytes, str(report)
