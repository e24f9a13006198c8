"""Fingerprints tell any two tensors apart that a slip could confuse; enabling finds where ranks differ."""

import importlib.util
import unittest

import torch
from parameterized import parameterized
from torch import nn

from diffusers_rocm.distributed.agreement import fingerprint
from diffusers_rocm.hooks.weight_agreement import first_difference

from ..distributed.test_collectives import world_axis
from ..testing_utils import run_ranks


def packed_worker() -> list[str | None]:
    """Weights packed for a kernel, which are not cut but compared."""
    from torchao.quantization import Int4TilePackedTo4dTensor

    model, found = nn.Linear(128, 64), []
    packed = [torch.arange(4096).view(8, 1, 32, 16) % 16, torch.ones(4, 64, 2, dtype=torch.bfloat16)]
    weight = Int4TilePackedTo4dTensor(packed[0].int(), packed[1], [1, 32], torch.Size([64, 128]))
    model.weight, model.bias = nn.Parameter(weight, requires_grad=False), None
    found.append(first_difference(model, world_axis()))
    model.weight.scale_and_zero[3, 5, 1] += torch.distributed.get_rank()
    found.append(first_difference(model, world_axis()))
    return found


def difference_worker(where: str) -> str | None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(300, 70), nn.BatchNorm1d(70))
    if torch.distributed.get_rank() == 1 and where == "dtype":
        model[1].bfloat16()
    if torch.distributed.get_rank() == 1 and where == "shape":
        model[0].bias = nn.Parameter(torch.zeros(69))
    if torch.distributed.get_rank() == 1 and where == "buffer dropped":
        del model[1].running_var
    if torch.distributed.get_rank() == 1 and where == "one bit":
        model[0].weight.data[-1, -1] = torch.nextafter(model[0].weight.data[-1, -1], torch.tensor(9.0))
    if torch.distributed.get_rank() == 1 and where == "buffer":
        model[1].running_mean[3] += 1
    try:
        return first_difference(model, world_axis())
    except ValueError as error:
        return str(error)


class OfItsOwnKind(torch.Tensor):
    """As GGUF's: whatever is done with it answers with its own kind, which has a last dim."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        result = super().__torch_function__(func, types, args, kwargs)
        if isinstance(result, torch.Tensor):
            result.shape[-1]
        return result


class TestWeightAgreement(unittest.TestCase):
    @parameterized.expand(
        [(dtype,) for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.complex64)]
        + [(torch.float8_e4m3fn,), (torch.bool,)]
    )
    def test_fingerprint(self, dtype):
        tensor = torch.randn(131, 77, generator=torch.Generator().manual_seed(0)).mul(50).to(dtype)
        same = fingerprint(tensor)
        assert same == fingerprint(tensor.clone())
        assert same == fingerprint(tensor.T.contiguous().T)  # by value, not by layout
        other = tensor.clone()
        other.view(torch.uint8)[130, -1] ^= 1
        assert same != fingerprint(other)
        if dtype != torch.bool:
            assert same != fingerprint(tensor.roll(1, 0))
        assert fingerprint(tensor[0, 1:6]) == fingerprint(tensor[0, 1:6].clone())  # not aligned to words
        fingerprint(tensor[0, 0]), fingerprint(tensor[:0])
        assert same == fingerprint(tensor.as_subclass(OfItsOwnKind))

    @parameterized.expand([(torch.float32,), (torch.bfloat16,)])
    def test_fingerprint_sees_the_order_within_a_run(self, dtype):
        tensor = torch.randn(3072, 64, generator=torch.Generator().manual_seed(0)).to(dtype)  # x_embedder of FLUX.1
        same = fingerprint(tensor)
        swapped = tensor.clone()
        swapped[[0, 1]] = swapped[[1, 0]]
        assert same != fingerprint(swapped)
        assert same != fingerprint(tensor.view(-1, 32, 64).flip(1).reshape(tensor.shape))
        words = tensor.view(torch.int64).flatten()
        for first, second in ((0, 5), (3, 1024 + 7), (7, 3 * 1024 + 3)):  # also across runs, by mirrored places
            other = words.clone()
            other[[first, second]] = other[[second, first]]
            assert same != fingerprint(other.view(dtype).view(tensor.shape)), (first, second)

    @parameterized.expand([("nowhere", None), ("one bit", "0.weight"), ("buffer", "1.running_mean")])
    def test_first_difference(self, where, name):
        assert run_ranks(3, difference_worker, where) == [name] * 3

    @unittest.skipUnless(importlib.util.find_spec("torchao"), "needs torchao")
    def test_packed_for_a_kernel(self):
        assert run_ranks(2, packed_worker) == [[None, "weight.scale_and_zero"]] * 2

    @parameterized.expand(
        [
            ("dtype", "1.weight is '[70] float32' on ranks 0, 2 and '[70] bfloat16' on rank 1"),
            ("shape", "0.bias is '[70] float32' on ranks 0, 2 and '[69] float32' on rank 1"),
            ("buffer dropped", "1.running_var is '[70] float32' on ranks 0, 2 and nothing on rank 1"),
        ]
    )
    def test_different_models(self, where, difference):
        message = f"the ranks were given different models: {difference}"
        assert run_ranks(3, difference_worker, where) == [message] * 3


if __name__ == "__main__":
    unittest.main()
