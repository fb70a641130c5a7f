# SPDX-License-Identifier: Apache-2.0
"""What the demo measures, compares and shows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_origin, get_type_hints

from tensorferry.errors import ProtocolError

if TYPE_CHECKING:
    import torch
    from rich.console import Console

_Record = TypeVar("_Record")

_MAX_INDEX = 1_000_000
_WIDE = 100


@dataclasses.dataclass
class Hop:
    """One payload's way from a stage to the next.

    Attributes:
        name: Of the hop.
        tensors: How many crossed.
        manifest: Bytes of the manifest.
        publish: Seconds that publishing took.
        bytes: Bytes of the tensors.
        wire: Seconds on the wire; for ``mapped``, of the copy out of the other's pool.
        landing: Seconds of the copy from the landing pool into the results.
        access: How the consumer read.
    """

    name: str
    tensors: int
    manifest: int
    publish: float
    bytes: int = 0
    wire: float = 0.0
    landing: float = 0.0
    access: str = ""

    @property
    def seconds(self) -> float:
        """All that the hop cost."""
        return self.publish + self.wire + self.landing


@dataclasses.dataclass
class Report:
    """What happened to one prompt so far; it travels beside the manifests.

    Attributes:
        index: Of the prompt, from 0.
        prompt: The text.
        seed: Of the picture's noise.
        compute: Seconds that the models took.
        hops: In the order of the stages.
    """

    index: int
    prompt: str
    seed: int
    compute: float = 0.0
    hops: list[Hop] = dataclasses.field(default_factory=list)

    @property
    def seconds(self) -> float:
        """The whole request: models and transfers."""
        return self.compute + sum(hop.seconds for hop in self.hops)

    @classmethod
    def from_plain(cls, plain: object) -> Report:
        """Return the report of which ``dataclasses.asdict`` made ``plain``.

        Raises:
            ProtocolError: It has another form.
        """
        report = _checked(cls, plain)
        report.hops = [_checked(Hop, hop) for hop in report.hops]
        if not (0 <= report.index < _MAX_INDEX and 0 <= report.seed < 1 << 63):
            raise ProtocolError(f"a report with index {report.index} and seed {report.seed}")
        return report


def _checked(kind: type[_Record], plain: object) -> _Record:
    hints = get_type_hints(kind)
    if not isinstance(plain, dict) or plain.keys() != hints.keys():
        raise ProtocolError(f"a message without a {kind.__name__.lower()} where one belongs")
    for name, hint in hints.items():
        wanted = get_origin(hint) or hint
        if type(plain[name]) is not wanted:
            raise ProtocolError(f"{name} is a {wanted.__name__}, not a {type(plain[name]).__name__}")
    return kind(**plain)


def write_picture(picture: torch.Tensor, path: Path) -> None:
    """Write a picture twice: ``.png`` to look at, ``.npy`` to compare bit for bit.

    Args:
        picture: Float32 tensor of shape [height, width, 3] with values in [0, 1].
        path: Without a suffix.

    Raises:
        OSError: A file cannot be written.
    """
    import numpy as np
    from PIL import Image

    np.save(path.with_suffix(".npy"), picture.numpy())
    Image.fromarray(_pixels(picture)).save(path.with_suffix(".png"))


def same_picture(path: Path, picture: torch.Tensor) -> bool:
    """Compare a written picture, floats and pixels, with one from this process, bit for bit.

    A picture that is missing or cannot be read is not the same.

    Args:
        path: What :func:`write_picture` was given.
        picture: Float32 tensor of shape [height, width, 3] with values in [0, 1].
    """
    import numpy as np
    from PIL import Image

    try:
        floats = np.load(path.with_suffix(".npy"))
        with Image.open(path.with_suffix(".png")) as image:
            pixels = np.asarray(image)
    except (OSError, ValueError, EOFError):
        return False
    return all(
        one.shape == other.shape and one.dtype == other.dtype and one.tobytes() == other.tobytes()
        for one, other in ((floats, picture.numpy()), (pixels, _pixels(picture)))
    )


def _pixels(picture: torch.Tensor) -> Any:
    import numpy as np

    return (picture.numpy() * 255).round().astype(np.uint8)


@contextmanager
def progress(console: Console, title: str, total: int) -> Iterator[Callable[[], None]]:
    """Show a bar on a terminal, and a line anywhere else.

    Args:
        console: Where.
        title: What is going on.
        total: Denoising steps.

    Yields:
        A function that counts one step.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    if not console.is_terminal:
        console.print(f"{title}: {total} denoising steps", highlight=False)
        yield lambda: None
        return
    columns = (TextColumn("{task.description:<16}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(title, total=total)
        yield lambda: bar.advance(task)


def print_table(console: Console, reports: Iterable[Report]) -> None:
    """Print a row for each hop of each picture, and one for each hop of all pictures."""
    from rich import box
    from rich.table import Table

    ordered = sorted(reports, key=lambda report: report.index)
    table = Table(
        box=box.SIMPLE_HEAD,
        padding=(0, 1) if console.width >= _WIDE else (0, 0),
        pad_edge=False,
        show_edge=False,
        caption="Times in ms; GB/s is bytes over wire time; share is of the whole request.\n"
        "A hop's first wire time includes connecting; with mapped, wire is the copy.",
        caption_justify="left",
    )
    for column in ("", "hop", "access", "tensors", "bytes", "publish", "wire", "landing", "GB/s", "share"):
        left = column in ("hop", "access")
        table.add_column(column, justify="left" if left else "right", no_wrap=True)
    for report in ordered:
        for hop in report.hops:
            table.add_row(str(report.index + 1), *_cells([hop], report.seconds))
    table.add_section()
    whole = sum(report.seconds for report in ordered)
    for hops in zip(*(report.hops for report in ordered), strict=True):
        table.add_row("all", *_cells(hops, whole))
    console.print(table)


def _cells(hops: Sequence[Hop], whole: float) -> list[str]:
    nbytes, wire = sum(hop.bytes for hop in hops), sum(hop.wire for hop in hops)
    times = sum(hop.publish for hop in hops), wire, sum(hop.landing for hop in hops)
    return [
        hops[0].name,
        ", ".join(sorted({hop.access for hop in hops})),
        str(sum(hop.tensors for hop in hops)),
        f"{nbytes:,}",
        *(f"{seconds * 1e3:.2f}" if seconds else "-" for seconds in times),
        f"{nbytes / wire / 1e9:.3f}" if wire else "-",
        f"{sum(hop.seconds for hop in hops) / whole:.2%}" if whole else "-",
    ]
