"""Files that run inside a sandbox. They import only the standard library, because AgentEvo is not
installed there."""
