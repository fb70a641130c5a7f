# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tensorferry.cli import demo_models

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads, gradients = torch.get_num_threads(), torch.is_grad_enabled()
    demo_models.prepare(CPU)
    yield
    torch.set_num_threads(threads)
    torch.set_grad_enabled(gradients)


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


def test_a_picture_has_structure_and_reports_its_steps():
    steps: list[int] = []
    conditioning = demo_models.TextEncoder(1, CPU)("a ferry")
    latents = demo_models.Denoiser(1, CPU, 3)(conditioning, 5, lambda: steps.append(1))
    picture = demo_models.Decoder(1, CPU)(latents)
    assert len(steps) == 3
    assert picture.shape == (384, 384, 3)
    assert picture.dtype == torch.float32
    assert bool(picture.isfinite().all())
    assert 0.0 <= float(picture.amin()) <= float(picture.amax()) <= 1.0
    coarse = torch.nn.functional.avg_pool2d(picture.permute(2, 0, 1), 32)
    assert float(picture.std()) > 0.1, "a flat picture compares nothing"
    assert float(coarse.std()) > 0.03, "nothing but noise is to be seen"


def test_the_mask_ends_with_the_prompt():
    mask = demo_models.attention_mask(demo_models.tokenize("abc"))
    assert mask.dtype == torch.bool
    assert mask[0].tolist() == [True] * 5 + [False] * (demo_models.TOKENS - 5)
    assert bool(demo_models.attention_mask(demo_models.tokenize("x" * 1000)).all())


def test_noise_has_unit_variance_and_depends_on_the_seed():
    assert torch.equal(demo_models.noise(3), demo_models.noise(3))
    assert not torch.equal(demo_models.noise(3), demo_models.noise(4))
    assert demo_models.noise(3).shape == (1, *demo_models.LATENT)
    assert float(demo_models.noise(3).std()) == pytest.approx(1.0)


@pytest.mark.parametrize(
    "change",
    [
        lambda given: given["prompt_embeds"].neg_(),
        lambda given: given["negative_prompt_embeds"].neg_(),
        lambda given: given["pooled"][0].neg_(),
        lambda given: given["pooled"][-1].neg_(),
        lambda given: given["attention_mask"]["prompt"].logical_not_(),
        lambda given: given["attention_mask"]["negative"].logical_not_(),
        lambda given: given["guidance"].neg_(),
    ],
    ids=["prompt", "negative", "pooled", "negative pooled", "mask", "negative mask", "guidance"],
)
def test_every_tensor_that_crosses_matters(change):
    denoiser = demo_models.Denoiser(1, CPU, 2)
    conditioning = demo_models.TextEncoder(1, CPU)("a ferry")
    before = denoiser(conditioning, 5)["latents"]
    assert torch.equal(before, denoiser(conditioning, 5)["latents"])
    change(conditioning)
    assert not torch.equal(before, denoiser(conditioning, 5)["latents"])
