"""A second model that starts as a copy of the policy and is then trained, or kept, by itself: a
reference, a critic, a process reward.

What the policy does not train (the base under its adapters) is shared, never copied: beside a
policy with adapters a copy costs another set of adapters.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

from transformers import PreTrainedModel

from agentevo.models.sharded import copy_sharded, is_sharded


def copy_policy(
    policy: PreTrainedModel, change: Callable[[PreTrainedModel], None] = lambda twin: None
) -> PreTrainedModel:
    """A copy of the policy as it is now, given other layers by `change`, that shares every
    parameter without gradient. Of a model that lies in parts on several processes each copies its
    own, and `change` comes before there are weights: what the policy has not is 0."""
    if is_sharded(policy):
        return copy_sharded(policy, change)
    shared = {id(p): p for p in policy.parameters() if not p.requires_grad}
    twin = copy.deepcopy(policy, shared)
    change(twin)
    return twin
