# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tensorferry.cli import bench_plots, bench_report
from tensorferry.cli.bench_results import PHASES, Report, Round, Series, combine, percentile


def series(row: str, wholes: list[list[float]], **changes: Any) -> Series:
    rounds = [Round(whole, {"publish": 0.1, "wire": min(whole)}, (0.5, 0.25), 1 << 20) for whole in wholes]
    one = Series(row, "nixl", "one 1 MiB", 1 << 20, rounds, about={"UCX": "1.22"})
    for name, value in changes.items():
        setattr(one, name, value)
    return one


def report(*all_series: Series) -> Report:
    host = {
        "host": "here",
        "cpu": "a CPU",
        "cpus": 2,
        "kernel": "6.18",
        "settings": {"huge pages": "never"},
        "packages": {"torch": "2.13"},
    }
    return Report(
        "tensorferry bench loopback",
        "2026-01-01T00:00:00+00:00",
        60.0,
        {"rounds": 3},
        [host],
        {"ray": "No module named 'ray'; pip install ray"},
        list(all_series),
    )


# ---- medians ------------------------------------------------------------------------------------


def test_the_figure_of_a_row_is_the_median_of_the_medians_of_its_rounds():
    one = series("x", [[1.0, 2.0, 300.0], [5.0, 4.0, 3.0], [100.0, 100.0, 100.0]])
    assert one.whole == 4.0
    assert one.spread == (2.0, 100.0)
    assert one.throughput == (1 << 20) / 4.0
    assert one.phase("wire") == 3.0
    assert one.phase("landing") == 0.0
    assert one.above == 1 << 20
    assert one.cpu_per_gb == pytest.approx((0.5 / (1 << 20) * 1e9, 0.25 / (1 << 20) * 1e9))


@pytest.mark.parametrize(
    ("count", "share", "expected"),
    [(100, 0.5, 50), (100, 0.99, 99), (101, 0.99, 100), (5, 0.99, 5), (1, 0.5, 1), (2, 0.5, 1)],
)
def test_percentiles_are_of_the_nearest_rank(count: int, share: float, expected: float):
    assert percentile(range(count, 0, -1), share) == expected


def test_percentiles_are_of_all_calls_of_all_rounds():
    one = series("x", [[float(value) for value in range(1, 51)], [float(value) for value in range(51, 101)]])
    assert one.percentile(0.99) == 99.0


# ---- both sides' records ------------------------------------------------------------------------

# The producer begins at 10, has published at 11 and is told at 20.  The consumer hears of it at 12, reads for
# 3, copies for 1 and ends at 17.
PRODUCER = {"records": [[10.0, 11.0, 20.0, 0.5]]}
CONSUMER = {"records": [[12.0, 3.0, 1.0, 17.0, 0.0, 0.25]], "above": 7}


def test_phases_add_up_to_the_whole_on_one_host():
    one = combine(PRODUCER, CONSUMER, batch=1, one_host=True)
    assert one.whole == [10.0]
    assert one.phases == {
        "publish": 1.0,
        "manifest": 1.0,
        "wire": 3.0,
        "landing": 1.0,
        "release": 3.0,
        "rest": 1.0,
    }
    assert sum(one.phases.values()) == one.whole[0]
    assert set(one.phases) == set(PHASES)
    assert (one.cpu, one.above) == ((0.5, 0.25), 7)


def test_two_hosts_have_two_clocks():
    late = {"records": [[1012.0, 3.0, 1.0, 1017.0, 0.0, 0.25]], "above": 7}
    one = combine(PRODUCER, late, batch=1, one_host=False)
    assert one.whole == [10.0]
    assert one.phases == {"publish": 1.0, "wire": 3.0, "landing": 1.0, "release": 4.0, "rest": 1.0}


def test_a_call_has_not_ended_before_the_consumer_has_its_tensors():
    early = {"records": [[10.0, 11.0, 14.0, 0.5]]}
    one = combine(early, CONSUMER, batch=1, one_host=True)
    assert one.whole == [7.0]
    assert one.phases["release"] == 0.0


