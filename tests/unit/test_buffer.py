# SPDX-License-Identifier: Apache-2.0
"""The reference class on the CPU: its contract, and the R-cases that it mends."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from tensorferry import device_copy
from tensorferry.buffer import SlotHandle, TransferTensorBuffer
from tensorferry.dtypes import SUPPORTED_DTYPES
from tensorferry.errors import ManifestError, RegistrationError, StaleHandleError, UsageError
from tensorferry.slot_layout import SlotBoundsError

MIB = 1 << 20


@pytest.fixture
def buffer() -> TransferTensorBuffer:
    return TransferTensorBuffer(4 * MIB, 4096, "encoder")


@pytest.fixture
def handle(buffer: TransferTensorBuffer) -> SlotHandle:
    return lend(buffer)


def lend(buffer: TransferTensorBuffer, size: int = 4096, request_id: str = "r") -> SlotHandle:
    handle = buffer.allocate(size=size, request_id=request_id)
    assert handle is not None
    return handle


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())


def slot_bytes(buffer: TransferTensorBuffer, handle: SlotHandle) -> torch.Tensor:
    return buffer.read_tensor(handle, [handle.size], torch.uint8)


# The contract of the reference


def test_properties_and_the_allocator_s_figures(buffer: TransferTensorBuffer) -> None:
    handle = lend(buffer, 5000)
    assert (handle.request_id, handle.offset, handle.size, handle.tensor_views) == ("r", 0, 8192, {})
    assert (buffer.pool_size, buffer.min_block_size, buffer.device) == (4 * MIB, 4096, "cpu")
    assert buffer.pool_data_ptr == buffer._pool.data_ptr() > 0
    assert (buffer.allocated_bytes, buffer.free_bytes, buffer.num_allocations) == (8192, 4 * MIB - 8192, 1)
    assert buffer.free_slots_count(typical_request_size=2 * MIB) == 1 == buffer.count_free_slots(2 * MIB)
    assert buffer.can_allocate(2 * MIB)
    assert not buffer.can_allocate(4 * MIB)
    block = buffer.get_block_info(0)
    assert block is not None
    assert (block.request_id, block.generation) == ("r", handle.generation)
    assert buffer.get_block_info(1) is None
    assert "'encoder' on cpu" in repr(buffer)


def test_the_pool_is_rounded_up_and_a_full_pool_lends_none() -> None:
    buffer = TransferTensorBuffer(pool_size=3 * MIB)
    assert buffer.pool_size == 4 * MIB
    handles = [lend(buffer, MIB) for _ in range(4)]
    assert [handle.offset for handle in handles] == [0, MIB, 2 * MIB, 3 * MIB]
    assert buffer.allocate(1, "r") is None
    assert buffer.free(handles[2])
    assert lend(buffer, MIB).offset == 2 * MIB
    assert buffer.allocate(5 * MIB, "r") is None


def test_stats_have_the_role_and_show_the_waste(buffer: TransferTensorBuffer) -> None:
    """In the reference nothing reports the waste of rounding up."""
    lend(buffer, 4097)
    stats = buffer.get_stats()
    assert stats["role"] == "encoder"
    assert (stats["requested_bytes"], stats["allocated_bytes"], stats["wasted_bytes"]) == (4097, 8192, 4095)


def test_many_small_tensors_take_one_slot() -> None:
    """In the reference each slot takes 1 MiB at least."""
    buffer = TransferTensorBuffer(2 * MIB)
    handle = lend(buffer, MIB)
    tensors = {str(index): torch.full((256,), index, dtype=torch.int32) for index in range(1000)}
    result = buffer.read_tensors_from_manifest(handle, buffer.write_tensors_from_gpu(handle, tensors))
    assert all(torch.equal(result[name], tensor) for name, tensor in tensors.items())
    assert buffer.num_allocations == 1


def test_a_size_that_is_not_positive_is_refused(buffer: TransferTensorBuffer) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        buffer.allocate(0, "r")


def test_write_returns_bytes_and_read_returns_the_tensor(
    buffer: TransferTensorBuffer, handle: SlotHandle
) -> None:
    tensor = torch.randn(4, 8)
    assert buffer.write_tensor(handle, "t", tensor, byte_offset=512) == 128
    assert torch.equal(buffer.read_tensor(handle, shape=[4, 8], dtype=torch.float32, byte_offset=512), tensor)


def test_the_manifest_has_the_form_of_the_reference(buffer: TransferTensorBuffer, handle: SlotHandle) -> None:
    manifest = buffer.write_tensors_from_gpu(
        handle, {"a": torch.zeros(3, 5), "n": None, "l": [None, torch.zeros(2, dtype=torch.bool)]}
    )
    assert manifest == {
        "a": [{"offset": 0, "shape": [3, 5], "dtype": "float32"}],
        "l": [{"offset": 512, "shape": [2], "dtype": "bool", "list_index": 1}],
    }


def test_a_manifest_of_the_reference_is_read(buffer: TransferTensorBuffer, handle: SlotHandle) -> None:
    buffer.write_tensor(handle, "t", torch.arange(4), byte_offset=1024)
    entry = {"offset": 1024, "shape": (4,), "dtype": "int64"}
    result = buffer.read_tensors_from_manifest(
        handle, {"t": [entry], "l": [{**entry, "list_index": 2}], "e": []}
    )
    assert result["t"].tolist() == [0, 1, 2, 3]
    assert result["l"][:2] == [None, None]
    assert result["l"][2].tolist() == [0, 1, 2, 3]
    assert set(result) == {"t", "l"}


# Memory


def test_without_an_accelerator_plain_memory_is_used_and_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The reference pins always, which fails without an accelerator."""
    monkeypatch.setattr(device_copy, "_accelerator_is_available", lambda: False)
    device_copy._said_unpinned.clear()
    with caplog.at_level(logging.INFO, "tensorferry"):
        assert TransferTensorBuffer(MIB).pool_size == MIB
        TransferTensorBuffer(MIB)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "no accelerator" in caplog.text


