"""What compiled code does while a message is on its way: the compiler's own passes, and one of ours.

The compiler orders what it computes by memory, and so may begin a message late, and may wait for it before it computes
what does not need it: in a block of one stream, all of the MLP. The order of the messages themselves it keeps as the
model has it, on all ranks.
"""

import itertools
from typing import Any

import torch
from torch import fx
from torch._inductor import ir
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.scheduler import BaseSchedulerNode
from torch._inductor.utils import contains_collective, contains_wait

from . import peer_products  # noqa: F401 whose operations are among those of torch


aten = torch.ops.aten
_WAIT = torch.ops._c10d_functional.wait_tensor.default
_SCATTERED = torch.ops.diffusers_rocm.multiply_and_scatter.default
_RESHAPES = (aten.view.default, aten.reshape.default)


class SplitProducts(CustomGraphPass):
    """A pass over a graph: a product of things side by side, of which some have come by message, becomes two.

    The product of the rest need not wait: `[attention, mlp] @ W` is `mlp @ W_mlp`, and `attention @ W_attention` added
    to it in the second product.
    """

    def __call__(self, graph: fx.Graph) -> None:
        waits = _waits(graph)
        for target in (aten.addmm.default, aten.mm.default):
            for product in graph.find_nodes(op="call_function", target=target):
                parts = _side_by_side(product.args[-2])
                last = frozenset().union(*(waits[part] for part in parts))
                if any(waits[part] < last for part in parts) and not product.kwargs:
                    _part_by_part(graph, product, dict(sorted(parts.items(), key=lambda part: waits[part[0]] == last)))
        for product in graph.find_nodes(op="call_function", target=_SCATTERED):
            (rows, *others), *_ = product.args
            parts = {} if others else _side_by_side(rows)
            last = frozenset().union(*(waits[part] for part in parts))
            early = {part: at for part, at in parts.items() if waits[part] < last}
            if len(early) == len(parts) - 1 > 0:
                _last_part_scattered(graph, product, early, next(iter(parts.items() - early.items())))

    def uuid(self) -> Any:
        return get_hash_for_files((__file__,))


def _waits(graph: fx.Graph) -> dict[fx.Node, frozenset[fx.Node]]:
    """The messages that each node needs."""
    found: dict[fx.Node, frozenset[fx.Node]] = {}
    for node in graph.nodes:
        own = {node} if node.target is _WAIT else set()
        found[node] = frozenset(own.union(*(found[given] for given in node.all_input_nodes)))
    return found


def _side_by_side(rows: fx.Node) -> dict[fx.Node, tuple[int, int]]:
    """What lies side by side in the rows of a product, and nowhere else, and its columns; empty if it is one thing."""
    cat = rows.args[0] if rows.target in _RESHAPES else rows
    if cat.target is not aten.cat.default or len(cat.users) > 1 or len(rows.users) > 1:
        return {}
    whole, stop, found = cat.meta["val"], 0, {}
    dim = cat.args[1] if len(cat.args) > 1 else 0
    for part in cat.args[0]:
        value = part.meta["val"]
        start, stop = stop, stop + value.shape[-1]
        if value.ndim != whole.ndim or value.dtype != whole.dtype or not isinstance(stop, int) or part in found:
            return {}
        found[part] = start, stop
    in_rows = dim % whole.ndim == whole.ndim - 1 and rows.meta["val"].shape[-1] == stop
    return found if in_rows else {}


def _part_by_part(graph: fx.Graph, product: fx.Node, parts: dict[fx.Node, tuple[int, int]]) -> None:
    """The products of the parts, in their order, each added to those before."""
    *total, _, weight = product.args
    with graph.inserting_before(product):
        for part, (start, stop) in parts.items():
            rows = _call(graph, aten.reshape.default, part, [-1, stop - start])
            columns = _call(graph, aten.slice.Tensor, weight, 0, start, stop)
            total = [_call(graph, aten.addmm.default if total else aten.mm.default, *total, rows, columns)]
    product.replace_all_uses_with(total[0])
    graph.erase_node(product)
    graph.eliminate_dead_code()


