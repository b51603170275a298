"""Models on disk: names, downloads, loading, saving, merging, conversion."""
