"""Hang detection: which rank hangs, and the evidence."""
