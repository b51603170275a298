"""Tasks for each of the tools that ship, with the calls that solve them.

lesson    the definition of a lesson; separate held-out tasks, and a solver's demonstrations
facts     people and cities of an invented world, for `search`
others    one file for each tool
"""

from agentevo.agents.tool_servers.lessons.arithmetic import Arithmetic
from agentevo.agents.tool_servers.lessons.copying import Copying
from agentevo.agents.tool_servers.lessons.facts import Facts
from agentevo.agents.tool_servers.lessons.hotel import Hotel
from agentevo.agents.tool_servers.lessons.lesson import Lesson
from agentevo.agents.tool_servers.lessons.shop import Shop

LESSONS: dict[str, Lesson] = {
    lesson.tool: lesson for lesson in (Hotel(), Arithmetic(), Shop(), Copying(), Facts())
}
"""The lessons by the name of their tool."""
