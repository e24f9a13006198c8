"""A VAE whose tiles are spread over ranks, against its own tiled decode in one process: bit for bit."""

import dataclasses
import math
import unittest
from types import SimpleNamespace

import diffusers
import pytest
import torch
import torch.distributed as dist
from diffusers import AutoencoderTiny, DiffusionPipeline
from diffusers.models.autoencoders.vae import DecoderOutput
from parameterized import parameterized

from diffusers_rocm import DataParallelConfig, ParallelConfig, parallelize
from diffusers_rocm.distributed.axis import Axis
from diffusers_rocm.pipelines.vae import FirstRankVAE, TiledVAE, _SharedCalls, check_vae

from ..models.testing_utils.common import randn
from ..models.testing_utils.parallelism import FLOAT32_BAR
from ..testing_utils import message_of, relative_l2, run_ranks, slow
from .testing_utils import PIPELINES, build, latents
from .testing_vaes import TINY_VAES


NAMES = [(name,) for name, tiny in TINY_VAES.items() if hasattr(diffusers, tiny.name)]


class Work:
    """What a decoder computes on this rank: calls, and the tiles that they begin."""

    def __init__(self, vae: torch.nn.Module):
        self.calls = self.tiles = 0
        vae.decoder.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, decoder, args, kwargs) -> None:
        caches = kwargs["feat_cache"] if "feat_cache" in kwargs else [kwargs.get("conv_cache")]
        self.calls += 1
        self.tiles += all(each is None for each in caches)

    def read(self) -> tuple[int, int]:
        seen = self.calls, self.tiles
        self.calls = self.tiles = 0
        return seen


@torch.no_grad()
def tiled(vae: torch.nn.Module, inputs: dict) -> torch.Tensor:
    """What one process makes of it."""
    vae.use_tiling = True
    sample = vae.decode(**inputs).sample
    vae.use_tiling = False
    return sample


@torch.no_grad()
def tile_worker(name: str, cases: list[tuple[int, bool]]) -> list[dict]:
    """Cases of a batch size, with slicing or without."""
    tiny, results = TINY_VAES[name], []
    vae = tiny.build()
    cls, work = type(vae), Work(vae)
    for batch, vae.use_slicing in cases:
        inputs = tiny.call(batch)
        whole, wanted = vae.decode(**inputs).sample, tiled(vae, inputs)
        shared = TiledVAE(vae, Axis.of_all())
        work.read()
        output = vae.decode(**inputs)
        mine, still = work.read(), vae.use_tiling
        (plain,) = vae.decode(*inputs.values(), return_dict=False)
        shared.remove()
        results.append(
            {
                "equal": torch.equal(output.sample, wanted) and torch.equal(plain, wanted),
                "work": mine,
                "tiling matters": whole.shape != wanted.shape or relative_l2(whole, wanted) > 1e-3,
                "restored": type(vae) is cls and not still and torch.equal(vae.decode(**inputs).sample, whole),
            }
        )
    return results


@torch.no_grad()
def few_tiles_worker(name: str, latents: tuple[int, ...]) -> tuple[bool, int]:
    vae, inputs = TINY_VAES[name].build(), {"z": randn(1, *latents, seed=0)}
    wanted, work = tiled(vae, inputs), Work(vae)
    TiledVAE(vae, Axis.of_all())
    return torch.equal(vae.decode(**inputs).sample, wanted), work.read()[1]


class ByCall(_SharedCalls):
    """The naive way to share: call after call, whatever tile they belong to."""

    def _compute(self, call, x, *args, **kwargs):
        self._cache = None
        return super()._compute(call, x, *args, **kwargs)


@torch.no_grad()
def naive_worker(name: str) -> float:
    tiny = TINY_VAES[name]
    vae, inputs = tiny.build(), tiny.call()
    wanted = tiled(vae, inputs)
    shared = TiledVAE(vae, Axis.of_all())
    shared._calls.remove()
    shared._calls = ByCall(vae.decoder, Axis.of_all())
    try:
        sample = vae.decode(**inputs).sample
    except RuntimeError:
        return float("inf")
    return relative_l2(sample, wanted) if sample.shape == wanted.shape else float("inf")


@torch.no_grad()
def first_rank_worker(name: str, dtype: torch.dtype) -> dict:
    tiny = TINY_VAES[name]
    vae, inputs = tiny.build().to(dtype), {"z": tiny.call(2)["z"].to(dtype)}
    cls, wanted, work = type(vae), vae.decode(**inputs).sample, Work(vae)
    shared = FirstRankVAE(vae, Axis.of_all())
    named, (plain,) = vae.decode(**inputs), vae.decode(inputs["z"], return_dict=False)
    calls = work.read()[0]
    shared.remove()
    return {
        "equal": isinstance(named, DecoderOutput) and torch.equal(named.sample, wanted) and torch.equal(plain, wanted),
        "calls": calls,
        "restored": type(vae) is cls,
    }


