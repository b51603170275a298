"""Tasks made from what a server of tools says of itself and answers; `making.py` has the whole."""