def test_inspecting_is_off_the_clock():
    lent = {"records": [[12.0, 3.0, 0.0, 17.0, 1.5, 0.25]], "above": None}
    one = combine(PRODUCER, lent, batch=1, one_host=True)
    assert one.whole == [8.5]
    assert one.phases["rest"] == 0.5
    assert sum(one.phases.values()) == 8.5


def test_times_of_several_payloads_in_flight_are_for_each():
    one = combine(PRODUCER, CONSUMER, batch=4, one_host=True)
    assert one.whole == [2.5]
    assert one.phases["wire"] == 0.75
    assert one.cpu == (0.125, 0.0625)


def test_only_the_wire_counts_where_a_limit_is_measured():
    one = combine(PRODUCER, CONSUMER, batch=1, one_host=True, elsewhere=True)
    assert (one.whole, one.phases, one.cpu) == ([3.0], {"wire": 3.0}, None)


@pytest.mark.parametrize(
    ("producer", "consumer"),
    [({"records": []}, {"records": [], "above": None}), (PRODUCER, {"records": [], "above": None})],
)
def test_sides_that_recorded_nothing_or_another_number_are_refused(
    producer: dict[str, Any], consumer: dict[str, Any]
):
    with pytest.raises(ValueError, match=r"recorded|argument"):
        combine(producer, consumer, batch=1, one_host=True)


# ---- reports ------------------------------------------------------------------------------------


def test_a_report_survives_json():
    before = report(series("x", [[1.0], [2.0]]), series("y", [], ended="it died"))
    assert Report.from_plain(json.loads(json.dumps(before.to_plain()))) == before


def test_the_fastest_comes_first_and_what_has_no_round_not_at_all():
    one = report(series("slow", [[2.0]]), series("dead", []), series("fast", [[1.0]]))
    assert [each.row for each in one.of("one 1 MiB")] == ["fast", "slow"]


def test_the_tables_have_every_figure_and_every_reason():
    console = Console(file=io.StringIO(), width=200)
    bench_report.print_tables(
        console, report(series("peer", [[0.001, 0.002, 0.003]]), series("dead", [], ended="it [died]"))
    )
    said = console.file.getvalue()  # type: ignore[attr-defined]
    line = next(line for line in said.splitlines() if line.startswith("peer"))
    assert line.split()[1:7] == ["2", "2", "to", "2", "3", "0.524"]
    assert "100" in line  # ms of publish
    assert "1.0 MiB, 100%" in line
    assert "476.84 + 238.42" in line
    assert "ray: No module named 'ray'; pip install ray" in said
    assert "dead, one 1 MiB: it [died]" in said


def test_markdown_has_the_same_figures():
    text = bench_report.markdown(report(series("peer", [[0.002]]), series("other", [[0.004]])))
    lines = text.splitlines()
    assert "| ms | one 1 MiB |" in lines
    assert "| peer | 2 |" in lines
    assert any(line.startswith("| other | 4 | 4 to 4 | 4 | 0.262 |") for line in lines)
    assert "`tensorferry bench loopback`" in text
    assert "a CPU, 2 CPUs" in text
    widths = {line.count("|") for line in lines if line.startswith(("| peer", "| other"))}
    assert len(widths) == 2  # the summary, and the table of the payload


def test_plots_are_drawn_as_png_and_svg(tmp_path: Path):
    pytest.importorskip("matplotlib", reason='pip install "tensorferry[bench]"')
    small = series("peer", [[0.001]], payload="one 4 KiB", nbytes=4096)
    files = bench_plots.draw(report(small, series("peer", [[0.002]])), tmp_path / "plots")
    names = {path.name for path in files}
    assert {"bandwidth.png", "bandwidth.svg", "phases-one-1-MiB.png", "latency-one-4-KiB.svg"} <= names
    for path in files:
        start = path.read_bytes()[:8]
        assert start == b"\x89PNG\r\n\x1a\n" if path.suffix == ".png" else start.startswith(b"<?xml")
