# SPDX-License-Identifier: Apache-2.0
"""``tensorferry inspect``: show what is in a manifest, without connecting to anything."""

from __future__ import annotations

import argparse
import sys
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tensorferry.errors import ManifestError, TensorferryError
from tensorferry.manifest import Manifest, read_manifest
from tensorferry.wire import MAX_MANIFEST_NBYTES

_MAX_VALUE_CHARACTERS = 400


def add_parser(commands: Any) -> None:
    """Add the subcommand to what ``ArgumentParser.add_subparsers`` returned."""
    parser = commands.add_parser("inspect", help="show what is in a manifest", description=__doc__)
    parser.add_argument("file", metavar="FILE", help="file with the bytes of a manifest, - for stdin")
    parser.add_argument(
        "--key-file", metavar="PATH", help="file with the producer's key; a line break at its end is ignored"
    )
    parser.add_argument(
        "--limit", type=int, default=200, metavar="N", help="show at most N tensors, 0 for all (200)"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the manifest and return 0, or say on stderr what is wrong and return 1."""
    try:
        key = Path(arguments.key_file).read_bytes().rstrip(b"\r\n") if arguments.key_file else None
        manifest = read_manifest(_read(arguments.file), key)
    except (OSError, TensorferryError) as error:
        print(f"tensorferry inspect: {_printable(str(error))}", file=sys.stderr)
        return 1
    console = Console(highlight=False)
    console.print(_overview(manifest, signed=key is not None))
    console.print(_offers(manifest))
    if manifest.metadata:
        console.print(_metadata(manifest))
    console.print(_tensors(manifest, arguments.limit or len(manifest.tensors)))
    return 0


def _read(file: str) -> bytes:
    if file == "-":
        data = sys.stdin.buffer.read(MAX_MANIFEST_NBYTES + 1)
    else:
        with Path(file).open("rb") as stream:
            data = stream.read(MAX_MANIFEST_NBYTES + 1)
    if len(data) > MAX_MANIFEST_NBYTES:
        raise ManifestError(
            f"{file} is larger than any manifest, which has {MAX_MANIFEST_NBYTES} bytes at most"
        )
    return data


def _overview(manifest: Manifest, *, signed: bool) -> Table:
    table = Table(box=box.SIMPLE, show_header=False, title="Publication", title_justify="left")
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    slot = manifest.ticket
    for name, value in (
        ("request id", manifest.request_id),
        ("producer", manifest.producer or "(unnamed)"),
        ("producer uid", manifest.peer.uid.hex()),
        ("backend", manifest.peer.backend),
        ("lease", f"{manifest.lease:g} s, {_expiry(manifest.expires)}"),
        ("consumers", str(manifest.consumers)),
        ("slot", f"{_size(slot.nbytes)} at offset {slot.offset}, generation {slot.generation}"),
        ("byte order", manifest.byteorder),
        ("checksums", manifest.checksum or "none"),
        ("MAC", "verified" if signed else "none"),
    ):
        table.add_row(Text(name, style="dim"), Text(_printable(value)))
    return table


def _offers(manifest: Manifest) -> Table:
    table = Table(box=box.SIMPLE, title="Access", title_justify="left")
    table.add_column("access")
    table.add_column("address bytes", justify="right")
    table.add_column("key bytes", justify="right")
    for offer in manifest.peer.offers:
        table.add_row(offer.access, str(len(offer.address)), str(len(offer.key)))
    return table


def _metadata(manifest: Manifest) -> Table:
    table = Table(box=box.SIMPLE, title="Metadata", title_justify="left")
    table.add_column("name", overflow="fold")
    table.add_column("value", overflow="fold")
    for name, value in manifest.metadata.items():
        table.add_row(Text(_printable(name)), Text(_printable(repr(value))))
    return table


def _tensors(manifest: Manifest, limit: int) -> Table:
    count = len(manifest.tensors)
    table = Table(
        box=box.SIMPLE,
        title=f"{count} tensor{'' if count == 1 else 's'}, {_size(manifest.nbytes)}",
        title_justify="left",
        caption=f"… and {count - limit} more" if count > limit else None,
        caption_justify="left",
    )
    table.add_column("name", overflow="fold", min_width=12)
    table.add_column("dtype", overflow="fold")
    table.add_column("shape", overflow="fold")
    table.add_column("offset", justify="right", no_wrap=True)
    table.add_column("bytes", justify="right", no_wrap=True)
    for spec in manifest.tensors[:limit]:
        cells = (_printable(spec.path), spec.dtype, str(list(spec.shape)), str(spec.offset), str(spec.nbytes))
        table.add_row(*map(Text, cells))
    return table


def _expiry(expires: float) -> str:
    remaining = expires - time.time()
    try:
        moment = datetime.fromtimestamp(expires, timezone.utc).isoformat(" ", "seconds")
    except (OverflowError, ValueError, OSError):
        return "until a time that no calendar has"
    when = f"{remaining:.0f} s left" if remaining > 0 else f"over for {-remaining:.0f} s"
    return f"until {moment} ({when})"


def _size(nbytes: int) -> str:
    if nbytes < 1024:
        return f"{nbytes} bytes"
    power = (nbytes.bit_length() - 1) // 10
    return f"{nbytes} bytes ({nbytes / (1 << 10 * power):.1f} {'KMGTPE'[power - 1]}iB)"


def _printable(text: str) -> str:
    """Return text that cannot steer a terminal, cut to a readable length."""
    if len(text) > _MAX_VALUE_CHARACTERS:
        text = f"{text[:_MAX_VALUE_CHARACTERS]}… ({len(text)} characters)"
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
