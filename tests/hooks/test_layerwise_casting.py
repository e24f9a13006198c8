"""Layerwise casting (weights stored in float8) before and after a model is made parallel, against one process."""

import unittest

import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module, remove_hook_from_module
from diffusers.hooks import apply_layerwise_casting
from parameterized import parameterized

from diffusers_rocm import ParallelConfig, parallelize

from ..models.testing_utils.parallelism import FLOAT32_BAR
from ..models.transformers.test_models_transformer_flux import FluxTransformerTesterConfig
from ..pipelines.testing_utils import PIPELINES, build, latents
from ..testing_utils import relative_l2, run_ranks


def cast(model: torch.nn.Module, everything: bool) -> None:
    """Into float8; of all layers if `everything`, else without the norms and their modulation, as is the default."""
    dtypes = {"storage_dtype": torch.float8_e4m3fn, "compute_dtype": torch.float32}
    if everything:
        apply_layerwise_casting(model, **dtypes, skip_modules_pattern=())
    else:
        model.enable_layerwise_casting(**dtypes)


def stored(model: torch.nn.Module) -> set[torch.dtype]:
    return {parameter.dtype for path, parameter in model.named_parameters() if path.endswith("to_q.weight")}


def casting_worker(name: str, mesh: dict, cast_first: bool, everything: bool) -> list[float]:
    """Errors of a whole loop, and of one after parallelism is disabled."""
    arguments, single, pipe = PIPELINES[name].call(), build(name), build(name)
    cast(single.transformer, everything)
    wanted = latents(single, arguments)
    if cast_first:
        cast(pipe.transformer, everything)
    parallelize(pipe, ParallelConfig(**mesh))
    if not cast_first:
        cast(pipe.transformer, everything)
    errors = [relative_l2(latents(pipe, arguments), wanted)]
    assert stored(pipe.transformer) == {torch.float8_e4m3fn}
    pipe.transformer.disable_parallelism()
    assert stored(pipe.transformer) == {torch.float8_e4m3fn}
    for (path, one), other in zip(single.transformer.named_parameters(), pipe.transformer.parameters(), strict=True):
        assert torch.equal(one.float(), other.float()), path
    return [*errors, relative_l2(latents(pipe, arguments), wanted)]


@torch.no_grad()
def other_weights_worker(mesh: dict) -> float:
    """Ranks with other weights, in float8 already, take the first one's."""
    config = FluxTransformerTesterConfig()
    model, single = config.get_model(seed=torch.distributed.get_rank()), config.get_model(seed=0)
    inputs = config.get_inputs(1)
    for each in (model, single):
        cast(each, everything=False)
    model.enable_parallelism(config=ParallelConfig(**mesh))
    return relative_l2(config.get_output(model, inputs), config.get_output(single, inputs))


@torch.no_grad()
def accelerate_worker(hook_first: bool) -> list[float]:
    """Hooks of accelerate on every Linear, which put their own forward in place of the module's."""
    config = FluxTransformerTesterConfig()
    model, inputs = config.get_model(), config.get_inputs(1)
    wanted = config.get_output(model, inputs)

    def hang() -> None:
        for module in model.modules():
            if isinstance(module, torch.nn.Linear):
                add_hook_to_module(module, AlignDevicesHook(execution_device="cpu"))

    if hook_first:
        hang()
    model.enable_parallelism(config=ParallelConfig(tp=2))
    if not hook_first:
        hang()
    errors = [relative_l2(config.get_output(model, inputs), wanted)]
    model.disable_parallelism()
    errors.append(relative_l2(config.get_output(model, inputs), wanted))
    remove_hook_from_module(model, recurse=True)
    return [*errors, relative_l2(config.get_output(model, inputs), wanted)]


CASES = [
    (name, mesh, cast_first, everything)
    for name, mesh, everything in (
        ("flux", {"tp": 2}, False),
        ("flux", {"tp": 2}, True),
        ("flux", {"ring": 2}, False),
        ("wan", {"tp": 2}, False),
        ("wan", {"ulysses": 2}, False),
        ("wan", {"cfg": 2}, False),
    )
    for cast_first in (True, False)
]


class TestLayerwiseCasting(unittest.TestCase):
    @parameterized.expand(CASES)
    def test_whole_loop(self, *case):
        for errors in run_ranks(2, casting_worker, *case):
            assert max(errors) <= FLOAT32_BAR, errors

    @parameterized.expand([({"tp": 2},), ({"ring": 2},)])
    def test_other_weights(self, mesh):
        for error in run_ranks(2, other_weights_worker, mesh):
            assert error <= FLOAT32_BAR

    @parameterized.expand([(True,), (False,)])
    def test_hooks_of_accelerate(self, hook_first):
        for errors in run_ranks(2, accelerate_worker, hook_first):
            assert max(errors) <= FLOAT32_BAR, errors


if __name__ == "__main__":
    unittest.main()
