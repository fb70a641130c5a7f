# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
import torch

from tensorferry.cli import bench_payloads
from tensorferry.cli.bench_payloads import Checker, Payload, WrongBytesError, chosen, named, readable
from tensorferry.errors import UsageError

CPU = torch.device("cpu")
SMALL = Payload("small", {"a": ((3, 5), "bfloat16"), "b": ((7,), "float32"), "c": ((2,), "int64")})


def described(payload: Payload) -> dict[str, tuple[list[int], torch.dtype]]:
    return {name: (list(tensor.shape), tensor.dtype) for name, tensor in payload.build(0, CPU).items()}


def test_the_payloads_are_those_of_the_pipelines():
    bf16, f32 = torch.bfloat16, torch.float32
    assert described(named("flux")) == {
        "prompt_embeds": ([1, 512, 4096], bf16),
        "pooled": ([1, 768], bf16),
        "text_ids": ([512, 3], bf16),
        "latents": ([1, 4096, 64], bf16),
    }
    assert described(named("wan")) == {
        "prompt_embeds": ([1, 512, 4096], bf16),
        "negative": ([1, 512, 4096], bf16),
        "image_embeds": ([1, 257, 1280], bf16),
        "latents": ([1, 16, 21, 90, 160], f32),
        "mask": ([1, 4, 21, 90, 160], bf16),
        "timesteps": ([50], f32),
    }
    assert dict(named("vlm").shapes) == {
        "image_embeds": ((16384, 3584), "bfloat16"),
        "grid": ((64, 3), "int64"),
    }
    many = described(named("many"))
    assert len(many) == 10_000
    assert all(one == ([256], f32) for one in many.values())
    assert described(named("one", 4096)) == {"x": ([4096], torch.uint8)}


@pytest.mark.parametrize(
    ("name", "nbytes"),
    [("flux", 4_723_200), ("wan", 30_819_528), ("vlm", 117_442_048), ("many", 10_240_000)],
)
def test_a_payload_knows_its_bytes(name: str, nbytes: int):
    payload = named(name)
    assert payload.nbytes == nbytes
    if nbytes < 50e6:
        assert sum(tensor.nbytes for tensor in payload.build(0, CPU).values()) == nbytes


def test_the_sweep_goes_from_1_byte_to_1_gib():
    sizes = [payload.nbytes for payload in chosen(["one"], [])]
    assert sizes == sorted(sizes)
    assert (sizes[0], sizes[-1]) == (1, 1 << 30)
    assert [payload.name for payload in chosen([], ["4KiB"])] == ["flux", "wan", "vlm", "many", "one 4 KiB"]


def test_wrong_names_and_sizes_are_usage_errors():
    for names, sizes in ((["nothing"], []), (["one"], ["4 parsecs"]), (["one"], ["0"])):
        with pytest.raises(UsageError):
            chosen(names, sizes)


@pytest.mark.parametrize(
    ("nbytes", "text"), [(1, "1 B"), (4096, "4 KiB"), (1 << 20, "1 MiB"), (3 << 29, "1.5 GiB")]
)
def test_sizes_are_readable(nbytes: int, text: str):
    assert readable(nbytes) == text


def test_small_payloads_are_sent_more_often():
    calls = [named("one", nbytes).calls for nbytes in bench_payloads.SIZES]
    assert calls == sorted(calls, reverse=True)
    assert calls[-1] >= 3


# ---- contents -----------------------------------------------------------------------------------


@pytest.mark.parametrize("payload", [SMALL, named("one", 1), named("one", 13), named("one", 3 << 20)])
def test_of_two_variants_no_byte_is_equal(payload: Payload):
    one, other = (payload.build(variant, CPU) for variant in (0, 1))
    for name in payload.shapes:
        different = one[name].view(-1).view(torch.uint8) != other[name].view(-1).view(torch.uint8)
        assert bool(different.all())


