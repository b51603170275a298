"""The section `gateway`: the door for agents that bring a client of their own."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from agentevo.config.section import Section


class GatewaySection(Section):
    """How agents reach the policy that ask it through a client of their own (OpenAI's API). Nothing
    listens before such an agent plays."""

    host: Literal["127.0.0.1", "::1", "localhost"] = "127.0.0.1"
    """Address that it listens on: this machine alone."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port that it listens on; 0 takes a free one."""
    distribution: Literal["recipe", "client"] = "recipe"
    """Who decides temperature, top_p, top_k and min_p: the `recipe`, whatever the agent's client
    asks; or the `client`, whose turns are context and never trained where they differ from the
    recipe's."""
    whole_calls: bool = False
    """Whether a stream tells a call of a tool when it is whole, and not its arguments as they are
    drawn: then nobody hears of a call that turns out to be none, and sends its beginning back."""
    max_body_mb: float = Field(default=16.0, gt=0, le=1024)
    """Longest body of a request, in MiB."""
    requests_per_s: float = Field(default=0.0, ge=0, le=1e6)
    """Requests a second that each session's key may make, and each address that shows wrong keys;
    what is beyond gets 429 and `Retry-After`. A second's worth may come at once. 0 is no limit."""
