"""Spares: nodes kept ready to take the place of another one, with the data staged, checked and proved."""
