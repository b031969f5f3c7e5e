"""``opsd demo``: a real training run on this machine, broken six ways and repaired each time."""
