"""What `tp` gives if norms and gates go over a slice of tokens on each rank, in blocks of FLUX.1's shape.

    torchrun --nproc_per_node=4 utils/bench_token_split.py --out FILE

A sum is then two messages: of its output each rank keeps a slice of tokens (a reduce-scatter), and before the next
column products the slices are gathered (Korthikanti et al., 2022). Each may go by NCCL, or by copies out of symmetric
memory, beside products in parts: what has come of one rank is multiplied while that of the next comes, and what is for
one rank is sent while that for the next is multiplied (Wang et al., 2023; torch's own are in
`torch.distributed._symmetric_memory`). On GPUs all of it is replayed from a graph of several blocks in a row.
"""

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
import torch.nn.functional as F
from torch import Tensor
from versions import versions

import diffusers_rocm
from diffusers_rocm.benchmarks.step import Clock


BLOCKS = 6


def norm(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], eps=1e-6) * (1 + scale) + shift


def norm_into(x: Tensor, shift: Tensor, scale: Tensor, place: Tensor) -> None:
    place.copy_(norm(x, shift, scale))


def gated(x: Tensor, gate: Tensor, y: Tensor) -> Tensor:
    return x + gate * y


def gated_sum(x: Tensor, gate: Tensor, own: Tensor, others: Tensor) -> Tensor:
    return x + gate * (own.float() + others.float().sum(0)).to(x.dtype)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[tokens, heads, size], each head normed and turned by its token's place."""
    x = F.rms_norm(x, x.shape[-1:], eps=1e-6)
    real, imaginary = x.unflatten(-1, (-1, 2)).unbind(-1)
    aside = torch.stack([-imaginary, real], -1).flatten(-2)
    return (x.float() * cos + aside.float() * sin).to(x.dtype)


