"""Checks a finished or interrupted run against its store: audit and replay."""
