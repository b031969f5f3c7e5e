"""Slurm as opsd sees it: one narrow port (``opsd.slurm.port.Slurm``) and two implementations of it."""

from __future__ import annotations
