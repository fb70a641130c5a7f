# SPDX-License-Identifier: Apache-2.0
"""Parts of tensors: what is read for them, and what comes back."""

from __future__ import annotations

import fake_backend
import pytest
import torch

from tensorferry.dtypes import SUPPORTED_DTYPES
from tensorferry.errors import IntegrityError, LeaseRevokedError, PayloadTooLargeError, UsageError
from tensorferry.manifest import read_manifest

KIB = 1024

LATENTS = torch.arange(16 * 12 * 640.0).reshape(16, 12, 640)
PAYLOAD = {
    "latents": LATENTS,
    "outputs": [{"audio": torch.arange(4000).reshape(4, 1000)}, None, (torch.tensor(3.5), torch.zeros(0, 7))],
    "mask": torch.arange(300) % 7 == 0,
}

# Of ``latents``: 640 floats make a row of 2,560 bytes, 12 rows a block.
INDICES = {
    "first dimension": slice(4, 8),
    "integers": (3, 5),
    "one element": (1, 2, 3),
    "last dimension": (..., slice(320, 480)),
    "middle dimension": (slice(None), slice(3, 5)),
    "steps": (slice(1, None, 3), slice(None, None, 5), slice(2, 600, 7)),
    "step over blocks": slice(None, None, 2),
    "short gaps": (..., slice(0, 600)),
    "past the end": slice(12, 99),
    "behind the end": slice(99, 120),
    "new dimensions": (None, slice(0, 2), None, 3),
    "everything": ...,
}


@pytest.fixture(params=["mapped", "served", "direct"])
def way(request):
    """An access mode; ``direct`` is ``served`` without landing in the pool."""
    return request.param


@pytest.fixture
def pair(make_producer, make_consumer, way):
    producer, consumer = make_producer(access="served" if way == "direct" else way), make_consumer()
    reader().lands_anywhere = way == "direct"
    return producer, consumer


@pytest.fixture
def served(make_producer, make_consumer):
    return make_producer(access="served"), make_consumer()


def reader() -> fake_backend.FakeReader:
    return fake_backend.READERS[-1]


def backend() -> fake_backend.FakePool:
    return fake_backend.POOLS[-1]


def in_pool(tensor: torch.Tensor, pool: torch.Tensor) -> bool:
    return pool.data_ptr() <= tensor.data_ptr() < pool.data_ptr() + pool.numel()


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)


# Pulling


@pytest.mark.parametrize("index", INDICES.values(), ids=INDICES)
def test_a_part_equals_indexing_by_torch(pair, index):
    producer, consumer = pair
    got = consumer.pull(producer.publish("a", PAYLOAD), slices={"latents": index})
    assert same(got["latents"], LATENTS[index])
    assert got["latents"].is_contiguous()
    assert list(got) == list(PAYLOAD)
    assert same(got["outputs"][0]["audio"], PAYLOAD["outputs"][0]["audio"])
    assert same(got["mask"], PAYLOAD["mask"])
    whole = read_manifest(producer.publish("b", PAYLOAD)).nbytes
    assert consumer.statistics().bytes_pulled == whole - LATENTS.nbytes + LATENTS[index].nbytes
    assert consumer.statistics().allocated_nbytes == 0
    assert producer.wait_released("a", 5)


@pytest.mark.parametrize("index", INDICES.values(), ids=INDICES)
def test_a_part_is_independent_of_both_pools(pair, index):
    producer, consumer = pair
    got = consumer.pull(producer.publish("a", {"x": LATENTS}), slices={"x": index})["x"]
    for pool in (backend().pool, reader().pool):
        assert not in_pool(got, pool)
        pool.fill_(255)
    assert same(got, LATENTS[index])
    weight = torch.ones(got.shape, requires_grad=True)
    got.mul_(weight).sum().backward()
    assert weight.grad is not None


def test_several_parts_by_their_paths(pair):
    producer, consumer = pair
    slices = {
        "outputs[0].audio": (slice(1, 3), slice(0, None, 500)),
        "outputs[2][0]": None,
        "outputs[2][1]": (slice(None), 3),
        "mask": slice(None, None, 3),
    }
    got = consumer.pull(producer.publish("a", PAYLOAD), slices=slices)
    audio, hole, (scalar, empty) = got["outputs"]
    assert same(audio["audio"], PAYLOAD["outputs"][0]["audio"][1:3, ::500])
    assert hole is None
    assert same(scalar, torch.tensor([3.5]))
    assert same(empty, torch.zeros(0))
    assert same(got["mask"], PAYLOAD["mask"][::3])
    assert same(got["latents"], LATENTS)


def test_names_and_slices_go_together(pair):
    producer, consumer = pair
    got = consumer.pull(
        producer.publish("a", PAYLOAD), names=["mask", "latents"], slices={"latents": (0, slice(2, 4))}
    )
    assert list(got) == ["mask", "latents"]
    assert same(got["latents"], LATENTS[0, 2:4])


