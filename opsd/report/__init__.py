"""The report of a run, as text and as a page, and the comparison of two."""
