"""Loading, offloading, quantisation and LoRA, each with each way of being parallel; docs/memory.md has the table."""

import itertools
import math
import tempfile
import unittest

import diffusers
import pytest
import torch
from packaging.version import Version
from parameterized import parameterized


pytest.importorskip("torchao", minversion="0.15.0")
pytest.importorskip("peft")

from ..testing_utils import run_ranks  # noqa: E402
from .testing_utils.features import CONFIG, FEATURES, MESHES, PIPELINES, feature_worker, pipeline_worker  # noqa: E402
from .testing_utils.parallelism import FLOAT32_BAR  # noqa: E402


# Of how far the quantised model of one process is from float32.
QUALITY_BAR = 1.1


class TestFeatures(unittest.TestCase):
    @parameterized.expand(itertools.product(FEATURES, MESHES))
    def test_feature(self, name, mesh):
        feature, degrees = FEATURES[name], MESHES[mesh]
        if "group offload" in name and Version(diffusers.__version__) < Version("0.42"):
            self.skipTest("diffusers before 0.42 offloads nothing without an accelerator")
        with tempfile.TemporaryDirectory() as folder:
            CONFIG.get_model().save_pretrained(folder)
            results = run_ranks(math.prod(degrees.values()), feature_worker, name, degrees, folder)
        for result in results:
            rounds = feature.rounds and "tp" in degrees
            if feature.refused is not None:
                assert feature.refused in result["refused"], result
                continue
            if rounds:
                assert result["error"] <= QUALITY_BAR * result["own"], result
            else:
                assert result["error"] <= FLOAT32_BAR, result
            assert (result["own"] > 1e-3) == ("int8" in name or "LoRA" in name), result  # it changes something
            assert (result["quantized"] > 10) == ("int8" in name), result
            assert (feature.unsaved or "") in result["unsaved"] and bool(feature.unsaved) == bool(result["unsaved"]), (
                result
            )
            assert result.get("saved", 0) <= FLOAT32_BAR, result
            if feature.not_whole and "tp" in degrees:
                assert feature.not_whole in result["not_whole"], result
            else:
                assert result["not_whole"] == "" and result["whole"] <= FLOAT32_BAR, result

    @parameterized.expand(itertools.product(PIPELINES, MESHES))
    def test_pipeline(self, name, mesh):
        degrees = MESHES[mesh]
        for result in run_ranks(math.prod(degrees.values()), pipeline_worker, name, degrees):
            assert result["error"] <= FLOAT32_BAR, result


if __name__ == "__main__":
    torch.set_num_threads(1)
    unittest.main()