def refuse_pinning(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    empty = torch.empty

    def fake(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        if pin_memory:
            raise error
        return empty(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", fake)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Found no NVIDIA driver on your system.\nPlease check"),
        AssertionError("Torch not compiled with CUDA enabled"),
        RuntimeError(""),
    ],
    ids=["no driver", "no CUDA", "no message"],
)
def test_pinning_by_hand_that_fails_names_the_cause(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """pytorch/pytorch#159740, #159774: "Found no NVIDIA driver" where memory was to be pinned."""
    refuse_pinning(monkeypatch, error)
    cause = str(error).split("\n", maxsplit=1)[0] or "RuntimeError"
    with pytest.raises(RegistrationError, match=cause):
        TransferTensorBuffer(MIB, pin_memory=True)


@pytest.mark.skipif(device_copy._accelerator_is_available(), reason="needs a machine that cannot pin memory")
def test_pinning_by_hand_on_this_machine() -> None:
    with pytest.raises(RegistrationError, match=r"cannot pin 1048576 bytes: .*pin"):
        TransferTensorBuffer(MIB, pin_memory=True)


def test_where_pinning_fails_despite_an_accelerator_plain_memory_is_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    refuse_pinning(monkeypatch, RuntimeError("CUDA error: OS call failed"))
    monkeypatch.setattr(device_copy, "_accelerator_is_available", lambda: True)
    device_copy._said_unpinned.clear()
    handle = lend(buffer := TransferTensorBuffer(MIB))
    assert "OS call failed" in caplog.text
    assert buffer.write_tensor(handle, "t", torch.ones(2)) == 8


def test_pin_memory_false_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    device_copy._said_unpinned.clear()
    TransferTensorBuffer(MIB, pin_memory=False)
    assert not caplog.records


def test_memory_that_cannot_be_had_is_a_registration_error() -> None:
    for size in (1 << 60, 1 << 70):
        with pytest.raises(RegistrationError, match="cannot allocate"):
            TransferTensorBuffer(size, pin_memory=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_cuda_pool_without_cuda_is_a_registration_error() -> None:
    with pytest.raises(RegistrationError, match="cuda"):
        TransferTensorBuffer(MIB, device="cuda")


@pytest.mark.parametrize("device", ["meta", "nonsense", "mps", "cuda:x"])
def test_a_pool_is_on_cpu_or_cuda(device: str) -> None:
    with pytest.raises(UsageError, match=device):
        TransferTensorBuffer(MIB, device=device)


def test_a_cuda_pool_is_not_pinned() -> None:
    with pytest.raises(UsageError, match="pin_memory"):
        TransferTensorBuffer(MIB, device="cuda:0", pin_memory=True)


def test_a_pool_made_in_inference_mode_works_outside() -> None:
    with torch.inference_mode():
        buffer = TransferTensorBuffer(MIB)
        source = torch.ones(3)
    handle = lend(buffer)
    buffer.write_tensor(handle, "t", source)
    assert torch.equal(buffer.read_tensor(handle, [3], torch.float32), torch.ones(3))


# What crosses


@pytest.mark.parametrize("dtype", SUPPORTED_DTYPES, ids=str)
@pytest.mark.parametrize("shape", [[], [3], [2, 0, 5], [1, 2, 3]], ids=str)
def test_every_dtype_and_shape_crosses_bit_for_bit(
    buffer: TransferTensorBuffer, handle: SlotHandle, dtype: torch.dtype, shape: list[int]
) -> None:
    """The reference knows ten dtypes, and no scalars of more than one byte."""
    count = torch.Size(shape).numel()
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (count * dtype.itemsize,), dtype=torch.uint8)
    tensor = raw.view(dtype).reshape(shape)
    manifest = buffer.write_tensors_from_gpu(handle, {"first": torch.ones(1), "t": tensor})
    result = buffer.read_tensors_from_manifest(handle, manifest)["t"]
    assert (result.dtype, list(result.shape)) == (dtype, shape)
    assert bits(result) == bits(raw)


def test_a_scalar_round_trips(buffer: TransferTensorBuffer, handle: SlotHandle) -> None:
    """vllm-project/vllm#52235, ray-project/ray#52830: "self.dim() cannot be 0 to view Float as Byte"."""
    assert buffer.write_tensor(handle, "guidance", torch.tensor(3.5)) == 4
    result = buffer.read_tensor(handle, [], torch.float32)
    assert (result.shape, result.item()) == (torch.Size([]), 3.5)


def test_only_empty_tensors_touch_nothing(buffer: TransferTensorBuffer, handle: SlotHandle) -> None:
    """meta-pytorch/torchstore#177, meta-pytorch/monarch#1133: tensors without bytes failed or hung."""
    before = slot_bytes(buffer, handle)
    manifest = buffer.write_tensors_from_gpu(handle, {"e": torch.empty(0, 4096, dtype=torch.bfloat16)})
    result = buffer.read_tensors_from_manifest(handle, manifest)["e"]
    assert (result.shape, result.dtype) == (torch.Size([0, 4096]), torch.bfloat16)
    assert torch.equal(slot_bytes(buffer, handle), before)


BASE = torch.arange(24.0).reshape(4, 6)
VIEWS = {
    "transposed": BASE.t(),
    "strided": BASE[:, ::2],
    "expanded": BASE[:, :1].expand(4, 6),
    "offset": BASE[1:],
    "channels_last": torch.arange(48.0).reshape(1, 3, 4, 4).contiguous(memory_format=torch.channels_last),
    "conjugated": torch.complex(BASE, BASE + 1).conj(),
    "negated": torch.complex(BASE, BASE + 1).conj().imag,
    "complex128": torch.complex(BASE, BASE).to(torch.complex128).t(),
    "float8": BASE.to(torch.float8_e4m3fn).t(),
    "requires_grad": BASE.clone().requires_grad_(),
    "parameter": torch.nn.Parameter(BASE.clone()),
}


@pytest.mark.parametrize("name", VIEWS)
def test_views_cross_as_contiguous_copies(
    buffer: TransferTensorBuffer, handle: SlotHandle, name: str
) -> None:
    """ray-project/ray#64376, meta-pytorch/torchstore#169: strided tensors were refused."""
    tensor = VIEWS[name]
    buffer.write_tensor(handle, name, tensor)
    result = buffer.read_tensor(handle, list(tensor.shape), tensor.dtype)
    assert result.is_contiguous()
    assert not result.requires_grad
    assert bits(result) == bits(tensor.detach().resolve_conj().resolve_neg())


@pytest.mark.parametrize(
    "value",
    [
        torch.empty(2, dtype=torch.bits8),
        torch.eye(2).to_sparse(),
        torch.empty(2, device="meta"),
        "text",
        7,
        object(),
    ],
    ids=["dtype", "sparse", "meta", "text", "number", "object"],
)
def test_what_cannot_cross_is_refused_at_the_producer_by_its_path(
    buffer: TransferTensorBuffer, handle: SlotHandle, value: Any
) -> None:
    """In the reference an unknown dtype shows at the consumer only."""
    before = slot_bytes(buffer, handle)
    with pytest.raises(UsageError, match=r"^out\[1\]: "):
        buffer.write_tensors_from_gpu(handle, {"a": torch.ones(9), "out": [None, value]})
    with pytest.raises(UsageError, match=r"^out: "):
        buffer.write_tensors_from_gpu(handle, {"out": value})
    with pytest.raises(UsageError, match=r"^out: "):
        buffer.write_tensor(handle, "out", value)
    assert torch.equal(slot_bytes(buffer, handle), before)


# Structure


def same(left: Any, right: Any) -> bool:
    if isinstance(right, (list, tuple)):
        return type(left) is type(right) and len(left) == len(right) and all(map(same, left, right))
    return left is right if right is None else torch.equal(left, right)


T = torch.arange(5)


@pytest.mark.parametrize(
    "value",
    [[T, None, T, None], [], [None], [None, None, T], (T,), (), (None,), (T, None), (None, T), [T], [T, T]],
    ids=str,
)
def test_lists_and_tuples_are_restored_exactly(
    buffer: TransferTensorBuffer, handle: SlotHandle, value: Any
) -> None:
    """The reference loses trailing holes, empty lists and tuples without a word."""
    manifest = buffer.write_tensors_from_gpu(handle, {"v": value, "t": T, "none": None})
    result = buffer.read_tensors_from_manifest(handle, manifest)
    assert list(result) == ["v", "t"]
    assert same(result["v"], value)


class Named(tuple[torch.Tensor, ...]):
    __slots__ = ()


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"f": T}, "e"),
        ([T, {"f": T}], r"e\[1\]"),
        ([[T]], r"e\[0\]"),
        ((None, (T,)), r"e\[1\]"),
        (Named((T,)), "e"),
    ],
    ids=str,
)
def test_deeper_structures_are_refused_by_path(
    buffer: TransferTensorBuffer, handle: SlotHandle, value: Any, path: str
) -> None:
    """In the reference they vanish without a word."""
    with pytest.raises(UsageError, match=f"^{path}: "):
        buffer.write_tensors_from_gpu(handle, {"e": value})


