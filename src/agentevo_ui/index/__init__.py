"""The dashboard's index of a store's attempts: a file in the user's cache, built from the store.
The file may be deleted at any time."""
