# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import gc
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorferry import columns, layout, packing
from tensorferry.backends.base import PeerOffer, SlotTicket
from tensorferry.dtypes import SUPPORTED_DTYPES, dtype_to_str
from tensorferry.layout import ALIGNMENT, MAX_GAP_NBYTES, Region
from tensorferry.manifest import Manifest
from tensorferry.orders import Order, Piece
from tensorferry.tensor_table import TensorSpec, TensorTable

CPU = torch.device("cpu")


@pytest.fixture(autouse=True, params=[True, False], ids=["exchange", "older-torch"])
def exchange(request, monkeypatch):
    """With torch's own way to take and make many tensors, which it has from 2.10 on, and without."""
    if not request.param:
        monkeypatch.setattr(columns, "EXCHANGE", None)
        monkeypatch.setattr(packing, "EXCHANGE", None)
    elif columns.EXCHANGE is None:
        pytest.skip(f"torch {torch.__version__} has no DLPack exchange API")


kinds = st.tuples(
    st.sampled_from([torch.uint8, torch.bfloat16, torch.float32, torch.complex64, torch.complex128]),
    st.lists(st.integers(1, 5), max_size=2).map(tuple),
)


def tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Random bits, for bool as well: what is not 0 or 1 must come back as it was."""
    generator = torch.Generator().manual_seed(seed)
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator).view(dtype).reshape(shape)


def bits(one: torch.Tensor) -> bytes:
    if one.dtype == torch.complex32:
        one = one.view(torch.int32)  # torch warns where it allocates complex32
    return one.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8).numpy().tobytes()


def describe(tensors, offsets):
    return TensorTable.of(
        [
            TensorSpec(f"t{i}", dtype_to_str(one.dtype), tuple(one.shape), offset, one.nbytes)
            for i, (one, offset) in enumerate(zip(tensors, offsets, strict=True))
        ]
    )


def order_of(table):
    slot = SlotTicket(0, 1, bytes(16), 0, 1)
    manifest = Manifest("r", table, {}, PeerOffer(bytes(16), "x", b"", ()), slot, 1.0, 2.0)
    return Order.of(manifest, None)


def round_trip(tensors, unpack=Order.copies):
    """Pack into a slot in the middle of a pool and unpack what has bytes."""
    offsets, nbytes = layout.lay_out(one.nbytes for one in tensors)
    pool = torch.full((8192 + nbytes,), 0xAA, dtype=torch.uint8)
    slot = pool[4096 : 4096 + nbytes]
    described = columns.describe(list(tensors), str)
    packing.clear_gaps(slot, offsets, described.sizes)
    left = described.copy(slot, offsets)
    packing.pack(slot, [described.tensors[place] for place in left], [offsets[place] for place in left])
    assert bytes(pool[:4096].numpy()) == b"\xaa" * 4096
    assert bytes(pool[4096 + nbytes :].numpy()) == b"\xaa" * 4096
    order = order_of(describe(tensors, offsets))
    pieces = [
        Piece(region, pool[4096 + region.start : 4096 + region.start + region.nbytes])
        for region in order.regions
    ]
    return unpack(order, pieces, CPU), pool


def check(tensors):
    for unpack in (Order.copies, Order.views):
        results, pool = round_trip(tensors, unpack)
        for got, want in zip(results, tensors, strict=True):
            assert (got.dtype, got.shape, bits(got)) == (want.dtype, want.shape, bits(want))
            assert got.is_contiguous()
            inside = pool.data_ptr() <= got.data_ptr() < pool.data_ptr() + pool.numel()
            assert inside == (unpack is Order.views and want.nbytes > 0)


@pytest.mark.parametrize("dtype", SUPPORTED_DTYPES, ids=str)
def test_every_bit_of_every_dtype_alone_and_in_runs(dtype):
    shapes = [(), (3,), (3,), (3,), (2, 5), (), (), (7, 1, 3), (1,), (1,)]
    check([tensor(dtype, shape, seed) for seed, shape in enumerate(shapes)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn, torch.complex128, torch.bool], ids=str)
def test_strides_do_not_matter(dtype):
    base = tensor(dtype, (4, 6, 8))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check([base.transpose(0, 2), base[:, ::2], base[0, 0].expand(5, 8), base[1:], base[::3, ::5, ::7]])
        check([base[..., i] for i in range(8)])


def test_tensors_without_bytes_take_no_room():
    empty = torch.empty(0, 3)
    offsets, nbytes = layout.lay_out([0, 1, 0, 64, 0])
    assert (offsets, nbytes) == ([0, 0, 1, 64, 128], 128)
    check([empty, torch.ones(3), empty, empty, torch.ones(3)])


def test_small_results_share_memory_and_large_ones_do_not(monkeypatch):
    sizes = []
    monkeypatch.setattr(
        packing, "fresh", lambda n, device: sizes.append(n) or torch.empty(n, dtype=torch.uint8)
    )
    small = [torch.full((112,), float(i)) for i in range(10)]
    large = [torch.full((10_000,), float(i)) for i in range(3)]
    round_trip([*small, *large])
    assert sizes == [4480, 40_000, 40_000, 40_000]
    sizes.clear()
    round_trip([torch.full((2000,), float(i)) for i in range(1000)])
    assert max(sizes) <= 1 << 20


def test_a_result_keeps_its_memory_alive():
    found, _ = round_trip([torch.full((100,), float(i)) for i in range(10)])
    last = found[9]
    del found
    gc.collect()
    blocks = [torch.full((1120,), -1.0) for _ in range(100)]
    assert last.tolist() == [9.0] * 100
    assert blocks[0][0] == -1


def test_results_above_the_huge_page_limit():
    check([tensor(torch.int16, ((4 << 20) + more,)) for more in (-1, 0, 1)])


@settings(deadline=None, max_examples=50)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(SUPPORTED_DTYPES),
            st.lists(st.integers(0, 5), max_size=3).map(tuple),
            st.integers(1, 4),
        ),
        max_size=20,
    )
)
def test_any_mixture(description):
    check([tensor(dtype, shape, i) for dtype, shape, count in description for i in range(count)])


def test_checksums_are_those_of_the_bytes():
    xxhash = pytest.importorskip("xxhash")
    memory = torch.arange(200, dtype=torch.uint8)
    assert packing.checksums(memory, [0, 64], [50, 0]) == [
        xxhash.xxh3_64_intdigest(bytes(range(50))),
        xxhash.xxh3_64_intdigest(b""),
    ]


def test_regions_bridge_small_gaps_only():
    def spec(offset, nbytes):
        return TensorSpec("t", "uint8", (nbytes,), offset, nbytes)

    near, far = 100 + MAX_GAP_NBYTES, 201 + 2 * MAX_GAP_NBYTES
    specs = [spec(far, 10), spec(0, 100), spec(near, 100), spec(5, 0)]
    assert layout.regions(TensorTable.of(specs)) == [Region(0, near + 100, [1, 2]), Region(far, 10, [0])]
    assert layout.regions(TensorTable.of([spec(7, 0)])) == []


def test_landing_keeps_the_alignment_within_the_slot():
    offsets, nbytes = layout.landing_offsets([Region(64, 10, [0]), Region(1000, 7, [1])])
    assert (offsets[0] % ALIGNMENT, offsets[1] % ALIGNMENT) == (0, 1000 % ALIGNMENT)
    assert offsets[1] >= 10
    assert nbytes == offsets[1] + 7


@given(st.lists(st.tuples(kinds, st.integers(0, 3)), min_size=1, max_size=8))
def test_tensors_may_lie_at_any_multiple_of_their_element_size(wanted):
    """As other producers may place them: it is no more than the wire format asks for."""
    tensors, offsets, end = [], [], 0
    for (dtype, shape), gap in wanted:
        one = tensor(dtype, shape, seed=len(tensors))
        offset = -(-end // dtype.itemsize + -gap) * dtype.itemsize
        tensors.append(one)
        offsets.append(offset)
        end = offset + one.nbytes
    slot = torch.full((end,), 0xAA, dtype=torch.uint8)
    for one, offset in zip(tensors, offsets, strict=True):
        slot[offset : offset + one.nbytes] = torch.frombuffer(bytearray(bits(one)), dtype=torch.uint8)
    order = order_of(describe(tensors, offsets))
    places, nbytes = layout.landing_offsets(order.regions)
    landing = torch.zeros(nbytes, dtype=torch.uint8)
    pieces = []
    for place, region in zip(places, order.regions, strict=True):
        memory = landing[place : place + region.nbytes]
        memory.copy_(slot[region.start : region.start + region.nbytes])
        pieces.append(Piece(region, memory))
    for unpack in (Order.copies, Order.views):
        assert [bits(one) for one in unpack(order, pieces, CPU)] == [bits(one) for one in tensors]
