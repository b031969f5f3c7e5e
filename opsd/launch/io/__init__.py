"""The launcher's loop and its ways to the outside: files, sockets, the console."""
