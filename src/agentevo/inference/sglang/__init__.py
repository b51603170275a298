"""An SGLang server as an engine, over HTTP."""
