"""What compiled code does while a message is on its way."""

import re
import unittest
from typing import Any
from unittest import mock

import torch
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch._inductor.utils import run_and_get_code

from diffusers_rocm import ParallelConfig
from diffusers_rocm.distributed import choices, links
from diffusers_rocm.distributed.axis import Axis
from diffusers_rocm.distributed.choices import Busy
from diffusers_rocm.distributed.collectives import all_reduce
from diffusers_rocm.distributed.fused_gelu import FUSE_GELU
from diffusers_rocm.distributed.overlap import HIDE_MESSAGES
from diffusers_rocm.distributed.peer_memory import gather_by_copies, teach_compiler
from diffusers_rocm.hooks import sequence_split
from diffusers_rocm.hooks.around_call import AroundCall
from diffusers_rocm.hooks.step_graph import StepGraph

from ..models.testing_utils.common import randn
from ..models.testing_utils.parallelism import FLOAT32_BAR
from ..models.transformers.test_models_transformer_flux import FluxTransformerTesterConfig
from ..testing_utils import relative_l2, run_ranks
from .peer_memory_on_a_cpu import Even


STEPS = re.compile(
    r"(?<!')torch\.ops\.(?:_c10d_functional|diffusers_rocm)\.(\w+)\.default\(|extern_kernels\.(\w*mm)\("
)


def steps(code: str) -> list[str]:
    """The messages, the waits and the products of compiled code, in their order."""
    called = code[code.index("def call(") :]
    return [next(filter(None, match.groups())) for match in STEPS.finditer(called)]


def under_messages(code: str) -> list[int]:
    """Products between each message and the next, or the next wait."""
    found = " ".join("product" if "mm" in step else step for step in steps(code))
    return [after.count("product") for after in re.findall(r"all_\w+((?: product)*)", found)]


@torch.no_grad()
def flux_worker(
    slow: bool,
    mesh: dict[str, Any],
    measured: bool = True,
    copies: bool = False,
    dtype: torch.dtype = torch.float32,
) -> tuple[float, list[int], list[str]]:
    """The error of FLUX, its blocks of one stream compiled; the products that one has under each message, and whether
    messages begin or are waited for, in order."""
    config = Even() if copies else FluxTransformerTesterConfig()
    model, inputs = config.get_model().to(dtype), config.get_inputs(1)
    inputs = {name: x if name.endswith("ids") else x.to(dtype) for name, x in inputs.items()}
    reference = config.get_output(model, inputs)
    fast = mock.patch.object(links, "FAST", 1.0 if slow else 0.0)
    known = mock.patch.object(links, "is_known", lambda _: measured)
    with fast, known, mock.patch.object(choices, "OF_CPU", Busy(1 << 40, 1 << 60)):  # messages go whole
        model.enable_parallelism(config=ParallelConfig(**mesh))
        if copies:  # as of a graph; without one they go by the process group
            teach_compiler()
            with mock.patch.object(sequence_split, "reaches_memory", lambda _: True):
                model.parallelism.split.by_copies(True)
        model._repeated_blocks = ["FluxSingleTransformerBlock"]
        model.compile_repeated_blocks(fullgraph=True, **({} if slow else {"options": FUSE_GELU | HIDE_MESSAGES}))
        output, codes = run_and_get_code(config.get_output, model, inputs)
    assert steps(codes[0]).count("addmm_gelu") == (dtype == torch.bfloat16)
    messages = [step for step in steps(codes[0]) if "mm" not in step and step != "next_place"]
    order = ["wait" if "wait" in step else "begin" for step in messages]
    return relative_l2(output, reference), under_messages(codes[0]), order


def side_by_side(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor, axis: Axis) -> Tensor:
    return torch.nn.functional.linear(torch.cat([all_reduce(x, axis), y], -1), weight, bias)


def without_bias(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor, axis: Axis) -> Tensor:
    """And what has come is in the middle."""
    return torch.cat([y[..., :3], all_reduce(x, axis), y[..., 3:]], -1) @ weight.T * bias


def of_two_messages(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor, axis: Axis) -> Tensor:
    first = all_reduce(x, axis)
    return torch.nn.functional.linear(torch.cat([all_reduce(first.sin(), axis), first], -1), weight, bias) + y.sum()


