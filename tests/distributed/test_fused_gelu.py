"""Gelu in the product before it: where it may be, and how near it is."""

import unittest

import torch
import torch.nn.functional as F
from parameterized import parameterized
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code
from torchao.quantization import Int8WeightOnlyConfig, quantize_

from diffusers_rocm.distributed.fused_gelu import FUSE_GELU, MOST_ROWS, addmm_gelu

from ..models.testing_utils.common import randn
from ..testing_utils import relative_l2, require_torch_accelerator


class Block(nn.Module):
    def __init__(self, approximate: str = "tanh", bias: bool = True, reads_both: bool = False):
        super().__init__()
        self.first, self.second = nn.Linear(16, 64, bias), nn.Linear(64, 16)
        self.gelu, self.reads_both = nn.GELU(approximate), reads_both

    def forward(self, x: Tensor) -> Tensor:
        made = self.first(x)
        return self.second(self.gelu(made) + made if self.reads_both else self.gelu(made))


class AnyOrder(Block):
    """By names, of something that is written to before gelu is asked for."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        made = F.linear(bias=self.first.bias, weight=self.first.weight, input=x)
        x.mul_(2)
        return self.second(F.gelu(input=made, approximate="tanh")) + 0 * x.sum()


def fused(model: nn.Module, x: Tensor) -> tuple[int, float]:
    """How many products have gelu in compiled code, and how far its answer is from the model's own."""
    torch._dynamo.reset()
    output, codes = run_and_get_code(torch.compile(model, fullgraph=True, options=FUSE_GELU), x)
    return sum(code.count("addmm_gelu.default(") for code in codes), relative_l2(output, model(x))


class TestFusedGelu(unittest.TestCase):
    @parameterized.expand(
        [
            ("of tokens", {}, (2, 3, 16), 1),
            ("of rows", {}, (5, 16), 1),
            ("of one row", {}, (16,), 0),
            ("exact gelu", {"approximate": "none"}, (2, 3, 16), 0),
            ("without bias", {"bias": False}, (2, 3, 16), 0),
            ("what something else reads", {"reads_both": True}, (2, 3, 16), 0),
        ]
    )
    def test_where(self, _, kwargs, shape, wanted):
        model, x = Block(**kwargs).bfloat16(), randn(*shape, seed=0).bfloat16()
        with torch.no_grad():
            count, error = fused(model, x)
        assert count == wanted and error < 1e-2, (count, error)

    def test_any_order(self):
        with torch.no_grad():
            count, error = fused(AnyOrder().bfloat16(), randn(2, 3, 16, seed=0).bfloat16())
        assert count == 1 and error < 1e-2, (count, error)

    def test_where_not(self):
        model, x = Block(), randn(2, 3, 16, seed=0)
        with torch.no_grad():
            assert fused(model, x)[0] == fused(model.half(), x.half())[0] == 0
            model = model.float()
            with torch.autocast("cpu", torch.bfloat16):
                assert fused(model, x)[0] == 0
        model, x = model.bfloat16(), x.bfloat16()
        assert fused(model, x)[0] == 0  # with gradients
        with torch.no_grad():
            with torch.autocast("cpu", torch.float16):
                assert fused(model, x)[0] == 0
            assert fused(model, randn(1, MOST_ROWS + 1, 16, seed=0).bfloat16())[0] == 0
            assert fused(model, randn(1, MOST_ROWS, 16, seed=0).bfloat16())[0] == 1
            quantize_(model.first, Int8WeightOnlyConfig())
            assert fused(model, x)[0] == 0

    def test_float32(self):
        """The same bits as of the two."""
        x, weight, bias = randn(2, 3, 16, seed=0), randn(8, 16, seed=1), randn(8, seed=2)
        assert torch.equal(addmm_gelu(x, weight, bias), F.gelu(F.linear(x, weight, bias), approximate="tanh"))

    @require_torch_accelerator
    def test_on_a_gpu_it_is_nearer(self):
        for rows in (17, 512, 1152):
            made = randn(2, rows, 256, seed=0), randn(768, 256, seed=1) / 16, randn(768, seed=2)
            x, weight, bias = (y.to("cuda", torch.bfloat16) for y in made)
            wanted = F.gelu(F.linear(x.double(), weight.double(), bias.double()), approximate="tanh")
            apart = relative_l2(F.gelu(F.linear(x, weight, bias), approximate="tanh"), wanted)
            assert 1e-4 < relative_l2(addmm_gelu(x, weight, bias), wanted) < 0.9 * apart
        model = Block().to("cuda", torch.bfloat16)
        with torch.no_grad():
            count, error = fused(model, randn(2, 9, 16, seed=0).to("cuda", torch.bfloat16))
        assert count == 1 and error < 1e-2


if __name__ == "__main__":
    unittest.main()