def _last_part_scattered(
    graph: fx.Graph, product: fx.Node, early: dict[fx.Node, tuple[int, int]], last: tuple[fx.Node, tuple[int, int]]
) -> None:
    """The same of a product whose sum over ranks is scattered: the products of other parts are what it adds."""
    _, (weight,), (bias,), *group = product.args
    with graph.inserting_before(product):
        for part, (start, stop) in early.items():
            rows = _call(graph, aten.reshape.default, part, [-1, stop - start])
            columns = _call(
                graph, aten.permute.default, _call(graph, aten.slice.Tensor, weight, 1, start, stop), [1, 0]
            )
            added = () if bias is None else (bias,)
            bias = _call(graph, aten.addmm.default if added else aten.mm.default, *added, rows, columns)
        part, (start, stop) = last
        rows = _call(graph, aten.reshape.default, part, [-1, stop - start])
        columns = _call(graph, aten.slice.Tensor, weight, 1, start, stop)
        scattered = _call(graph, _SCATTERED, [rows], [columns], [bias], *group)
    product.replace_all_uses_with(scattered)
    graph.erase_node(product)
    graph.eliminate_dead_code()


def _call(graph: fx.Graph, target: Any, *args: Any) -> fx.Node:
    node = graph.call_function(target, args)
    node.meta["val"] = target(*fx.map_arg(args, lambda given: given.meta["val"]))
    return node


def share_products(nodes: list[BaseSchedulerNode]) -> list[BaseSchedulerNode]:
    """A pass over what is ordered already: a message that has nothing beside it takes a product from one before.

    That is from the last that has another one, or an attention, and can do without: if nothing needs it earlier.
    """
    order = list(nodes)
    messages = [node for node in order if contains_collective(node)]
    for index, message in enumerate(messages):
        if _beside(order, message):
            continue
        for earlier in reversed(messages[:index]):
            beside = _beside(order, earlier)
            products = [node for node in beside if _is_product(node)]
            if len(beside) > 1 and products and _move(order, products[-1], message):
                break
    return order


def _move(order: list[BaseSchedulerNode], product: BaseSchedulerNode, message: BaseSchedulerNode) -> bool:
    """To after the message, if nothing up to it needs what the product makes."""
    start, stop, made = order.index(product), order.index(message), product.get_buffer_names()
    if any(need.name in made for node in order[start : stop + 1] for need in node.unmet_dependencies):
        return False
    order[start : stop + 1] = [*order[start + 1 : stop + 1], product]
    return True


def _beside(order: list[BaseSchedulerNode], message: BaseSchedulerNode) -> list[BaseSchedulerNode]:
    """Products and attention between a message and the next one, or its wait."""
    sent = message.get_buffer_names()

    def ends(node: BaseSchedulerNode) -> bool:
        waited = contains_wait(node) and any(need.name in sent for need in node.unmet_dependencies)
        return waited or contains_collective(node)

    rest = itertools.islice(order, order.index(message) + 1, None)
    beside = itertools.takewhile(lambda node: not ends(node), rest)
    return [node for node in beside if _is_product(node) or "attention" in str(getattr(node.node, "op_overload", ""))]


def _is_product(node: BaseSchedulerNode) -> bool:
    if isinstance(node.node, (ir.ExternKernelOut, ir.TemplateBuffer)):
        return True
    return "addmm_gelu" in str(getattr(node.node, "op_overload", ""))


# For `torch.compile(options=...)`.
HIDE_MESSAGES = {
    "reorder_for_compute_comm_overlap": True,
    "reorder_for_compute_comm_overlap_passes": ["raise_comms", "sink_waits", share_products],
    "post_grad_custom_post_pass": SplitProducts(),
}
