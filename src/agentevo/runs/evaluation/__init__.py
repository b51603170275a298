"""Evaluates models on tasks, with several attempts each and several models side by side. Stores the
result of each attempt, so that attempts can be scored again without playing. Importing this package
loads no torch."""
