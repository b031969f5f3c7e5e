"""The pictures of the documentation, made by ``make pictures``: pages, boards, the terminal."""
