"""A pass over compiled code: gelu in the product before it, which GPUs' libraries compute as they write it.

By itself it reads and writes what is largest of all that is between the products of a block, and takes of the memory's
bandwidth what a message beside it would. Gelu is meant as tanh approximates it, which is what the libraries have.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._subclasses import FakeTensor
from torch.fx.experimental.symbolic_shapes import statically_known_true


# More were not measured in a step: of 4,608 a product takes longer with gelu than both (docs/performance_trials.md).
MOST_ROWS = 2304

_library = torch.library.Library("diffusers_rocm", "FRAGMENT")
_library.define("addmm_gelu(Tensor x, Tensor weight, Tensor bias) -> Tensor")
_NAMES = "input", "weight", "bias"
_addmm_gelu = torch.ops.diffusers_rocm.addmm_gelu.default


def addmm_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """`gelu(x @ weight.T + bias)` of `x` [..., in], with a weight [out, in]: [..., out]."""
    if x.device.type == "cpu":  # where torch's operation has the error function
        return F.gelu(F.linear(x, weight, bias), approximate="tanh")
    rows = torch._addmm_activation(bias, x.flatten(0, -2), weight.t(), use_gelu=True)
    return rows.view(*x.shape[:-1], len(weight))


for _device in ("CUDA", "CPU"):
    _library.impl("addmm_gelu", addmm_gelu, _device)


@torch.library.register_fake("diffusers_rocm::addmm_gelu", lib=_library)
def _(x, weight, bias):
    return x.new_empty(*x.shape[:-1], weight.shape[0])


class FuseGelu(CustomGraphPass):
    """Over a graph of the functions that the model has called."""

    def __call__(self, graph: fx.Graph) -> None:
        for gelu in graph.find_nodes(op="call_function", target=F.gelu):
            (linear,) = gelu.args or gelu.all_input_nodes
            if linear.target is not F.linear or len(linear.users) > 1 or gelu.kwargs.get("approximate") != "tanh":
                continue
            given = {**dict(zip(_NAMES, linear.args, strict=False)), **linear.kwargs}
            operands = tuple(given.get(name) for name in _NAMES)
            if _may_be_one(*operands, gelu):
                with graph.inserting_before(linear):  # what it reads may be written to before gelu is asked for
                    fused = graph.call_function(_addmm_gelu, operands)
                fused.meta = gelu.meta.copy()
                gelu.replace_all_uses_with(fused)
                graph.erase_node(gelu)
                graph.erase_node(linear)

    def uuid(self) -> Any:
        return get_hash_for_files((__file__,))


def _may_be_one(x: fx.Node, weight: fx.Node, bias: fx.Node | None, gelu: fx.Node) -> bool:
    """Plain tensors in bfloat16, without gradients.

    In float32 gelu is less near to float64 so, by NVIDIA's libraries, and in bfloat16 nearer.
    """
    if bias is None:
        return False
    values = [node.meta.get("example_value") for node in (x, weight, bias, gelu)]
    if not all(type(value) is FakeTensor and value.dtype == torch.bfloat16 for value in values):
        return False
    rows = values[0].shape[:-1]
    return len(rows) > 0 and statically_known_true(math.prod(rows) <= MOST_ROWS) and not values[-1].requires_grad


# For `torch.compile(options=...)`.
FUSE_GELU = {"pre_grad_custom_pass": FuseGelu()}
