"""A second model that starts as a copy of the policy and is then trained, or kept, separately: a
reference, a critic, a process reward.

Weights that the policy does not train (the base under its adapters) are shared, never copied: a
copy of a policy with adapters costs only another set of adapters.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

from transformers import PreTrainedModel

from agentevo.models.sharded import copy_sharded, is_sharded


def copy_policy(
    policy: PreTrainedModel, change: Callable[[PreTrainedModel], None] = lambda twin: None
) -> PreTrainedModel:
    """A copy of the policy as it is now, with other layers from `change`, that shares every
    parameter without gradient. Of a model that is split over several processes each process copies
    its own part, and `change` runs before there are weights: what the policy does not have is 0."""
    if is_sharded(policy):
        return copy_sharded(policy, change)
    shared = {id(p): p for p in policy.parameters() if not p.requires_grad}
    twin = copy.deepcopy(policy, shared)
    change(twin)
    return twin
