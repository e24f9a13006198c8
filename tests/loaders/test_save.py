"""Saving a sharded model: one tensor in memory at a time, and nothing lost where the disk says no."""

import resource
import tempfile
import unittest
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from diffusers import FluxTransformer2DModel
from parameterized import parameterized
from torch.distributed.device_mesh import init_device_mesh

from diffusers_rocm import TensorParallelConfig
from diffusers_rocm.loaders import save

from ..models.testing_utils.parallelism import _clone_state, _same_state
from ..models.transformers.test_models_transformer_flux import FluxTransformerTesterConfig
from ..testing_utils import run_ranks


def sharded_model(seed: int = 0, mesh=None) -> tuple[FluxTransformer2DModel, dict[str, torch.Tensor]]:
    model = FluxTransformerTesterConfig().get_model(seed)
    state = _clone_state(model)
    config = TensorParallelConfig(mesh=mesh) if mesh is not None else TensorParallelConfig(tp=dist.get_world_size())
    model.enable_parallelism(config=config)
    return model, state


def one_tensor_worker(folder: str) -> int:
    """The most full tensors that were ever alive together on this rank."""
    model, _ = sharded_model()
    alive, most = [], 0
    gather = save.gather_parameter

    def watched(*args, **kwargs):
        nonlocal most
        tensor = gather(*args, **kwargs)
        if tensor is not None:
            alive.append(weakref.ref(tensor))
        most = max(most, sum(ref() is not None for ref in alive))
        return tensor

    save.gather_parameter = watched
    try:
        model.save_pretrained(folder)
    finally:
        save.gather_parameter = gather
    return most


def full_disk_worker(folder: str, most: int) -> tuple[str, bool, list[str]]:
    """Rank 0 may write no file over `most` bytes: the error on this rank; is the checkpoint from before still good?"""
    before, state = sharded_model(seed=1)
    before.save_pretrained(folder)
    model, _ = sharded_model(seed=2)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, limits[1]))
    try:
        with pytest.raises(OSError) as caught:
            model.save_pretrained(folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    files = sorted(file.name for file in Path(folder).iterdir())
    return str(caught.value), _same_state(FluxTransformer2DModel.from_pretrained(folder), state), files


def mesh_worker(folder: str) -> bool:
    """On a (dp, tp) mesh one of the groups writes."""
    model, state = sharded_model(mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")))
    model.save_pretrained(folder, variant="fp32")
    return _same_state(FluxTransformer2DModel.from_pretrained(folder, variant="fp32"), state)


def replaced_worker(folder: str) -> bool:
    """A small checkpoint over one of many files: the files of the old one are gone, and the new one is read."""
    old, _ = sharded_model(seed=1)
    old.save_pretrained(folder, max_shard_size="1MB")
    new, state = sharded_model(seed=2)
    new.save_pretrained(folder)
    return _same_state(FluxTransformer2DModel.from_pretrained(folder), state)


def size_worker(folder: str) -> str:
    model, _ = sharded_model(mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")))
    with pytest.raises(ValueError) as caught:
        model.save_pretrained(folder, max_shard_size="large")
    return str(caught.value)


def options_worker(folder: str) -> str:
    model, _ = sharded_model()
    with pytest.raises(ValueError) as caught:
        model.save_pretrained(folder, safe_serialization=False)
    return str(caught.value)


class TestSave(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name

    def test_one_tensor_at_a_time(self):
        assert run_ranks(2, one_tensor_worker, self.folder) == [1, 0]

    # Full in the middle of a large tensor, and where small ones are in the file's buffer still.
    @parameterized.expand([(100_000,), (3_678_000,)])
    def test_full_disk(self, most):
        first, second = run_ranks(2, full_disk_worker, self.folder, most)
        assert "File too large" in first[0] and "rank 0 could not save" in second[0], (first, second)
        for _, good, files in (first, second):
            assert good and files == ["config.json", "diffusion_pytorch_model.safetensors"], files

    def test_mesh_of_several_axes(self):
        assert run_ranks(4, mesh_worker, self.folder) == [True] * 4
        assert sorted(file.name for file in Path(self.folder).iterdir()) == [
            "config.json",
            "diffusion_pytorch_model.fp32.safetensors",
        ]

    def test_files_of_an_earlier_checkpoint(self):
        assert run_ranks(2, replaced_worker, self.folder) == [True, True]
        assert len(list(Path(self.folder).iterdir())) == 2

    def test_a_size_that_is_none_is_said_on_all_ranks(self):
        for message in run_ranks(4, size_worker, self.folder):
            assert "large" in message, message

    def test_options_that_cannot_be_had(self):
        for message in run_ranks(2, options_worker, self.folder):
            assert "disable_parallelism" in message


if __name__ == "__main__":
    unittest.main()
