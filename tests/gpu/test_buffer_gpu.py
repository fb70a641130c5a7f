# SPDX-License-Identifier: Apache-2.0
"""The reference class on a GPU: streams, ownership and devices."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tensorferry.buffer import SlotHandle, TransferTensorBuffer
from tensorferry.dtypes import SUPPORTED_DTYPES
from tensorferry.errors import UsageError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

MIB = 1 << 20
LONG = 200_000_000  # clock cycles, about 0.1 s
POOLS = ["cpu", "cuda:0"]


def delay() -> None:
    """Keep the current stream busy for a while."""
    torch.cuda._sleep(LONG)  # type: ignore[no-untyped-call]


def lend(buffer: TransferTensorBuffer, size: int = MIB) -> SlotHandle:
    handle = buffer.allocate(size, "r")
    assert handle is not None
    return handle


def test_a_cpu_pool_is_pinned() -> None:
    assert TransferTensorBuffer(MIB)._pool.is_pinned()
    assert TransferTensorBuffer(MIB, pin_memory=True)._pool.is_pinned()
    assert not TransferTensorBuffer(MIB, pin_memory=False)._pool.is_pinned()


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("dtype", SUPPORTED_DTYPES, ids=str)
def test_every_dtype_crosses_bit_for_bit(pool: str, dtype: torch.dtype) -> None:
    buffer = TransferTensorBuffer(MIB, device=pool)
    handle = lend(buffer)
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (12 * dtype.itemsize,), dtype=torch.uint8)
    tensor = raw.cuda().view(dtype).reshape(3, 4)
    manifest = buffer.write_tensors_from_gpu(
        handle, {"t": tensor, "scalar": tensor[0, 0], "view": tensor.t()}
    )
    for device in ("cuda", "cpu"):
        result = buffer.read_tensors_from_manifest(handle, manifest, device=device)
        assert result["t"].device.type == device
        assert torch.equal(result["t"].cpu().reshape(-1).view(torch.uint8), raw)
        assert result["scalar"].shape == torch.Size([])
        assert result["view"].shape == torch.Size([4, 3])


@pytest.mark.parametrize("pool", ["cuda", "cuda:0"])
@pytest.mark.parametrize("target", ["cuda", "cuda:0", torch.device("cuda", 0)], ids=str)
def test_a_result_is_independent_of_the_pool(pool: str, target: Any) -> None:
    """In the reference "cuda" and "cuda:0" differ, and the result is a view of the slot."""
    buffer = TransferTensorBuffer(MIB, device=pool)
    assert buffer.device == pool
    handle = lend(buffer)
    buffer.write_tensor(handle, "t", torch.arange(1000, device="cuda"))
    result = buffer.read_tensor(handle, [1000], torch.int64, device=target)
    start, end = buffer.pool_data_ptr, buffer.pool_data_ptr + buffer.pool_size
    assert not start <= result.data_ptr() < end
    assert buffer.free(handle)
    buffer.write_tensor(lend(buffer), "t", torch.zeros(1000, dtype=torch.int64, device="cuda"))
    assert torch.equal(result.cpu(), torch.arange(1000))


@pytest.mark.parametrize("with_stream", [True, False])
def test_a_read_to_the_cpu_is_complete_on_return(with_stream: bool) -> None:
    """The reference returned host memory before the copy into it had ended."""
    buffer = TransferTensorBuffer(8 * MIB, device="cuda:0")
    handle = lend(buffer, 8 * MIB)
    source = torch.arange(MIB, device="cuda")
    stream = torch.cuda.Stream() if with_stream else None
    buffer.write_tensor(handle, "t", source, stream=stream)
    delay()
    result = buffer.read_tensor(handle, [MIB], torch.int64, device="cpu", stream=stream)
    assert torch.equal(result, torch.arange(MIB))


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("with_stream", [True, False])
def test_what_kernels_wrote_before_the_call_is_what_is_written(pool: str, with_stream: bool) -> None:
    """vllm-project/vllm-ascend#16555: a staging copy was not over when the transfer began."""
    buffer = TransferTensorBuffer(8 * MIB, device=pool)
    handle = lend(buffer, 8 * MIB)
    stream = torch.cuda.Stream() if with_stream else None
    source = torch.zeros(MIB, dtype=torch.int64, device="cuda")
    delay()
    source += 7
    buffer.write_tensors_from_gpu(handle, {"t": source}, stream=stream)
    source += 1  # in place, right after the call
    buffer.synchronize(handle)
    assert buffer.read_tensor(handle, [MIB], torch.int64).unique().tolist() == [7]


