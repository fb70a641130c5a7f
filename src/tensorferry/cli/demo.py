# SPDX-License-Identifier: Apache-2.0
"""``tensorferry demo``: a text-to-image pipeline of three processes, compared with one process."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensorferry.errors import TensorferryError, UsageError

if TYPE_CHECKING:
    from tensorferry.cli.demo_stages import Settings

PROMPTS = (
    "a ferry crossing a fjord at dawn, oil on canvas",
    "copper pipes and dials in a lighthouse",
    "a harbour at night, rain on the quay",
)
STAGES = ("encoder", "denoiser", "decoder")
FEWEST_STEPS = 20
_END_SECONDS = 10.0


def add_parser(commands: Any) -> None:
    """Add the ``demo`` command to a parser's subcommands."""
    parser = commands.add_parser(
        "demo",
        help="run a text-to-image pipeline of three processes and compare it with one process",
        description="Without STAGE: runs encoder, denoiser and decoder as processes on this host, runs the "
        "same prompts in one process, compares the pictures bit for bit, and prints what each hop cost. "
        "With STAGE: runs that stage alone, for pipelines over several hosts; start the decoder first.",
    )
    parser.add_argument(
        "stage", nargs="?", choices=STAGES, metavar="STAGE", help=f"one of {', '.join(STAGES)}"
    )
    parser.add_argument("--access", choices=("auto", "served", "rdma", "mapped"), default="auto")
    parser.add_argument("--tls", metavar="LIST", help="UCX transports, for example tcp")
    parser.add_argument(
        "--net-devices", metavar="LIST", help="network devices for UCX, for example lo or eth0"
    )
    parser.add_argument("--device", default="cpu", help="where the models run: cpu, cuda, cuda:1")
    parser.add_argument(
        "--prompts", type=Path, metavar="FILE", help="one prompt a line; '#' starts a comment"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("out"), metavar="DIR", help="for the pictures (default: out)"
    )
    parser.add_argument("--steps", type=int, default=25, help=f"denoising steps, at least {FEWEST_STEPS}")
    parser.add_argument("--seed", type=int, default=7, help="of weights and noise; the same for all stages")
    parser.add_argument(
        "--listen", metavar="HOST:PORT", help="denoiser, decoder: wait for the stage before here"
    )
    parser.add_argument(
        "--connect", metavar="HOST:PORT", help="encoder, denoiser: where the next stage listens"
    )
    parser.add_argument("--events", action="store_true", help=argparse.SUPPRESS)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the demo or one stage; return the exit status: 0, or 1 with one line on stderr."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        if arguments.steps < FEWEST_STEPS:
            raise UsageError(f"--steps is at least {FEWEST_STEPS}, not {arguments.steps}")
        return _run_stage(arguments) if arguments.stage else _run_all(arguments)
    except KeyboardInterrupt:
        return 130
    except (TensorferryError, OSError) as error:
        print(f"tensorferry demo: {error}", file=sys.stderr)
        return 1


def read_prompts(path: Path | None) -> list[str]:
    """Return the prompts of a file, or the built-in ones.

    Raises:
        UsageError: The file cannot be read or has none.
    """
    if path is None:
        return list(PROMPTS)
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the prompts in {path}: {error}") from error
    prompts = [line for line in lines if line and not line.startswith("#")]
    if not prompts:
        raise UsageError(f"there are no prompts in {path}")
    return prompts


def _settings(arguments: argparse.Namespace) -> Settings:
    import torch

    from tensorferry.cli import demo_models
    from tensorferry.cli.demo_stages import Settings

    try:
        device = torch.device(arguments.device)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"--device {arguments.device} cannot be used: {error}") from error
    demo_models.prepare(device)
    options = {"TLS": arguments.tls, "NET_DEVICES": arguments.net_devices}
    chosen = {name: value for name, value in options.items() if value}
    return Settings(device, arguments.access, chosen, arguments.steps, arguments.seed)


# ---- one stage ----------------------------------------------------------------------------------