def of_two_kinds(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor, axis: Axis) -> Tensor:
    both = torch.cat([all_reduce(x, axis), y.double()], -1)
    return torch.nn.functional.linear(both, weight.double(), bias.double())


def twice_the_same(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor, axis: Axis) -> Tensor:
    both = [all_reduce(x, axis)[..., :4], y[..., :4]]
    return torch.nn.functional.linear(torch.cat([*both, y[..., 4:], both[0]], -1), weight, bias)


def one_below_the_other(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor, axis: Axis) -> Tensor:
    both = torch.cat([all_reduce(x, axis), y], 0)
    return torch.nn.functional.linear(torch.cat([both, both], -1), weight, bias)


def of_one_message(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor, axis: Axis) -> Tensor:
    found = all_reduce(x, axis)
    return torch.nn.functional.linear(torch.cat([found, found.sin()], -1), weight, bias) + y.sum()


def of_two_heads(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor, axis: Axis) -> Tensor:
    """Side by side in each head, and so not in the rows of the product."""
    both = torch.cat([all_reduce(x, axis)[:, :2, :4], y[:, :2, :4]], -1)
    return torch.nn.functional.linear(both.flatten(1), weight, bias)


def asked_for_twice(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor, axis: Axis) -> Tensor:
    both = torch.cat([all_reduce(x, axis), y], -1)
    return torch.nn.functional.linear(both, weight, bias) + both.sum()


def scatter(both: Tensor, weight: Tensor, bias: Tensor | None, axis: Axis) -> Tensor:
    given = [both.flatten(0, 1)], [weight], [bias]
    return torch.ops.diffusers_rocm.multiply_and_scatter(*given, axis.size, axis.group.group_name, False, "")[0]


def scattered(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor, axis: Axis) -> Tensor:
    return scatter(torch.cat([all_reduce(x, axis), y], -1), weight, bias, axis)


def scattered_without_bias(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor, axis: Axis) -> Tensor:
    """And what has come is in the middle."""
    return scatter(torch.cat([y[..., :3], all_reduce(x, axis), y[..., 3:]], -1), weight, None, axis) * bias


def scattered_of_one_message(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor, axis: Axis) -> Tensor:
    found = all_reduce(x, axis)
    return scatter(torch.cat([found, found.sin()], -1), weight, bias, axis) + y.sum()


# With the products that each becomes, but for one whose sum is scattered.
FUNCTIONS = {
    scattered: 1,
    scattered_without_bias: 2,
    scattered_of_one_message: 0,
    side_by_side: 2,
    without_bias: 3,
    of_two_messages: 2,
    one_below_the_other: 1,
    of_one_message: 1,
    of_two_kinds: 1,
    twice_the_same: 1,
    of_two_heads: 1,
    asked_for_twice: 1,
}


def split_worker() -> list[tuple[str, float, int]]:
    """Each function's name, its error when it is compiled, and its products."""
    axis, shape, results = Axis.of_all(), (2, 5, 8), []
    x, y, weight, bias = randn(*shape, seed=axis.rank), randn(*shape, seed=3), randn(7, 16, seed=4), randn(7, seed=5)
    for function in FUNCTIONS:
        wanted = function(x.clone(), y, weight, bias, axis)
        compiled = torch.compile(function, fullgraph=True, options=HIDE_MESSAGES)
        found, (code,) = run_and_get_code(compiled, x, y, weight, bias, axis)
        results.append((function.__name__, relative_l2(found, wanted), sum("mm" in step for step in steps(code))))
    return results


def after_a_product(x: Tensor, y: Tensor, weight: Tensor, axis: Axis) -> Tensor:
    """Of which the message needs nothing."""
    before = y @ weight
    return all_reduce(x, axis).sin() * before


def early_worker() -> list[int]:
    """In the model's order, where the compiler has no reason for another."""
    axis, x = Axis.of_all(), randn(16, 16, seed=0)
    options = HIDE_MESSAGES | {"reorder_for_peak_memory": False, "reorder_for_locality": False}
    compiled = torch.compile(after_a_product, fullgraph=True, options=options)
    _, (code,) = run_and_get_code(compiled, x, x + 1, x + 2, axis)
    return under_messages(code)


def needed_by_the_second(x: Tensor, y: Tensor, axis: Axis) -> Tensor:
    """Both products go into the second message."""
    first, before = all_reduce(x, axis), (y @ y.sin()) @ y
    return all_reduce(first.sin() * before, axis)


