"""Files that run inside a sandbox. They import nothing but the standard library, because AgentEvo
is not installed there."""
