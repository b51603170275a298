"""Attention and log-probs over a packed token tree, computed without padding or whole logits."""
