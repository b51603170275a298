"""The policy as the objects of other frameworks. One module per framework, which imports it."""
