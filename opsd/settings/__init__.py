"""The sections of the configuration that are no collector's, and what sections are made of. Below all packages."""
