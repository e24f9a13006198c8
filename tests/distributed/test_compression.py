"""Activations in 8 bits: how far they are from what was sent, that all ranks get the same, and whole models."""

import contextlib
import importlib.util
import itertools
import math
import os
import sys
import unittest
from pathlib import Path
from unittest import mock

import pytest
import torch
from diffusers import FluxPipeline, FluxTransformer2DModel
from hypothesis import given, settings
from hypothesis import strategies as st
from parameterized import parameterized
from torch.utils._pytree import tree_map_only

from diffusers_rocm import ContextParallelConfig, ParallelConfig, TensorParallelConfig
from diffusers_rocm.distributed import collectives, compression
from diffusers_rocm.distributed.compression import (
    GROUP,
    RECORD,
    compress,
    compress_parts,
    compressed_size,
    decompress,
    decompress_parts,
)
from diffusers_rocm.distributed.mesh import mesh_axes
from diffusers_rocm.models import attention_heads
from diffusers_rocm.models.attention_heads import scatter_heads
from diffusers_rocm.models.attention_parallel import _keys_of_all
from diffusers_rocm.pipelines.model_folder import EMBEDDED_MODEL

from ..models.testing_utils.common import randn
from ..models.transformers.test_models_transformer_flux import FluxTransformerTesterConfig
from ..models.transformers.test_models_transformer_hunyuan_video import HunyuanVideoTransformerTesterConfig
from ..models.transformers.test_models_transformer_wan import WanTransformerTesterConfig
from ..testing_utils import relative_l2, run_ranks, slow


sys.path.insert(0, str(Path(__file__).parents[2] / "utils"))
from check_shapes import held_out_prompts  # noqa: E402


# Of one forward, in bfloat16: the error against float32 with 8 bits, over that without.
BAR = 1.5
MODELS = {
    "flux": FluxTransformerTesterConfig,
    "wan": WanTransformerTesterConfig,
    "hunyuan_video": HunyuanVideoTransformerTesterConfig,
}
MESHES = [{"tp": 2}, {"tp": 3}, {"ulysses": 2}, {"ulysses": 3}, {"ring": 2}, {"ring": 3}, {"ulysses": 2, "tp": 2}]


def collectives_worker(world: int) -> dict:
    """Sums, exchanges and gathers of several ranks, of sizes that no group divides, against the exact ones."""
    axis, results = mesh_axes({"ring": world}).sending("int8").ring, {}
    exact = mesh_axes({"ring": world}).ring
    x = randn(3, 7, 41, seed=axis.rank)
    with mock.patch.object(collectives, "COMPRESSED_FROM", x.numel()):
        summed = collectives.reduce_from_axis(x.clone(), axis)
    results["sum"] = relative_l2(summed, collectives.reduce_from_axis(x.clone(), exact))
    results["same on all"] = torch.equal(collectives.broadcast_from_first(summed, exact), summed)
    results["small"] = torch.equal(
        collectives.reduce_from_axis(x.clone(), axis), collectives.reduce_from_axis(x.clone(), exact)
    )
    for name, unit in (("uneven", 1), ("records", RECORD)):
        send = tuple(unit * (rank + 2) * (axis.rank + 1) for rank in range(world))
        receive = tuple(unit * (axis.rank + 2) * (rank + 1) for rank in range(world))
        x = randn(sum(send), seed=axis.rank)
        rounded, wanted = (collectives.start_exchange([x], 0, send, receive, each)() for each in (axis, exact))
        results[name] = relative_l2(rounded, wanted)
    sizes = (2, 5, 3)[:world]
    x = randn(sizes[axis.rank], 3, 11, seed=axis.rank)
    results["gather"] = relative_l2(
        *(collectives.start_gather_tokens([x], 1, sizes, each)() for each in (axis, exact))
    )
    if world == 3:  # each rounds its part of the sum once more, and not what it keeps
        flats = [randn(2 * 3 * RECORD, seed=rank).bfloat16() for rank in range(world)]
        rounded = torch.stack([decompress(compress(each), len(each), torch.float32) for each in flats])
        for rank, part in enumerate(rounded.view(world, world, -1)):
            part[rank] = flats[rank].view(world, -1)[rank]
        wanted = decompress(compress(rounded.sum(0)), len(flats[0]), torch.bfloat16)
        with mock.patch.object(collectives, "COMPRESSED_FROM", 1):
            results["rounded once"] = torch.equal(collectives.reduce_from_axis(flats[axis.rank].clone(), axis), wanted)
    if world == 2:  # each rank rounds once what it sends, and sums in float32
        x, y = (randn(3, 90, seed=rank).bfloat16() for rank in (axis.rank, 1 - axis.rank))
        rounded = [decompress(compress(each.flatten()), each.numel(), torch.float32) for each in (x, y)]
        with mock.patch.object(collectives, "COMPRESSED_FROM", 1):
            summed = collectives.reduce_from_axis(x.clone(), axis)
        results["rounded once"] = torch.equal(summed.flatten(), sum(rounded).bfloat16())
    x = randn(3, 7, 41, seed=axis.rank).requires_grad_()
    results["gradients"] = torch.equal(collectives.reduce_from_axis(x, axis), collectives.reduce_from_axis(x, exact))
    return results


