"""Runbooks: one file per kind of incident, each the page, the detector, the diagnosis and the remedy."""
