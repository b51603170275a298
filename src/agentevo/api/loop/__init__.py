"""A program's own loop: it gathers groups of attempts and trains on them, here or through a
server."""
