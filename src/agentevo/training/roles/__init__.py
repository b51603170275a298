"""The models other than the policy: reference, critic, process reward, reward model."""
