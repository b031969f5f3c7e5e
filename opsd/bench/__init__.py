"""Benchmarks: each measures opsd beside its peers in the same run."""
