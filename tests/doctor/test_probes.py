"""Probes of devices, for real on the CPU over Gloo, and what is made of what they find."""

import math

import pytest
import torch

from diffusers_rocm.doctor import kernel_work, probes, work
from diffusers_rocm.doctor.children import Outcome, run_ranks
from diffusers_rocm.doctor.finding import OK, PROBLEM, SKIPPED, WARNING
from diffusers_rocm.models.attention_kernels import KERNELS, Kernel, _math

from . import faulty
from .machines import CPU


BOTH = "export NCCL_P2P_DISABLE=1"
CPU_DEVICE = torch.device("cpu")


class TestOneRank:
    def test_nothing_to_exchange(self, monkeypatch):
        monkeypatch.setattr(probes, "kernels", lambda device, seconds: iter(()))
        found = list(probes.run_probes(CPU, "cpu", 1, 120, {}))
        assert {each.status for each in found} == {SKIPPED} and len(found) == 6


class TestCopies:
    def test_pattern(self):
        """One content is not another one that has moved, and no byte is always the same."""
        one, other = (work.pattern(1000, seed, CPU_DEVICE) for seed in (1, 2))
        assert (one != other).all() and (one[1:] != other[:-1]).all() and (one[1:] != one[:-1]).all()
        assert (one.view(torch.uint8).view(-1, 4).float().std(0) > 0).all()

    def test_right(self):
        assert work.wrong_elements(CPU_DEVICE, CPU_DEVICE, 1001, 3) == 0

    @pytest.mark.parametrize(
        "copy, wrong",
        [
            (lambda to, of: None, 1001),  # nothing arrives
            (lambda to, of: to.copy_(work.pattern(1001, 2, CPU_DEVICE)), 1001),  # what was sent before
            (lambda to, of: to.copy_(of.roll(1)), 1001),
            (lambda to, of: to[:-1].copy_(of[:-1]), 1),
            (lambda to, of: to.copy_(of).index_fill_(0, torch.tensor([7]), 0), 1),
        ],
    )
    def test_wrong(self, copy, wrong):
        assert work.wrong_elements(CPU_DEVICE, CPU_DEVICE, 1001, 3, copy) == wrong

    def test_findings(self):
        fine = [{"source": 0, "target": 1, "wrong": 0, "gigabytes": 20.0}]
        bad = [*fine, {"source": 1, "target": 0, "wrong": 3, "gigabytes": 20.0}]
        assert probes.copies(Outcome({0: fine}, ""), "cuda").status == OK
        found = probes.copies(Outcome({0: bad}, ""), "cuda")
        assert found.status == PROBLEM and found.fix == BOTH and "1 to 0 (3 elements)" in found.seen
        found = probes.copies(
            Outcome({0: fine}, "rank 0 hung at copying from device 1 to 0: killed after 60 s"), "cuda"
        )
        assert found.status == PROBLEM and "from device 1 to 0" in found.seen


def exchanged(gigabytes: float = 20.0, wrong: int = 0, failure: str = "", log: str = "") -> Outcome:
    names = [f"{name} of {size}" for size in ("1.0 MB", "28.3 MB") for name in ("all-reduce", "all-to-all")]
    each = {"wrong": dict.fromkeys(names, wrong), "gigabytes": dict.fromkeys(names, gigabytes)}
    return Outcome({0: each, 1: each}, failure, log)


P2P_LINE = "a:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM"
BAD_BUILD = "a:1:2 [0] NCCL INFO RCCL version : 2.27.7-HEAD:96a25b5"