def test_no_two_words_are_equal():
    words = named("one", 4 << 20).build(0, CPU)["x"].view(torch.int64)
    assert len(torch.unique(words)) == len(words)
    parts = [tensor.view(-1).view(torch.uint8) for tensor in SMALL.build(0, CPU).values()]
    whole = [bytes(part[: len(part) // 8 * 8].tolist()) for part in parts]
    eights = [data[at : at + 8] for data in whole for at in range(0, len(data), 8)]
    assert len(set(eights)) == len(eights)


def test_tensors_have_memory_of_their_own():
    addresses = {tensor.untyped_storage().data_ptr() for tensor in SMALL.build(0, CPU).values()}
    assert len(addresses) == 3


# ---- comparison ---------------------------------------------------------------------------------

FEW_AND_MANY = [SMALL, Payload("many", {f"t{index}": ((2,), "float32") for index in range(100)})]


@pytest.fixture(params=FEW_AND_MANY, ids=["few", "many"])
def payload(request: pytest.FixtureRequest) -> Payload:
    return request.param  # type: ignore[no-any-return]


def test_what_was_sent_passes_in_turn(payload: Payload):
    checker = Checker(payload, CPU)
    for call in range(6):
        checker.keep([payload.build(call % 2, CPU)], call % 2)


def test_every_flipped_bit_is_found(payload: Payload):
    checker = Checker(payload, CPU)
    result = payload.build(0, CPU)
    for name, tensor in result.items():
        flat = tensor.view(-1).view(torch.uint8)
        for at in (0, flat.numel() // 2, flat.numel() - 1):
            for bit in range(8):
                flat[at] ^= 1 << bit
                with pytest.raises(WrongBytesError, match=rf"^{name} .* byte {at}$"):
                    checker.inspect(result, 0)
                flat[at] ^= 1 << bit
    checker.inspect(result, 0)


def test_stale_bytes_are_found(payload: Payload):
    checker = Checker(payload, CPU)
    checker.keep([payload.build(0, CPU)], 0)
    with pytest.raises(WrongBytesError):
        checker.keep([payload.build(0, CPU)], 1)


def test_a_result_that_lives_in_a_buffer_that_is_used_again_is_found(payload: Payload):
    checker = Checker(payload, CPU)
    buffer = payload.build(0, CPU)
    checker.keep([buffer], 0)
    for name, tensor in payload.build(1, CPU).items():
        buffer[name].copy_(tensor)
    with pytest.raises(WrongBytesError, match="a result changed when the next one came"):
        checker.keep([{name: tensor.clone() for name, tensor in buffer.items()}], 1)


def test_buffers_that_are_used_in_turn_are_found(payload: Payload):
    checker = Checker(payload, CPU)
    buffers = [payload.build(variant, CPU) for variant in (0, 1)]
    for variant in (0, 1):
        checker.keep([buffers[variant]], variant)
    with pytest.raises(WrongBytesError, match="share memory"):  # though the bytes are as they should be
        checker.keep([{name: tensor[:] for name, tensor in buffers[0].items()}], 0)


def test_results_of_one_call_are_of_both_variants_and_apart():
    checker = Checker(SMALL, CPU)
    checker.keep([SMALL.build(variant, CPU) for variant in (1, 0, 1, 0)], 1)
    same = SMALL.build(0, CPU)
    with pytest.raises(WrongBytesError):
        checker.keep([same, same], 0)


def test_shape_dtype_names_and_strides_count(payload: Payload):
    checker = Checker(payload, CPU)
    good = payload.build(0, CPU)
    name = next(iter(good))
    turned = good[name].reshape(-1).clone()[::1].reshape(good[name].shape)
    strided = torch.empty((*turned.shape, 2), dtype=turned.dtype)[..., 0].copy_(turned)
    wrong = [
        {**good, name: good[name].reshape(-1)[None]},
        {**good, name: good[name].view(torch.int16)},
        {**good, name: strided},
        {**good, "more": torch.zeros(1)},
        {other: tensor for other, tensor in good.items() if other != name},
        dict(reversed(good.items())),
    ]
    for result in wrong:
        with pytest.raises(WrongBytesError):
            checker.inspect(result, 0)


def test_tensors_at_odd_addresses_are_compared_too():
    payload = named("one", 21)
    memory = torch.empty(32, dtype=torch.uint8)
    result = {"x": memory[3:24].copy_(payload.build(1, CPU)["x"])}
    checker = Checker(payload, CPU)
    checker.inspect(result, 1)
    memory[23] ^= 1
    with pytest.raises(WrongBytesError, match="byte 20"):
        checker.inspect(result, 1)
