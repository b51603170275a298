"""Engines in other processes: their server, its clients, who may connect, and how they are
found."""
