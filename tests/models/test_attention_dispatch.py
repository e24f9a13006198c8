"""Kernels against one softmax in float64; what backends return; which kernel is chosen, and why."""

import math
import sys
import tempfile
import types
import unittest
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from parameterized import parameterized
from torch._dynamo.backends.common import aot_autograd
from torch.utils._pytree import tree_leaves

from diffusers_rocm.models import attention_dispatch, attention_kernels
from diffusers_rocm.models.attention_dispatch import check_ring_backend, choose_kernel, explain
from diffusers_rocm.models.attention_kernels import KERNELS, Platform, normalise, platform_of

from ..testing_utils import relative_l2
from .testing_utils.common import randn


CUDA = torch.cuda.is_available()
MASKS = ("none", "keys", "full", "heads", "additive", "dead rows")
CPU_KERNELS = ("flash_cpu", "math")
CUDA_KERNELS = ("cudnn", "flash", "efficient", "math")
CASES = [
    *[("cpu", name, dtype, mask) for name in CPU_KERNELS for dtype in ("float32", "bfloat16") for mask in MASKS],
    *[("cuda", name, "bfloat16", mask) for name in CUDA_KERNELS for mask in MASKS],
]


def make_mask(kind: str, batch: int, heads: int, queries: int, keys: int, device: str = "cpu") -> torch.Tensor | None:
    generator = torch.Generator().manual_seed(3)
    if kind == "none":
        return None
    if kind == "additive":
        return torch.randn(batch, 1, queries, keys, generator=generator).to(device)
    shape = {
        "keys": (batch, 1, 1, keys),
        "full": (1, 1, queries, keys),
        "heads": (1, heads, queries, keys),
        "dead rows": (batch, 1, queries, keys),
    }[kind]
    mask = torch.rand(shape, generator=generator) > 0.4
    mask[..., 0] = True
    if kind == "dead rows":
        mask[:, :, ::3] = False
    return mask.to(device)


def reference(q, k, v, mask, scale=None):
    """`(out, lse)` by the definition, in float64."""
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    scores = q @ k.transpose(2, 3) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask.double()
    out = (scores.softmax(-1).nan_to_num(0) @ v).transpose(1, 2)
    return out, scores.logsumexp(-1).transpose(1, 2)


class TestKernels(unittest.TestCase):
    @parameterized.expand(CASES)
    def test_against_one_softmax(self, device, name, dtype, kind):
        if device == "cuda" and not CUDA:
            pytest.skip("needs a GPU")
        kernel, dtype = KERNELS[name], getattr(torch, dtype)
        if kind != "none" and not kernel.takes_mask:
            assert kernel.why_not(platform_of(device), dtype, 64, True) == "takes no mask"
            return
        batch, heads, queries, keys, size = 2, 3, 37, 51, 64
        generator = torch.Generator().manual_seed(0)
        # Views as the schedules pass them: tokens first in memory, keys and values in one message.
        q = torch.randn(queries, batch, heads, size, generator=generator).to(device, dtype).transpose(0, 1)
        message = torch.randn(keys, batch, 2 * heads, size, generator=generator).to(device, dtype).transpose(0, 1)
        k, v = message.chunk(2, dim=2)
        mask = make_mask(kind, batch, heads, queries, keys, device)
        for scale in (None, 0.3):
            out, lse = kernel(q, k, v, mask, scale)
            want, want_lse = reference(q, k, v, mask, scale)
            assert out.shape == q.shape and out.dtype == dtype
            assert lse.shape == q.shape[:3] and lse.dtype == torch.float32
            bar = 1e-6 if dtype == torch.float32 else 8e-3
            assert relative_l2(out, want) <= bar
            dead = want_lse == -math.inf
            assert torch.equal(lse == -math.inf, dead) and (kind == "dead rows") == dead.any().item()
            assert out[dead].eq(0).all()
            assert (lse[~dead] - want_lse[~dead]).abs().max() <= (1e-5 if dtype == torch.float32 else 2e-2)

    def test_causal(self):
        q, k, v = (torch.randn(1, 9, 2, 16) for _ in range(3))
        causal = torch.ones(9, 9, dtype=torch.bool).tril()
        for name in CPU_KERNELS:
            out, lse = KERNELS[name](q, k, v, None, None, True)
            want, want_lse = reference(q, k, v, causal)
            assert relative_l2(out, want) <= 1e-6 and relative_l2(lse, want_lse) <= 1e-6

    @parameterized.expand([(name, kind) for name in CPU_KERNELS for kind in ("none", "keys", "dead rows")])
    def test_gradients(self, name, kind):
        q, k, v = (torch.randn(2, 9, 2, 16, dtype=torch.float64, requires_grad=True) for _ in range(3))
        mask = make_mask(kind, 2, 2, 9, 9)
        grads = []
        for out in (KERNELS[name](q, k, v, mask, None)[0], None):
            if out is None:
                heads_first = (x.transpose(1, 2) for x in (q, k, v))
                fill = mask if kind != "dead rows" else mask | ~mask.any(-1, keepdim=True)
                out = torch.nn.functional.scaled_dot_product_attention(*heads_first, attn_mask=fill).transpose(1, 2)
                if kind == "dead rows":
                    out = out * mask.any(-1).transpose(1, 2)[..., None]
            grads.append(torch.autograd.grad((out * torch.arange(16)).sum(), (q, k, v)))
        for ours, theirs in zip(*grads, strict=True):
            assert relative_l2(ours, theirs) <= 1e-10