def turned_both(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return turned(q, cos, sin), turned(k, cos, sin)


def gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def beside_gelu(attention: Tensor, mlp: Tensor) -> Tensor:
    return torch.cat([attention, gelu(mlp)], -1)


class Links:
    """Memory that all ranks reach, meetings and copies."""

    def __init__(self, args: argparse.Namespace, device: torch.device, dtype: torch.dtype):
        self.args, self.device, self.dtype = args, device, dtype
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.on_gpu = device.type == "cuda"
        self.made = 0
        self.side = torch.cuda.Stream() if self.on_gpu else None
        self.shared: list[Tensor] = []
        self.memory: Any = None

    def places(self, *shape: int) -> list[Tensor]:
        """One tensor of each rank, this one's first and then those that come after it."""
        order = [(self.rank + step) % self.world for step in range(self.world)]
        self.made += 1
        if not self.on_gpu:  # a trial without GPUs: files in memory
            size = torch.Size(shape).numel()
            folder = Path(self.args.folder)
            tensors = [
                torch.from_file(str(folder / f"{self.made}_{rank}"), shared=True, size=size, dtype=self.dtype)
                for rank in order
            ]
            dist.barrier()
            return [tensor.view(shape) for tensor in tensors]
        made = symmetric.empty(shape, dtype=self.dtype, device=self.device)
        self.shared.append(made)
        self.memory = symmetric.rendezvous(made, dist.group.WORLD.group_name)
        return [self.memory.get_buffer(rank, shape, self.dtype) for rank in order]

    def meet(self) -> None:
        if self.on_gpu:
            self.memory.barrier(channel=0)
        else:
            dist.barrier()

    def copy(self, into: Tensor, x: Tensor) -> Any:
        """Begin a copy when what was begun before is done; what to wait for."""
        if not self.on_gpu:
            into.copy_(x)
            return None
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            into.copy_(x, non_blocking=True)
            return self.side.record_event()

    def wait(self, event: Any) -> None:
        if event is not None:
            torch.cuda.current_stream().wait_event(event)


class Column:
    """Column products of one input: of all its rows, or of slices as they come."""

    def __init__(self, bench: "Bench", *widths: int):
        self.bench, self.widths = bench, widths
        self.weight, self.bias = bench.random(sum(widths), bench.width, scale=0.02), bench.zeros(sum(widths))
        self.weights, self.biases = self.weight.split(widths), self.bias.split(widths)

    def whole(self, x: Tensor) -> list[Tensor]:
        return [F.linear(x, weight, bias) for weight, bias in zip(self.weights, self.biases, strict=True)]

    def outputs(self, rows: int) -> tuple[list[Tensor], list[tuple[Tensor, Tensor, Tensor]]]:
        """The outputs of `rows` rows, and for each product its weight, bias and output."""
        fused = self.bench.fused
        if fused:
            output = self.bench.empty(rows, sum(self.widths))
            return list(output.split(self.widths, -1)), [(self.weight, self.bias, output)]
        outputs = [self.bench.empty(rows, width) for width in self.widths]
        return outputs, list(zip(self.weights, self.biases, outputs, strict=True))


def multiply(x: Tensor, products: list[tuple[Tensor, Tensor, Tensor]], rows: slice) -> None:
    for weight, bias, output in products:
        torch.addmm(bias, x, weight.t(), out=output[rows])


class Bench:
    def __init__(self, args: argparse.Namespace, device: torch.device):
        self.args, self.device, self.clock = args, device, Clock(device)
        self.on_gpu = device.type == "cuda"
        self.dtype = torch.bfloat16 if self.on_gpu else torch.float32
        self.links = Links(args, device, self.dtype)
        self.rank, self.world = self.links.rank, self.links.world
        self.width, self.size = args.width, 128
        self.text, self.image = args.text, args.tokens - args.text
        self.slice = (args.text + self.image) // self.world
        heads = self.width // self.size // self.world
        self.inner, self.mlp = heads * self.size, 4 * self.width // self.world
        self.generator = torch.Generator(device).manual_seed(self.rank)
        self.fused, self.parts = False, self.world
        self.single = Column(self, self.inner, self.inner, self.inner, self.mlp), self.row(self.inner + self.mlp)
        self.double = [
            (Column(self, *[self.inner] * 3), self.row(self.inner), Column(self, self.mlp), self.row(self.mlp))
            for _ in range(2)
        ]
        self.generator.manual_seed(0)  # the rest is the same on all ranks
        self.shift, self.scale, self.gate = (self.random(self.width, scale=0.1) for _ in range(3))
        self.x = self.random(args.tokens, self.width)
        angles = torch.outer(torch.arange(args.tokens), torch.logspace(0, -3, self.size // 2)).repeat_interleave(2, -1)
        self.cos, self.sin = (f(angles)[:, None].to(device) for f in (torch.cos, torch.sin))
        # Tokens as slices bring them: of this rank, and then of those that come after it; of each the text first.
        of_text, of_image = torch.arange(args.tokens).split([self.text, self.image])
        order = [(self.rank + step) % self.world for step in range(self.world)]
        texts, images = of_text.chunk(self.world), of_image.chunk(self.world)
        self.by_slices = torch.cat([torch.cat([texts[rank], images[rank]]) for rank in order]).to(device)
        self.by_streams = torch.cat([*(texts[rank] for rank in order), *(images[rank] for rank in order)]).to(device)
        self.in_order = torch.cat([torch.cat([texts[r], images[r]]) for r in range(self.world)]).to(device)
        self.microseconds: dict[str, float] = {}
        self.compiled = {
            f: torch.compile(f, dynamic=False) if self.on_gpu else f
            for f in (norm, norm_into, gated, gated_sum, turned_both, gelu, beside_gelu)
        }
        if not args.no_copies:
            self.mine, *self.theirs = self.links.places(self.slice, self.width)
            self.received, *self.there = self.links.places(self.world - 1, self.slice, self.width)

    def random(self, *shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device, dtype=self.dtype) * scale

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, device=self.device, dtype=self.dtype)

    def row(self, width: int) -> tuple[Tensor, Tensor]:
        return self.random(self.width, width, scale=0.02), self.zeros(self.width)

    def zeros(self, *shape: int) -> Tensor:
        """Biases, which torch's own products in parts do not take."""
        return torch.zeros(shape, device=self.device, dtype=self.dtype)

    def run(self, function: Callable, *given: Any) -> Any:
        return self.compiled[function](*given)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, order: Tensor | None) -> Tensor:
        """[tokens, inner] each, of tokens in `order`."""
        q, k, v = (x.unflatten(-1, (-1, self.size)) for x in (q, k, v))
        q, k = self.run(turned_both, q, k, *self.places_of(order))
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v)[0].transpose(0, 1).flatten(1)

    def places_of(self, order: Tensor | None) -> tuple[Tensor, Tensor]:
        """Made once in a step."""
        if order is None:
            return self.cos, self.sin
        if not hasattr(order, "places"):
            order.places = self.cos[order], self.sin[order]
        return order.places

    # --- as it is: all tokens on each rank, and sums by NCCL

    def summed(self, x: Tensor, row: tuple[Tensor, Tensor]) -> Tensor:
        y = F.linear(x, *row)
        dist.all_reduce(y)
        return y

    def single_whole(self, x: Tensor) -> Tensor:
        column, row = self.single
        q, k, v, mlp = column.whole(self.run(norm, x, self.shift, self.scale))
        h = self.run(beside_gelu, self.attend(q, k, v, None), mlp)
        return self.run(gated, x, self.gate, self.summed(h, row))

    def double_whole(self, x: Tensor) -> Tensor:
        streams = list(x.split([self.text, self.image]))
        made = [
            column.whole(self.run(norm, x, self.shift, self.scale))
            for x, (column, *_) in zip(streams, self.double, strict=True)
        ]
        q, k, v = (torch.cat(each) for each in zip(*made, strict=True))
        attended = self.attend(q, k, v, None).split([self.text, self.image])
        for i, (_, out, up, down) in enumerate(self.double):
            streams[i] = self.run(gated, streams[i], self.gate, self.summed(attended[i], out))
            (mlp,) = up.whole(self.run(norm, streams[i], self.shift, self.scale))
            streams[i] = self.run(gated, streams[i], self.gate, self.summed(self.run(gelu, mlp), down))
        return torch.cat(streams)

    # --- slices, by NCCL: in the order of ranks

    def gathered(self, x: Tensor) -> Tensor:
        all_ = self.empty(len(x) * self.world, self.width)
        dist.all_gather_into_tensor(all_, x)
        return all_

    def scattered(self, y: Tensor) -> Tensor:
        part = self.empty(len(y) // self.world, self.width)
        dist.reduce_scatter_tensor(part, y)
        return part

    def single_nccl(self, x: Tensor) -> Tensor:
        column, row = self.single
        q, k, v, mlp = column.whole(self.gathered(self.run(norm, x, self.shift, self.scale)))
        h = self.run(beside_gelu, self.attend(q, k, v, self.in_order), mlp)
        return self.run(gated, x, self.gate, self.scattered(F.linear(h, *row)))

    # --- slices, by copies beside products in parts

    def gather(self, x: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """The normed rows of all ranks, `parts` at a time, as they come: which, and the rows."""
        count, sizes = len(x), self.part_sizes()
        self.run(norm_into, x, self.shift, self.scale, self.mine[:count])
        self.links.meet()
        all_ = self.empty(count * (self.world - 1), self.width)
        events = [
            self.links.copy(into, there[:count]) for into, there in zip(all_.split(count), self.theirs, strict=True)
        ]
        yield slice(0, count), self.mine[:count]
        first = 0
        for size in sizes:
            self.links.wait(events[first + size - 1])
            rows = slice(first * count, (first + size) * count)
            yield slice(rows.start + count, rows.stop + count), all_[rows]
            first += size

    def part_sizes(self) -> list[int]:
        others = self.world - 1
        return [1] * others if self.parts == self.world else [others]

    def columns(self, x: Tensor, column: Column) -> list[Tensor]:
        outputs, products = column.outputs(self.world * len(x))
        for rows, part in self.gather(x):
            multiply(part, products, rows)
        return outputs

    def scatter(self, x: Tensor, h: Tensor, row: tuple[Tensor, Tensor]) -> Tensor:
        """`x` and the gated sum of its rows of all ranks' products of `h`, whose rows are this rank's first."""
        count, (weight, bias) = len(x), row
        event, first, sent = None, 0, []
        for size in self.part_sizes():
            sent.append(torch.addmm(bias, h[(first + 1) * count : (first + size + 1) * count], weight.t()))
            for step, part in enumerate(sent[-1].split(count), start=first):
                event = self.links.copy(self.there[step][step, :count], part)
            first += size
        y = torch.addmm(bias, h[:count], weight.t())
        self.links.wait(event)
        self.links.meet()
        return self.run(gated_sum, x, self.gate, y, self.received[:, :count])

    def single_copies(self, x: Tensor) -> Tensor:
        column, row = self.single
        q, k, v, mlp = self.columns(x, column)
        h = self.run(beside_gelu, self.attend(q, k, v, self.by_slices), mlp)
        return self.scatter(x, h, row)

    def double_copies(self, x: Tensor) -> Tensor:
        """Rows of text and image in one message; products of the image in parts, of the few of text at once."""
        count = self.text // self.world
        (t_column, t_out, t_up, t_down), (column, out, up, down) = self.double
        for columns, rows_ in (((t_column, column), (t_out, out)), ((t_up, up), (t_down, down))):
            of_text, of_image = columns
            outputs, products = of_image.outputs(self.image)
            texts = []
            size = self.image // self.world
            for rows, part in self.gather(x):
                part = part.unflatten(0, (-1, self.slice))
                texts.append(part[:, :count])
                if len(part) == 1:
                    first = rows.start // self.slice
                    multiply(part[0, count:], products, slice(first * size, (first + 1) * size))
                else:
                    multiply(part[:, count:].flatten(0, 1), products, slice(size, None))
            text_outputs = of_text.whole(torch.cat(texts).flatten(0, 1))
            if len(outputs) == 3:
                joined = [torch.cat(each) for each in zip(text_outputs, outputs, strict=True)]
                text, image = self.attend(*joined, self.by_streams).split([self.text, self.image])
            else:
                text, image = (self.run(gelu, x) for x in (*text_outputs, *outputs))
            x = self.scatter_both(x, text, image, *rows_)
        return x

    def scatter_both(self, x: Tensor, text: Tensor, image: Tensor, t_row: Any, row: Any) -> Tensor:
        count, (weight, bias) = self.text // self.world, row
        texts = F.linear(text, *t_row).split(count)
        size = self.image // self.world
        event, first, sent = None, 0, []
        for index, y in enumerate(texts[1:]):
            event = self.links.copy(self.there[index][index, :count], y)
        for parts in self.part_sizes():
            sent.append(torch.addmm(bias, image[(first + 1) * size : (first + parts + 1) * size], weight.t()))
            for step, part in enumerate(sent[-1].split(size), start=first):
                event = self.links.copy(self.there[step][step, count : self.slice], part)
            first += parts
        y = torch.cat([texts[0], torch.addmm(bias, image[:size], weight.t())])
        self.links.wait(event)
        self.links.meet()
        return self.run(gated_sum, x, self.gate, y, self.received)

    # --- torch's own

    def single_torch(self, x: Tensor) -> Tensor:
        column, row = self.single
        group = dist.group.WORLD.group_name
        weights = [column.weight] if self.fused else column.weights
        _, made = torch.ops.symm_mem.fused_all_gather_matmul(
            self.run(norm, x, self.shift, self.scale), [w.t() for w in weights], 0, group, return_A=False
        )
        q, k, v, mlp = made[0].split(column.widths, -1) if self.fused else made
        h = self.run(beside_gelu, self.attend(q, k, v, self.in_order), mlp)
        y = torch.ops.symm_mem.fused_matmul_reduce_scatter(h, row[0].t(), "sum", 0, group)
        return self.run(gated, x, self.gate, y)

    def time(self, name: str, block: Callable[[Tensor], Tensor], x: Tensor) -> None:
        """Median microseconds of a block, on the slowest rank."""

        def several() -> Tensor:
            y = x
            for _ in range(BLOCKS):
                y = block(y)
            return y

        several()
        run = several
        if self.on_gpu:
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                several()
            run = graph.replay
        times = []
        for _ in range(self.args.repeats + 3):
            dist.barrier()
            times.append(self.clock.milliseconds(run) * 1000 / BLOCKS)
        found = torch.tensor(statistics.median(times[3:]), device=self.device)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        self.microseconds[name] = round(found.item(), 1)
        if self.rank == 0:
            print(f"{name:50s} {found.item():9.1f} us", flush=True)

    def compare(self, name: str, block: Callable[[Tensor], Tensor], whole: Callable[[Tensor], Tensor]) -> None:
        """Time a block of slices that is right: as `whole` is, for this rank's tokens, to rounding."""
        own = self.by_slices[: self.slice]
        x = self.x[own].contiguous()
        wanted = whole(self.x)[own].float() - x.float()
        try:
            found = block(x).float() - x.float()
        except (RuntimeError, NotImplementedError, AttributeError) as error:
            if self.rank == 0:
                print(f"{name}: not run: {str(error).partition(chr(10))[0]}", flush=True)
            return
        off = (found - wanted).norm() / wanted.norm()
        dist.all_reduce(off, dist.ReduceOp.MAX)
        if off > (2e-2 if self.on_gpu else 1e-5):
            raise SystemExit(f"{name} is wrong: {off.item():.1e} away")
        self.time(name, block, x)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4608)
    parser.add_argument("--text", type=int, default=512, help="of these tokens")
    parser.add_argument("--width", type=int, default=3072)
    parser.add_argument("--no-copies", action="store_true", help="NCCL alone")
    parser.add_argument("--folder", help="on CPUs: where files stand in for symmetric memory")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--out", type=Path, help="write the rows as JSON")
    args = parser.parse_args()
    bench = Bench(args, diffusers_rocm.init())
    with torch.no_grad():
        bench.time("single, whole", bench.single_whole, bench.x)
        bench.compare("single, slices by NCCL", bench.single_nccl, bench.single_whole)
        bench.time("double, whole", bench.double_whole, bench.x)
        for fused in (False, True):
            bench.fused = fused
            if args.no_copies:
                break
            of = "one product" if bench.fused else "a product each"
            if bench.on_gpu:
                bench.compare(f"single, torch's own, {of}", bench.single_torch, bench.single_whole)
            for parts in sorted({bench.world, 2}):
                bench.parts = parts
                bench.compare(f"single, copies, {of}, {bench.parts} parts", bench.single_copies, bench.single_whole)
                bench.compare(f"double, copies, {of}, {bench.parts} parts", bench.double_copies, bench.double_whole)
    if bench.rank == 0 and args.out:
        content = {"versions": versions(), "microseconds": bench.microseconds}
        args.out.write_text(json.dumps(content, indent=2) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
