"""Measuring models on tasks: several attempts each, several models side by side, results kept per
attempt and scored again without playing. Importing this loads no torch."""
