"""Benchmarks: each measures opsd and comparable programs in the same run."""


class BenchError(Exception):
    """The benchmark cannot be run; the message says why."""