@pytest.mark.parametrize("pool", POOLS)
def test_a_non_contiguous_source_is_copied_whole(pool: str) -> None:
    """In the reference such copies were not ordered with the side stream."""
    buffer = TransferTensorBuffer(4 * MIB, device=pool)
    handle = lend(buffer, 4 * MIB)
    source = torch.arange(MIB, dtype=torch.int32, device="cuda").reshape(1024, 1024)
    expected = source.t().cpu()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        delay()
    buffer.write_tensor(handle, "t", source.t(), stream=stream)
    del source
    fillers = [torch.full((1024, 1024), -1, dtype=torch.int32, device="cuda") for _ in range(8)]
    buffer.synchronize(handle)
    assert torch.equal(buffer.read_tensor(handle, [1024, 1024], torch.int32), expected)
    del fillers


@pytest.mark.parametrize("pool", POOLS)
def test_a_slot_is_not_reused_before_a_queued_read_has_ended(pool: str) -> None:
    """NVIDIA/TensorRT-LLM#15546: a buffer was overwritten while a queued copy still read it."""
    buffer = TransferTensorBuffer(4 * MIB, device=pool)
    handle = lend(buffer, 4 * MIB)
    buffer.write_tensor(handle, "t", torch.full((MIB,), 5, dtype=torch.int32))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        delay()
    result = buffer.read_tensor(handle, [MIB], torch.int32, device="cuda", stream=stream)
    assert buffer.free(handle)
    buffer.write_tensor(lend(buffer, 4 * MIB), "t", torch.full((MIB,), 6, dtype=torch.int32))
    assert result.unique().tolist() == [5]


def test_a_result_of_a_side_stream_can_be_used_at_once() -> None:
    buffer = TransferTensorBuffer(4 * MIB)
    handle = lend(buffer, 4 * MIB)
    buffer.write_tensor(handle, "t", torch.full((MIB,), 5, dtype=torch.int32))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        delay()
    result = buffer.read_tensor(handle, [MIB], torch.int32, device="cuda", stream=stream)
    assert (result + 1).unique().tolist() == [6]


def test_host_and_device_tensors_mix_in_one_batch() -> None:
    buffer = TransferTensorBuffer(MIB)
    handle = lend(buffer)
    tensors = {"host": torch.arange(4), "device": [torch.arange(5, device="cuda"), None]}
    manifest = buffer.write_tensors_from_gpu(handle, tensors, stream=torch.cuda.Stream())
    result = buffer.read_tensors_from_manifest(handle, manifest, device="cuda", stream=torch.cuda.Stream())
    assert result["host"].tolist() == [0, 1, 2, 3]
    assert result["device"][0].tolist() == [0, 1, 2, 3, 4]
    assert result["device"][1] is None


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_the_current_device_stays_and_the_right_one_is_used() -> None:
    """ai-dynamo/nixl#324, #857: the device has to be that of the address."""
    buffer = TransferTensorBuffer(MIB, device="cuda:1")
    handle = lend(buffer)
    buffer.write_tensor(handle, "t", torch.arange(9, device="cuda:0"), stream=torch.cuda.Stream("cuda:1"))
    result = buffer.read_tensor(handle, [9], torch.int64, device="cuda:1")
    assert result.device == torch.device("cuda", 1)
    assert result.tolist() == list(range(9))
    assert torch.cuda.current_device() == 0
    with pytest.raises(UsageError, match="cuda:0"):
        buffer.read_tensor(handle, [9], torch.int64, device="cuda:1", stream=torch.cuda.Stream("cuda:0"))