def test_names_are_strings(buffer: TransferTensorBuffer, handle: SlotHandle) -> None:
    with pytest.raises(UsageError, match="names are strings"):
        buffer.write_tensors_from_gpu(handle, {7: T})  # type: ignore[dict-item]


# Bounds


@pytest.mark.parametrize("offset", [-1, -4096, 4089, 4096, 1 << 70])
def test_a_write_outside_the_slot_is_refused_and_changes_nothing(
    buffer: TransferTensorBuffer, handle: SlotHandle, offset: int
) -> None:
    neighbour = lend(buffer)
    buffer.write_tensor(neighbour, "n", torch.full((4096,), 7, dtype=torch.uint8))
    before = slot_bytes(buffer, handle)
    with pytest.raises(
        ValueError, match=f"t: 8 bytes at offset {offset} leave the slot of 4096 bytes"
    ) as caught:
        buffer.write_tensor(handle, "t", torch.zeros(2), byte_offset=offset)
    assert isinstance(caught.value, UsageError)
    assert torch.equal(slot_bytes(buffer, handle), before)
    assert slot_bytes(buffer, neighbour).unique().tolist() == [7]


def test_a_batch_is_written_wholly_or_not_at_all(buffer: TransferTensorBuffer, handle: SlotHandle) -> None:
    before = slot_bytes(buffer, handle)
    with pytest.raises(SlotBoundsError, match="last"):
        buffer.write_tensors_from_gpu(handle, {"first": torch.ones(900), "last": torch.ones(200)})
    assert torch.equal(slot_bytes(buffer, handle), before)


