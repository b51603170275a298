"""A run's folder: its contents, its owner, and the rules of resuming."""
