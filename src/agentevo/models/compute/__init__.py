"""The model's computation, shared by engine and trainer: attention, fused layers, adapters,
experts."""
