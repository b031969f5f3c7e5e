"""The launcher's event loop and its I/O: files, sockets, the console."""
