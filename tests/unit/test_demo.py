# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import socket
import struct
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from tensorferry.cli import demo, demo_channel, demo_models, main
from tensorferry.cli.demo_stages import write_picture
from tensorferry.errors import ProtocolError, UsageError

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_thread():
    threads, gradients = torch.get_num_threads(), torch.is_grad_enabled()
    demo_models.prepare(CPU)
    yield
    torch.set_num_threads(threads)
    torch.set_grad_enabled(gradients)


def pair() -> tuple[demo_channel.Channel, socket.socket]:
    here, there = socket.socketpair()
    channel = demo_channel.Channel.__new__(demo_channel.Channel)
    channel._socket = here
    return channel, there


def test_models_depend_on_the_seed_and_the_prompt_only():
    first, again, other = (demo_models.TextEncoder(seed, CPU) for seed in (1, 1, 2))
    assert torch.equal(first("a")["prompt_embeds"], again("a")["prompt_embeds"])
    assert not torch.equal(first("a")["prompt_embeds"], first("b")["prompt_embeds"])
    assert not torch.equal(first("a")["prompt_embeds"], other("a")["prompt_embeds"])


def test_tokens_are_bounded_and_any_text_has_some():
    for prompt in ("", "ä", "x" * 1000):
        tokens = demo_models.tokenize(prompt)
        assert tokens.shape == (1, demo_models.TOKENS)
        assert 0 <= int(tokens.min()) <= int(tokens.max()) < 258


def test_a_picture_has_three_stretched_channels_and_reports_its_steps():
    steps = []
    conditioning = demo_models.TextEncoder(1, CPU)("a ferry")
    latents = demo_models.Denoiser(1, CPU, 3)(conditioning, 5, lambda: steps.append(1))
    picture = demo_models.Decoder(1, CPU)(latents)
    assert len(steps) == 3
    assert picture.shape == (384, 384, 3)
    assert picture.dtype == torch.float32
    assert float(picture.std()) > 0.01, "a flat picture compares nothing"
    assert (float(picture.amin()), float(picture.amax())) == (0.0, 1.0)


def test_one_changed_bit_makes_a_picture_different(tmp_path: Path):
    picture = torch.rand(8, 8, 3)
    write_picture(picture, tmp_path / "picture")
    assert demo.same_picture(tmp_path / "picture", picture)
    changed = np.load(tmp_path / "picture.npy")
    changed.view(np.uint8)[0, 0, 0] ^= 1
    np.save(tmp_path / "picture.npy", changed)
    assert not demo.same_picture(tmp_path / "picture", picture)


def test_a_changed_png_is_different(tmp_path: Path):
    picture = torch.rand(8, 8, 3)
    write_picture(1 - picture, tmp_path / "picture")
    np.save(tmp_path / "picture.npy", picture.numpy())
    assert not demo.same_picture(tmp_path / "picture", picture)


@pytest.mark.parametrize(
    ("text", "address"),
    [("host:1", ("host", 1)), ("127.0.0.1:65535", ("127.0.0.1", 65535)), ("[::1]:80", ("::1", 80))],
)
def test_addresses(text: str, address: tuple[str, int]):
    assert demo_channel.parse_address(text) == address


@pytest.mark.parametrize("text", ["host", "host:", ":80", "::1:80", "host:-1", "host:70000", "host:x", ""])
def test_addresses_of_another_form_are_refused(text: str):
    with pytest.raises(UsageError):
        demo_channel.parse_address(text)


def test_messages_cross_whole():
    listener = demo_channel.listen("127.0.0.1:0")
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    message = {"manifest": bytes(500_000), "report": {"hops": [1, 2.5, None, "x"]}}
    received = []

    def serve() -> None:
        with demo_channel.accept(listener, 10) as channel:
            received.append(channel.receive())

    thread = threading.Thread(target=serve)
    thread.start()
    with demo_channel.connect(address, 10) as channel:
        channel.send(message)
    thread.join(10)
    assert received == [message]


@pytest.mark.parametrize(
    "data",
    [
        struct.pack(">I", 1 << 31),
        struct.pack(">I", 100) + b"short",
        struct.pack(">I", 1) + b"\xc1",
        struct.pack(">I", 1) + b"\x01",
        struct.pack(">I", 6) + b"\xdd\xff\xff\xff\xff\x00",
        b"\x00",
        b"",
    ],
    ids=["huge", "cut", "no msgpack", "no map", "huge array", "no length", "closed"],
)
def test_what_is_no_message_is_a_protocol_error(data: bytes):
    channel, peer = pair()
    with channel:
        peer.sendall(data)
        peer.close()
        with pytest.raises(ProtocolError):
            channel.receive()


def test_nobody_there_is_an_error_within_the_time():
    with pytest.raises(UsageError, match="no stage listens"):
        demo_channel.connect("127.0.0.1:1", 0.3)
    with pytest.raises(UsageError, match="nobody connected"):
        demo_channel.accept(demo_channel.listen("127.0.0.1:0"), 0.1)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--steps", "19"],
        ["--prompts", "/no/such/file"],
        ["--device", "cuda:99"],
        ["encoder"],
        ["denoiser", "--listen", "127.0.0.1:0"],
        ["decoder", "--listen", "nowhere"],
    ],
)
def test_wrong_arguments_are_one_line_and_status_1(
    arguments: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    assert main(["demo", "--out", str(tmp_path), *arguments]) == 1
    assert capsys.readouterr().err.startswith("tensorferry demo: ")


def test_prompts_are_lines_without_comments(tmp_path: Path):
    file = tmp_path / "prompts"
    file.write_text("# mine\n one \n\ntwo\n", encoding="utf-8")
    assert demo.read_prompts(file) == ["one", "two"]
    file.write_text("#\n")
    with pytest.raises(UsageError):
        demo.read_prompts(file)
