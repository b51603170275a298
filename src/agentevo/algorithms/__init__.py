"""The RL maths: pure functions of tensors [sequences, tokens], each with its formula and source.

Everything that has a name in a recipe is bound once (`bind_policy_loss`, `bind_aggregation`, ...):
binding checks the name and the hyper-parameters, and the result is called with tensors only. Names,
formulas, hyper-parameters and the names in other systems are in `agentevo.catalogue`, `agentevo
list algorithms` and docs/algorithms.md.
"""
