"""One rank differs, fails, is killed or stopped: all ranks end, soon, and the user reads why."""

import json
import re
import time
import unittest

import pytest
from parameterized import parameterized

from diffusers_rocm.distributed.launching import launch

from ..distributed.test_launching import alive, pids
from ..testing_utils import in_process, run_ranks, slow
from .faulty_rank import run


TIMEOUT = 8.0
MESHES = [{"tp": 2}, {"cfg": 2}, {"ring": 2}, {"dp": 2}]

# What every rank says where ranks differ; replicas (dp) compare the arguments of the call.
ON_ALL = {
    "dtype": r"different models: \S+ is '\[.*\] float32' on rank 0 and '\[.*\] bfloat16' on rank 1$",
    "degrees": r"different configs: (dp|cfg|ring|tp|ulysses) is -?\d on rank 0 and -?\d on rank 1$",
    "rotate_method": r"different configs: rotate_method is 'p2p' on rank 0 and 'allgather' on rank 1$",
    "rank_check": r"different arguments of parallelize\(\): rank_check is 'first' on rank 0 and 'off' on rank 1$",
    "generator": r"different generators \(seed 0 on rank 0, none on rank 1\); give all the same, or none$",
}
INPUTS = "different inputs to FluxTransformer2DModel"
IN_REPLICA = ON_ALL | {
    "timestep": INPUTS + r": timestep is \[1\] float32 \(1; norm 1\) on rank 0 and .*\(0\.99; norm 0\.99\) on rank 1$",
    "prompt": INPUTS + r": encoder_hidden_states is \[1, 11, 32\] float32 \(.*\) on rank 0 and \[1, .*\) on rank 1$",
    "dtype of the prompt": INPUTS
    + r": hidden_states is \[.*\] float32 .* on rank 0 and \[.*\] bfloat16 .* on rank 1$",
    "steps": r"different schedules: the number of steps is 3 on rank 0 and 4 on rank 1$",
    "resolution": INPUTS + r": hidden_states is \[1, 35, 16\] .* on rank 0 and \[1, 28, 16\] .* on rank 1$",
}
OF_REPLICAS = ON_ALL | {
    "prompt": r"different arguments: prompt_embeds is \[2, 11, 32\] .* on rank 0 and \[2, 11, 32\] .* on rank 1$",
    "dtype of the prompt": r"different arguments: prompt_embeds is .* float32 .* bfloat16 .* on rank 1$",
    "steps": r"different arguments: num_inference_steps is 3 on rank 0 and 4 on rank 1$",
    "resolution": r"different arguments: height is 80 on rank 0 and 64 on rank 1$",
}

# What the launcher's last line says.
LAST_LINES = {
    "exception": r"rank {faulty} failed: RuntimeError: the cause of it all",
    "SIGKILL": r"rank {faulty} was killed by SIGKILL \(out of host memory\?\)",
    "SIGSTOP": r"ranks? [\d, ]+ waited 8 s for rank {faulty}: stopped, hung, or only slow\? --timeout .* longer",
}


def messages_worker(degrees: dict[str, int], faults: list[str], rank_check: str = "first") -> dict[str, str]:
    messages = {}
    for fault in faults:
        with pytest.raises(ValueError) as caught:
            run(fault, degrees, faulty=1, rank_check=rank_check)
        messages[fault] = str(caught.value)
    return messages


class TestRankFaults(unittest.TestCase):
    @parameterized.expand([(next(iter(degrees)), degrees) for degrees in MESHES])
    def test_ranks_that_differ_say_in_what(self, name, degrees):
        wanted = OF_REPLICAS if name == "dp" else IN_REPLICA
        for messages in run_ranks(2, messages_worker, degrees, list(wanted)):
            for fault, pattern in wanted.items():
                assert re.search(pattern, messages[fault]), (fault, messages[fault])

    def test_every_step_can_be_compared(self):
        for messages in run_ranks(2, messages_worker, {"tp": 2}, ["a later timestep"], "always"):
            assert re.search(INPUTS + r": timestep is \[1\]", messages["a later timestep"]), messages

    def check_last_line(self, fault: str, degrees: dict[str, int], last_line: str) -> None:
        """Start real ranks of which the last has a fault; check all that the user sees of it."""
        world = 4 if len(degrees) > 1 else 2
        arguments = (fault, json.dumps(degrees), str(world - 1), str(TIMEOUT))
        result = in_process(lambda: launch(world, ["tests.hooks.faulty_rank", *arguments]))
        out, err = result.stdout, result.stderr
        began = max(map(float, re.findall(r"begins at (\S+)", out)), default=0.0)
        assert time.time() - began < TIMEOUT + 20, err
        assert result.returncode == 1, err
        assert re.fullmatch("diffusers-rocm: " + last_line.format(faulty=world - 1), err.strip().splitlines()[-1]), err
        if fault == "SIGSTOP":  # the error itself is there as well
            assert "Timed out waiting 8000ms" in err, err
        assert len(pids(out)) == world and not any(alive(pid) for pid in pids(out)), out

    def test_the_last_line(self):
        self.check_last_line("SIGSTOP", {"tp": 2}, LAST_LINES["SIGSTOP"])

    @slow
    def test_the_last_line_of_groups_that_are_parts_of_the_world(self):
        self.check_last_line("SIGSTOP", {"cfg": 2, "tp": 2}, LAST_LINES["SIGSTOP"])

    @parameterized.expand(
        [
            (f"{fault} {name}", fault, degrees, pattern)
            for degrees in MESHES
            for name in degrees
            for fault, pattern in (LAST_LINES | (OF_REPLICAS if name == "dp" else IN_REPLICA)).items()
        ]
    )
    @slow
    def test_each_last_line(self, name, fault, degrees, pattern):
        said = "" if fault in LAST_LINES else r"rank \d failed: ValueError: the ranks were (given )?"
        self.check_last_line(fault, degrees, said + pattern.removesuffix("$"))


if __name__ == "__main__":
    unittest.main()