@pytest.mark.parametrize("dtype", SUPPORTED_DTYPES, ids=str)
def test_every_bit_of_every_dtype(pair, dtype):
    producer, consumer = pair
    memory = torch.arange(24 * dtype.itemsize, dtype=torch.uint8) * 11
    whole = (memory & 1 if dtype is torch.bool else memory).view(dtype).reshape(4, 6)
    manifest = producer.publish("a", {"x": whole})
    for index in (slice(1, 3), (..., slice(1, None, 2)), (2, 3)):
        got = consumer.pull(manifest, slices={"x": index}, release=False)["x"]
        assert (got.dtype, got.shape) == (dtype, whole[index].shape)
        assert torch.equal(bits(got), bits(whole[index]))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype == torch.complex32:
        tensor = tensor.view(torch.int32)  # torch warns where it allocates complex32
    return tensor.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def test_a_request_takes_slices(pair):
    producer, consumer = pair
    manifest = producer.publish("a", PAYLOAD)
    requests = [
        consumer.start_pull(manifest, slices={"latents": (..., slice(n, None, 3))}, release=False)
        for n in range(3)
    ]
    for n, request in enumerate(requests):
        assert same(request.result(10)["latents"], LATENTS[..., n::3])


def test_nothing_is_read_for_a_part_without_elements(pair):
    producer, consumer = pair
    verified = []
    reader().before_verify = lambda pool, ticket: verified.append(ticket)
    got = consumer.pull(producer.publish("a", {"x": LATENTS}), slices={"x": (slice(3, 3), ..., 0)})
    assert same(got["x"], LATENTS[3:3, ..., 0])
    assert not any(reader().posted)
    assert len(verified) == 1
    assert producer.wait_released("a", 5)


# What crosses


@pytest.mark.parametrize("way", ["served", "direct"], indirect=True)
@pytest.mark.parametrize(
    ("name", "reads", "nbytes"),
    [
        ("first dimension", 1, 4 * 12 * 2560),
        ("integers", 1, 2560),
        ("one element", 1, 4),
        ("last dimension", 16 * 12, 16 * 12 * 640),
        ("middle dimension", 16, 16 * 2 * 2560),
        ("steps", 5 * 3, 5 * 3 * (85 * 28 + 4)),
        ("step over blocks", 8, 8 * 12 * 2560),
        ("short gaps", 1, 16 * 12 * 2560 - 160),
        ("past the end", 1, 4 * 12 * 2560),
        ("new dimensions", 2, 2 * 2560),
        ("everything", 1, 16 * 12 * 2560),
    ],
)
def test_only_these_bytes_cross_in_few_reads(pair, name, reads, nbytes):
    producer, consumer = pair
    consumer.pull(producer.publish("a", {"x": LATENTS}), slices={"x": INDICES[name]})
    (spans,) = reader().posted
    assert (len(spans), sum(span.nbytes for span in spans)) == (reads, nbytes)


@pytest.mark.parametrize("way", ["direct"], indirect=True)
@pytest.mark.parametrize(
    ("index", "lands_in_result"),
    [
        ((..., slice(0, 600)), False),  # gaps are cut out on the way from the pool to the result
        (slice(None, None, 2), True),  # 8 reads of 30 KiB
        ((..., slice(0, 320)), False),  # 192 reads of 1,280 bytes
        ((3, slice(None), slice(0, 320)), False),
        ((3, 5, 7), True),
    ],
)
def test_parts_land_in_results_where_that_is_faster(pair, index, lands_in_result):
    producer, consumer = pair
    got = consumer.pull(producer.publish("a", {"x": LATENTS}), slices={"x": index})["x"]
    assert same(got, LATENTS[index])
    (spans,) = reader().posted
    assert {span.destination < 0 for span in spans} == {lands_in_result}


def test_whole_tensors_beside_a_part_are_read_as_ever(served):
    producer, consumer = served
    payload = {name: torch.full((256,), float(ord(name))) for name in "abcdef"}
    got = consumer.pull(producer.publish("r", payload), slices={"c": slice(0, 128)})
    assert all(same(got[name], payload[name]) for name in "abdef")
    (spans,) = reader().posted
    assert sorted(span.nbytes for span in spans) == [512, 5 * KIB + KIB]


def test_a_mapped_part_needs_no_room_and_no_read(make_producer, make_consumer):
    producer, consumer = make_producer(access="mapped"), make_consumer("4KiB")
    got = consumer.pull(producer.publish("a", {"x": LATENTS}), slices={"x": (slice(None), 3)})
    assert same(got["x"], LATENTS[:, 3])
    assert reader().posted == []


def test_room_is_taken_for_what_lands(make_producer, make_consumer):
    producer, consumer = make_producer(access="served"), make_consumer("64KiB")
    manifest = producer.publish("a", {"x": LATENTS})
    assert same(
        consumer.pull(manifest, slices={"x": (..., slice(0, 64))}, release=False)["x"], LATENTS[..., :64]
    )
    with pytest.raises(PayloadTooLargeError, match=r"request 'a' of producer .* needs 491360 bytes"):
        consumer.pull(manifest, slices={"x": (..., slice(0, 600))})