def test_the_last_byte_of_a_slot_can_be_used(buffer: TransferTensorBuffer, handle: SlotHandle) -> None:
    assert buffer.write_tensor(handle, "t", torch.tensor([5], dtype=torch.uint8), byte_offset=4095) == 1
    assert buffer.read_tensor(handle, [1], torch.uint8, 4095).item() == 5
    assert buffer.write_tensor(handle, "e", torch.empty(0), byte_offset=4096) == 0


def test_an_unaligned_offset_works(buffer: TransferTensorBuffer, handle: SlotHandle) -> None:
    tensor = torch.randn(7, dtype=torch.float64)
    buffer.write_tensor(handle, "t", tensor, byte_offset=3)
    assert torch.equal(buffer.read_tensor(handle, [7], torch.float64, byte_offset=3), tensor)


@pytest.mark.parametrize(
    ("shape", "offset"),
    [
        ([1025], 0),
        ([1], 4093),
        ([1], -4),
        ([-1], 0),
        ([-2, -2], 0),
        ([1 << 62, 4], 0),
        ([0, 1 << 62, 1 << 62], 0),
        ([1] * 65, 0),
    ],
    ids=str,
)
def test_reads_are_bounded_by_the_slot(
    buffer: TransferTensorBuffer, handle: SlotHandle, shape: list[int], offset: int
) -> None:
    """In the reference they are bounded by the pool only."""
    with pytest.raises(SlotBoundsError):
        buffer.read_tensor(handle, shape, torch.float32, byte_offset=offset)


