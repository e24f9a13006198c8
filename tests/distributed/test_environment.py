"""What ranks are started with, by their GPUs."""

import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

from parameterized import parameterized

from diffusers_rocm.distributed import environment
from diffusers_rocm.distributed.environment import SETTINGS, prepare, unset, visible_archs


RADEON = {"TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL": "1", "MIOPEN_FIND_MODE": "FAST"}
INSTINCT = {
    "GPU_MAX_HW_QUEUES": "2",
    "TORCH_NCCL_HIGH_PRIORITY": "1",
    "HIP_FORCE_DEV_KERNARG": "1",
    "HSA_NO_SCRATCH_RECLAIM": "1",
}

# Starts one rank of a node that seems to have a gfx1100; the rank prints its own environment, before any torch.
LAUNCH = """
import sys
from diffusers_rocm.distributed import environment
from diffusers_rocm.distributed.launching import launch
environment.visible_archs = lambda: {"gfx1100"}
names = ["TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL", "MIOPEN_FIND_MODE", "GPU_MAX_HW_QUEUES"]
show = f"import os, sys; print([os.environ.get(name) for name in {names}], 'torch' in sys.modules)"
sys.exit(launch(1, ["timeit", "-n1", "-r1", show]))
"""


class TestEnvironment(unittest.TestCase):
    @parameterized.expand(
        [
            ("gfx1100", 2, RADEON),
            ("gfx1102", 1, RADEON),
            ("gfx1201", 4, RADEON | {"PYTORCH_MIOPEN_SUGGEST_NHWC": "1"}),
            ("gfx1150", 1, {"TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL": "1"}),
            ("gfx1151", 4, {"TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL": "1"}),
            ("gfx942", 8, INSTINCT),
            ("gfx942", 4, INSTINCT | {"NCCL_MIN_NCHANNELS": "32"}),
            ("gfx942", 1, INSTINCT),
            ("gfx950", 4, INSTINCT),
            ("gfx906", 4, {}),
            ("sm_90", 4, {}),
        ]
    )
    def test_by_architecture(self, arch, ranks, wanted):
        assert {setting.name: setting.value for setting in unset({arch}, ranks, {})} == wanted

    def test_what_is_set_stays(self):
        found = unset({"gfx1100"}, 2, {"MIOPEN_FIND_MODE": "NORMAL"})
        assert [setting.name for setting in found] == ["TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL"]
        with mock.patch.dict("os.environ", MIOPEN_FIND_MODE="NORMAL") as variables:
            with mock.patch.object(environment, "visible_archs", return_value={"gfx1100"}):
                with self.assertLogs("diffusers_rocm", "INFO") as logs:
                    prepare(2, None)
            assert variables["MIOPEN_FIND_MODE"] == "NORMAL"
            assert variables["TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL"] == "1"
        assert len(logs.output) == 1 and "TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL=1: " in logs.output[0]

    def test_a_mixed_node_gets_what_each_wants_and_the_table_is_one(self):
        assert {setting.name for setting in unset({"gfx1100", "gfx942"}, 8, {})} == RADEON.keys() | INSTINCT.keys()
        assert len({setting.name for setting in SETTINGS}) == len(SETTINGS)
        assert all(setting.why and setting.source for setting in SETTINGS)

    def test_without_rocm_there_is_none(self):
        with mock.patch("torch.version.hip", None):
            assert visible_archs() == set()
        properties = mock.Mock(gcnArchName="gfx942:sramecc+:xnack-")
        with mock.patch("torch.version.hip", "7.0"), mock.patch("torch.cuda.device_count", return_value=2):
            with mock.patch("torch.cuda.get_device_properties", return_value=properties):
                assert visible_archs() == {"gfx942"}

    def test_the_ranks_have_it_before_torch(self):
        root = Path(__file__).parents[2]
        result = subprocess.run([sys.executable, "-c", LAUNCH], cwd=root, capture_output=True, text=True, timeout=120)
        assert "['1', 'FAST', None] False" in result.stdout, result.stdout + result.stderr

    def test_the_flight_recorder_dumps_among_the_logs(self):
        with tempfile.TemporaryDirectory() as folder, mock.patch.dict("os.environ") as variables:
            prepare(2, Path(folder))
            assert variables["TORCH_FR_DUMP_TEMP_FILE"].startswith(folder)
            assert variables["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1" and int(variables["TORCH_FR_BUFFER_SIZE"]) > 0


if __name__ == "__main__":
    unittest.main()
