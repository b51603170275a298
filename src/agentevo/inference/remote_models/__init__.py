"""Models behind another provider's HTTP API, for frozen agents, judges and teachers. Their answers
are recorded and counted, and their costs are tracked. They are never trained on."""

from agentevo.inference.remote_models.conversations import RemoteConversations
from agentevo.inference.remote_models.model import RemoteModel, RemoteModels
from agentevo.inference.remote_models.wire import RemoteReply, Usage

__all__ = ["RemoteConversations", "RemoteModel", "RemoteModels", "RemoteReply", "Usage"]