def test_a_read_of_an_unsupported_dtype_is_refused(buffer: TransferTensorBuffer, handle: SlotHandle) -> None:
    with pytest.raises(UsageError, match="quint8"):
        buffer.read_tensor(handle, [1], torch.quint8)


# Handles and ownership


def test_a_stale_handle_does_not_free_the_next_owner(buffer: TransferTensorBuffer) -> None:
    """In the reference it does: offsets have no generation."""
    first = lend(buffer)
    assert buffer.free(first)
    second = lend(buffer)
    assert second.offset == first.offset
    buffer.write_tensor(second, "t", T)
    assert not buffer.free(first)
    assert torch.equal(buffer.read_tensor(second, [5], torch.int64), T)
    assert buffer.num_allocations == 1


def test_a_handle_dies_when_it_is_freed(buffer: TransferTensorBuffer, handle: SlotHandle) -> None:
    assert "freed" not in repr(handle)
    assert buffer.free(handle)
    assert handle.freed
    assert "freed" in repr(handle)
    lend(buffer)  # the same offset
    for use in (
        lambda: buffer.write_tensor(handle, "t", T),
        lambda: buffer.read_tensor(handle, [5], torch.int64),
        lambda: buffer.write_tensors_from_gpu(handle, {"t": T}),
        lambda: buffer.read_tensors_from_manifest(handle, {}),
        lambda: buffer.synchronize(handle),
    ):
        with pytest.raises(StaleHandleError, match="freed"):
            use()
    assert not buffer.free(handle)


def test_a_handle_of_another_pool_or_made_by_hand_is_refused(
    buffer: TransferTensorBuffer, handle: SlotHandle
) -> None:
    """spaskalev/buddy_alloc#119: a bad free was ignored without a word."""
    other = TransferTensorBuffer(MIB, 4096)
    foreign = lend(other)
    for wrong in (foreign, SlotHandle("r", 0, 4096), SlotHandle("r", 1 << 40, 4096)):
        assert not buffer.free(wrong)
        with pytest.raises(StaleHandleError):
            buffer.write_tensor(wrong, "t", T)
    assert (buffer.num_allocations, other.num_allocations) == (1, 1)


def test_a_handle_cannot_reach_beyond_its_block(buffer: TransferTensorBuffer, handle: SlotHandle) -> None:
    handle.size = MIB
    with pytest.raises(SlotBoundsError):
        buffer.read_tensor(handle, [4097], torch.uint8)


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu"), "cpu:0"], ids=repr)
def test_a_result_is_independent_of_the_pool(
    buffer: TransferTensorBuffer, handle: SlotHandle, device: torch.device | str
) -> None:
    """In the reference "cuda" and "cuda:0" differ, and the result is a view of the slot."""
    buffer.write_tensor(handle, "t", T)
    result = buffer.read_tensor(handle, [5], torch.int64, device=device)
    result_2 = buffer.read_tensors_from_manifest(
        handle, {"t": [{"offset": 0, "shape": [5], "dtype": "int64"}]}, device=device
    )["t"]
    buffer.write_tensor(handle, "t", T + 1)
    assert torch.equal(result, T)
    assert torch.equal(result_2, T)
    result.zero_()
    assert torch.equal(buffer.read_tensor(handle, [5], torch.int64), T + 1)


def test_synchronize_of_an_idle_slot_returns(buffer: TransferTensorBuffer, handle: SlotHandle) -> None:
    buffer.synchronize(handle)


# Manifests from a peer

