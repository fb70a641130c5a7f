# SPDX-License-Identifier: Apache-2.0
"""The demo's three models: real architectures, small, with random weights from a seed.

Nothing can be expected of the pictures but texture; they are there to be compared.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from tensorferry.errors import UsageError

TOKENS = 77
WIDTH = 768
LATENT = (4, 48, 48)
GUIDANCE = 5.0
_BEGIN, _END, _VOCABULARY = 256, 257, 258


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


def _libraries() -> tuple[Any, Any]:
    try:
        import diffusers
        import transformers
    except ImportError as error:
        raise UsageError(f'the demo needs its models: pip install "tensorferry[demo]" ({error})') from error
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
        conditioned, plain = self._encode(prompt), self._encode("")
        return {
            "prompt_embeds": conditioned.last_hidden_state,
            "negative_prompt_embeds": plain.last_hidden_state,
            "pooled": [conditioned.pooler_output, None, plain.pooler_output],
            "attention_mask": tokenize(prompt).ne(_END).to(self._device),
            "guidance": torch.tensor(GUIDANCE, device=self._device),
        }

    def _encode(self, prompt: str) -> Any:
        return self._model(input_ids=tokenize(prompt).to(self._device))


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
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
            block_out_channels=(32, 64),
            layers_per_block=1,
            attention_head_dim=8,
            norm_num_groups=16,
            cross_attention_dim=WIDTH,
        )
        self._unet = unet.to(device).eval()
        self._scheduler = diffusers.DDIMScheduler(num_train_timesteps=1000)
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
        noise = torch.randn((1, *LATENT), generator=torch.Generator().manual_seed(seed))
        latents = noise.to(self._device)
        context = torch.cat([conditioning["negative_prompt_embeds"], conditioning["prompt_embeds"]])
        self._scheduler.set_timesteps(self._steps)
        for step in self._scheduler.timesteps:
            both = self._unet(torch.cat([latents, latents]), step, encoder_hidden_states=context).sample
            plain, conditioned = both.chunk(2)
            predicted = plain + conditioning["guidance"] * (conditioned - plain)
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
        """Return the picture, float32 on the CPU, shape [384, 384, 3], each channel stretched to [0, 1]."""
        picture: torch.Tensor = self._vae.decode(latents["latents"]).sample[0].float().cpu()
        low = picture.amin(dim=(1, 2), keepdim=True)
        high = picture.amax(dim=(1, 2), keepdim=True)
        return ((picture - low) / (high - low)).permute(1, 2, 0).contiguous()