class TestCompiledMasks(unittest.TestCase):
    @parameterized.expand([("flash_cpu",), ("math",)])
    @torch.no_grad()
    def test_no_mask_for_every_query(self, name):
        """What a compiler would write out, for 119,000 tokens 26 GiB, must not be in its graph."""
        q, k, v = (randn(2, 96, 3, 8, seed=seed) for seed in range(3))
        mask, sizes = torch.arange(96)[None, None, None] < 17, []

        def inspected(graph: torch.fx.GraphModule, inputs: list) -> torch.fx.GraphModule:
            values = (node.meta.get("val") for node in graph.graph.nodes)
            sizes.extend(x.numel() for each in values for x in tree_leaves(each) if isinstance(x, torch.Tensor))
            return graph

        def attend(q, k, v, mask):
            out, lse = KERNELS[name](q, k, v, mask, None)
            return out * 2, lse

        torch._dynamo.reset()
        compiled = torch.compile(attend, fullgraph=True, backend=aot_autograd(fw_compiler=inspected))
        for found, wanted in zip(compiled(q, k, v, mask), attend(q, k, v, mask), strict=True):
            torch.testing.assert_close(found, wanted)
        assert sizes and max(sizes) <= q.numel(), sizes  # and not 96 * 96


class TestNormalise(unittest.TestCase):
    """The rule is the number of axes, never a version."""

    @parameterized.expand(
        [
            (layout, trailing, padding, dtype)
            for layout in ("heads first", "tokens first")
            for trailing in (False, True)
            for padding in (0, 27)
            for dtype in (torch.float32, torch.bfloat16)
        ]
    )
    def test_every_shape_becomes_one(self, layout, trailing, padding, dtype):
        for heads, length in ((3, 5), (5, 5)):  # the shape does not say which is which when they are equal
            out, lse = torch.randn(2, length, heads, 4), torch.randn(2, length, heads).to(dtype)
            raw = torch.nn.functional.pad(lse.transpose(1, 2), (0, padding), value=7.0)
            if layout == "tokens first":
                raw = raw.transpose(1, 2)
            if trailing:
                raw = raw[..., None]
            got, got_lse = normalise(out, raw, None, layout == "heads first")
            assert got_lse.shape == (2, length, heads) and got_lse.dtype == torch.float32
            assert torch.equal(got_lse, lse.float()) and torch.equal(got, out)

    def test_trailing_axis_where_the_heads_are_one(self):
        out = torch.randn(2, 5, 1, 4)
        for raw in (torch.randn(2, 1, 5), torch.randn(2, 1, 5, 1)):
            assert torch.equal(normalise(out, raw, None, True)[1].flatten(), raw.flatten())


