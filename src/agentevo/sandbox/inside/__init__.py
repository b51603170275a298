"""What runs inside a sandbox: files of their own, which import nothing but the standard library,
since AgentEvo is not there."""
