# SPDX-License-Identifier: Apache-2.0
"""The demo's stages: each takes work from the one before it and hands tensors to the next."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

import tensorferry
from tensorferry.cli import demo_channel, demo_models
from tensorferry.cli.demo_channel import Channel

WAIT_SECONDS = 120.0
POOL = "64MiB"

Event = Callable[[dict[str, Any]], None]


@dataclass
class Settings:
    """What all stages are told.

    Attributes:
        device: Where the models run and pulled tensors go.
        access: ``auto``, ``served``, ``rdma`` or ``mapped``.
        options: UCX settings without the ``UCX_`` prefix.
        steps: Denoising steps of a picture.
        seed: Of weights and noise.
        event: Told what has been done.
    """

    device: torch.device
    access: Any
    options: dict[str, str]
    steps: int
    seed: int
    event: Event = field(default=lambda event: None)

    def producer(self, name: str) -> tensorferry.Producer:
        """Return a producer with these settings."""
        return tensorferry.Producer(POOL, access=self.access, backend_options=self.options, name=name)

    def consumer(self, name: str) -> tensorferry.Consumer:
        """Return a consumer with these settings."""
        return tensorferry.Consumer(POOL, access=self.access, backend_options=self.options, name=name)

    def synchronize(self) -> None:
        """Wait for the device, so that times are those of the work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class Sender:
    """Publishes and sends manifests, with what each stage has measured so far.

    Args:
        settings: Of the stage.
        name: Of the hop.
        channel: To the next stage.
    """

    def __init__(self, settings: Settings, name: str, channel: Channel) -> None:
        self._producer = settings.producer(name)
        self._name = name
        self._channel = channel
        self._published: list[str] = []

    def send(self, report: dict[str, Any], tensors: dict[str, Any]) -> None:
        """Hand tensors over.

        Args:
            report: Goes with the manifest, with this hop added to it.
            tensors: The payload.
        """
        request = f"{self._name} {report['index']}"
        before = self._producer.statistics().publish_seconds
        manifest = self._producer.publish(
            request, tensors, metadata={"seed": report["seed"]}, timeout=WAIT_SECONDS
        )
        self._published.append(request)
        hop = {
            "name": self._name,
            "tensors": len(tensorferry.read_manifest(manifest).tensors),
            "manifest": len(manifest),
            "publish": self._producer.statistics().publish_seconds - before,
        }
        self._channel.send({"manifest": manifest, "report": {**report, "hops": [*report["hops"], hop]}})

    def end(self) -> None:
        """Say that nothing more comes, and stay until everything was taken."""
        self._channel.send({"end": True})
        for request in self._published:
            self._producer.wait_released(request, timeout=WAIT_SECONDS)

    def close(self) -> None:
        """Free the pool."""
        self._producer.close()


class Receiver:
    """Receives manifests and pulls what they name.

    Args:
        settings: Of the stage.
        name: Of the stage.
        channel: From the stage before.
    """

    def __init__(self, settings: Settings, name: str, channel: Channel) -> None:
        self._consumer = settings.consumer(name)
        self._settings = settings
        self._channel = channel

    def __iter__(self) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """Yield reports and payloads until the stage before has ended."""
        while not (message := self._channel.receive()).get("end"):
            before = self._consumer.statistics()
            tensors = self._consumer.pull(
                message["manifest"], device=self._settings.device, timeout=WAIT_SECONDS
            )
            after = self._consumer.statistics()
            report = message["report"]
            used = [
                name for name, pulls in after.pulls_by_access.items() if pulls > before.pulls_by_access[name]
            ]
            report["hops"][-1] |= {
                "bytes": after.bytes_pulled - before.bytes_pulled,
                "wire": after.wire_seconds - before.wire_seconds,
                "landing": after.landing_seconds - before.landing_seconds,
                "access": ", ".join(used),
            }
            yield report, tensors

    def close(self) -> None:
        """Free the pool."""
        self._consumer.close()


@contextmanager
def _computing(settings: Settings, report: dict[str, Any]) -> Iterator[None]:
    started = time.perf_counter()
    yield
    settings.synchronize()
    report["compute"] += time.perf_counter() - started


def run_encoder(settings: Settings, prompts: list[str], connect: str) -> None:
    """Encode every prompt and hand the embeddings to the denoiser at ``connect``."""
    encoder = demo_models.TextEncoder(settings.seed, settings.device)
    with demo_channel.connect(connect, WAIT_SECONDS) as channel:
        sender = Sender(settings, "encoder→denoiser", channel)
        try:
            for index, prompt in enumerate(prompts):
                report = {
                    "index": index,
                    "prompt": prompt,
                    "seed": settings.seed + index,
                    "compute": 0.0,
                    "hops": [],
                }
                with _computing(settings, report):
                    tensors = encoder(prompt)
                sender.send(report, tensors)
                settings.event({"event": "encoded", "index": index})
            sender.end()
        finally:
            sender.close()


def run_denoiser(settings: Settings, upstream: Channel, connect: str) -> None:
    """Denoise for every manifest that comes, and hand the latents to the decoder at ``connect``."""
    denoiser = demo_models.Denoiser(settings.seed, settings.device, settings.steps)
    with demo_channel.connect(connect, WAIT_SECONDS) as channel:
        receiver = Receiver(settings, "denoiser", upstream)
        sender = Sender(settings, "denoiser→decoder", channel)
        try:
            for report, conditioning in receiver:
                with _computing(settings, report):
                    latents = denoiser(
                        conditioning, report["seed"], lambda: settings.event({"event": "step"})
                    )
                sender.send(report, latents)
            sender.end()
        finally:
            receiver.close()
            sender.close()


def run_decoder(settings: Settings, upstream: Channel, out: Path) -> None:
    """Decode for every manifest that comes, and write the pictures to ``out``."""
    decoder = demo_models.Decoder(settings.seed, settings.device)
    receiver = Receiver(settings, "decoder", upstream)
    try:
        for report, latents in receiver:
            with _computing(settings, report):
                picture = decoder(latents)
            write_picture(picture, out / f"picture-{report['index'] + 1:02}")
            settings.event({"event": "picture", **report})
    finally:
        receiver.close()


def write_picture(picture: torch.Tensor, path: Path) -> None:
    """Write a picture twice: ``.png`` to look at, ``.npy`` to compare bit for bit."""
    from PIL import Image

    array = picture.numpy()
    np.save(path.with_suffix(".npy"), array)
    Image.fromarray((array * 255).round().astype(np.uint8)).save(path.with_suffix(".png"))


def run_alone(settings: Settings, prompts: list[str]) -> Iterator[torch.Tensor]:
    """Make the same pictures in this one process; the reference for the comparison."""
    encoder = demo_models.TextEncoder(settings.seed, settings.device)
    denoiser = demo_models.Denoiser(settings.seed, settings.device, settings.steps)
    decoder = demo_models.Decoder(settings.seed, settings.device)
    for index, prompt in enumerate(prompts):
        yield decoder(
            denoiser(encoder(prompt), settings.seed + index, lambda: settings.event({"event": "step"}))
        )