def _run_stage(arguments: argparse.Namespace) -> int:
    from tensorferry.cli import demo_channel

    for option, needed in (
        ("connect", arguments.stage != "decoder"),
        ("listen", arguments.stage != "encoder"),
    ):
        if needed and not getattr(arguments, option):
            raise UsageError(f"the {arguments.stage} needs --{option} HOST:PORT")
    listener = None
    if arguments.stage != "encoder":
        listener = demo_channel.listen(arguments.listen)
        _emit(arguments, {"event": "listening", "port": listener.getsockname()[1]})
    from tensorferry.cli import demo_stages

    settings = _settings(arguments)
    settings.event = lambda event: _emit(arguments, event)
    if listener is None:
        demo_stages.run_encoder(settings, read_prompts(arguments.prompts), arguments.connect)
        return 0
    with demo_channel.accept(listener, demo_stages.WAIT_SECONDS) as upstream:
        if arguments.stage == "denoiser":
            demo_stages.run_denoiser(settings, upstream, arguments.connect)
        else:
            arguments.out.mkdir(parents=True, exist_ok=True)
            demo_stages.run_decoder(settings, upstream, arguments.out)
    return 0


def _emit(arguments: argparse.Namespace, event: dict[str, Any]) -> None:
    """Tell the demo by a line of JSON, or the person by a line of text."""
    if arguments.events:
        print(json.dumps(event), flush=True)
    elif event["event"] == "picture":
        hops = "; ".join(f"{hop['name']}: {hop['bytes']} bytes by {hop['access']}" for hop in event["hops"])
        print(f"picture {event['index'] + 1}: {event['prompt']} ({hops})", flush=True)
    elif event["event"] != "step":
        print(" ".join(f"{value}" for value in event.values()), flush=True)


# ---- all of it ----------------------------------------------------------------------------------


