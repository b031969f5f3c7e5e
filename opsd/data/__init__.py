"""Runs of datatrove pipelines, with proof of what is done and counts of documents at each hand-over."""