def needed_by_none(x: Tensor, y: Tensor, axis: Axis) -> Tensor:
    """Of three products, the second message has the last, and the third nothing: the second has no more than one."""
    first, beside = all_reduce(x, axis), ((y @ y.sin()) @ y).cos() @ y
    return all_reduce(all_reduce(first.sin(), axis).cos(), axis) * beside


def shared_worker() -> list[list[int]]:
    """The products under each message."""
    axis, x, found = Axis.of_all(), randn(16, 16, seed=0), []
    for function in (needed_by_the_second, needed_by_none):
        compiled = torch.compile(function, fullgraph=True, options=HIDE_MESSAGES)
        wanted = function(x.clone(), x + 1, axis)
        output, (code,) = run_and_get_code(compiled, x, x + 1, axis)
        assert relative_l2(output, wanted) <= FLOAT32_BAR
        found.append(under_messages(code))
    return found


def in_two_chains(x: Tensor, y: Tensor, axis: Axis) -> tuple[Tensor, Tensor]:
    """A sum of a sum, and then a gather that needs neither: it could go before the second sum."""
    first = funcol.all_reduce(x, "sum", axis.group)
    return funcol.all_reduce(first @ first, "sum", axis.group), funcol.all_gather_tensor(y @ y, 0, axis.group)


def order_worker() -> list[list[str]]:
    """The order of messages, without the passes and with them."""
    axis, x = Axis.of_all(), randn(16, 16, seed=0)
    found = []
    for options in ({}, HIDE_MESSAGES):
        torch._dynamo.reset()
        compiled = torch.compile(in_two_chains, fullgraph=True, options=options)
        _, (code,) = run_and_get_code(compiled, x, x + 1, axis)
        found.append([step for step in steps(code) if step.startswith("all_")])
    return found


def keys_of_all(x: Tensor, weight: Tensor, angle: Tensor, axis: Axis, beside: bool) -> Tensor:
    """Queries and keys, which one kernel would turn: what a message needs, and what it does not."""
    keys, queries = ((x @ part).view(16, 2, 8) * angle.cos() for part in weight.chunk(2, 1))
    gathered = gather_by_copies([keys], 1, axis.size, axis.group, queries if beside else None)
    return queries.flatten(1) @ gathered.flatten(1).T


def keys_of_others(x: Tensor, weight: Tensor, angle: Tensor, axis: Axis, first: str) -> Tensor:
    """Queries of what a message before is made of, too, or of what it brings."""
    shared = x @ weight
    if first == "copies":
        before = gather_by_copies([shared.sin()], 1, axis.size, axis.group).chunk(axis.size)[0]
    else:
        before = all_reduce(shared.sin(), axis)
    queries = (before if first == "brought" else shared) @ weight.T
    keys = gather_by_copies([angle.flatten(0, 1) @ weight[:8]], 1, axis.size, axis.group, queries)
    return before + queries @ keys[:16]


def beside_worker() -> list[list[str]]:
    """The steps, and those if it is not said what is beside the message; and those of queries of more than one use."""
    axis, found = Axis.of_all(), []
    x, weight, angle = randn(16, 16, seed=axis.rank), randn(16, 32, seed=2), randn(16, 1, 8, seed=3)
    teach_compiler()
    calls = [(keys_of_all, weight, beside) for beside in (True, False)]
    calls += [(keys_of_others, weight[:, :16].clone(), first) for first in ("copies", "group", "brought")]
    for function, *given in calls:
        given[1:1] = [angle, axis]
        wanted = function(x.clone(), *given)
        output, (code,) = run_and_get_code(torch.compile(function, fullgraph=True, options=HIDE_MESSAGES), x, *given)
        assert relative_l2(output, wanted) <= FLOAT32_BAR, given
        found.append([step for step in steps(code) if step != "next_place"])
    return found


# Whether links are slow, whether ranks reach each other's memory, whether the model is a graph, what is asked for, and
# the options that blocks are compiled with, by their names.
USES = (
    (True, False, False, {}, [*HIDE_MESSAGES]),
    (False, False, True, {}, [*FUSE_GELU]),
    (False, True, True, {}, [*FUSE_GELU, *HIDE_MESSAGES]),
    (False, True, False, {}, [*FUSE_GELU]),
    (True, False, False, {"mode": "max-autotune"}, []),
    (True, False, False, {"options": {"max_autotune": True}}, ["max_autotune"]),
    (True, False, False, {"backend": "eager"}, []),
)


