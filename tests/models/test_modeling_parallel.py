"""Configs, meshes and every error of `enable_parallelism`."""

import unittest

import diffusers
import torch
from diffusers import FluxTransformer2DModel, UNet2DModel
from parameterized import parameterized
from torch.distributed.device_mesh import init_device_mesh

from diffusers_rocm import TensorParallelConfig, verify_plan
from diffusers_rocm.hooks.tensor_parallel import sharded_modules

from ..testing_utils import message_of, relative_l2, run_ranks
from .testing_utils.parallelism import FLOAT32_BAR
from .transformers.test_models_transformer_flux import FLUX_INIT, FluxTransformerTesterConfig


def tiny_flux(**changes) -> FluxTransformer2DModel:
    return FluxTransformer2DModel(**{**FLUX_INIT, "num_layers": 1, "num_single_layers": 1, **changes})


class TestTensorParallelConfig(unittest.TestCase):
    def test_tp_and_its_alias(self):
        assert TensorParallelConfig(4).tp == TensorParallelConfig(tp=4).tp_degree == 4
        assert TensorParallelConfig(tp_degree=4).tp == 4
        assert TensorParallelConfig(tp=2, tp_degree=2).tp == 2
        assert TensorParallelConfig().tp == 1
        assert repr(TensorParallelConfig(tp=3)) == "TensorParallelConfig(tp=3)"

    def test_it_is_one_of_diffusers_where_diffusers_has_one(self):
        theirs = getattr(diffusers, "TensorParallelConfig", None)
        assert theirs is None or issubclass(TensorParallelConfig, theirs)

    @parameterized.expand([({"tp": 2, "tp_degree": 4}, ("tp=2", "tp_degree=4")), ({"tp": 0}, ("at least 1", "0"))])
    def test_contradictions(self, arguments, parts):
        message = message_of(TensorParallelConfig, **arguments)
        assert all(part in message for part in parts), message

    @parameterized.expand([(-1,), (2.0,), ("2",), (True,)])
    def test_not_a_number_of_ranks(self, value):
        assert repr(value) in message_of(TensorParallelConfig, tp=value)
        assert repr(value) in message_of(TensorParallelConfig, tp_degree=value)


def errors_worker() -> dict[str, str]:
    """Everything that two ranks must refuse; the model must be usable after each refusal."""
    model = tiny_flux()
    messages = {}

    def refuse(name: str, model, config) -> None:
        messages[name] = message_of(model.enable_parallelism, config=config)
        assert getattr(model, "parallelism", None) is None and next(sharded_modules(model), None) is None

    refuse("world", model, TensorParallelConfig(tp=3))
    refuse("heads", tiny_flux(num_attention_heads=1), TensorParallelConfig(tp=2))
    refuse("class", UNet2DModel(block_out_channels=(32, 64, 64, 64)), TensorParallelConfig(tp=2))
    with torch.device("meta"):
        refuse("meta", tiny_flux(), TensorParallelConfig(tp=2))
    broken = tiny_flux()
    broken.transformer_blocks[0].ff = torch.nn.Identity()
    refuse("module", broken, TensorParallelConfig(tp=2))
    different = tiny_flux(num_layers=1 + torch.distributed.get_rank())
    refuse("models", different, TensorParallelConfig(tp=2))

    messages["not a mesh"] = message_of(TensorParallelConfig, mesh="tp")
    messages["cp_plan"] = message_of(model.enable_parallelism, config=TensorParallelConfig(tp=2), cp_plan={"": {}})
    messages["2d mesh"] = message_of(TensorParallelConfig, mesh=init_device_mesh("cpu", (1, 2)))
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    messages["mesh size"] = message_of(TensorParallelConfig, tp=4, mesh=mesh)

    model.enable_parallelism(config=TensorParallelConfig(tp=2))
    messages["verify"] = message_of(verify_plan, model, 2)
    messages["twice"] = message_of(model.enable_parallelism, config=TensorParallelConfig(tp=2))
    theirs = diffusers.ContextParallelConfig(ulysses_degree=2)
    messages["theirs"] = message_of(model.enable_parallelism, config=theirs)
    model.disable_parallelism()
    messages["disabled"] = message_of(model.disable_parallelism)
    return messages


