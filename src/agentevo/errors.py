"""The tree of all errors that AgentEvo raises on purpose.

Policy: a bad configuration is fatal before anything is created. A bad rollout is data (a `failed`
trajectory with its reason). A bad step never commits. Each message says what is wrong, where, and
how to fix it.
"""

from __future__ import annotations

from collections.abc import Sequence

LONGEST = 4000
"""The maximum number of stored characters of a message."""
SHOWN = 200
"""The maximum number of characters of a value in a message."""


def describe_error(error: BaseException) -> str:
    """`Kind: message` for anything that a user's code raised, as a text that every database
    accepts."""
    if isinstance(error, OverreachError):
        return str(error)

    kind = type(error).__name__
    try:
        text = f"{kind}: {error}"
    except BaseException:  # noqa: BLE001 (a user's `__str__` may raise anything)
        text = f"{kind}: its message can't be shown, since its __str__ raises"

    return storable(text)


def shown(value: object) -> str:
    """The shortened repr of a value from a user's code."""
    try:
        text = repr(value)
    except BaseException:  # noqa: BLE001 (a user's `__repr__` may raise anything)
        text = f"a {type(value).__name__} whose __repr__ raises"
    return storable(text, SHOWN)


def storable(text: str, longest: int = LONGEST) -> str:
    """The text in a form that every database accepts: without NUL and lone surrogates, and at most
    that many characters long."""
    if len(text) > longest:
        text = f"{text[:longest]}... ({len(text)} characters)"
    text = text.replace("\0", "\\x00")
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


class AgentEvoError(Exception):
    """The base class of all errors that AgentEvo raises on purpose."""


class OverreachError(AgentEvoError):
    """A user's code tried to end more than its own attempt, by SystemExit, KeyboardInterrupt or
    another BaseException. Only its own attempt ends."""

    def __init__(self, error: BaseException, who: str) -> None:
        what = f"SystemExit({shown(error.code)})" if isinstance(error, SystemExit) else ""
        super().__init__(
            f"{what or describe_error(error)}: {who} can't end the process that it runs in"
        )


class ConfigError(AgentEvoError):
    """The configuration is invalid. Nothing was created. The command line exits with code 2."""


class LoadingTimeoutError(ConfigError):
    """A user's module or constructor has not ended within its deadline."""


class SeveralProblemsError(ConfigError):
    """Independent checks have refused a configuration. The message has their messages, in order."""

    def __init__(self, problems: Sequence[ConfigError]) -> None:
        super().__init__("\n".join(dict.fromkeys(map(str, problems))))
        self.problems = tuple(problems)


class UnknownNameError(ConfigError):
    """A name (environment, algorithm, model, recipe) that no registry knows."""


class MissingExtraError(ConfigError):
    """An optional package is needed. The message contains the line `pip install
    'agentevo[extra]'`."""


class ModelError(ConfigError):
    """A model or tokenizer can't be found, loaded or used."""


class BadRequestError(AgentEvoError):
    """An agent's request to the policy is not valid: its messages, tools or sampling parameters."""


class ImageError(BadRequestError):
    """An image can't be used: its format, its size, its bytes, or where it would come from."""


class NoCallError(AgentEvoError):
    """An agent that has to call the policy with its own client never called the policy."""


class CommandFailedError(AgentEvoError):
    """An agent program did not start, or ended with an exit code other than 0."""


class EngineError(AgentEvoError):
    """The engine can't serve a request."""


class RequestTooLongError(EngineError):
    """Prompt plus new tokens exceed the context length or the whole KV memory."""


class GrammarError(EngineError):
    """A grammar can't be used: it is not valid, or takes too long."""


class DeadlineExceededError(EngineError, TimeoutError):
    """A request, environment or agent did not answer within its deadline."""


class EngineUnavailableError(EngineError):
    """No engine answers. That is the infrastructure's failure, not the agent's."""


class WeightsNotSentError(EngineError):
    """A trainer that sends weights on request has not sent the requested weights yet. The receiver
    requests them again."""


class WeightsLostError(EngineError):
    """Weights were damaged during the transfer. The trainer's weights may be undamaged, so the
    receiver requests them again."""


class StreamDivergedError(EngineUnavailableError):
    """A streamed request ended with other tokens than its listener received, and the received
    tokens can't be withdrawn."""


class ListenerError(AgentEvoError):
    """A listener of a request's tokens raised an error. Its own request ends, and the engine
    continues."""


class AttemptsFailedError(AgentEvoError):
    """Every attempt of a run's first evaluation or first step failed, because the agent,
    environment or scorer is broken."""


class EnvironmentFailure(AgentEvoError):
    """An environment broke, which is not the player's fault. The trajectory is recorded as
    failed."""


class ToolError(AgentEvoError):
    """A tool raises this error if it can't carry out the call. The policy reads the message."""


class ToolArgumentsError(ToolError):
    """The arguments of a call do not match its tool."""


class ToolUnavailableError(AgentEvoError):
    """A tool does not respond. That is the infrastructure's failure, not the policy's. `was_sent`:
    whether the call may have been carried out nevertheless."""

    def __init__(self, message: str, *, was_sent: bool = False) -> None:
        super().__init__(message)
        self.was_sent = was_sent


class SandboxError(AgentEvoError):
    """A sandbox can't be started or used. The code that runs in it is not at fault."""


class StoreError(AgentEvoError):
    """The store can't be opened, or refuses a write."""


class UnusableStoreError(StoreError, ConfigError):
    """The given store is unusable: its URL is wrong, its file is not a store, or it was damaged."""


class NoStoreError(UnusableStoreError):
    """The store to open does not exist, and the caller does not create it."""


class StoreUnavailableError(StoreError):
    """The database can't be reached now. The call may or may not have taken effect, and may be
    repeated."""


class DiskError(AgentEvoError):
    """A file can't be written, because the disk is full or read-only. Existing content stays
    intact."""


class TrainingError(AgentEvoError):
    """A step can't be computed or must not be committed (for example a non-finite loss)."""


class CheckpointError(TrainingError):
    """A checkpoint is missing, incomplete, or belongs to another configuration, or can't be
    written."""


class UnusableCheckpointError(CheckpointError, ConfigError):
    """The given path is not a checkpoint, or is damaged."""
