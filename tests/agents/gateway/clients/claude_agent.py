"""The Claude Agent SDK: Claude Code's program, with the tool in this process."""

from tempfile import TemporaryDirectory

from claude_agent_sdk import ClaudeAgentOptions, ResultMessage, create_sdk_mcp_server, query, tool

from cold_start import call
from hunt import INSTRUCTIONS, MAX_TURNS, OPEN_BOX, Hunt

TEACHER = {"opens": lambda colour: call("mcp__hunt__open_box", colour=colour)}


async def rollout(task, policy):
    hunt = Hunt(task)
    answer = ""

    @tool(OPEN_BOX["name"], OPEN_BOX["description"], OPEN_BOX["parameters"])
    async def open_box(arguments):
        return {"content": [{"type": "text", "text": hunt.open_box(**arguments)}]}

    with TemporaryDirectory() as home:
        options = ClaudeAgentOptions(
            model="policy",
            tools=[],
            system_prompt=INSTRUCTIONS,
            mcp_servers={"hunt": create_sdk_mcp_server("hunt", tools=[open_box])},
            allowed_tools=["mcp__hunt__open_box"],
            max_turns=MAX_TURNS,
            setting_sources=[],
            cwd=home,
            env={
                "ANTHROPIC_BASE_URL": policy.session.base,
                "ANTHROPIC_API_KEY": policy.session.key,
                "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
                "HOME": home,
            },
        )
        async for message in query(prompt=task.query, options=options):
            if isinstance(message, ResultMessage):
                answer = message.result

    return hunt.reward(answer)