def heads_worker(heads: int, key_heads: int) -> list[list[bool]]:
    """What of an attention comes as it was, by Ulysses and by a ring: none needs a gradient, then each by itself."""
    axes = [mesh_axes({name: 2}).sending("int8") for name in ("ulysses", "ring")]
    exactly = [mesh_axes({name: 2}) for name in ("ulysses", "ring")]
    lengths, rank, found = (5, 4), axes[0].ulysses.rank, []
    for trained in (None, 0, 1, 2):
        shapes = [(1, lengths[rank], count, 16) for count in (heads, key_heads, key_heads)]
        q, k, v = (randn(*shape, seed=3 * rank + index) for index, shape in enumerate(shapes))
        if trained is not None:
            (q, k, v)[trained].requires_grad_()
        by_ulysses = [scatter_heads(q, k, v, lengths, each.ulysses) for each in (axes[0], exactly[0])]
        by_ring = [_keys_of_all(q, k, v, lengths, each.ring) for each in (axes[1], exactly[1])]
        pairs = itertools.chain(zip(*by_ulysses, strict=True), zip(*by_ring, strict=True))
        found.append([torch.equal(x, y) for x, y in pairs])
    return found


def groups_worker() -> tuple[int, int]:
    """Elements that are rounded of one attention a group of heads at a time, and those of its queries."""
    axis, rounded = mesh_axes({"ulysses": 2}).sending("int8").ulysses, []

    def spy(x: torch.Tensor, counts: list[int]) -> torch.Tensor:
        rounded.append(x.numel())
        return compress_parts(x, counts)

    q, k, v = (randn(1, 5, 4, 16, seed=index) for index in range(3))
    where = (5, 5), axis.rank, 2, axis.group.group_name, False
    with mock.patch.object(attention_heads, "compress_parts", spy):
        attention_heads.attention_in_groups(q, k, v, None, None, "math", *where)
    return sum(rounded), q.numel()


def trained_inputs(prompts: list[str]) -> list[dict]:
    """What the pipeline gives the embedded model at each step, as bfloat16 holds it."""
    pipe, given = FluxPipeline.from_pretrained(EMBEDDED_MODEL), []
    pipe.set_progress_bar_config(disable=True)
    pipe.transformer.register_forward_pre_hook(lambda module, args, kwargs: given.append(kwargs), with_kwargs=True)
    generators = [torch.Generator().manual_seed(index) for index in range(len(prompts))]
    pipe(prompts, height=128, width=128, num_inference_steps=8, max_sequence_length=16, generator=generators)
    return [tree_map_only(torch.Tensor, torch.Tensor.bfloat16, kwargs) for kwargs in given]


