"""The arithmetic of shards: every element exactly once, whatever the sizes."""

import unittest

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diffusers_rocm.distributed.sharding import Block, Shard, granule


blocks = st.builds(lambda count, unit: Block(count * unit, unit), st.integers(1, 30), st.sampled_from([1, 3, 16, 64]))


class TestSharding(unittest.TestCase):
    @given(st.lists(blocks, min_size=1, max_size=5), st.integers(1, 9), st.sampled_from([0, 1]))
    @settings(max_examples=200, deadline=None)
    def test_take_and_put_are_inverse(self, blocks, world, dim):
        shard = Shard(dim, tuple(blocks))
        shape = [5, 5]
        shape[dim] = sum(block.size for block in blocks)
        full = torch.arange(shape[0] * shape[1]).reshape(shape)
        again = torch.full_like(full, -1)
        for rank in range(world):
            local = shard.take(full, rank, world)
            assert local.shape == shard.local_shape(full.shape, rank, world)
            assert local.is_contiguous() and local.untyped_storage().data_ptr() != full.untyped_storage().data_ptr()
            shard.put(again, local, rank, world)
        assert torch.equal(again, full)

    @given(blocks, st.integers(1, 9))
    @settings(max_examples=200, deadline=None)
    def test_a_block_is_dealt_in_whole_units_and_evenly(self, block, world):
        sizes = [stop - start for start, stop in (block.bounds(rank, world) for rank in range(world))]
        assert sum(sizes) == block.size
        assert all(size % block.unit == 0 for size in sizes)
        assert max(sizes) - min(sizes) <= block.unit
        assert sizes == sorted(sizes, reverse=True)

    def test_heads_of_flux_on_5_cards(self):
        heads = Block(24 * 128, 128)
        assert [(b - a) // 128 for a, b in (heads.bounds(rank, 5) for rank in range(5))] == [5, 5, 5, 5, 4]

    def test_granule(self):
        assert granule(12288, 5) == 64 and granule(12288, 24) == 64
        assert granule(512, 4) == 32  # 64 would leave two granules a rank
        assert granule(100, 3) == 4
        assert granule(7, 2) == 1

    def test_a_fused_projection_is_not_cut_as_one(self):
        fused = torch.arange(12)  # [q0..q3 | k0..k3 | v0..v3]
        shard = Shard(0, (Block(4, 1),) * 3)
        assert shard.take(fused, 1, 2).tolist() == [2, 3, 6, 7, 10, 11]
        assert Shard(0, (Block(12, 1),)).take(fused, 1, 2).tolist() == [6, 7, 8, 9, 10, 11]  # the trap

    def test_first_rank_only(self):
        bias = torch.arange(3)
        assert torch.equal(Shard(None).take(bias, 0, 4), bias)
        assert all(Shard(None).take(bias, rank, 4) is None for rank in (1, 2, 3))


if __name__ == "__main__":
    unittest.main()
