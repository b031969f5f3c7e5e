"""Simulated GPUs: a small NVML library in C, controlled through shared memory and always labelled as simulated."""