@torch.no_grad()
@mock.patch.object(collectives, "COMPRESSED_FROM", 1)
def trained_worker(meshes: list[dict[str, int]], prompts: list[str]) -> list[torch.Tensor]:
    """The embedded model's error in each forward in bfloat16, in one process, and with 8 bits with each mesh."""
    inputs = trained_inputs(prompts)

    def load(dtype: torch.dtype) -> FluxTransformer2DModel:
        return FluxTransformer2DModel.from_pretrained(EMBEDDED_MODEL, subfolder="transformer", torch_dtype=dtype)

    def answers(model: FluxTransformer2DModel) -> list[torch.Tensor]:
        given = tree_map_only(torch.Tensor, lambda x: x.to(model.dtype), inputs)
        return [x for kwargs in given for x in model(**kwargs)[0]]

    wanted = answers(load(torch.float32))

    def errors(model: FluxTransformer2DModel) -> torch.Tensor:
        return torch.tensor([relative_l2(x, y) for x, y in zip(answers(model), wanted, strict=True)])

    by_mesh = [errors(load(torch.bfloat16))]
    for degrees in meshes:
        model = load(torch.bfloat16)
        model.enable_parallelism(config=ParallelConfig(**degrees, communication="int8"))
        by_mesh.append(errors(model))
    return by_mesh


@torch.no_grad()
@mock.patch.object(collectives, "COMPRESSED_FROM", 1)
def model_worker(name: str, degrees: dict[str, int], rotate_method: str, compiled: bool = False) -> dict[str, float]:
    config = MODELS[name]()
    reference = config.get_output(config.get_model(), config.get_inputs(1))
    model, inputs = config.get_model(dtype=torch.bfloat16), config.cast(config.get_inputs(1), torch.bfloat16)
    errors = {"one process": relative_l2(config.get_output(model, inputs), reference)}
    for communication in ("exact", "int8"):
        torch._dynamo.reset()
        model = config.get_model(dtype=torch.bfloat16)
        model.enable_parallelism(
            config=ParallelConfig(**degrees, rotate_method=rotate_method, communication=communication)
        )
        if compiled:
            model.compile_repeated_blocks(fullgraph=True)
        errors[communication] = relative_l2(config.get_output(model, inputs), reference)
    return errors


