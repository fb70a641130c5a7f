# SPDX-License-Identifier: Apache-2.0
"""``tensorferry demo``: a text-to-image pipeline of three processes, compared with one process."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from tensorferry.errors import TensorferryError, UsageError

if TYPE_CHECKING:
    from tensorferry.cli.demo_stages import Settings

PROMPTS = (
    "a ferry crossing a fjord at dawn, oil on canvas",
    "copper pipes and dials in a lighthouse",
    "a harbour at night, rain on the quay",
)
STAGES = ("encoder", "denoiser", "decoder")
STEPS = (20, 1000)
MAX_SEED = 2**62
_NEEDED = ("diffusers", "transformers", "PIL")


def add_parser(commands: Any) -> None:
    """Add the ``demo`` command to a parser's subcommands."""
    parser = commands.add_parser(
        "demo",
        help="run a text-to-image pipeline of three processes and compare it with one process",
        description="Without STAGE: runs encoder, denoiser and decoder as processes on this host, runs the "
        "same prompts in one process, compares the pictures bit for bit, and prints what each hop cost. "
        "With STAGE: runs that stage alone, for pipelines over several hosts; start the decoder first. "
        "What the stages tell each other is neither encrypted nor authenticated.",
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
        "--prompts", type=Path, metavar="FILE", help="one prompt a line; lines with '#' are comments"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("out"), metavar="DIR", help="for the pictures (default: out)"
    )
    parser.add_argument(
        "--steps", type=int, default=25, metavar="N", help=f"denoising steps, {STEPS[0]} to {STEPS[1]} (25)"
    )
    parser.add_argument(
        "--seed", type=int, default=7, metavar="N", help="of weights and noise, the same for all stages (7)"
    )
    parser.add_argument(
        "--listen", metavar="HOST:PORT", help="denoiser, decoder: wait for the stage before here"
    )
    parser.add_argument(
        "--connect", metavar="HOST:PORT", help="encoder, denoiser: where the next stage listens"
    )
    parser.add_argument("--events", action="store_true", help=argparse.SUPPRESS)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the demo or one stage.

    Returns:
        The exit status: 0; 1 when a picture differs, or with one line on stderr; 3 of a stage
        that lost its neighbour; 130 after Ctrl-C.
    """
    from tensorferry.cli.demo_channel import ChannelLostError
    from tensorferry.cli.demo_processes import LOST_STATUS

    try:
        with _ended_by_sigterm():
            _check(arguments)
            return _run_stage(arguments) if arguments.stage else _run_all(arguments)
    except KeyboardInterrupt:
        return 130
    except (TensorferryError, OSError) as error:
        print(f"tensorferry demo: {error}", file=sys.stderr)
        return LOST_STATUS if isinstance(error, ChannelLostError) else 1


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Leave by SystemExit when terminated, so that nothing stays behind."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _check(arguments: argparse.Namespace) -> None:
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        raise UsageError(f'{", ".join(missing)} missing: pip install "tensorferry[demo]"')
    if not STEPS[0] <= arguments.steps <= STEPS[1]:
        raise UsageError(f"--steps is {STEPS[0]} to {STEPS[1]}, not {arguments.steps}")
    if not 0 <= arguments.seed <= MAX_SEED:
        raise UsageError(f"--seed is 0 to 2**62, not {arguments.seed}")
    stage = arguments.stage
    for option, takers in (("connect", STAGES[:2]), ("listen", STAGES[1:])):
        if stage in takers and not getattr(arguments, option):
            raise UsageError(f"the {stage} needs --{option} HOST:PORT")
        if stage not in takers and getattr(arguments, option):
            raise UsageError(f"--{option} is for {' and '.join(takers)}, not for {stage or 'all of them'}")


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
        reason = str(error).partition("\n")[0]
        raise UsageError(f"--device {arguments.device} cannot be used: {reason}") from error
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"--device is cpu, cuda or cuda:N, not {arguments.device}")
    demo_models.prepare(device)
    options = {"TLS": arguments.tls, "NET_DEVICES": arguments.net_devices}
    chosen = {name: value for name, value in options.items() if value}
    return Settings(device, arguments.access, chosen, arguments.steps, arguments.seed)


# ---- one stage ----------------------------------------------------------------------------------


def _run_stage(arguments: argparse.Namespace) -> int:
    with _telling_warnings(arguments), ExitStack() as stack:
        from tensorferry.cli import demo_channel

        if arguments.listen:
            listener = stack.enter_context(demo_channel.listen(arguments.listen))
            _emit(arguments, {"event": "listening", "port": listener.getsockname()[1]})
        from tensorferry.cli import demo_stages

        settings = _settings(arguments)
        settings.event = lambda event: _emit(arguments, event)
        if arguments.stage == "encoder":
            demo_stages.run_encoder(settings, read_prompts(arguments.prompts), arguments.connect)
            return 0
        upstream = stack.enter_context(demo_channel.accept(listener, demo_stages.WAIT_SECONDS))
        if arguments.stage == "denoiser":
            demo_stages.run_denoiser(settings, upstream, arguments.connect)
        else:
            arguments.out.mkdir(parents=True, exist_ok=True)
            demo_stages.run_decoder(settings, upstream, arguments.out)
    return 0


@contextmanager
def _telling_warnings(arguments: argparse.Namespace) -> Iterator[None]:
    """Pass on our own warnings, and drop those that the models' libraries have about themselves."""

    def tell(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        _emit(arguments, {"event": "warning", "text": str(message)})

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("default", module=r"tensorferry\b")
        warnings.showwarning = tell
        yield


def _emit(arguments: argparse.Namespace, event: dict[str, Any]) -> None:
    """Tell the demo by a line of JSON, or the person by a line of text."""
    if arguments.events:
        print(json.dumps(event), flush=True)
    elif event["event"] == "picture":
        report = event["report"]
        hops = "; ".join(f"{hop['name']}: {hop['bytes']} bytes by {hop['access']}" for hop in report["hops"])
        print(f"picture {report['index'] + 1}: {report['prompt']} ({hops})", flush=True)
    elif event["event"] == "encoded":
        print(f"encoded {event['index'] + 1}: {event['prompt']}", flush=True)
    elif event["event"] == "listening":
        print(f"listening on port {event['port']}", flush=True)
    elif event["event"] == "warning":
        print(f"tensorferry demo: warning: {event['text']}", file=sys.stderr, flush=True)


# ---- all of it ----------------------------------------------------------------------------------


def _loopback(arguments: argparse.Namespace) -> list[str]:
    """Bind UCX to this host, unless an RDMA device or the user says otherwise."""
    from tensorferry.backends.ucx_library import rdma_devices

    if arguments.net_devices:
        return ["--net-devices", arguments.net_devices]
    wants_rdma = arguments.access == "rdma" and rdma_devices()
    return [] if wants_rdma or arguments.tls not in (None, "tcp") else ["--net-devices", "lo"]


def _run_all(arguments: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.markup import escape

    from tensorferry.cli import demo_processes, demo_report, demo_stages

    console = Console(highlight=False)
    prompts = read_prompts(arguments.prompts)
    settings = _settings(arguments)
    arguments.out.mkdir(parents=True, exist_ok=True)
    common = ["--access", arguments.access, "--device", arguments.device, *_loopback(arguments)]
    common += ["--steps", str(arguments.steps), "--seed", str(arguments.seed)]
    common += ["--tls", arguments.tls] if arguments.tls else []
    reports: list[demo_report.Report] = []
    warned: set[str] = set()
    steps = len(prompts) * arguments.steps

    with demo_report.progress(console, "three processes", steps) as advance:

        def on_event(event: dict[str, Any]) -> None:
            if event["event"] == "picture":
                reports.append(demo_report.Report.from_plain(event["report"]))
            elif event["event"] == "step":
                advance()
            elif event["event"] == "warning" and event["text"] not in warned:
                warned.add(event["text"])
                console.print(f"[yellow]warning[/] {escape(event['text'])}")

        demo_processes.run_pipeline(common, arguments.prompts, arguments.out, on_event)
    if len(reports) != len(prompts):
        raise UsageError(f"{len(prompts)} pictures were asked for, {len(reports)} came")
    with demo_report.progress(console, "one process", steps) as advance:
        settings.event = lambda event: advance()
        different = [
            str(index + 1)
            for index, picture in enumerate(demo_stages.run_alone(settings, prompts))
            if not demo_report.same_picture(demo_stages.picture_path(arguments.out, index), picture)
        ]
    demo_report.print_table(console, reports)
    console.print(f"{len(prompts)} pictures in {escape(str(arguments.out))}{os.sep}")
    if different:
        console.print(f"[bold red]different[/] from those of one process: {', '.join(different)}")
        return 1
    console.print("[bold green]identical[/], bit for bit, with those of one process")
    return 0
