"""The section `gateway`: the HTTP server for agents that use their own client."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from agentevo.runtime.section import Section


class GatewaySection(Section):
    """How agents with their own client (of OpenAI's API) reach the policy. The gateway listens only
    once such an agent plays."""

    host: Literal["127.0.0.1", "::1", "localhost"] = "127.0.0.1"
    """Address that the gateway listens on. Only this machine can reach it."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port that the gateway listens on. 0 takes a free one."""
    distribution: Literal["recipe", "client"] = "recipe"
    """Where temperature, top_p, top_k and min_p come from. `recipe`: the recipe's values replace
    the client's; `client`: the client's values apply, and a turn with other values than the
    recipe's is context and never trained."""
    whole_calls: bool = False
    """Whether a stream sends a tool call only when it is complete, rather than its arguments as
    they are sampled. Then no client gets, and sends back, the beginning of a call that turns out
    not to be a call."""
    max_body_mb: float = Field(default=16.0, gt=0, le=1024)
    """Largest body of a request, without its images, in MiB."""
    max_image_body_mb: float = Field(default=64.0, gt=0, le=1024)
    """Largest body of a request with images, in MiB. Never less than max_body_mb."""
    max_attempt_images_mb: float = Field(default=512.0, gt=0, le=65536)
    """Largest sum of the different images that an attempt's client sends, in MiB. They stay in
    memory until the attempt ends."""
    requests_per_s: float = Field(default=0.0, ge=0, le=1e6)
    """Maximum number of requests per second for each session's key, and for each address that sends
    wrong keys. Further requests get 429 and `Retry-After`. A burst of one second's requests is
    allowed. 0: no limit."""
