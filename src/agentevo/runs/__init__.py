"""A run's folder: what it holds, who owns it, and when it may be resumed."""
