"""Rotary positions (RoPE, arXiv 2104.09864) and the ways of stretching them to longer sequences."""

from __future__ import annotations

import math

import torch

from opsd.trainer.model_settings import ModelSettings, yarn_attention


def rotary_angles(at: torch.Tensor, settings: ModelSettings, *, window: bool = False) -> torch.Tensor:
    """The cosines and sines [2, .., channels / 2] of RoPE for the positions ``at`` [..].

    Positions may count through the whole sequence: attention depends only on their differences, so they need not
    restart with each document. Layers with a ``window`` may have a base of their own.
    """
    frequencies, scale = rotary_frequencies(settings, at.device, window=window)
    return turns(at, frequencies) * scale


def rotary_frequencies(
    settings: ModelSettings, device: torch.device, *, window: bool = False
) -> tuple[torch.Tensor, float]:
    """Angles per position [channels / 2], and the factor of rotated queries and keys."""
    channels = settings.rotary_channels
    exponents = -torch.arange(0, channels, 2, device=device, dtype=torch.float32) / channels
    if window and settings.window_theta:
        return settings.window_theta**exponents, 1.0
    frequencies = settings.rope_theta**exponents / settings.rope_factor
    if settings.yarn_factor > 1:
        return _yarn(frequencies, settings), settings.yarn_attention or yarn_attention(settings.yarn_factor)
    return (_llama3(frequencies, settings) if settings.llama3_factor > 1 else frequencies), 1.0


def turns(at: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
    """The cosines and sines [2, .., channels / 2] of the positions ``at`` [..]."""
    angles = at[..., None].float() * frequencies
    return torch.stack((angles.cos(), angles.sin()))


def _yarn(frequencies: torch.Tensor, settings: ModelSettings) -> torch.Tensor:
    """YaRN (arXiv 2309.00071, section 3).

    Channels that turn more often than the upper bound of ``yarn_turns`` within the original length keep their
    frequency, those that turn less often than the lower one are slowed down by the factor, and those between by a
    linear ramp over the channels.
    """
    channels = settings.rotary_channels

    def channel(turns: float) -> float:
        wavelength = settings.yarn_positions / (turns * 2 * math.pi)
        return channels * math.log(wavelength) / (2 * math.log(settings.rope_theta))

    few, many = settings.yarn_turns
    low, high = channel(many), channel(few)
    if settings.yarn_whole_channels:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, channels - 1)
    ramp = torch.arange(len(frequencies), device=frequencies.device, dtype=torch.float32)
    slowed = ((ramp - low) / (high - low if high != low else 0.001)).clamp(0, 1)
    return slowed * (frequencies / settings.yarn_factor) + (1 - slowed) * frequencies


def _llama3(frequencies: torch.Tensor, settings: ModelSettings) -> torch.Tensor:
    """Llama 3.1's scaling: as YaRN, but with a ramp over the turns, and no factor for queries and keys.

    Source: ``apply_scaling`` in meta-llama/llama-models.
    """
    few, many = settings.llama3_turns
    turns = settings.llama3_positions * frequencies / (2 * math.pi)
    kept = ((turns - few) / (many - few)).clamp(0, 1)
    return (1 - kept) * (frequencies / settings.llama3_factor) + kept * frequencies


def rotation_factors(angles: torch.Tensor) -> torch.Tensor:
    """The factors of ``rotate``, [2, .., 1, channels], for ``angles`` [2, .., channels / 2] from ``rotary_angles``."""
    cos, sin = angles
    return torch.stack((torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)))[..., None, :]


def rotate(x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """Rotate pairs of channels (i, i + n / 2) of the first n of ``x`` [batch, sequence, heads, head_dim], as in Llama.

    n is the number of channels of ``rotation``.
    """
    cos, sin = rotation.to(x.dtype)
    channels = cos.shape[-1]
    if channels < x.shape[-1]:
        return torch.cat((rotate(x[..., :channels], rotation), x[..., channels:]), dim=-1)
    return torch.addcmul(x * cos, x.roll(channels // 2, dims=-1), sin)