class TestCollectives:
    @pytest.mark.parametrize(
        "which, what",
        [("all_reduce", "all-reduce"), ("_all_gather", "all-gather"), ("all_to_all_single", "all-to-all")],
    )
    def test_lost_contents(self, which, what):
        """A collective that ends, with one element wrong, is none that works; and only that one is named."""
        outcome = run_ranks(faulty.lossy_exchange, 2, {"work": work.__file__, "which": which}, 120)
        assert outcome.failure == ""
        found = probes.collectives(outcome, 2, "cpu")
        assert found.status == PROBLEM and f"{what} of 1.0 MB on rank 0 (1 elements)" in found.seen
        others = {"all-reduce", "all-gather", "all-to-all"} - {what}
        assert not any(f"{other} of" in found.seen for other in others)

    def test_findings(self):
        assert probes.collectives(exchanged(), 2, "cuda").status == OK
        failed = probes.collectives(
            exchanged(failure="rank 0 hung at all-reduce of 1.0 MB: killed after 9 s"), 2, "cuda"
        )
        assert failed.status == PROBLEM and "rank 0 hung" in failed.seen and failed.fix.startswith(BOTH)
        known = probes.collectives(exchanged(failure="rank 0 failed", log=BAD_BUILD), 2, "cuda")
        assert known.status == PROBLEM and "ROCm 7.2.1" in known.seen and "pip install" in known.fix
        assert probes.collectives(exchanged(log=BAD_BUILD), 2, "cuda").status == WARNING

    @pytest.mark.parametrize(
        "device, log, fix",
        [
            ("cpu", "", "unset GLOO_SOCKET_IFNAME; "),
            ("cuda", "", BOTH),
            ("cuda", "a:1:2 [0] NCCL WARN Bootstrap : no socket interface found", "unset NCCL_SOCKET_IFNAME "),
            ("cuda", "a:1:2 [0] NCCL WARN Failed to initialize any NET plugin", "unset NCCL_NET "),
            ("cuda", 'a:1:2 [0] NCCL WARN Unrecognized element token "foo" when parsing "foo"', "unset NCCL_ALGO "),
        ],
    )
    def test_fix_is_of_the_cause(self, device, log, fix):
        """Gloo has no P2P to be turned off, and what NCCL says that it lacks is not mended by that."""
        found = probes.collectives(exchanged(failure="rank 0 failed", log=log), 2, device)
        assert found.status == PROBLEM and found.fix.startswith(fix)

    def test_wrong_contents_on_a_cpu(self):
        assert "NCCL" not in probes.collectives(exchanged(wrong=1), 2, "cpu").fix
        row = {"source": 1, "target": 0, "wrong": 3, "gigabytes": 20.0}
        assert "NCCL" not in probes.copies(Outcome({0: [row]}, ""), "cpu").fix

    def test_bandwidth(self):
        assert probes.bandwidth(exchanged(0.5), "cuda").status == WARNING
        assert probes.bandwidth(exchanged(20), "cuda").status == OK
        assert probes.bandwidth(exchanged(0.5), "cpu").status == OK
        assert probes.bandwidth(exchanged(failure="rank 0 failed"), "cuda").status == SKIPPED

    @pytest.mark.parametrize(
        "outcome, control, status, seen",
        [
            (exchanged(failure="hung"), exchanged(), PROBLEM, "P2P is broken here"),
            (exchanged(wrong=1), exchanged(), PROBLEM, "P2P is broken here"),
            (exchanged(failure="hung"), exchanged(failure="hung"), PROBLEM, "it is not P2P"),
            (exchanged(failure="x", log=BAD_BUILD), exchanged(failure="x"), PROBLEM, "with and without P2P: RCCL of"),
            (exchanged(), exchanged(failure="hung"), WARNING, "fail without it, through shared memory: hung"),
            (exchanged(20, log=P2P_LINE), exchanged(5), OK, "all-reduce of 28.3 MB: 20.00 GB/s, 5.00 with"),
            (exchanged(5, log=P2P_LINE), exchanged(20), WARNING, "faster through the host's memory"),
            (exchanged(5), exchanged(5), OK, "not in use; "),
        ],
    )
    def test_control(self, outcome, control, status, seen):
        found = probes.peer_to_peer(outcome, control)
        assert found.status == status and seen in found.seen, found
        if seen == "P2P is broken here":
            assert found.fix == BOTH