class _Stage:
    """One stage as a process of this host; its events come to ``on_event`` on a thread of its own."""

    def __init__(self, name: str, options: Sequence[str], on_event: Callable[[dict[str, Any]], None]) -> None:
        self.name = name
        self.port = 0
        self.listening = threading.Event()
        self._on_event = on_event
        self._said = ""
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        command = [sys.executable, "-m", "tensorferry.cli", "demo", name, "--events", *options]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self._log, text=True)  # noqa: S603
        self._reader = threading.Thread(target=self._read, name=f"demo-{name}", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                if not line.startswith("{"):  # UCX writes its log to stdout
                    self._said += line
                    continue
                event = json.loads(line)
                if event["event"] == "listening":
                    self.port = event["port"]
                    self.listening.set()
                else:
                    self._on_event(event)

    def address(self) -> str:
        while not self.listening.wait(0.1):
            if self.process.poll() is not None:
                raise self.failure()
        return f"127.0.0.1:{self.port}"

    def failure(self) -> UsageError:
        self._log.seek(0)
        log = (self._said + self._log.read()).strip()
        return UsageError(f"the {self.name} ended with status {self.process.returncode}:\n{log}")

    def end(self) -> None:
        """Make sure that the process is gone, and all it said was heard."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._reader.join(_END_SECONDS)
        self._log.close()


def _loopback(arguments: argparse.Namespace) -> list[str]:
    """Bind UCX to this host, unless an RDMA device or the user says otherwise."""
    from tensorferry.backends.ucx_library import rdma_devices

    if arguments.net_devices:
        return ["--net-devices", arguments.net_devices]
    wants_rdma = arguments.access == "rdma" and rdma_devices()
    return [] if wants_rdma or arguments.tls not in (None, "tcp") else ["--net-devices", "lo"]


def _run_pipeline(arguments: argparse.Namespace, on_event: Callable[[dict[str, Any]], None]) -> None:
    common = ["--access", arguments.access, "--device", arguments.device, *_loopback(arguments)]
    common += ["--steps", str(arguments.steps), "--seed", str(arguments.seed)]
    if arguments.tls:
        common += ["--tls", arguments.tls]
    prompts = ["--prompts", str(arguments.prompts)] if arguments.prompts else []
    stages: list[_Stage] = []

    def start(name: str, *options: str) -> _Stage:
        stages.append(_Stage(name, [*common, *options], on_event))
        return stages[-1]

    try:
        decoder = start("decoder", "--listen", "127.0.0.1:0", "--out", str(arguments.out))
        denoiser = start("denoiser", "--listen", "127.0.0.1:0", "--connect", decoder.address())
        start("encoder", "--connect", denoiser.address(), *prompts)
        running = list(stages)
        while running:
            for stage in list(running):
                try:
                    status = stage.process.wait(0.1)
                except subprocess.TimeoutExpired:
                    continue
                if status != 0:
                    raise stage.failure()
                running.remove(stage)
    finally:
        for stage in stages:
            stage.end()


def _run_all(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from tensorferry.cli import demo_stages

    console = Console()
    prompts = read_prompts(arguments.prompts)
    settings = _settings(arguments)
    arguments.out.mkdir(parents=True, exist_ok=True)
    reports: list[dict[str, Any]] = []
    steps = len(prompts) * arguments.steps

    with _progress(console, "three processes", steps) as advance:

        def on_event(event: dict[str, Any]) -> None:
            if event["event"] == "picture":
                reports.append(event)
            elif event["event"] == "step":
                advance()

        _run_pipeline(arguments, on_event)
    different = []
    with _progress(console, "one process", steps) as advance:
        settings.event = lambda event: advance()
        for index, picture in enumerate(demo_stages.run_alone(settings, prompts)):
            path = arguments.out / f"picture-{index + 1:02}"
            if not same_picture(path, picture):
                different.append(index + 1)
    if len(reports) != len(prompts):
        raise UsageError(f"{len(prompts)} pictures were asked for, {len(reports)} came")
    _print_table(console, reports)
    console.print(f"{len(prompts)} pictures in {arguments.out}{os.sep}", highlight=False)
    if different:
        numbers = ", ".join(map(str, different))
        console.print(f"[bold red]different[/] from those of one process: {numbers}", highlight=False)
        return 1
    console.print("[bold green]identical[/], bit for bit, with those of one process")
    return 0


def same_picture(path: Path, picture: Any) -> bool:
    """Compare a written picture, floats and PNG, with one from this process, bit for bit.

    Args:
        path: Without its suffix.
        picture: Float32 tensor of shape [height, width, 3].
    """
    import numpy as np
    from PIL import Image

    from tensorferry.cli.demo_stages import write_picture

    with tempfile.TemporaryDirectory() as folder:
        write_picture(picture, Path(folder) / "picture")
        for suffix in (".npy", ".png"):
            load: Any = np.load if suffix == ".npy" else Image.open
            ours, theirs = (
                np.asarray(load(file.with_suffix(suffix))) for file in (Path(folder) / "picture", path)
            )
            if ours.shape != theirs.shape or ours.tobytes() != theirs.tobytes():
                return False
    return True


@contextmanager
def _progress(console: Any, title: str, total: int) -> Iterator[Callable[[], None]]:
    """Show a bar on a terminal, and a line anywhere else."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description:<16}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    bar = Progress(*columns, console=console, disable=not console.is_terminal)
    if not console.is_terminal:
        console.print(f"{title}: {total} denoising steps", highlight=False)
    with bar if console.is_terminal else nullcontext():
        task = bar.add_task(title, total=total)
        yield lambda: bar.advance(task)


def _print_table(console: Any, reports: list[dict[str, Any]]) -> None:
    """Print a row for each hop of each picture, and one for all."""
    from rich import box
    from rich.table import Table

    table = Table(
        box=box.SIMPLE_HEAD,
        padding=0,
        caption="times in ms; share: of the picture's whole request, models included",
    )
    for column in ("", "hop", "access", "tensors", "bytes", "publish", "wire", "landing", "GB/s", "share"):
        left = column in ("hop", "access")
        table.add_column(column, justify="left" if left else "right", no_wrap=True)
    for report in sorted(reports, key=lambda one: one["index"]):
        spent = [hop["publish"] + hop["wire"] + hop["landing"] for hop in report["hops"]]
        whole = report["compute"] + sum(spent)
        for hop, seconds in zip(report["hops"], spent, strict=True):
            table.add_row(
                str(report["index"] + 1),
                hop["name"],
                hop["access"],
                str(hop["tensors"]),
                f"{hop['bytes']:,}",
                *(f"{hop[phase] * 1e3:.2f}" for phase in ("publish", "wire", "landing")),
                f"{hop['bytes'] / hop['wire'] / 1e9:.2f}" if hop["wire"] else "-",
                f"{seconds / whole:.1%}",
            )
    console.print(table)
