"""What every other package stands on: files, signals, threads, event loops, parsing, progress,
registries. It knows nothing of models or agents."""