class TestCompression(unittest.TestCase):
    @given(
        st.integers(1, 400),
        st.floats(1e-30, 1e30),
        st.sampled_from([torch.float32, torch.bfloat16]),
        st.integers(0, 2**31),
    )
    @settings(max_examples=100, deadline=None)
    def test_rounding(self, count, size, dtype, seed):
        x = (size * randn(count, seed=seed)).to(dtype)
        records = compress(x)
        assert records.dtype == torch.uint8 and records.shape == (compressed_size(count),)
        assert records.numel() == -(-count // 32) * 36
        back = decompress(records, count, torch.float32)
        # Turned as a matrix, of numbers of float64; a scale has eight bits of its own.
        matrix = torch.ones(1, 1, dtype=torch.float64)
        for _ in range(3):
            matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
        turned, of_back = (
            (torch.nn.functional.pad(each.double(), (0, -count % 16)).view(-1, 2, 8) @ matrix / 8).view(-1, 16)
            for each in (x, back)
        )
        bound = turned.abs().amax(1, keepdim=True) / 254 * (1 + 2**-7)
        whole = count // 16
        assert (of_back - turned)[:whole].abs().le(bound[:whole]).all()
        assert relative_l2(back.double(), x.double()) < 0.02

    def test_what_is_not_finite_is_seen(self):
        x = torch.ones(3 * GROUP)
        x[GROUP], x[-1] = torch.nan, torch.inf
        back = decompress(compress(x), len(x), torch.float32)
        assert torch.allclose(back[:GROUP], x[:GROUP], rtol=2**-8) and back[GROUP:].isnan().all()
        for dtype in (torch.float16, torch.bfloat16, torch.float64):
            assert decompress(compress(torch.zeros(5)), 5, dtype).eq(0).all()
        torch._dynamo.reset()
        records = torch.compile(compress, fullgraph=True)(x)
        assert decompress(records, len(x), torch.float32).isnan().equal(back.isnan())

    @parameterized.expand([(torch.float16,), (torch.bfloat16,), (torch.float32,)])
    def test_the_largest_numbers_stay_finite(self, dtype):
        x = torch.tensor([1, -1, 0.9, 0], dtype=dtype) * torch.finfo(dtype).max
        back = decompress(compress(x), len(x), dtype)
        assert back.isfinite().all() and relative_l2(back.double(), x.double()) < 0.01, back

    def test_parts_that_no_group_divides_are_whole_where_compiled(self):
        """torch 2.13's compiler for CPUs splits a loop into groups, and forgets what is left."""
        counts = 70, 200
        x = randn(sum(counts), seed=0)
        records = compress_parts(x, counts)
        torch._dynamo.reset()
        back = torch.compile(decompress_parts, fullgraph=True)(records, counts, torch.float32)
        assert torch.equal(back, decompress_parts(records, counts, torch.float32)) and relative_l2(back, x) < 0.007

    def test_neighbours_of_what_is_large_are_not_coarse(self):
        x = randn(1000 * GROUP, seed=0).view(-1, GROUP)
        x[:, 5] *= 30
        back = decompress(compress(x.flatten()), x.numel(), torch.float32).view_as(x)
        # With the scale of what is large each would be 0.07 off.
        assert (back - x)[:, :5].square().mean().sqrt() < 0.04

    def test_float8_rounds_more_coarsely(self):
        x = randn(1000 * GROUP, seed=0)
        groups = x.view(-1, GROUP)
        scale = groups.abs().amax(1, keepdim=True) / torch.finfo(torch.float8_e4m3fn).max
        float8 = relative_l2((groups / scale).to(torch.float8_e4m3fn).float() * scale, groups)
        int8 = relative_l2(decompress(compress(x), len(x), torch.float32), x)
        assert int8 < 0.007 and 0.02 < float8, (int8, float8)

    @parameterized.expand([(2,), (3,)])
    def test_collectives(self, world):
        for results in run_ranks(world, collectives_worker, world):
            assert results.pop("same on all") and results.pop("small") and results.pop("gradients")
            assert results.pop("rounded once")
            for name, error in results.items():
                assert 1e-4 < error < 0.01, (name, error)

    @parameterized.expand(
        [
            *((name, degrees, "p2p") for name in ("flux", "wan") for degrees in MESHES),
            ("flux", {"ring": 3}, "allgather"),
            ("hunyuan_video", {"ring": 2}, "p2p"),  # with its mask
            ("hunyuan_video", {"ulysses": 2}, "p2p"),
        ]
    )
    def test_model(self, name, degrees, rotate_method):
        self.check(run_ranks(math.prod(degrees.values()), model_worker, name, degrees, rotate_method))

    def test_trained_model(self):
        """Queries and keys of trained weights are larger than random ones, and what is rounded of them counts more."""
        meshes = [{"tp": 4}, {"ulysses": 4}, {"ring": 4}, {"tp": 2, "ulysses": 2}]
        for one_process, *by_mesh in run_ranks(4, trained_worker, meshes, held_out_prompts(8)):
            for degrees, errors in zip(meshes, by_mesh, strict=True):
                assert (errors <= BAR * one_process).all(), (degrees, errors / one_process)
                # Of all together: queries in 8 bits would have 1.21, and groups of 32 about as much.
                assert errors.norm() <= 1.2 * one_process.norm(), (degrees, errors.norm() / one_process.norm())

    @parameterized.expand([(4, 4), (4, 2), (3, 3)])
    def test_queries_go_as_they_are_and_so_do_all_with_gradients(self, heads, key_heads):
        for plain, *trained in run_ranks(2, heads_worker, heads, key_heads):
            assert plain == [True, False, False, False, False], plain
            assert all(itertools.chain(*trained)), trained

    def test_queries_of_groups_go_as_they_are(self):
        for rounded, of_queries in run_ranks(2, groups_worker):
            assert rounded == 3 * of_queries  # keys, values and outputs

    @parameterized.expand([({"tp": 2},), ({"ulysses": 2},), ({"ring": 2},)])
    @slow
    def test_compiled(self, degrees):
        self.check(run_ranks(2, model_worker, "flux", degrees, "p2p", True))

    def check(self, results: list[dict[str, float]]) -> None:
        for errors in results:
            assert errors["int8"] <= BAR * errors["one process"], errors
            assert errors["int8"] != errors["exact"], errors

    def test_configs(self):
        for config in (
            TensorParallelConfig(2, communication="int8"),
            ContextParallelConfig(2, communication="int8"),
            ParallelConfig(tensor_parallel_config=TensorParallelConfig(2, communication="int8"), ring=2),
        ):
            assert config.communication == "int8" and "communication='int8'" in repr(config)
        assert "communication" not in repr(TensorParallelConfig(2))
        inner = TensorParallelConfig(2, communication="int8")
        for make, message in (
            (lambda: TensorParallelConfig(2, communication="int4"), "must be 'exact' or 'int8'; got 'int4'"),
            (
                lambda: ParallelConfig(tensor_parallel_config=inner, communication="exact"),
                "differ in communication: exact, int8",
            ),
        ):
            with pytest.raises(ValueError, match=message):
                make()


@unittest.skipUnless(
    importlib.util.find_spec("triton") and (torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"),
    "needs triton, and a GPU or TRITON_INTERPRET=1",
)
class TestKernels(unittest.TestCase):
    """Of Triton's, which round as torch's operations do, but for what lies between two integers."""

    device = "cuda" if torch.cuda.is_available() else "cpu"

    def setUp(self):
        if self.device == "cpu":
            patch = mock.patch.object(torch.cuda, "device", lambda _: contextlib.nullcontext())
            patch.start()
            self.addCleanup(patch.stop)

    @parameterized.expand(itertools.product((5, GROUP, 3 * GROUP + 8, 5003), (torch.float32, torch.bfloat16)))
    def test_equal_torch(self, count, dtype):
        from diffusers_rocm.distributed import compression_triton

        x = randn(count, seed=count).to(dtype)
        wanted, step = decompress(compress(x), count, torch.float32), x.abs().max().float() / 127
        records = compression_triton.compress(x.to(self.device))
        self.assertEqual(records.shape, (compressed_size(count),))
        back = compression_triton.decompress(records, torch.empty(count, device=self.device))
        torch.testing.assert_close(back.cpu(), wanted, rtol=1e-5, atol=1.01 * step.item())
        # Interpreted, it cuts bits off, of scales and of the answer, where a GPU rounds.
        if self.device == "cuda":
            self.assertLess((back.cpu() - wanted).abs().gt(1e-5).float().mean(), 0.03)  # one in 250, turned
        into = compression_triton.decompress(records, torch.empty(count, dtype=dtype, device=self.device))
        torch.testing.assert_close(into.float(), back, rtol=0 if dtype == torch.float32 else 2**-7, atol=0)

    @parameterized.expand([(torch.float16,), (torch.bfloat16,), (torch.float32,)])
    def test_the_largest_numbers_stay_finite(self, dtype):
        from diffusers_rocm.distributed import compression_triton

        x = torch.tensor([1, -1, 0.9, 0], dtype=dtype, device=self.device) * torch.finfo(dtype).max
        back = compression_triton.decompress(compression_triton.compress(x), torch.empty_like(x))
        self.assertTrue(back.isfinite().all() and relative_l2(back.double(), x.double()) < 0.01, back)

    @parameterized.expand([(torch.nan,), (torch.inf,)])
    def test_what_is_not_finite_is_seen(self, value):
        from diffusers_rocm.distributed import compression_triton

        x = torch.ones(3 * GROUP - 1, device=self.device)
        x[GROUP] = value
        back = compression_triton.decompress(compression_triton.compress(x), torch.empty_like(x))
        self.assertTrue(back[GROUP : 2 * GROUP].isnan().all())
        for part in (slice(GROUP), slice(2 * GROUP, None)):
            torch.testing.assert_close(back[part], x[part], rtol=2**-8, atol=0)

    @unittest.skipUnless(torch.cuda.is_available(), "needs a GPU")
    def test_compiled_code_calls_them(self):
        x = randn(5003, seed=0).bfloat16().cuda()

        def both(x: torch.Tensor) -> torch.Tensor:
            return 3 * decompress(compress(2 * x), len(x), torch.bfloat16)

        torch._dynamo.reset()
        compiled = torch.compile(both, fullgraph=True)
        with mock.patch.object(compression, "_kernels_of", wraps=compression._kernels_of) as asked:
            self.assertTrue(torch.equal(compiled(x), both(x)))
        self.assertEqual(asked.call_count, 4)

    def test_are_taken(self):
        """What is tried first finds them right."""
        self.assertIsNotNone(compression._kernels_of(torch.device(self.device)))


if __name__ == "__main__":
    unittest.main()
