"""The rank page for other trainers: a few lines each on top of ``opsd.client``, imported by who uses them."""
