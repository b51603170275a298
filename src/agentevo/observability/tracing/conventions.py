"""Every name that a span can have: OpenTelemetry's semantic conventions for generative AI, at a
pinned version, and AgentEvo's own names.

All names of gen_ai.* have the status "Development": they change between versions. A test compares
these names with the package of the pinned version. All other names are AgentEvo's and begin with
`agentevo.`.
"""

from __future__ import annotations

from typing import Final

VERSION: Final = "1.44.0"
"""The release of OpenTelemetry's registry that defines these gen_ai.* names."""
SCHEMA_URL: Final = f"https://opentelemetry.io/schemas/{VERSION}"
SCOPE: Final = "agentevo"
"""The instrumentation scope, and the default service name."""
PROVIDER: Final = "agentevo"
"""The provider of a policy. gen_ai.provider.name accepts any name if no known one applies."""

# Operations
CHAT: Final = "chat"
INVOKE_AGENT: Final = "invoke_agent"
EXECUTE_TOOL: Final = "execute_tool"

# Attributes of the conventions
OPERATION: Final = "gen_ai.operation.name"
PROVIDER_NAME: Final = "gen_ai.provider.name"
AGENT_NAME: Final = "gen_ai.agent.name"
CONVERSATION_ID: Final = "gen_ai.conversation.id"
REQUEST_MODEL: Final = "gen_ai.request.model"
RESPONSE_MODEL: Final = "gen_ai.response.model"
REQUEST_CHOICES: Final = "gen_ai.request.choice.count"
REQUEST_TEMPERATURE: Final = "gen_ai.request.temperature"
FINISH_REASONS: Final = "gen_ai.response.finish_reasons"
INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
INPUT_MESSAGES: Final = "gen_ai.input.messages"
OUTPUT_MESSAGES: Final = "gen_ai.output.messages"
TOOL_DEFINITIONS: Final = "gen_ai.tool.definitions"
TOOL_NAME: Final = "gen_ai.tool.name"
TOOL_ARGUMENTS: Final = "gen_ai.tool.call.arguments"
TOOL_RESULT: Final = "gen_ai.tool.call.result"
EVALUATION_EVENT: Final = "gen_ai.evaluation.result"
EVALUATION_NAME: Final = "gen_ai.evaluation.name"
EVALUATION_SCORE: Final = "gen_ai.evaluation.score.value"
EVALUATION_EXPLANATION: Final = "gen_ai.evaluation.explanation"
ERROR_TYPE: Final = "error.type"
SERVICE_NAME: Final = "service.name"

# AgentEvo's own names
RUN_NAME: Final = "agentevo.run.name"
RUN_ID: Final = "agentevo.run.id"
TASK_ID: Final = "agentevo.task.id"
GROUP_ID: Final = "agentevo.group.id"
TRAJECTORY_ID: Final = "agentevo.trajectory.id"
ATTEMPT: Final = "agentevo.attempt"
"""The number of the attempt in its group."""
STEP: Final = "agentevo.step"
LABEL: Final = "agentevo.label"
"""The purpose of the attempt: train, greedy, sampled."""
CALL_ID: Final = "agentevo.call.id"
"""The id of the call in Store.calls."""
STATUS: Final = "agentevo.status"
PROMPT_TEXT: Final = "agentevo.prompt.text"
"""The prompt's tokens as a text (token2text)."""
COMPLETION_TEXT: Final = "agentevo.completion.text"
OWN: Final = "agentevo."
"""The prefix of attributes that the conventions do not define."""

# Environment variables with the same meaning as AgentEvo's keys
ENV_CONTENTS: Final = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
ENV_DISABLED: Final = "OTEL_SDK_DISABLED"
ENV_LENGTHS: Final = (
    "OTEL_SPAN_ATTRIBUTE_VALUE_LENGTH_LIMIT",
    "OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT",
)
ENV_QUEUE: Final = "OTEL_BSP_MAX_QUEUE_SIZE"
ENV_BATCH: Final = "OTEL_BSP_MAX_EXPORT_BATCH_SIZE"
ENV_DELAY_MS: Final = "OTEL_BSP_SCHEDULE_DELAY"
