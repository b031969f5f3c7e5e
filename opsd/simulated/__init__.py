"""Simulated GPUs: a small NVML library in C, driven through shared memory; always labelled as simulated."""
