"""Spares: nodes that are ready to replace another one, with data staged and software and hardware checked."""