GOOD = {"offset": 0, "shape": [4], "dtype": "float32"}
ITEM = {**GOOD, "list_index": 0}
ATTACKS: dict[str, Any] = {
    "not a mapping": [],
    "name": {7: [GOOD]},
    "entries": {"t": GOOD},
    "entry": {"t": ["x"]},
    "no offset": {"t": [{"shape": [4], "dtype": "float32"}]},
    "offset type": {"t": [{**GOOD, "offset": "0"}]},
    "offset bool": {"t": [{**GOOD, "offset": True}]},
    "offset float": {"t": [{**GOOD, "offset": 0.0}]},
    "negative offset": {"t": [{**GOOD, "offset": -512}]},
    "offset past the slot": {"t": [{**GOOD, "offset": 4096}]},
    "offset overflow": {"t": [{**GOOD, "offset": (1 << 64) - 16}]},
    "straddles the end": {"t": [{**GOOD, "offset": 4084}]},
    "no shape": {"t": [{"offset": 0, "dtype": "float32"}]},
    "shape type": {"t": [{**GOOD, "shape": "4"}]},
    "negative dimension": {"t": [{**GOOD, "shape": [-4, -1]}]},
    "dimension type": {"t": [{**GOOD, "shape": [2.0]}]},
    "dimension bool": {"t": [{**GOOD, "shape": [True]}]},
    "shape overflow": {"t": [{**GOOD, "shape": [1 << 32, 1 << 32, 1 << 32]}]},
    "zero times overflow": {"t": [{**GOOD, "shape": [0, 1 << 62, 1 << 62]}]},
    "too many dimensions": {"t": [{**GOOD, "shape": [1] * 65}]},
    "unknown dtype": {"t": [{**GOOD, "dtype": "float33"}]},
    "dtype with dots": {"t": [{**GOOD, "dtype": "torch.float32"}]},
    "dtype type": {"t": [{**GOOD, "dtype": ["float32"]}]},
    "huge index": {"t": [{**ITEM, "list_index": 1 << 40}]},
    "huge index in parts": {str(part): [{**ITEM, "shape": [0], "list_index": 99_999}] for part in range(11)},
    "negative index": {"t": [{**ITEM, "list_index": -1}]},
    "index type": {"t": [{**ITEM, "list_index": "0"}]},
    "index twice": {"t": [ITEM, ITEM]},
    "index past the length": {"t": [{**ITEM, "list_length": 0}]},
    "huge length": {"t": [{"list_length": 1 << 40}]},
    "length type": {"t": [{**ITEM, "list_length": None}]},
    "some without index": {"t": [ITEM, GOOD]},
    "two single tensors": {"t": [GOOD, GOOD]},
    "container": {"t": [{**ITEM, "container": "dict"}]},
    "container type": {"t": [{**ITEM, "container": ["tuple"]}]},
    "tuple without index": {"t": [{**GOOD, "container": "tuple"}]},
    "empty entry": {"t": [{}]},
    "the slot many times over": {str(part): [{**GOOD, "shape": [1024]}] for part in range(2)},
}


@pytest.mark.parametrize("name", ATTACKS)
def test_a_bad_manifest_is_refused_before_anything_is_read(
    buffer: TransferTensorBuffer, handle: SlotHandle, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("memory was touched")

    monkeypatch.setattr(buffer, "_copy_out", fail)
    with pytest.raises(ManifestError) as caught:
        buffer.read_tensors_from_manifest(handle, ATTACKS[name])
    assert isinstance(caught.value, ValueError)
    assert len(str(caught.value)) < 400


def test_the_error_names_the_entry_and_the_numbers(buffer: TransferTensorBuffer, handle: SlotHandle) -> None:
    with pytest.raises(ManifestError, match="'t': 16 bytes at offset 4084 leave the slot of 4096 bytes"):
        buffer.read_tensors_from_manifest(handle, {"t": [{**GOOD, "offset": 4084}]})
    with pytest.raises(ManifestError, match="'t': unknown dtype 'float33'"):
        buffer.read_tensors_from_manifest(handle, {"t": [{**GOOD, "dtype": "float33"}]})


def test_a_single_element_with_a_stride_is_written() -> None:
    buffer = TransferTensorBuffer(1 << 20)
    handle = buffer.allocate(64, "r")
    assert handle is not None
    buffer.write_tensor(handle, "x", torch.arange(2, dtype=torch.int16)[::2])
    assert buffer.read_tensor(handle, [1], torch.int16).tolist() == [0]