class TestChoice(unittest.TestCase):
    HOPPER, AMPERE, CPU = Platform("cuda", (9, 0)), Platform("cuda", (8, 0)), Platform("cpu")
    BLACKWELL, RTX_5090, TURING = Platform("cuda", (10, 0)), Platform("cuda", (12, 0)), Platform("cuda", (7, 5))
    MI300X, RX_7900 = Platform("rocm", architecture="gfx942"), Platform("rocm", architecture="gfx1100")
    RX_6800 = Platform("rocm", architecture="gfx1030", lacks=("flash", "efficient"))

    @parameterized.expand(
        [
            ("HOPPER", torch.bfloat16, 128, False, "cudnn"),
            ("HOPPER", torch.bfloat16, 256, False, "flash"),
            ("HOPPER", torch.bfloat16, 128, True, "cudnn"),
            ("HOPPER", torch.float32, 128, True, "efficient"),
            ("HOPPER", torch.float64, 128, False, "math"),
            ("HOPPER", torch.bfloat16, 100, False, "math"),
            ("AMPERE", torch.bfloat16, 128, False, "flash"),
            ("AMPERE", torch.bfloat16, 128, True, "cudnn"),
            ("TURING", torch.float16, 128, False, "efficient"),
            ("BLACKWELL", torch.bfloat16, 128, False, "cudnn"),
            ("RTX_5090", torch.bfloat16, 128, False, "flash"),
            ("MI300X", torch.bfloat16, 128, False, "flash"),
            ("MI300X", torch.bfloat16, 128, True, "efficient"),
            ("RX_7900", torch.bfloat16, 128, False, "flash"),
            ("RX_6800", torch.bfloat16, 128, False, "math"),
            ("CPU", torch.float32, 24, True, "flash_cpu"),
        ]
    )
    def test_the_fastest_that_fits(self, platform, dtype, head_size, mask, want):
        reasons = explain(getattr(self, platform), dtype, head_size, mask)
        assert next(name for name, reason in reasons if reason is None) == want, reasons
        assert ("math", None) in reasons
        # What somebody has installed changes nothing, here as in diffusers: it is for those who ask for it.
        with patch.object(attention_kernels._Package, "why_not", lambda package: None):
            with_all = explain(getattr(self, platform), dtype, head_size, mask)
        assert next(name for name, reason in with_all if reason is None) == want, with_all

    def test_reasons(self):
        reasons = dict(explain(self.MI300X, torch.float16, 128, True))
        assert reasons["cudnn"] == "runs on cuda, not on rocm"
        assert reasons["flash"] == "takes no mask"
        assert reasons["aiter"] == "aiter is not installed"
        # It crashes on Radeons (TheRock #7700); FlashAttention 3 is built for Hopper.
        assert dict(explain(self.RX_7900, torch.bfloat16, 128, False))["aiter"] == (
            "is for gfx94x and gfx95x, not for gfx1100"
        )
        assert dict(explain(self.RX_6800, torch.bfloat16, 128, False))["flash"] == "is not in this torch for gfx1030"
        for platform in (self.AMPERE, self.BLACKWELL, self.RTX_5090):
            assert dict(explain(platform, torch.bfloat16, 128, False))["flash_attn_3"] == (
                "is for compute capability 9.0 and later, below 10.0"
            )

    def test_what_torch_lacks_on_an_architecture(self):
        """torch is asked: AOTriton has its list of architectures. Emulated, not validated on hardware."""
        asked = []

        def can_use(params):
            asked.append((params.query.dtype, params.query.shape[-1]))
            return False

        gpu = types.SimpleNamespace(gcnArchName="gfx1030:sramecc+:xnack-")
        zeros = torch.zeros
        with (
            patch.object(torch.version, "hip", "7.0"),
            patch.object(torch.cuda, "get_device_properties", lambda: gpu),
            patch.object(torch, "zeros", lambda *shape, device, **options: zeros(*shape, **options)),
            patch.object(attention_kernels, "can_use_flash_attention", can_use),
            patch.object(attention_kernels, "can_use_efficient_attention", lambda params: True),
        ):
            found = platform_of.__wrapped__("cuda")
        assert found == Platform("rocm", architecture="gfx1030", lacks=("flash",))
        assert asked == [(torch.bfloat16, 64)]

    def test_a_choice_says_why(self):
        """Once, at the level info: `--verbose` shows it."""
        attention_dispatch._tell_choice.cache_clear()
        q = torch.randn(1, 4, 2, 16)
        with self.assertLogs(attention_dispatch.logger, "INFO") as logs:
            choose_kernel(q, None)
            choose_kernel(q, None)
        (told,) = logs.output
        assert "attention kernel flash_cpu for float32 heads of 16; flash runs on cuda and rocm, not on cpu" in told

    def test_a_kernel_that_is_asked_for_and_cannot(self):
        q = torch.randn(1, 4, 2, 16)
        with pytest.raises(ValueError, match=r"'cudnn' runs on cuda, not on cpu; usable here: flash_cpu, math"):
            choose_kernel(q, None, "cudnn")
        assert choose_kernel(q, None, "flash").name == "flash_cpu"

    @parameterized.expand(
        [
            ("aiter", "aiter", "return_lse", "MI300X"),
            ("flash_attn", "flash_attn", "return_attn_probs", "MI300X"),
            ("flash_attn_interface", "flash_attn_3", "return_attn_probs", "HOPPER"),
            ("flash_attn_interface", "flash_attn_3", "", "HOPPER"),
        ]
    )
    def test_packages_that_are_importable(self, module, name, flag, platform):
        """A stand-in with the package's signature and shapes; the real ones need their GPUs."""

        def attend(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, asked=True):
            out, lse = reference(q, k, v, None, softmax_scale)
            lse = lse.transpose(1, 2).float()
            return (out.to(q.dtype), lse, None) if asked else out.to(q.dtype)

        if flag == "return_lse":
            function = lambda q, k, v, softmax_scale=None, causal=False, return_lse=False: attend(  # noqa: E731
                q, k, v, 0.0, softmax_scale, causal, return_lse
            )
        elif flag:
            function = lambda q, k, v, softmax_scale=None, causal=False, return_attn_probs=False: attend(  # noqa: E731
                q, k, v, 0.0, softmax_scale, causal, return_attn_probs
            )
        else:
            function = lambda q, k, v, softmax_scale=None, causal=False: attend(q, k, v, 0.0, softmax_scale)  # noqa: E731
        fake = types.ModuleType(module)
        fake.flash_attn_func, fake.__spec__ = function, types.SimpleNamespace(name=module)
        assert dict(explain(getattr(self, platform), torch.bfloat16, 128, False))[name].endswith("is not installed")
        unknown = attention_kernels._Package(module, attention_kernels._PACKAGES[name].hub)
        packages = patch.dict(attention_kernels._PACKAGES, {name: unknown})
        packages.start()
        self.addCleanup(packages.stop)
        sys.modules[module] = fake  # not by patch.dict: the compiler imports modules that must stay
        self.addCleanup(sys.modules.pop, module)
        assert dict(explain(getattr(self, platform), torch.bfloat16, 128, False))[name] is None
        q, k, v = (torch.randn(2, 7, 3, 16) for _ in range(3))
        answers = [KERNELS[name](q, k, v, None, None)]

        @torch.compile(fullgraph=True, backend="eager")
        def chosen(q, k, v):
            return choose_kernel(q.bfloat16(), None, name)(q, k, v, None, None)

        with patch.object(attention_dispatch, "platform_of", lambda device: getattr(self, platform)):
            answers.append(chosen(q, k, v))
        want, want_lse = reference(q, k, v, None)
        for out, lse in answers:
            assert relative_l2(out, want) <= 1e-6 and relative_l2(lse, want_lse) <= 1e-6

    def test_a_package_that_cannot_be_imported(self):
        """Built for another torch, as diffusers takes it too."""
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        Path(folder.name, "broken_attn.py").write_text("raise ImportError('undefined symbol: _ZN3c10')")
        broken = attention_kernels._Package("broken_attn", "flash_hub")
        with (
            patch.dict(attention_kernels._PACKAGES, {"flash_attn": broken}),
            patch.object(sys, "path", [folder.name, *sys.path]),
        ):
            reasons = explain(self.MI300X, torch.bfloat16, 128, False)
        assert dict(reasons)["flash_attn"] == "flash_attn cannot be imported (undefined symbol: _ZN3c10)"

    def test_rocm_gets_contiguous_values(self):
        """SDPA was wrong for a strided value on ROCm 7.0 (ROCm/pytorch#3230): emulated, not validated on hardware."""
        seen = []

        def run(q, k, v, mask, scale, is_causal):
            seen.append([x.is_contiguous() for x in (q, k, v)])
            return attention_kernels._math(q, k, v, mask, scale, is_causal)

        k, v = torch.randn(5, 1, 4, 16).transpose(0, 1).chunk(2, dim=2)
        for name in ("flash", "efficient", "aiter"):
            kernel = KERNELS[name].__class__(**{**vars(KERNELS[name]), "run": run})
            with patch.object(attention_kernels, "platform_of", lambda device: Platform("rocm")):
                kernel(k, k, v, None, None)
        assert seen == [[True] * 3] * 3

    def test_backends_without_log_sum_exp(self):
        check_ring_backend("attn", "native")
        check_ring_backend("attn", "_native_flash")
        check_ring_backend("attn", None)
        check_ring_backend("attn", "nosuch")  # diffusers refuses it, and lists those that there are
        with pytest.raises(ValueError, match="attn uses attention backend 'sage'.*rotate_method=\"allgather\""):
            check_ring_backend("attn", "sage")
