"""Loading, offloading, quantisation and LoRA, each with each way of being parallel; docs/memory.md has the table."""

import importlib.util
import itertools
import unittest

import diffusers
import pytest
from packaging.version import Version
from parameterized import parameterized


pytest.importorskip("torchao", minversion="0.16.0")
pytest.importorskip("peft")

from ..testing_utils import slow  # noqa: E402
from .testing_utils.features import DYNAMIC, FEATURES, KINDS, MESHES, PIPELINES, run  # noqa: E402
from .testing_utils.parallelism import FLOAT32_BAR  # noqa: E402


# Of how far the quantised model of one process is from float32.
QUALITY_BAR = 1.1


ALL = "TP 2 x Ulysses 2"
OTHERS = [mesh for mesh in MESHES if mesh != ALL]


class TestFeatures(unittest.TestCase):
    @parameterized.expand(FEATURES)
    def test_feature(self, name):
        self.check(name, ALL)

    @parameterized.expand(itertools.product(FEATURES, OTHERS))
    @slow
    def test_feature_on_another_mesh(self, name, mesh):
        self.check(name, mesh)

    def check(self, name, mesh):
        feature = FEATURES[name]
        if feature.needs and importlib.util.find_spec(feature.needs) is None:
            self.skipTest(f"needs {feature.needs}")
        if "group offload" in name and Version(diffusers.__version__) < Version("0.42"):
            self.skipTest("diffusers before 0.42 offloads nothing without an accelerator")
        for result in run(name, mesh):
            if feature.refused and "tp" in MESHES[mesh]:
                assert feature.refused in result["refused"], result
                continue
            if feature.rounds and ("tp" in MESHES[mesh] or any(kind in name for kind in DYNAMIC)):
                assert result["error"] <= QUALITY_BAR * result["own"], result
            else:
                assert result["error"] <= FLOAT32_BAR, result
            quantized = any(kind in name for kind in KINDS)
            changes = quantized or "LoRA" in name or "DoRA" in name or feature.needs is not None
            assert (result["own"] > 1e-3) == changes, result
            assert (result["quantized"] > 10) == quantized, result
            assert (feature.unsaved or "") in result["unsaved"], result
            assert bool(feature.unsaved) == bool(result["unsaved"]), result
            assert feature.unsaved or result["saved"] <= FLOAT32_BAR, result
            if feature.not_whole and "tp" in MESHES[mesh]:
                assert feature.not_whole in result["not_whole"], result
            else:
                assert result["not_whole"] == "" and result["whole"] <= FLOAT32_BAR, result

    @parameterized.expand(PIPELINES)
    def test_pipeline(self, name):
        self.check_pipeline(name, "TP 2")

    @parameterized.expand([(name, mesh) for name in PIPELINES for mesh in MESHES if mesh != "TP 2"])
    @slow
    def test_pipeline_on_another_mesh(self, name, mesh):
        self.check_pipeline(name, mesh)

    def check_pipeline(self, name, mesh):
        for result in run(name, mesh):
            assert result["error"] <= FLOAT32_BAR, result


if __name__ == "__main__":
    unittest.main()
