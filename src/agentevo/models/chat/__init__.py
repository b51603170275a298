"""Chat formats: messages to token ids and back, by the model's template."""
