"""Models behind a foreign HTTP API: for frozen agents, judges and teachers. Their answers are
recorded, counted and paid for, and never trained."""

from agentevo.remote_models.conversations import RemoteConversations
from agentevo.remote_models.model import RemoteModel, RemoteModels
from agentevo.remote_models.wire import RemoteReply, Usage

__all__ = ["RemoteConversations", "RemoteModel", "RemoteModels", "RemoteReply", "Usage"]
