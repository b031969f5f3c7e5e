"""The sections of the configuration that several packages know; pure data, below all of them."""
