"""Conversations: the recorded tree of turns of one attempt, and the place of each request in it."""
