import contextlib
import copy
import functools
import math
import unittest
from unittest import mock

import torch
from diffusers import FluxTransformer2DModel
from parameterized import parameterized

import diffusers_rocm
from diffusers_rocm import ParallelConfig, TensorParallelConfig
from diffusers_rocm.distributed.collectives import all_gather_stacked
from diffusers_rocm.distributed.sharding import Block, Shard
from diffusers_rocm.hooks.modulation import StepModulation

from ...testing_utils import relative_l2, require_torch_multi_accelerator, run_ranks
from ..testing_utils.any_mesh import AnyMeshTesterMixin
from ..testing_utils.common import BaseModelTesterConfig, randn
from ..testing_utils.context_parallelism import ContextParallelTesterMixin, enable
from ..testing_utils.parallelism import (
    FLOAT32_BAR,
    TensorParallelTesterMixin,
    _clone_state,
    _same_state,
)
from ..testing_utils.plans import PlanTesterMixin


def flux_inputs(batch_size: int, guidance: bool) -> dict:
    height, width, text = 5, 7, 11  # nothing divides by anything
    ids = torch.zeros(height, width, 3)
    ids[..., 1] += torch.arange(height)[:, None]
    ids[..., 2] += torch.arange(width)[None]
    inputs = {
        "hidden_states": randn(batch_size, height * width, 16, seed=1),
        "encoder_hidden_states": randn(batch_size, text, 32, seed=2),
        "pooled_projections": randn(batch_size, 24, seed=3),
        # Exact in bf16 after the model's factor of 1000, or its rounding would drown every other error.
        "timestep": torch.tensor([0.5, 0.25])[:batch_size],
        "img_ids": ids.reshape(-1, 3),
        "txt_ids": torch.zeros(text, 3),
    }
    if guidance:
        inputs["guidance"] = torch.tensor([4.0, 2.0])[:batch_size]
    return inputs


FLUX_INIT = {
    "in_channels": 16,
    "num_layers": 2,
    "num_single_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 8,
    "joint_attention_dim": 32,
    "pooled_projection_dim": 24,
    "axes_dims_rope": (4, 6, 6),
}


class FluxTransformerTesterConfig(BaseModelTesterConfig):
    model_class = FluxTransformer2DModel
    repeated_block_count = 2

    def get_init_dict(self):
        return {**FLUX_INIT, "guidance_embeds": True}

    def get_dummy_inputs(self, batch_size=1):
        return flux_inputs(batch_size, guidance=True)


class FluxSchnellTransformerTesterConfig(FluxTransformerTesterConfig):
    """Without the guidance embedding, and with what a ControlNet adds."""

    def get_init_dict(self):
        return {**FLUX_INIT, "guidance_embeds": False}

    def get_dummy_inputs(self, batch_size=1):
        residuals = {
            "controlnet_block_samples": [randn(batch_size, 35, 128, seed=4)],  # one for both blocks
            "controlnet_single_block_samples": [randn(batch_size, 35, 128, seed=seed) for seed in (5, 6)],
        }
        return flux_inputs(batch_size, guidance=False) | residuals


class TestFluxTransformerTensorParallel(FluxTransformerTesterConfig, TensorParallelTesterMixin, unittest.TestCase):
    pass


class TestFluxTransformerContextParallel(FluxTransformerTesterConfig, ContextParallelTesterMixin, unittest.TestCase):
    pass


class TestFluxTransformerAnyMesh(FluxTransformerTesterConfig, AnyMeshTesterMixin, unittest.TestCase):
    pass


class TestFluxTransformer(FluxTransformerTesterConfig, PlanTesterMixin, unittest.TestCase):
    pass


class TestFluxSchnellTransformer(FluxSchnellTransformerTesterConfig, PlanTesterMixin, unittest.TestCase):
    pass


class FluxAcceleratorTransformerTesterConfig(FluxTransformerTesterConfig):
    device = "cuda"  # ROCm's name too


@require_torch_multi_accelerator
class TestFluxTransformerTensorParallelAccelerator(
    FluxAcceleratorTransformerTesterConfig, TensorParallelTesterMixin, unittest.TestCase
):
    """The same over NCCL or RCCL."""


@require_torch_multi_accelerator
class TestFluxTransformerContextParallelAccelerator(
    FluxAcceleratorTransformerTesterConfig, ContextParallelTesterMixin, unittest.TestCase
):
    """The same over NCCL or RCCL."""


