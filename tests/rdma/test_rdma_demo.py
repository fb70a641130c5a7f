# SPDX-License-Identifier: Apache-2.0
"""The demo's three stages with verbs between them: the pictures are those of one process."""

from __future__ import annotations

import importlib.util

import lane
import pytest

pytestmark = [*lane.needs_rdma, pytest.mark.slow, pytest.mark.timeout(1700)]

STEPS = 2  # a denoising step takes about a minute there
OPTIONS = ["--steps", str(STEPS), "--access", "rdma", "--tls", "rc_verbs,ud_verbs"]
PROMPT = "a ferry at dawn"


def test_the_pictures_of_three_processes_over_verbs_are_those_of_one(tmp_path):
    """Encoder and decoder are at one end, the denoiser is at the other, so that both hops cross the wire."""
    if importlib.util.find_spec("diffusers") is None:
        pytest.skip('the demo\'s models are not installed: pip install ".[demo]"')
    import torch

    from tensorferry.cli import demo_models, demo_report, demo_stages

    device = torch.device("cpu")
    demo_models.prepare(device)
    torch.set_num_threads(1)
    # Before the stages are forked, which then have the models' libraries: importing them takes minutes here.
    alone = next(demo_stages.run_alone(demo_stages.Settings(device, "auto", {}, STEPS, 7), [PROMPT]))

    near, far = lane.ends()
    hosts = ("10.77.0.1", "10.77.0.2") if lane.MACHINES == "two" else ("127.0.0.1", "127.0.0.1")
    decoder_at, denoiser_at = f"{hosts[0]}:18981", f"{hosts[1]}:18982"
    prompts = tmp_path / "prompts.txt"
    prompts.write_text(PROMPT)
    with near.process() as decoder, far.process() as denoiser, near.process() as encoder:
        decoder.start(run_stage, "decoder", near.device, ["--listen", decoder_at, "--out", str(tmp_path)])
        denoiser.start(run_stage, "denoiser", far.device, ["--listen", denoiser_at, "--connect", decoder_at])
        encoder.start(
            run_stage, "encoder", near.device, ["--connect", denoiser_at, "--prompts", str(prompts)]
        )
        said = [one.result(1200) for one in (encoder, denoiser, decoder)]
    assert [status for status, _ in said] == [0, 0, 0], said
    assert said[2][1].count("bytes by rdma") == 2
    assert demo_report.same_picture(demo_stages.picture_path(tmp_path, 0), alone)


def run_stage(namespace, stage, device, arguments):
    """Run a stage as its command does, with patience; return its status and what it said."""
    import io
    from contextlib import redirect_stdout

    from tensorferry.cli import demo, demo_stages, main

    demo.STEPS = (STEPS, STEPS)
    demo_stages.WAIT_SECONDS = 1000.0
    said = io.StringIO()
    with redirect_stdout(said):
        status = main(["demo", stage, *OPTIONS, "--net-devices", f"{device}:1", *arguments])
    return status, said.getvalue()
