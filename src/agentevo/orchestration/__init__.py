"""Puts sampler and trainer together."""