@torch.no_grad()
def schnell_worker(tp: int, batch_size: int) -> float:
    config = FluxSchnellTransformerTesterConfig()
    model, inputs = config.get_model(), config.get_dummy_inputs(batch_size)
    reference = config.get_output(model, inputs)
    model.enable_parallelism(config=TensorParallelConfig(tp=tp))
    return relative_l2(config.get_output(model, inputs), reference)


@torch.no_grad()
def uneven_worker(tp: int) -> tuple[float, list[int]]:
    """24 heads, as FLUX.1 has, on any number of ranks."""
    config = FluxTransformerTesterConfig()
    init = {**config.get_init_dict(), "num_attention_heads": 24, "num_layers": 1, "num_single_layers": 1}
    config.get_init_dict = lambda: init
    model, inputs = config.get_model(), config.get_dummy_inputs(1)
    reference = config.get_output(model, inputs)
    model.enable_parallelism(config=TensorParallelConfig(tp=tp))
    attention, feed_forward = model.transformer_blocks[0].attn, model.transformer_blocks[0].ff.net[2]
    error = relative_l2(config.get_output(model, inputs), reference)
    return error, [attention.heads, attention.to_q.out_features, feed_forward.in_features]


@torch.no_grad()
def naive_proj_out_worker(tp: int) -> tuple[float, float]:
    """Ours, and the same with the columns of the single blocks' proj_out cut as one contiguous run (bug TP-1)."""
    config = FluxTransformerTesterConfig()
    model, inputs = config.get_model(), config.get_dummy_inputs(1)
    reference = config.get_output(model, inputs)
    full = [block.proj_out.weight.clone() for block in model.single_transformer_blocks]
    model.enable_parallelism(config=TensorParallelConfig(tp=tp))
    ours = relative_l2(config.get_output(model, inputs), reference)
    for block, weight in zip(model.single_transformer_blocks, full, strict=True):
        naive = Shard(1, (Block(weight.shape[1], 1),)).take(weight, model.parallelism.axes.tp.rank, tp)
        assert naive.shape == block.proj_out.weight.shape  # nothing would crash: that is what makes it a trap
        block.proj_out.weight.copy_(naive)
    return ours, relative_l2(config.get_output(model, inputs), reference)


@torch.no_grad()
def fused_worker(tp: int, when: str) -> dict:
    config = FluxTransformerTesterConfig()
    model, inputs = config.get_model(), config.get_dummy_inputs(2)
    reference, state = config.get_output(model, inputs), _clone_state(model)
    if when == "before":
        model.fuse_qkv_projections()
        state = _clone_state(model)
    model.enable_parallelism(config=TensorParallelConfig(tp=tp))
    if when == "after":
        model.fuse_qkv_projections()
    attention = model.transformer_blocks[0].attn
    used = []
    attention.to_qkv.register_forward_hook(lambda *_: used.append("to_qkv"))
    attention.to_added_qkv.register_forward_hook(lambda *_: used.append("to_added_qkv"))
    error = relative_l2(config.get_output(model, inputs), reference)
    rows = [attention.to_qkv.out_features, attention.to_added_qkv.out_features]
    model.disable_parallelism()
    fused = relative_l2(config.get_output(model, inputs), reference)
    if when == "after":
        model.unfuse_qkv_projections()
    return {"error": error, "used": used[:2], "rows": rows, "fused": fused, "restored": _same_state(model, state)}


@torch.no_grad()
def no_blocks_worker(tp: int, **changes) -> float:
    config = FluxTransformerTesterConfig()
    init = {**config.get_init_dict(), **changes}
    config.get_init_dict = lambda: init
    model, inputs = config.get_model(), config.get_dummy_inputs(1)
    reference = config.get_output(model, inputs)
    model.enable_parallelism(config=TensorParallelConfig(tp=tp))
    return relative_l2(config.get_output(model, inputs), reference)


@torch.no_grad()
def controlnet_residuals_worker(split: tuple) -> tuple[float, float]:
    """Error with a ControlNet's residuals, which every rank is given whole, and what they change at all."""
    config = FluxTransformerTesterConfig()
    model, inputs = config.get_model(), config.get_dummy_inputs(1)
    plain = config.get_output(model, inputs)
    inputs["controlnet_block_samples"] = [randn(1, 35, 128, seed=seed) for seed in (40, 41)]
    inputs["controlnet_single_block_samples"] = (randn(1, 35, 128, seed=42),)
    reference = config.get_output(model, inputs)
    enable(model, split)
    return relative_l2(config.get_output(model, inputs), reference), relative_l2(plain, reference)


