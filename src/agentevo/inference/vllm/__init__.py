"""vLLM as an engine, in processes of its own."""
