"""smolagents: its tool-calling agent, over chat completions."""

from smolagents import LogLevel, OpenAIModel, ToolCallingAgent, tool

from cold_start import call
from hunt import INSTRUCTIONS, MAX_TURNS, Hunt
from learn import learn


def rollout(task, policy):
    hunt = Hunt(task)
    model = OpenAIModel(
        "policy",
        api_base=policy.base_url,  # changed
        api_key=policy.api_key,  # changed
    )
    agent = ToolCallingAgent(
        [tool(hunt.open_box)], model, max_steps=MAX_TURNS, verbosity_level=LogLevel.OFF
    )
    agent.prompt_templates["system_prompt"] = INSTRUCTIONS  # its own has 5,000 characters
    return hunt.reward(agent.run(task.query))


TEACHER = {"says": lambda answer: call("final_answer", answer=answer)}

if __name__ == "__main__":
    learn(rollout, **TEACHER)
