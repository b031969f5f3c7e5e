"""Readers, parsers and series that several collectors share."""
