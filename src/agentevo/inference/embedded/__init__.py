"""The embedded engine: continuous batching in the trainer's process, on the trainer's weights."""
