"""The RL maths: pure functions of tensors [sequences, tokens]. Each function that has a name in a
recipe stands below its entry (entries.py): formula, source, hyper-parameters with defaults.

Training binds each once (`bind_policy_loss`, `bind_aggregation`, ...): binding checks the name and
the hyper-parameters, and the result is called with tensors only. Importing this package imports no
torch (lazy_torch.py), since the configuration reads the entries.
"""