def log2_lse(q, k, v, mask, scale, is_causal):
    out, lse = _math(q, k, v, mask, scale, is_causal)
    return out, lse / math.log(2)


def without_mask(q, k, v, mask, scale, is_causal):
    return _math(q, k, v, None, scale, is_causal)


def refuses(q, k, v, mask, scale, is_causal):
    raise RuntimeError("no kernel image\nis available")


def not_a_number(q, k, v, mask, scale, is_causal):
    out, lse = _math(q, k, v, mask, scale, is_causal)
    return out * math.nan, lse


class TestKernels:
    @pytest.mark.parametrize(
        "run, seen",
        [
            (log2_lse, "bfloat16 is wrong"),
            (without_mask, "bfloat16 masked is wrong"),
            (refuses, "bfloat16: no kernel image is available"),
            (not_a_number, "bfloat16 is wrong"),
        ],
    )
    def test_wrong(self, run, seen):
        rows = kernel_work._try(Kernel("bad", run), CPU_DEVICE, torch.bfloat16)
        found = probes.kernel("bad", {"tried": rows})
        assert found.status == PROBLEM and found.seen.startswith(seen), found

    def test_layout_that_is_not_what_the_kernel_says(self):
        rows = kernel_work._try(Kernel("bad", _math, heads_first=False), CPU_DEVICE, torch.float32)
        assert probes.kernel("bad", {"tried": rows}).status == PROBLEM

    def test_no_lse_is_no_fault(self):
        def run(*args):
            return _math(*args)[0], None

        rows = kernel_work._try(Kernel("plain", lambda *args: run(*args)), CPU_DEVICE, torch.float32)
        assert probes.kernel("plain", {"tried": rows}).status == OK

    def test_one_that_crashes(self, monkeypatch):
        """Those after it are tried all the same."""
        assert faulty.KERNELS == tuple(KERNELS)
        monkeypatch.setattr(kernel_work, "try_kernels", faulty.crashing_kernel)
        found = {each.name.removeprefix("attention "): each for each in probes.kernels("cpu", 100)}
        assert set(found) == set(KERNELS)
        assert found.pop("flash_cpu").seen == "rank 0 was killed by SIGSEGV at kernel flash_cpu"
        assert {each.status for each in found.values()} == {SKIPPED}

    def test_none_begins(self, monkeypatch):
        monkeypatch.setattr(kernel_work, "try_kernels", faulty.refuse_to_begin)
        (found,) = probes.kernels("cpu", 100)
        assert found.status == PROBLEM and "no luck" in found.seen


class TestSdpa:
    @pytest.mark.parametrize(
        "answers, status",
        [
            ({"flash": "", "efficient": ""}, OK),
            ({"flash": "", "efficient": "no"}, OK),
            ({"flash": "no", "efficient": "no"}, WARNING),
            (
                {
                    "flash": "Flash Efficient attention on Current AMD GPU is still experimental. Enable it with "
                    "TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL=1.",
                    "efficient": "",
                },
                WARNING,
            ),
        ],
    )
    def test_findings(self, answers, status):
        found = probes.sdpa(Outcome({0: answers}, ""))
        assert found.status == status
        assert ("export TORCH_ROCM" in found.fix) == ("experimental" in answers["flash"])


class TestAskTorch:
    def test_this_one(self):
        build, failure = probes.ask_torch(120)
        assert failure == "" and build.version == torch.__version__ and build.hip == torch.version.hip
        assert len(build.devices) == torch.cuda.device_count()

    def test_one_that_crashes(self, monkeypatch):
        monkeypatch.setattr(work, "ask_torch", faulty.abort)
        build, failure = probes.ask_torch(60)
        assert failure == "rank 0 was killed by SIGABRT at the collective" and build.version == torch.__version__