# Borrowing


def test_a_borrowed_part_is_a_view_of_the_producers_pool(make_producer, make_consumer):
    producer, consumer = make_producer(access="mapped"), make_consumer("4KiB")
    manifest = producer.publish("a", PAYLOAD)
    for index in INDICES.values():
        with consumer.borrow(manifest, slices={"latents": index}, release=False) as tensors:
            assert same(tensors["latents"], LATENTS[index])
            if tensors["latents"].numel():
                assert in_pool(tensors["latents"], backend().pool)
                assert long_strides(tensors["latents"]) == long_strides(LATENTS[index])
            assert same(tensors["mask"], PAYLOAD["mask"])


def long_strides(tensor: torch.Tensor) -> list[int]:
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


def test_a_borrowed_part_is_where_it_landed(served):
    producer, consumer = served
    manifest = producer.publish("a", PAYLOAD)
    for index in INDICES.values():
        with consumer.borrow(manifest, slices={"latents": index}, release=False) as tensors:
            assert same(tensors["latents"], LATENTS[index])
            if tensors["latents"].numel():
                assert in_pool(tensors["latents"], reader().pool)
    assert consumer.statistics().allocated_nbytes == 0


# What must not be accepted


@pytest.mark.parametrize(
    ("slices", "message"),
    [
        (
            {"latent": 0},
            r"'latent', but the tensors to pull are 'latents', 'outputs\[0\]\.audio', .*, 'mask'$",
        ),
        ({"outputs": 0}, "'outputs'"),
        ({"outputs[1]": 0}, r"'outputs\[1\]'"),
        ({0: 0}, "has 0, but"),
        ({"latents": 16}, r"slices\['latents'\] for a tensor of shape \(16, 12, 640\): 16 is not in"),
        ({"outputs[0].audio": slice(None, None, -1)}, r"slices\['outputs\[0\]\.audio'\].*the step -1"),
        ([("latents", 0)], "slices is a mapping from paths of tensors to indices, not list"),
        ([], "slices is a mapping"),
    ],
    ids=repr,
)
def test_wrong_slices_are_refused_before_connecting(served, slices, message):
    producer, consumer = served
    manifest = producer.publish("a", PAYLOAD)
    with pytest.raises(UsageError, match=message):
        consumer.pull(manifest, slices=slices)
    with pytest.raises(UsageError, match=message), consumer.borrow(manifest, slices=slices):
        pass
    assert reader().connected == 0


def test_slices_are_of_what_is_pulled(served):
    producer, consumer = served
    manifest = producer.publish("a", PAYLOAD)
    with pytest.raises(UsageError, match=r"'latents', but the tensors to pull are 'mask'$"):
        consumer.pull(manifest, names=["mask"], slices={"latents": 0})
    with pytest.raises(UsageError, match=r"are none at all$"):
        consumer.pull(manifest, names=[], slices={"latents": 0})


def test_a_message_lists_some_names_only(served):
    producer, consumer = served
    manifest = producer.publish("a", {f"t{i}": torch.zeros(1) for i in range(1000)})
    with pytest.raises(UsageError, match=r"are 't0', .*, 't7' and 992 more$"):
        consumer.pull(manifest, slices={"x": 0})


def test_checksums_are_of_whole_tensors(make_producer, make_consumer, way):
    mode = "served" if way == "direct" else way
    producer, consumer = make_producer(access=mode, checksum="xxh3"), make_consumer()
    reader().lands_anywhere = way == "direct"
    manifest = producer.publish("a", PAYLOAD)
    spec = read_manifest(manifest).tensors[0]
    backend().slot(read_manifest(manifest).ticket)[spec.offset] ^= 1
    with pytest.raises(IntegrityError, match="latents"):
        consumer.pull(manifest)
    got = consumer.pull(manifest, slices={"latents": slice(0, 1)}, release=False)
    assert not same(got["latents"], LATENTS[:1])
    backend().slot(read_manifest(manifest).ticket)[read_manifest(manifest).tensors[-1].offset] ^= 1
    with pytest.raises(IntegrityError, match="mask"):
        consumer.pull(manifest, slices={"latents": slice(0, 1)})


@pytest.mark.parametrize("name", ["first dimension", "last dimension", "short gaps"])
def test_data_that_may_be_anothers_is_discarded(pair, name):
    producer, consumer = pair
    manifest = producer.publish("a", {"x": LATENTS})

    def reuse(pool, ticket):  # between the copy and the check
        producer.revoke("a")
        pool.pool.fill_(7)

    reader().before_verify = reuse
    with pytest.raises(LeaseRevokedError, match="request 'a' of producer"):
        consumer.pull(manifest, slices={"x": INDICES[name]})
    assert (consumer.statistics().failed_pulls, consumer.statistics().allocated_nbytes) == (1, 0)
