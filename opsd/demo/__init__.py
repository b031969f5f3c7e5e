"""``opsd demo``: a real training run on this machine, broken five ways and repaired each time."""
