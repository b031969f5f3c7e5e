"""Slurm: one port (``opsd.slurm.port.Slurm``) and its two implementations."""

from __future__ import annotations
