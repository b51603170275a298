"""Every failure that AgentEvo raises on purpose, in one small tree.

Policy: a bad configuration is fatal before anything is created; a bad rollout is data (a `failed`
trajectory with its reason); a bad step never commits. Each message says what is wrong, where, and
how to fix it.
"""

from __future__ import annotations


def described(error: BaseException) -> str:
    """`Kind: message` of anything that a user's code raised, as a text that any database takes."""
    kind = type(error).__name__
    try:
        text = f"{kind}: {error}"
    except Exception:  # noqa: BLE001 (a user's `__str__` may raise anything)
        text = f"{kind}: its message can't be shown, since its __str__ raises"
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


class AgentEvoError(Exception):
    """Root of the tree: catching it catches everything raised on purpose."""


class ConfigError(AgentEvoError):
    """The configuration can't be used; the command line exits with code 2 and nothing was
    created."""


class UnknownNameError(ConfigError):
    """A name (environment, algorithm, model, recipe) that no registry knows."""


class MissingExtraError(ConfigError):
    """An optional package is needed; the message gives the `pip install 'agentevo[extra]'` line."""


class ModelError(AgentEvoError):
    """A model or tokenizer can't be found, loaded or used."""


class BadRequestError(AgentEvoError):
    """What an agent asked of the policy is no request: its messages, tools or sampling."""


class EngineError(AgentEvoError):
    """The engine can't serve a request."""


class RequestTooLongError(EngineError):
    """Prompt plus new tokens exceed the context length or the whole KV memory."""


class DeadlineExceededError(EngineError, TimeoutError):
    """A request, environment or agent did not answer within its deadline."""


class EngineUnavailableError(EngineError):
    """No engine answers: the infrastructure's failure, not the agent's."""


class EnvironmentFailure(AgentEvoError):
    """An environment broke (not the player's fault): its trajectory is recorded as failed."""


class StoreError(AgentEvoError):
    """The store can't be opened, or refuses a write."""


class StoreUnavailableError(StoreError):
    """The database can't be reached now; the call may have happened or not, and repeating it is
    harmless."""


class TrainingError(AgentEvoError):
    """A step can't be computed or must not be committed (for example a non-finite loss)."""


class CheckpointError(TrainingError):
    """A checkpoint is missing, torn, or belongs to another configuration."""
