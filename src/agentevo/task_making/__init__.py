"""Makes tasks from a tool server's schemas and answers, or from documents. Start with
`making.py`."""