class Interrupt(BaseException):
    """As KeyboardInterrupt, which no hook sees."""


@torch.no_grad()
def shared_modulation_worker(parallel: dict[str, int]) -> tuple[int, list[bool]]:
    """Features of modulation that this rank computes before the blocks, and whether they find all of theirs."""
    config = FluxTransformerTesterConfig()
    model, inputs = config.get_model(), config.get_dummy_inputs(1)
    linears = [*(block.norm.linear for block in model.single_transformer_blocks), model.norm_out.linear]
    for block in model.transformer_blocks:
        linears += [block.norm1.linear, block.norm1_context.linear]
    ready: list[bool] = []
    model.enable_parallelism(config=ParallelConfig(**parallel))
    model.single_transformer_blocks[0].register_forward_pre_hook(
        lambda *_: ready.extend(linear.ready is not None for linear in linears)
    )
    with mock.patch("diffusers_rocm.hooks.modulation.all_gather_stacked", side_effect=all_gather_stacked) as gather:
        config.get_output(model, inputs)
    model.disable_parallelism()
    ((local, _),) = (call.args for call in gather.call_args_list)
    assert not any("ready" in vars(linear) for linear in linears)
    return local.shape[-1], ready


def stale_modulation_worker(parallel: dict[str, int]) -> dict[str, float]:
    """Errors of what runs after, or beside, a forward whose modulation was computed beforehand."""
    config = FluxTransformerTesterConfig()
    model, inputs = config.get_model(), config.get_dummy_inputs(1)
    block, single = model.transformer_blocks[0], model.single_transformer_blocks[-1]
    x, other = torch.randn(1, 5, 128), torch.randn(1, 128)

    def doubled(module, args, output):
        return 2 * output

    changed = {**inputs, "timestep": inputs["timestep"] * 0.1}
    with torch.no_grad():
        plain, modulation = config.get_output(model, inputs), block.norm1(x, emb=other)[0]
        plain_changed = config.get_output(model, changed)
        handle = model.time_text_embed.register_forward_hook(doubled)
        hooked = config.get_output(model, inputs)
        handle.remove()
    model.enable_parallelism(config=ParallelConfig(**parallel))

    def interrupt(module, args):
        raise Interrupt

    def fail(module, args):
        raise RuntimeError

    errors, handle = {}, single.register_forward_pre_hook(interrupt)
    with torch.no_grad(), contextlib.suppress(Interrupt):
        config.get_output(model, inputs)
    handle.remove()
    # With gradients nothing is computed beforehand.
    errors["after an interrupt"] = relative_l2(config.get_output(model, changed).detach(), plain_changed)
    errors["without gradients"] = relative_l2(config.get_output(model, inputs).detach(), plain)
    handle = single.register_forward_pre_hook(fail)
    with torch.no_grad(), contextlib.suppress(RuntimeError):
        config.get_output(model, inputs)
    handle.remove()
    with torch.no_grad():
        errors["a block by itself after an error"] = relative_l2(block.norm1(x, emb=other)[0], modulation)
    # Weights that offloading keeps elsewhere: each Linear computes its own when it is there.
    step = next(hook for hook in model.parallelism.hooks if isinstance(hook, StepModulation))
    with torch.no_grad():
        step._in_forward = True
        step._compute(model.time_text_embed, (), torch.empty(1, 128, device="meta"))
        step._in_forward = False
    assert all(linear.ready is None for linear in step._linears)
    assert not any("modulation_order" in name for name in model.state_dict())
    with torch.no_grad():
        model.time_text_embed(inputs["timestep"] * 1000, inputs["guidance"] * 1000, inputs["pooled_projections"])
        errors["a block by itself"] = relative_l2(block.norm1(x, emb=other)[0], modulation)
        handle = model.time_text_embed.register_forward_hook(doubled)
        errors["a hook on the embedding"] = relative_l2(config.get_output(model, inputs), hooked)
        handle.remove()
        copied = copy.deepcopy(model)
        model.disable_parallelism()
        assert "modulation_order" not in "".join(name for name, _ in model.named_buffers())
        errors["a copy"] = relative_l2(config.get_output(copied, inputs), plain)
    return errors


