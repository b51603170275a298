"""Creates a second model that starts as a copy of the policy and is then trained or frozen
separately: a reference, a critic, or a process reward.

Weights that the policy does not train (the base under its adapters) are shared, so a copy of a
policy with adapters needs only the memory of another set of adapters.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

from transformers import PreTrainedModel

from agentevo.models.compute.sharded import copy_sharded, is_sharded


def copy_policy(
    policy: PreTrainedModel, change: Callable[[PreTrainedModel], None] = lambda twin: None
) -> PreTrainedModel:
    """Copies the current policy. Parameters without gradient are shared. `change` may replace
    layers of the copy. If the model is split over several processes, each process copies its own
    part, and `change` runs before the weights are copied; weights that the policy does not have are
    0."""
    if is_sharded(policy):
        return copy_sharded(policy, change)
    shared = {id(p): p for p in policy.parameters() if not p.requires_grad}
    twin = copy.deepcopy(policy, shared)
    change(twin)
    return twin
