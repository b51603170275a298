"""Makes tasks from a tool server's schemas and results, or from documents. Start with
`server_tasks.py`."""
