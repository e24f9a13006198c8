"""The styles by themselves, on modules made for the purpose."""

import unittest
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from diffusers.models.normalization import RMSNorm as DiffusersRMSNorm
from parameterized import parameterized
from torch import nn

from diffusers_rocm.hooks.tensor_parallel import resolve, shard_modules, unshard_modules
from diffusers_rocm.models.plans.plan import TensorParallelPlan

from ..distributed.test_collectives import world_axis
from ..testing_utils import relative_l2, run_ranks


HEADS, DIM = 5, 4  # nothing here divides by 2, 3 or 4


class Toy(nn.Module):
    """Fused [q | k | v] with q normalised across the heads, a SwiGLU, and an output that is gathered."""

    config = SimpleNamespace(num_attention_heads=HEADS, attention_head_dim=DIM).__dict__

    def __init__(self, norm: str):
        super().__init__()
        width = HEADS * DIM
        self.qkv = nn.Linear(7, 3 * width)
        self.norm_q = {
            "torch": lambda: nn.RMSNorm(width, eps=1e-5),
            "torch, default eps": lambda: nn.RMSNorm(width),
            "diffusers": lambda: DiffusersRMSNorm(width, eps=1e-5),
            "diffusers, bias": lambda: DiffusersRMSNorm(width, eps=1e-5, bias=True),
        }[norm]()
        self.out = nn.Linear(width, 7)
        self.up = nn.Linear(7, 2 * 13)
        self.down = nn.Linear(13, 7, bias=False)
        self.last = nn.Linear(7, 9)
        for parameter in self.parameters():
            nn.init.normal_(parameter, 0.5, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        # Small enough that the norm's eps shows.
        x = x + self.out(self.norm_q(1e-3 * q) * torch.tanh(k) + v)
        gate, up = self.up(x).chunk(2, dim=-1)
        return self.last(x + self.down(F.silu(gate) * up))


PLAN = TensorParallelPlan(
    {
        "qkv": "column:heads+heads+heads",
        "norm_q": "norm:heads",
        "out": "row:heads",
        "up": "column:mlp+mlp",
        "down": "row:mlp",
        "last": "gather",
    }
)


def toy_worker(norm: str, dtype: torch.dtype) -> dict:
    torch.manual_seed(0)
    model, x = Toy(norm), torch.randn(2, 3, 7)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    x.requires_grad_()
    reference = model(x)
    (reference * torch.arange(9)).sum().backward()
    grads, x.grad = {"x": x.grad, **{n: p.grad.clone() for n, p in model.named_parameters()}}, None
    model.zero_grad()

    axis = world_axis()
    shard_modules(resolve(model, PLAN, axis.size), axis)
    output = model(x)
    (output * torch.arange(9)).sum().backward()
    errors = [relative_l2(output, reference), relative_l2(x.grad, grads["x"])]
    for path, module in model.named_children():
        for name, shard in module.sharding.shards.items():
            expected = shard.take(grads[f"{path}.{name}"], axis.rank, axis.size)
            if expected is not None:
                errors.append(relative_l2(getattr(module, name).grad, expected))
    honest = [
        (module.out_features, module.in_features) == tuple(module.weight.shape)
        for module in model.children()
        if isinstance(module, nn.Linear)
    ]
    biases = [model.out.bias is not None, model.qkv.bias is not None]
    unshard_modules(model)
    restored = all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    return {"errors": errors, "honest": honest, "biases": biases, "restored": restored, "classes": str(model)}


def head_norm_worker(eps: float) -> float:
    model = nn.ModuleDict({"norm": nn.RMSNorm(DIM, eps=eps)})
    model.config = Toy.config
    x = 1e-3 * torch.randn(2, 3, HEADS, DIM, generator=torch.Generator().manual_seed(0))
    reference = model.norm(x)
    shard_modules(resolve(model, TensorParallelPlan({"norm": "head_norm"}), world_axis().size), world_axis())
    return relative_l2(model.norm(x), reference)


def norm_in_half_worker(dtype: torch.dtype) -> tuple[float, float]:
    """Errors of q's norm in half precision with large values, over this rank's heads: single, and sharded."""
    torch.manual_seed(0)
    model = Toy("torch").to(dtype)
    x = (300 * torch.randn(50, 7, HEADS * DIM)).to(dtype)
    reference = F.rms_norm(x.double(), (HEADS * DIM,), model.norm_q.weight.double(), 1e-5)
    single = model.norm_q(x)
    axis = world_axis()
    shard_modules(resolve(model, PLAN, axis.size), axis)
    mine = model.norm_q.sharding.shards["weight"].take(torch.arange(HEADS * DIM), axis.rank, axis.size)
    return relative_l2(single[..., mine], reference[..., mine]), relative_l2(
        model.norm_q(x[..., mine]), reference[..., mine]
    )


class TestStyles(unittest.TestCase):
    @parameterized.expand(
        [(world, norm) for world in (2, 3, 4) for norm in ("torch", "diffusers")]
        + [(2, "torch, default eps"), (2, "diffusers, bias")]
    )
    def test_every_style(self, world, norm):
        results = run_ranks(world, toy_worker, norm, torch.float32)
        for result in results:
            assert max(result["errors"]) < 1e-5, result
            assert all(result["honest"]) and result["restored"], result
            assert "Parallel" not in result["classes"] and "Sharded" not in result["classes"], result
        assert [result["biases"] for result in results] == [[True, True]] + [[False, True]] * (world - 1)

    @parameterized.expand([(torch.bfloat16,), (torch.float16,)])
    def test_norm_across_heads_sums_squares_in_float32(self, dtype):
        for single, sharded in run_ranks(3, norm_in_half_worker, dtype):
            assert 0 < sharded <= 1.25 * single < 0.01, (sharded, single)

    @parameterized.expand([(1e-5,), (1e-6,), (0.3,)])
    def test_norm_within_a_head_keeps_its_eps(self, eps):
        assert max(run_ranks(2, head_norm_worker, eps)) < 1e-6

    def test_plan_that_does_not_add_up(self):
        for layout, part in (("column:heads", "60"), ("column:heads+kv", "kv"), ("column:heads+heads", "40")):
            with pytest.raises(ValueError, match=part):
                resolve(Toy("torch"), TensorParallelPlan({"qkv": layout}), 2)

    def test_rule_that_matches_nothing(self):
        with pytest.raises(ValueError, match="nothing is at 'blocks"):
            resolve(Toy("torch"), TensorParallelPlan({"blocks.*.qkv": "column:heads"}), 2)

    def test_rules_with_a_slip(self):
        for style, message in (
            ("colum:heads", "qkv: there is no style 'colum', only column, "),
            ("local:heads", "'heads' names no attributes of a Linear"),
            ("local:", "'' names no attributes of a Linear"),
        ):
            with pytest.raises(ValueError, match=message):
                resolve(Toy("torch"), TensorParallelPlan({"qkv": style}), 2)

    def test_module_that_a_style_cannot_take(self):
        model = Toy("torch")
        model.last = type("MyLinear", (nn.Linear,), {})(7, 9)
        with pytest.raises(ValueError, match="last is a .*MyLinear and .*only a Linear"):
            resolve(model, PLAN, 2)

    def test_weight_that_is_not_a_plain_tensor(self):
        from torch.testing._internal.two_tensor import TwoTensor

        model = Toy("torch")
        model.last.weight = nn.Parameter(TwoTensor(torch.randn(9, 7), torch.randn(9, 7)), requires_grad=False)
        with pytest.raises(ValueError, match="weight of last is a TwoTensor.*unquantised"):
            resolve(model, PLAN, 2)


def backend_worker() -> str:
    return dist.get_backend()


class TestRanks(unittest.TestCase):
    def test_the_ranks_of_these_tests_are_real(self):
        assert run_ranks(2, backend_worker) == ["gloo", "gloo"]


if __name__ == "__main__":
    unittest.main()