def given_worker() -> list[list[list[str]]]:
    """The options of every block, for each use."""
    found = []
    for slow, reached, of_a_graph, kwargs, _ in USES:
        model, given = FluxTransformerTesterConfig().get_model(), []
        with mock.patch.object(links, "FAST", 1.0 if slow else 0.0):
            model.enable_parallelism(config=ParallelConfig(ulysses=2))
        with mock.patch.object(sequence_split, "reaches_memory", lambda axis, reached=reached: reached):
            (StepGraph if of_a_graph else AroundCall)(model)

        def compiled(self, options=(), given=given, **kwargs):
            given.append([*options])

        with mock.patch.object(torch.nn.Module, "compile", compiled):
            model.compile_repeated_blocks(**kwargs)
        found.append(given)
    return found


class TestOverlap(unittest.TestCase):
    def test_mlp_is_under_the_messages(self):
        """Its product under the first, its part of the output's under the second; over slow links values go before,
        and those of queries and keys are under them, and queries and keys, and what goes back, are two messages each,
        which begin when what is sent is there, and the products are under the last of each; in 8 bits queries and
        keys are in messages of their own; not on GPUs that were not measured. All that a ring gathers goes at once,
        values first; by copies in one message, queries beside it, too."""
        both, ring = {"ulysses": 2}, {"ring": 2}
        plain = [1, 1], ["begin", "wait"] * 2
        halves = [2, 0, 1, 0, 1], [*["begin"] * 3, "wait", *["wait", "begin"] * 2, "wait", "wait"]
        rounded = both | {"communication": "int8"}
        apart = [2, 0, 0, 0, 1, 0, 1], [*["begin"] * 5, "wait", *["wait", "wait", "begin"] * 2, "wait", "wait"]
        in_bf16 = False, both, True, False, torch.bfloat16  # gelu is in the MLP's first product
        kinds = (
            (False, both, plain),
            (*in_bf16, plain),
            (True, rounded, apart),
            (True, both, halves),
            (True, both, False, plain),
        )
        for *how, wanted in kinds:
            for error, *found in run_ranks(2, flux_worker, *how):
                exact = rounded not in how and torch.bfloat16 not in how
                assert error <= (FLOAT32_BAR if exact else 0.02) and found == [*wanted], (error, found)
        # Whether queries are made under the first or the second is the compiler's choice, and another on each rank.
        for error, products, order in run_ranks(2, flux_worker, True, ring):
            assert error <= FLOAT32_BAR and order == ["begin", "begin", "wait", "wait"], (error, order)
            assert products in ([2, 2], [1, 3]), products

        for error, products, order in run_ranks(2, flux_worker, False, ring, True, True):
            assert error <= FLOAT32_BAR and order == ["begin", "wait"] and products == [3], (error, products, order)

    def test_split_products(self):
        for results in run_ranks(2, split_worker):
            assert all(error <= FLOAT32_BAR for _, error, _ in results), results
            assert [products for *_, products in results] == [*FUNCTIONS.values()], results

    def test_message_is_early(self):
        assert run_ranks(2, early_worker) == [[1], [1]]

    def test_products_are_shared(self):
        assert run_ranks(2, shared_worker) == [[[2, 0], [2, 1, 0]]] * 2

    def test_order_of_messages(self):
        for plain, hidden in run_ranks(2, order_worker):
            assert len(plain) == 3 and hidden == plain, (plain, hidden)

    def test_what_is_beside(self):
        """Queries, whose product, and all that follows, no kernel makes before the message of keys has begun."""
        told, untold = ["mm", "fetch_all_gather", "mm", "wait_tensor", "mm"], ["mm", "mm", "fetch_all_gather"]
        for found, without, *of_others in run_ranks(2, beside_worker):
            assert found == told and without[:3] == untold, (found, without)
            for each in of_others:  # one product for both, and what was sent before goes before
                begun = ["message" if "all" in step else step for step in each if step != "wait_tensor"]
                assert begun == ["mm", "message", "mm", "message", "mm", "addmm"], of_others

    def test_when(self):
        for found in run_ranks(2, given_worker):
            assert found == [[options] * 4 for *_, options in USES]


if __name__ == "__main__":
    unittest.main()