def requires_grad_worker(tp: int) -> bool:
    """Frozen weights come back frozen, parameter by parameter, whatever this rank held of them."""
    model = FluxTransformerTesterConfig().get_model()
    for index, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(index % 3 == 0)
    before = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    changed = "transformer_blocks.0.attn.to_q.weight"
    with torch.inference_mode():
        model.enable_parallelism(config=TensorParallelConfig(tp=tp))
    config = FluxTransformerTesterConfig()
    config.get_output(model, config.get_dummy_inputs(1)).sum().backward()
    model.get_parameter(changed).requires_grad_(not before[changed])
    before[changed] = not before[changed]
    model.disable_parallelism()
    return before == {name: parameter.requires_grad for name, parameter in model.named_parameters()}


class TestFluxTransformerContextParallelCases(unittest.TestCase):
    @parameterized.expand([((3, 1, "p2p"),), ((1, 2, "p2p"),)])
    def test_residuals_of_a_controlnet(self, split):
        for error, change in run_ranks(split[0] * split[1], controlnet_residuals_worker, split):
            assert error <= FLOAT32_BAR and change > 0.01, (error, change)


class TestFluxTransformerTensorParallelCases(unittest.TestCase):
    @parameterized.expand([(tp, batch_size) for tp in (2, 3, 4) for batch_size in (1, 2)])
    def test_without_guidance_embedding(self, tp, batch_size):
        for error in run_ranks(tp, schnell_worker, tp, batch_size):
            assert error <= FLOAT32_BAR, error

    def test_24_heads_on_5_ranks(self):
        results = run_ranks(5, uneven_worker, 5)
        assert all(error <= FLOAT32_BAR for error, _ in results), results
        assert [sizes[0] for _, sizes in results] == [5, 5, 5, 5, 4]
        assert [sizes[1] for _, sizes in results] == [80, 80, 80, 80, 64]
        rows = [sizes[2] for _, sizes in results]
        assert sum(rows) == 4 * 24 * 16 and all(row % 64 == 0 for row in rows) and max(rows) - min(rows) <= 64, rows

    def test_naive_slices_of_proj_out_fail_the_bar_that_ours_pass(self):
        for ours, naive in run_ranks(2, naive_proj_out_worker, 2):
            assert ours <= FLOAT32_BAR, ours
            assert naive > 0.1, naive

    @parameterized.expand([("before", 2), ("before", 3), ("after", 2), ("after", 3)])
    def test_fused_projections(self, when, tp):
        for result in run_ranks(tp, fused_worker, tp, when):
            assert result["error"] <= FLOAT32_BAR, result
            assert result["used"] == ["to_qkv", "to_added_qkv"], result
            assert all(rows <= 3 * 16 * 4 for rows in result["rows"]), result
            assert result["fused"] <= FLOAT32_BAR, result
            assert result["restored"], result

    @parameterized.expand([({"num_single_layers": 0},), ({"num_layers": 0},)])
    def test_without_blocks_of_one_kind(self, changes):
        for error in run_ranks(2, functools.partial(no_blocks_worker, **changes), 2):
            assert error <= FLOAT32_BAR, error

    @parameterized.expand([({"tp": 2},), ({"ulysses": 2},), ({"ring": 2, "tp": 2},)])
    def test_modulation_is_never_stale(self, parallel):
        for errors in run_ranks(math.prod(parallel.values()), stale_modulation_worker, parallel):
            assert len(errors) == 6 and max(errors.values()) <= FLOAT32_BAR, errors

    @parameterized.expand([({"tp": 2},), ({"ring": 2},), ({"ulysses": 2, "tp": 2},)])
    def test_modulation_is_shared(self, parallel):
        """By all ranks of a forward."""
        in_all = (2 * 12 + 2 * 3 + 2) * 128  # of two blocks of either kind, and of the last norm
        world = math.prod(parallel.values())
        for features, ready in run_ranks(world, shared_modulation_worker, parallel):
            assert features * world == in_all and ready and all(ready), (features, ready)

    def test_requires_grad_and_inference_mode(self):
        assert all(run_ranks(3, requires_grad_worker, 3))

    @parameterized.expand([(4, 6.1), (2, 12.0), (5, 5.0)])
    def test_bytes_of_the_real_model(self, tp, gigabytes):
        with torch.device("meta"):
            model = FluxTransformer2DModel(guidance_embeds=True).to(torch.bfloat16)
        report = diffusers_rocm.verify_plan(model, tp)
        assert 23.8 < report.full_bytes / 1e9 < 23.81
        assert report.full_bytes / tp <= max(report.rank_bytes) <= gigabytes * 1e9, str(report)
        assert report.replicated_bytes < 0.01 * report.full_bytes, str(report)


if __name__ == "__main__":
    unittest.main()
