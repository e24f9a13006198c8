"""diffusers' own ring with a backend whose log-sum-exp has no trailing axis, with and without our registration.

ROCm's flash kernel gives the LSE as [B, H, S]; so does CUDA's. The kernel of the CPU stands in for it here, through
diffusers' very code path. docs/bug.md tells the story.
"""

import unittest
from unittest import mock

import diffusers
import pytest
import torch
import torch.distributed as dist
from diffusers import ContextParallelConfig, FluxTransformer2DModel
from diffusers.models._modeling_parallel import ParallelConfig
from diffusers.models.attention_dispatch import AttentionBackendName, dispatch_attention_fn
from packaging.version import Version
from parameterized import parameterized
from torch.distributed.device_mesh import init_device_mesh

import diffusers_rocm
from diffusers_rocm.distributed.mesh import forget_former_groups

from ..testing_utils import relative_l2, run_ranks
from .test_attention_dispatch import reference
from .transformers.test_models_transformer_flux import FLUX_INIT, randn


VERSION = Version(diffusers.__version__)
CRASH = "The size of tensor a (3) must match the size of tensor b (16)"


def flash(query, key, value, dropout_p=0.0, is_causal=False, return_debug_mask=False, scale=None):
    """As aten's flash attention answers on ROCm and CUDA: the LSE is [B, H, S]."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, scale=scale)
    assert lse.ndim == 3
    return out, lse, None, None, 0, 0, None, None, None


def ring_worker(registered: bool, ring: int, ulysses: int, options: dict) -> float | str:
    """Error of diffusers' context parallelism against one softmax, or what it raised."""
    if not registered:
        diffusers_rocm.unregister()
    try:
        config = ContextParallelConfig(ring_degree=ring, ulysses_degree=ulysses, **options)
        parallel = ParallelConfig(context_parallel_config=config)
        forget_former_groups()
        mesh = init_device_mesh("cpu", (ring, ulysses), mesh_dim_names=("ring", "ulysses"))
        parallel.setup(dist.get_rank(), ring * ulysses, torch.device("cpu"), mesh=mesh)
        whole = [randn(2, 8, 3 if ulysses == 1 else 4, 16, seed=seed) for seed in (1, 2, 3)]
        mine = [x.chunk(ring * ulysses, dim=1)[dist.get_rank()].contiguous() for x in whole]
        with mock.patch.object(torch.ops.aten, "_scaled_dot_product_flash_attention", flash), torch.no_grad():
            out = dispatch_attention_fn(*mine, backend=AttentionBackendName._NATIVE_FLASH, parallel_config=parallel)
        want = reference(*whole, None)[0].chunk(ring * ulysses, dim=1)[dist.get_rank()]
        return relative_l2(out, want)
    except RuntimeError as error:
        return str(error)
    finally:
        diffusers_rocm.register()


@torch.no_grad()
def model_worker() -> float:
    """A model under diffusers' own config, as a user of it would run it."""
    torch.manual_seed(0)
    model = FluxTransformer2DModel(**FLUX_INIT).eval()
    ids = torch.zeros(36, 3)
    ids[:, 1] = torch.arange(36)
    inputs = {
        "hidden_states": randn(1, 36, 16, seed=1),
        "encoder_hidden_states": randn(1, 12, 32, seed=2),
        "pooled_projections": randn(1, 24, seed=3),
        "timestep": torch.tensor([0.5]),
        "img_ids": ids,
        "txt_ids": torch.zeros(12, 3),
    }
    want = model(**inputs, return_dict=False)[0]
    with mock.patch.object(torch.ops.aten, "_scaled_dot_product_flash_attention", flash):
        model.set_attention_backend("_native_flash")
        model.enable_parallelism(config=ContextParallelConfig(ring_degree=2))
        return relative_l2(model(**inputs, return_dict=False)[0], want)


CASES = [("ring", 2, 1, {}, Version("0.38")), ("unified", 2, 2, {}, Version("0.38"))]
if VERSION >= Version("0.38"):
    CASES.append(("ring_anything", 2, 1, {"ring_anything": True}, Version("0.40")))


class TestLogSumExp(unittest.TestCase):
    @parameterized.expand([case[:4] for case in CASES])
    def test_diffusers_own_ring_works_when_registered(self, name, ring, ulysses, options):
        for error in run_ranks(ring * ulysses, ring_worker, True, ring, ulysses, options):
            assert error <= 1e-6, error

    @parameterized.expand(CASES)
    def test_and_crashes_without_in_the_versions_that_have_the_bug(self, name, ring, ulysses, options, mended):
        for error in run_ranks(ring * ulysses, ring_worker, False, ring, ulysses, options):
            if VERSION < mended:
                size = "3" if ulysses == 1 else "2"
                assert CRASH.replace("(3)", f"({size})") in error, error
            else:
                assert error <= 1e-6, error

    def test_a_model_under_diffusers_own_config(self):
        if VERSION >= Version("0.42"):
            pytest.skip("diffusers 0.42 cannot enable parallelism on a CPU")
        for error in run_ranks(2, model_worker):
            assert error <= 1e-5, error
