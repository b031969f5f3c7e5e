"""Preflight: no run starts on a bad node. Checks measure, the judge compares, the engine runs and reports."""
