# SPDX-License-Identifier: Apache-2.0
"""The demo's stages: each takes work from the one before it and hands tensors to the next."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

import tensorferry
from tensorferry.cli import demo_channel, demo_models
from tensorferry.cli.demo_channel import Channel, ChannelLostError
from tensorferry.cli.demo_report import Hop, Report, write_picture
from tensorferry.errors import ProtocolError, TransferError

WAIT_SECONDS = 120.0
POOL = "64MiB"
WINDOW = 2  # publications a stage may be ahead of the next one
LEASE = 3600.0  # so long may the next stage compute before it takes what waits for it
_LOOK_SECONDS = 0.5
_GRACE_SECONDS = 5.0
_STEP = {"event": "step"}

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
        return tensorferry.Producer(
            POOL, access=self.access, backend_options=self.options, lease=LEASE, name=name
        )

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
        self._held: deque[str] = deque()

    def send(self, report: Report, tensors: dict[str, Any]) -> None:
        """Hand tensors over, once the next stage is no more than ``WINDOW`` publications behind.

        Args:
            report: Goes with the manifest, with this hop added to it.
            tensors: The payload.

        Raises:
            ChannelLostError: The next stage is gone.
            TensorferryError: The tensors cannot be published.
        """
        self._wait_until_held(WINDOW - 1)
        request = f"{self._name} {report.index + 1}"
        before = self._producer.statistics().publish_seconds
        manifest = self._producer.publish(
            request, tensors, metadata={"seed": report.seed, "index": report.index}
        )
        self._held.append(request)
        hop = Hop(
            name=self._name,
            tensors=len(tensorferry.read_manifest(manifest).tensors),
            manifest=len(manifest),
            publish=self._producer.statistics().publish_seconds - before,
        )
        report.hops.append(hop)
        self._channel.send({"manifest": manifest, "report": asdict(report)})

    def end(self) -> None:
        """Say that nothing more comes, and stay until everything was taken.

        Raises:
            ChannelLostError: The next stage left something.
        """
        self._channel.send({"end": True})
        self._wait_until_held(0)

    def _wait_until_held(self, most: int) -> None:
        while len(self._held) > most:
            # Asked first: who has taken everything may leave before its release is heard.
            left = self._channel.left_by_peer()
            if self._producer.wait_released(self._held[0], _GRACE_SECONDS if left else _LOOK_SECONDS):
                self._held.popleft()
            elif left:
                raise ChannelLostError(f"the next stage left without taking {self._held[0]!r}")

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

    def __iter__(self) -> Iterator[tuple[Report, dict[str, Any]]]:
        """Yield reports and payloads until the stage before has ended.

        Raises:
            ChannelLostError: The stage before is gone.
            ProtocolError: It sent something else than a manifest and a report.
            TensorferryError: The tensors cannot be pulled.
        """
        while not (message := self._channel.receive()).get("end"):
            manifest, report = message.get("manifest"), Report.from_plain(message.get("report"))
            if not isinstance(manifest, bytes) or not report.hops:
                raise ProtocolError("a message without a manifest, or without the hop that it took")
            before = self._consumer.statistics()
            tensors = self._pull(manifest)
            after = self._consumer.statistics()
            hop = report.hops[-1]
            hop.bytes = after.bytes_pulled - before.bytes_pulled
            hop.wire = after.wire_seconds - before.wire_seconds
            hop.landing = after.landing_seconds - before.landing_seconds
            pulls, earlier = after.pulls_by_access, before.pulls_by_access
            hop.access = ", ".join(access for access in pulls if pulls[access] > earlier[access])
            yield report, tensors

    def _pull(self, manifest: bytes) -> dict[str, Any]:
        try:
            return self._consumer.pull(manifest, device=self._settings.device, timeout=WAIT_SECONDS)
        except TransferError as error:
            if self._channel.left_by_peer(_LOOK_SECONDS):
                raise ChannelLostError(f"the stage before is gone: {error}") from error
            raise

    def close(self) -> None:
        """Free the pool."""
        self._consumer.close()


@contextmanager
def _computing(settings: Settings, report: Report) -> Iterator[None]:
    started = time.perf_counter()
    yield
    settings.synchronize()
    report.compute += time.perf_counter() - started


def run_encoder(settings: Settings, prompts: list[str], connect: str) -> None:
    """Encode every prompt and hand the embeddings to the denoiser at ``connect``.

    Raises:
        UsageError: No denoiser listens there.
        TensorferryError: What was encoded could not be handed over.
    """
    encoder = demo_models.TextEncoder(settings.seed, settings.device)
    with demo_channel.connect(connect, WAIT_SECONDS) as channel:
        sender = Sender(settings, "encoder→denoiser", channel)
        try:
            for index, prompt in enumerate(prompts):
                report = Report(index, prompt, settings.seed + index)
                with _computing(settings, report):
                    tensors = encoder(prompt)
                sender.send(report, tensors)
                settings.event({"event": "encoded", "index": index, "prompt": prompt})
            sender.end()
        finally:
            sender.close()


def run_denoiser(settings: Settings, upstream: Channel, connect: str) -> None:
    """Denoise for every manifest that comes, and hand the latents to the decoder at ``connect``.

    Raises:
        UsageError: No decoder listens there.
        TensorferryError: Something could not be pulled or handed over.
    """
    denoiser = demo_models.Denoiser(settings.seed, settings.device, settings.steps)
    with demo_channel.connect(connect, WAIT_SECONDS) as channel:
        receiver = Receiver(settings, "denoiser", upstream)
        try:
            sender = Sender(settings, "denoiser→decoder", channel)
            try:
                for report, conditioning in receiver:
                    with _computing(settings, report):
                        latents = denoiser(conditioning, report.seed, lambda: settings.event(_STEP))
                    sender.send(report, latents)
                sender.end()
            finally:
                sender.close()
        finally:
            receiver.close()


def run_decoder(settings: Settings, upstream: Channel, out: Path) -> None:
    """Decode for every manifest that comes, and write the pictures to ``out``.

    Raises:
        TensorferryError: Something could not be pulled.
        OSError: A picture cannot be written.
    """
    decoder = demo_models.Decoder(settings.seed, settings.device)
    receiver = Receiver(settings, "decoder", upstream)
    try:
        for report, latents in receiver:
            with _computing(settings, report):
                picture = decoder(latents)
            write_picture(picture, picture_path(out, report.index))
            settings.event({"event": "picture", "report": asdict(report)})
    finally:
        receiver.close()


def picture_path(out: Path, index: int) -> Path:
    """Return where the picture of a prompt goes, without its suffixes."""
    return out / f"picture-{index + 1:02}"


def run_alone(settings: Settings, prompts: list[str]) -> Iterator[torch.Tensor]:
    """Make the same pictures in this one process; the reference for the comparison."""
    encoder = demo_models.TextEncoder(settings.seed, settings.device)
    denoiser = demo_models.Denoiser(settings.seed, settings.device, settings.steps)
    decoder = demo_models.Decoder(settings.seed, settings.device)
    for index, prompt in enumerate(prompts):
        yield decoder(denoiser(encoder(prompt), settings.seed + index, lambda: settings.event(_STEP)))