def idle_worker() -> str:
    return message_of(tiny_flux().enable_parallelism, config=TensorParallelConfig(tp=2))


@torch.no_grad()
def mesh_worker(shape: tuple[int, ...], names: tuple[str, ...]) -> tuple[float, int, int]:
    """A user's own mesh; every tp group computes for itself."""
    config = FluxTransformerTesterConfig()
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    model, inputs = config.get_model(), config.get_dummy_inputs(1)
    reference = config.get_output(model, inputs)
    model.enable_parallelism(config=TensorParallelConfig(mesh=mesh))
    error = relative_l2(config.get_output(model, inputs), reference)
    return error, model.parallelism.axes.tp.size, model.transformer_blocks[0].attn.heads


@torch.no_grad()
def one_rank_worker() -> bool:
    """tp=1 changes nothing and asks no other rank anything: only rank 0 goes through here."""
    config = FluxTransformerTesterConfig()
    model, inputs = config.get_model(), config.get_dummy_inputs(1)
    reference = config.get_output(model, inputs)
    if torch.distributed.get_rank() == 0:
        model.enable_parallelism(config=TensorParallelConfig(tp=1))
        output = config.get_output(model, inputs)
        model.disable_parallelism()
        return torch.equal(output, reference)
    return True


class TestEnableParallelism(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.messages, other = run_ranks(2, errors_worker)
        assert cls.messages == other

    @parameterized.expand(
        [
            ("world", ("tp=3", "2 rank", "ParallelConfig(tp=2)")),
            ("heads", ("tp=2", "1 attention head", "tp <= 1")),
            ("class", ("UNet2DModel has no tensor-parallel plan", "the nearest classes with one: ")),
            ("meta", ("meta", "from_pretrained")),
            ("module", ("FluxTransformer2DModel", "transformer_blocks.*.ff.net.0.proj")),
            ("models", ("different models",)),
            ("not a mesh", ("DeviceMesh", "str")),
            ("cp_plan", ("cp_plan", "tp=2")),
            ("2d mesh", ("'tp'", "no names")),
            ("mesh size", ("tp=4", "2 ranks")),
            ("verify", ("sharded already",)),
            ("twice", ("parallel already", "tp=2", "disable_parallelism")),
            ("theirs", ("parallel already", "disable_parallelism")),
            ("disabled", ("not parallel",)),
        ]
    )
    def test_message(self, name, parts):
        assert all(part in self.messages[name] for part in parts), self.messages[name]

    def test_no_process_group(self):
        message = message_of(tiny_flux().enable_parallelism, config=TensorParallelConfig(tp=2))
        assert "tp=2" in message and "torchrun" in message, message

    def test_idle_ranks(self):
        for message in run_ranks(4, idle_worker):
            assert "tp=2, but 4 rank(s)" in message and "ParallelConfig(dp=2, tp=2)" in message, message

    def test_one_rank_communicates_nothing(self):
        assert all(run_ranks(2, one_rank_worker))

    def test_one_rank_without_a_process_group(self):
        config = FluxTransformerTesterConfig()
        model, inputs = config.get_model(), config.get_dummy_inputs(1)
        with torch.no_grad():
            reference = config.get_output(model, inputs)
            model.enable_parallelism(config=TensorParallelConfig(tp=1))
            assert torch.equal(config.get_output(model, inputs), reference)

    @parameterized.expand(
        [((2,), ("x",), 2), ((2, 2), ("dp", "tp"), 2), ((2, 2), ("tp", "dp"), 2), ((1, 3), ("dp", "tp"), 3)]
    )
    def test_own_mesh(self, shape, names, tp):
        world = torch.Size(shape).numel()
        for error, size, heads in run_ranks(world, mesh_worker, shape, names):
            assert error <= FLOAT32_BAR and size == tp and heads <= -(-8 // tp), (error, size, heads)


if __name__ == "__main__":
    unittest.main()
