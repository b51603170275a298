"""The RL maths: pure functions of tensors, each with its formula and source."""
