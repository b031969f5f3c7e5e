"""The rank page for other trainers: thin layers on top of ``opsd.client``."""
