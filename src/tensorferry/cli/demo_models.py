# SPDX-License-Identifier: Apache-2.0
"""The demo's three models: real architectures, small, with random weights from a seed.

Nothing can be expected of the pictures but colour and texture; they are there to be compared.
Every tensor that crosses has a say in them: embeddings, pooled vectors, masks and guidance.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

TOKENS = 77
WIDTH = 768
LATENT = (4, 48, 48)
GUIDANCE = 7.5
TRAINED_STEPS = 1000
_BEGIN, _END, _VOCABULARY = 256, 257, 258
_SMALLEST_NOISE = 3


def prepare(device: torch.device) -> None:
    """Make results depend on nothing but weights and inputs: one thread, deterministic kernels."""
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    logging.getLogger("diffusers").setLevel(logging.ERROR)
    if device.type == "cuda":
        torch.backends.cudnn.deterministic = True
        torch.backends.cudnn.benchmark = False


def tokenize(prompt: str) -> torch.Tensor:
    """Return the prompt's UTF-8 bytes as token numbers, shape [1, 77]; there is no vocabulary to download."""
    tokens = [_BEGIN, *prompt.encode()[: TOKENS - 2], _END]
    return torch.tensor([tokens + [_END] * (TOKENS - len(tokens))])


def attention_mask(tokens: torch.Tensor) -> torch.Tensor:
    """Return a bool tensor like ``tokens``, True up to the first end, False for what fills up."""
    return tokens.eq(_END).cumsum(1).le(1)


def noise(seed: int) -> torch.Tensor:
    """Return the first latents, shape [1, 4, 48, 48]: Gaussian noise of several resolutions.

    Random weights cannot make large shapes out of white noise, so some are put in here.
    """
    generator = torch.Generator().manual_seed(seed)
    channels, height, width = LATENT
    total = torch.zeros(1, *LATENT)
    shrunk = 1
    while height // shrunk >= _SMALLEST_NOISE:
        coarse = torch.randn(1, channels, height // shrunk, width // shrunk, generator=generator)
        total += shrunk * torch.nn.functional.interpolate(coarse, (height, width), mode="bicubic")
        shrunk *= 2
    return total / total.std()


def _libraries() -> tuple[Any, Any]:
    import diffusers
    import transformers

    return diffusers, transformers


class TextEncoder:
    """A CLIP text encoder.

    Args:
        seed: Of the weights.
        device: Where it runs.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        _, transformers = _libraries()
        torch.manual_seed(seed)
        config = transformers.CLIPTextConfig(
            vocab_size=_VOCABULARY,
            hidden_size=WIDTH,
            intermediate_size=2 * WIDTH,
            num_hidden_layers=2,
            num_attention_heads=12,
            max_position_embeddings=TOKENS,
            projection_dim=WIDTH,
            bos_token_id=_BEGIN,
            eos_token_id=_END,
            pad_token_id=_END,
        )
        self._model = transformers.CLIPTextModel(config).to(device).eval()
        self._device = device

    def __call__(self, prompt: str) -> dict[str, Any]:
        """Return what the denoiser needs: embeddings [1, 77, 768] with and without the prompt, and more."""
        tokens, no_tokens = (tokenize(text).to(self._device) for text in (prompt, ""))
        conditioned, plain = (self._model(input_ids=ids) for ids in (tokens, no_tokens))
        return {
            "prompt_embeds": conditioned.last_hidden_state,
            "negative_prompt_embeds": plain.last_hidden_state,
            "pooled": [conditioned.pooler_output, None, plain.pooler_output],
            "attention_mask": {"prompt": attention_mask(tokens), "negative": attention_mask(no_tokens)},
            "guidance": torch.tensor(GUIDANCE, device=self._device),
        }


class Denoiser:
    """A conditioned U-Net under a DDIM scheduler, with classifier-free guidance.

    Args:
        seed: Of the weights.
        device: Where it runs.
        steps: How many steps a picture takes.
    """

    def __init__(self, seed: int, device: torch.device, steps: int) -> None:
        diffusers, _ = _libraries()
        torch.manual_seed(seed)
        unet = diffusers.UNet2DConditionModel(
            sample_size=LATENT[1],
            in_channels=LATENT[0],
            out_channels=LATENT[0],
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
            block_out_channels=(32, 64, 64),
            layers_per_block=1,
            attention_head_dim=8,
            norm_num_groups=16,
            cross_attention_dim=WIDTH,
            class_embed_type="projection",
            projection_class_embeddings_input_dim=WIDTH,
        )
        self._unet = unet.to(device).eval()
        self._scheduler = diffusers.DDIMScheduler(
            num_train_timesteps=TRAINED_STEPS, clip_sample=False, prediction_type="v_prediction"
        )
        self._device = device
        self._steps = steps

    def __call__(
        self, conditioning: dict[str, Any], seed: int, stepped: Any = None
    ) -> dict[str, torch.Tensor]:
        """Return the latents [1, 4, 48, 48] of one picture.

        Args:
            conditioning: What the text encoder returned.
            seed: Of the first noise.
            stepped: Called after every step.
        """
        latents = noise(seed).to(self._device)
        given = conditioning
        context = torch.cat([given["negative_prompt_embeds"], given["prompt_embeds"]])
        pooled = torch.cat([given["pooled"][-1], given["pooled"][0]])
        mask = torch.cat([given["attention_mask"]["negative"], given["attention_mask"]["prompt"]])
        self._scheduler.set_timesteps(self._steps)
        for step in self._scheduler.timesteps:
            both = self._unet(
                torch.cat([latents, latents]),
                step,
                encoder_hidden_states=context,
                encoder_attention_mask=mask,
                class_labels=pooled,
            ).sample
            plain, conditioned = both.chunk(2)
            predicted = plain + given["guidance"] * (conditioned - plain)
            latents = self._scheduler.step(predicted, step, latents).prev_sample
            if stepped is not None:
                stepped()
        return {"latents": latents}


class Decoder:
    """An AutoencoderKL's decoder.

    Args:
        seed: Of the weights.
        device: Where it runs.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        diffusers, _ = _libraries()
        torch.manual_seed(seed)
        vae = diffusers.AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            block_out_channels=(16, 32, 32, 64),
            layers_per_block=1,
            norm_num_groups=16,
            latent_channels=LATENT[0],
        )
        self._vae = vae.to(device).eval()

    def __call__(self, latents: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the picture, float32 on the CPU, shape [384, 384, 3], in [0, 1].

        Each channel is centred and softly clipped: random weights know no right brightness.
        """
        scaled = latents["latents"] / self._vae.config.scaling_factor
        picture: torch.Tensor = self._vae.decode(scaled).sample[0].float().cpu()
        deviation, mean = torch.std_mean(picture, dim=(1, 2), keepdim=True)
        return torch.erf((picture - mean) / (1.5 * deviation)).add(1).div(2).permute(1, 2, 0).contiguous()