def errors_worker(kind: type) -> dict[str, str]:
    """Each message, and that the VAE works after it."""
    tiny, rank = TINY_VAES["kl"], dist.get_rank()
    vae, inputs, messages = tiny.build(), tiny.call(), {}
    with torch.no_grad():
        wanted = tiled(vae, inputs) if kind is TiledVAE else vae.decode(**inputs).sample
    kind(vae, Axis.of_all())

    def refuse(name: str, **arguments) -> None:
        with pytest.raises((ValueError, RuntimeError)) as caught:
            vae.decode(**inputs | arguments)
        messages[name] = f"{type(caught.value).__name__}: {caught.value}"

    def fail(*_):
        raise MemoryError("no memory left")

    refuse("gradients", z=inputs["z"].clone().requires_grad_())
    if kind is TiledVAE:
        refuse("shapes", z=inputs["z"][:, :, : 19 - rank])
        vae.tile_latent_min_size -= rank
        refuse("settings")
        vae.tile_latent_min_size += rank
    broken = vae.decoder.conv_out.register_forward_hook(fail) if rank == 0 else None
    with pytest.raises((MemoryError, RuntimeError)) as caught:
        vae.decode(**inputs)
    messages["failure"] = f"{type(caught.value).__name__}: {caught.value}"
    if broken is not None:
        broken.remove()
    messages["afterwards"] = str(torch.equal(vae.decode(**inputs).sample, wanted))
    return messages


def with_vae(name: str) -> DiffusionPipeline:
    """A tiny pipeline with a tiny VAE of as many channels."""
    tiny, statistics = TINY_VAES["kl" if name == "flux" else name], {}
    if name == "wan":
        statistics = {"latents_mean": [0.1, -0.2, 0.3, 0.0], "latents_std": [1.0, 1.5, 2.0, 0.5]}
    else:
        statistics = {"shift_factor": 0.1, "scaling_factor": 0.5}
    pipe = build(name)
    pipe = type(pipe)(**{**pipe.components, "vae": dataclasses.replace(tiny, config=tiny.config | statistics).build()})
    pipe.set_progress_bar_config(disable=True)
    return pipe


def pipeline_worker(name: str, degrees: dict[str, int], mode: str, prompts: int = 1) -> dict:
    pipe, arguments = with_vae(name), PIPELINES[name].call(prompts) | {"height": 32, "width": 48}
    whole = latents(pipe, arguments, output_type="pt")
    pipe.vae.use_tiling = True
    wanted = latents(pipe, arguments, output_type="pt") if mode == "tile" else whole
    pipe.vae.use_tiling = False
    work, cls = Work(pipe.vae), type(pipe.vae)
    axes = parallelize(pipe, ParallelConfig(**degrees), vae=mode)
    outputs = [latents(pipe, arguments, output_type="pt", return_dict=False)]
    tiles = work.read()[1]
    if axes.replica.size > 1:
        with pytest.raises(ValueError, match="output_type is"):
            latents(pipe, arguments, output_type="latent" if axes.replica.rank else "pt")
    pipe.transformer.disable_parallelism()
    outputs.append(latents(pipe, arguments, output_type="pt"))
    return {
        "errors": [relative_l2(outputs[0], wanted), relative_l2(outputs[1], whole)],
        "tiles": tiles,
        "restored": type(pipe.vae) is cls,
    }


def modes_differ_worker() -> str:
    modes = ("tile", "first-rank")
    return message_of(parallelize, with_vae("flux"), DataParallelConfig(dp=2), vae=modes[dist.get_rank()])


class TestTiledVAE(unittest.TestCase):
    def check(self, name: str, world: int, cases: list[tuple[int, bool]]) -> None:
        tiny = TINY_VAES[name]
        for results in zip(*run_ranks(world, tile_worker, name, cases), strict=True):
            (batch, slicing), cases = cases[0], cases[1:]
            for result in results:
                assert result["equal"] and result["restored"] and result["tiling matters"], result
            calls, tiles = (sum(each) for each in zip(*(result["work"] for result in results), strict=True))
            slices = batch if slicing else 1
            assert (calls, tiles) == (slices * tiny.calls, slices * tiny.tiles), results
            # Tiles differ in size, by half and more.
            assert all(calls <= 2 * slices * tiny.calls / world for calls, _ in (x["work"] for x in results)), results

    @parameterized.expand(NAMES)
    def test_two_ranks(self, name):
        tiny = TINY_VAES[name]
        self.check(name, 2, [(1, False), *(tiny.batches if len(tiny.latents) == 3 else ())])

    @parameterized.expand(NAMES)
    @slow
    def test_more_ranks(self, name):
        self.check(name, 3, list(TINY_VAES[name].batches))
        self.check(name, 4, [(1, False)])

    def test_batches_on_three_ranks(self):
        self.check("kl", 3, [(2, False), (3, True)])
        self.check("wan", 3, [(2, True)])

    @parameterized.expand(
        [
            ("kl", (4, 5, 13), 3, 3, 2),
            ("kl", (4, 5, 7), 2, 1, 1),
            ("wan", (4, 3, 4, 7), 3, 2, 2),
            ("wan", (4, 2, 3, 3), 3, 1, 1),
            ("hunyuan_video", (4, 2, 3, 3), 2, 1, 1),
        ]
    )
    def test_fewer_tiles_than_ranks(self, name, shape, world, *tiles):
        results = run_ranks(world, few_tiles_worker, name, shape)
        assert all(equal for equal, _ in results), results

    @parameterized.expand([("wan",), ("qwenimage",), ("cogvideox",)])
    def test_the_chunks_of_a_tile_must_stay_together(self, name):
        """What a rank that had another chunk would compute is wrong, and the comparison above would see it."""
        assert min(run_ranks(2, naive_worker, name)) > 1e-3


