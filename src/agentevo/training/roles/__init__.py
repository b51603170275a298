"""The models beside the policy: reference, critic, process reward, reward model."""
