"""What the dashboard knows of a store's attempts: a file in the user's cache that is made from the
store and can be deleted at any time."""