class TestFirstRankVAE(unittest.TestCase):
    @parameterized.expand([("kl", torch.float32), ("wan", torch.bfloat16), ("dc", torch.float16)])
    def test_one_decodes(self, name, dtype):
        results = run_ranks(2, first_rank_worker, name, dtype)
        for result in results:
            assert result["equal"] and result["restored"], result
        assert results[0]["calls"] > 0 and results[1]["calls"] == 0, results


class TestErrors(unittest.TestCase):
    @parameterized.expand([(TiledVAE,), (FirstRankVAE,)])
    def test_ranks_fail_together(self, kind):
        for rank, messages in enumerate(run_ranks(2, errors_worker, kind)):
            if kind is TiledVAE:
                assert "inputs to AutoencoderKL.decode(): z is [1, 4, 19, 13]" in messages["shapes"]
                assert "tile_latent_min_size is 8 on rank 0 and 7 on rank 1" in messages["settings"]
            if kind is TiledVAE or rank == 0:
                assert "AutoencoderKL that ranks share has no gradients" in messages["gradients"]
            wanted = "MemoryError: no memory left"
            assert messages["failure"].endswith(wanted) and (rank == 0) == (messages["failure"] == wanted), messages
            assert messages["afterwards"] == "True"

    def test_what_cannot_be_had(self):
        vae, ltx = TINY_VAES["kl"].build(), TINY_VAES["ltx"]
        noisy = dataclasses.replace(ltx, config=ltx.config | {"decoder_inject_noise": (True, False, False, False)})
        replaced = TINY_VAES["kl"].build()
        replaced.decode = replaced.decode
        cases = [
            (None, "first-rank", "has no VAE"),
            (AutoencoderTiny(), "tile", "does not know the tiles of AutoencoderTiny"),
            (noisy.build(), "tile", "AutoencoderKLLTXVideo draws noise (decoder_inject_noise)"),
            (replaced, "tile", "the decode of this AutoencoderKL was replaced"),
        ]
        for each, mode, message in cases:
            assert message in message_of(check_vae, SimpleNamespace(vae=each), mode)
        for each, mode in ((AutoencoderTiny(), "first-rank"), (noisy.build(), "first-rank"), (None, "replicate")):
            check_vae(SimpleNamespace(vae=each), mode)
        shared = TiledVAE(vae, Axis.single("replica"))
        assert "is parallel already" in message_of(check_vae, SimpleNamespace(vae=vae), "first-rank")
        shared.remove()
        check_vae(SimpleNamespace(vae=vae), "tile")


class TestPipelines(unittest.TestCase):
    def check(self, name: str, degrees: dict[str, int], mode: str, prompts: int = 1) -> list[int]:
        results = run_ranks(math.prod(degrees.values()), pipeline_worker, name, degrees, mode, prompts)
        for result in results:
            assert max(result["errors"]) <= FLOAT32_BAR and result["restored"], result
        return [result["tiles"] for result in results]

    def test_flux(self):
        tiles = self.check("flux", {"tp": 2}, "tile")
        assert sum(tiles) == 12 and min(tiles) >= 4, tiles

    def test_wan(self):
        tiles = self.check("wan", {"cfg": 2}, "tile")
        assert sum(tiles) == 9 and min(tiles) >= 4, tiles

    def test_first_rank(self):
        assert self.check("flux", {"ulysses": 2}, "first-rank") == [1, 0]

    @slow
    def test_replicas(self):
        tiles = self.check("flux", {"dp": 2, "tp": 2}, "tile", prompts=2)
        assert sum(tiles) == 24 and min(tiles) >= 4, tiles
        self.check("flux", {"dp": 2}, "tile", prompts=2)

    def test_modes_that_differ(self):
        for message in run_ranks(2, modes_differ_worker):
            assert "vae is 'tile' on rank 0 and 'first-rank' on rank 1" in message

    def test_one_rank(self):
        result = pipeline_worker("flux", {}, "tile")
        assert max(result["errors"]) <= FLOAT32_BAR and result["tiles"] == 12 and result["restored"], result


if __name__ == "__main__":
    unittest.main()
