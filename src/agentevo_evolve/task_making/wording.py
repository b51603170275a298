"""Puts a scenario into words without a model. The first sentence of each tool's description says
what to do, with the arguments that the agent receives. The text never contains names of tools.

"Books a free room for a guest." becomes "booking a free room for a guest". The text does not
contain the verb itself, which could be the name of a tool, such as `book`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from agentevo_evolve.task_making.scenario import Scenario, ScenarioStep

_FIRST_SENTENCE = re.compile(r"^(.+?)(?:[.!?](?:\s|$)|\n\s*\n|$)", re.DOTALL)
_VOWELS = "aeiou"
_VERBS = """
    add adjust allow analyze answer append apply approve archive arrange ask assign assess attach
    book browse build buy calculate call cancel change check checkout clear clone close combine
    commit compare compile complete compress compute confirm convert copy count create cut decode
    decrease define delete deliver deploy describe detect determine diff disable discover display
    divide download draw drop duplicate echo edit email enable encode ensure estimate evaluate
    examine execute export extract fetch fill filter find fix format generate get give greet group
    guess heat hide identify import increase inform insert inspect install invite join judge kill
    launch lend list load lock log look make mark measure merge modify move multiply navigate
    notify obtain open order pay perform pick ping place plan play post predict prepare print
    process produce provide publish pull purge push put query rank rate read receive record refund
    register remove rename render reopen replace reply report request reserve reset resize resolve
    restart restore retrieve return revert roll run save say schedule search see select sell send
    set share ship show solve sort split stage stamp start stop store submit subtract suggest sum
    summarize swap switch take tell test toggle track transfer translate trigger tune turn unlock
    unstage update upload use validate verify view visit wait watch write
"""
"""Verbs with which descriptions of tools begin."""
_OBJECT_STARTS = """
    a an the all any each every one two your its his her their this that these those some multiple
    new existing
"""
"""Words after which a first word is a verb: "Frobs the item"."""


class Phrases(NamedTuple):
    """The fixed phrases of a scenario's text in one language."""

    task: str
    then: str
    found_value: str
    """With the placeholders {name} and {source}."""
    say_first: str
    say_value: str
    say_open: str
    say_key: str
    """With the placeholder {key}."""
    personas: Mapping[str, str]
    """Maps a persona to the text before the task."""


LANGUAGES: Mapping[str, Phrases] = {
    "en": Phrases(
        task="Your task: ",
        then="; then ",
        found_value="{name}: the first that comes of {source}",
        say_first="Say the first line of what you find.",
        say_value="Say the value that you find.",
        say_open="Say in a few words what came of it.",
        say_key="Say the first {key} that you find.",
        personas={
            "hurried": "I have no time, so be quick.",
            "polite": "Good day, could you please help me?",
            "newcomer": "I have never done this before.",
        },
    ),
    "de": Phrases(
        task="Deine Aufgabe: ",
        then="; danach ",
        found_value="{name}: das Erste, was sich hieraus ergibt: {source}",
        say_first="Nenne die erste Zeile dessen, was du findest.",
        say_value="Nenne den Wert, den du findest.",
        say_open="Sage in wenigen Worten, was daraus geworden ist.",
        say_key="Nenne den ersten Wert von {key}, den du findest.",
        personas={
            "hurried": "Ich habe keine Zeit, also bitte schnell.",
            "polite": "Guten Tag, könnten Sie mir bitte helfen?",
            "newcomer": "Ich mache das zum ersten Mal.",
        },
    ),
    "zh": Phrases(
        task="任务：",
        then="；然后 ",
        found_value="{name}：由此得到的第一个：{source}",
        say_first="请说出你找到的内容的第一行。",
        say_value="请说出你找到的值。",
        say_open="请简短说明结果。",
        say_key="请说出你找到的第一个 {key}。",
        personas={
            "hurried": "我没有时间，请快一点。",
            "polite": "您好，请帮帮我。",
            "newcomer": "我第一次做这件事。",
        },
    ),
}
PERSONAS = tuple(LANGUAGES["en"].personas)


def word_scenario(
    scenario: Scenario, descriptions: Mapping[str, str], *, language: str = "en", persona: str = ""
) -> str:
    """The scenario as the text that the agent receives."""
    phrases = LANGUAGES[language]
    sources = {source.step for step in scenario.steps for source in step.found.values()}
    call_texts = [
        _describe_call(scenario.steps, number, descriptions, phrases)
        for number in range(len(scenario.steps))
        if number not in sources
    ]
    parts = [phrases.personas[persona]] if persona else []
    parts.append(f"{phrases.task}{phrases.then.join(call_texts)}.")
    if scenario.is_open:
        parts.append(phrases.say_open)
    elif scenario.steps[-1].question is not None:
        parts.append(phrases.say_value)
    elif scenario.answer is not None:
        last = phrases.say_key.format(key=scenario.place) if scenario.place else phrases.say_first
        parts.append(last)

    return " ".join(parts)


def _describe_call(
    steps: Sequence[ScenarioStep], number: int, descriptions: Mapping[str, str], phrases: Phrases
) -> str:
    """A call in words. The text contains the calls that provide its arguments."""
    step = steps[number]
    if step.question is not None:
        return step.question.words

    arguments = [f"{_plain(name)}: {shown(value)}" for name, value in step.required_values.items()]
    for name, origin in step.found.items():
        source = _describe_call(steps, origin.step, descriptions, phrases)
        arguments.append(phrases.found_value.format(name=_plain(name), source=source))

    activity = activity_of(descriptions[step.tool])
    return f"{activity} ({', '.join(arguments)})" if arguments else activity


def activity_of(description: str) -> str:
    """The first sentence of a description as an activity: "Lists free rooms, the cheapest first."
    becomes "listing free rooms, the cheapest first"."""
    sentence = _FIRST_SENTENCE.match(" ".join(description.split()))
    words = sentence[1].rstrip(" .:;").split(" ") if sentence is not None else []
    if not words or not words[0]:
        return "doing what there is to do"
    start = gerund(words[0].lower()) if _starts_with_verb(words) else words[0]
    return " ".join([start, *words[1:]])


def _starts_with_verb(words: Sequence[str]) -> bool:
    """Whether a description's first word is a verb: a known verb, or a word before an object.
    "The current time", "A tool for notes" and "Weather in a city" start with none."""
    first = words[0].lower()
    if not re.fullmatch(r"[a-z]+", first) or first in _OBJECT_STARTS.split():
        return False

    stems = {first, first.removesuffix("s"), first.removesuffix("es")}
    stems |= {f"{first[:-3]}y"} if first.endswith("ies") else set()
    return bool(stems & set(_VERBS.split())) or (
        len(words) > 1 and words[1].lower() in _OBJECT_STARTS.split()
    )


def gerund(verb: str) -> str:
    """The gerund of a verb: books, book -> booking; creates, create -> creating; gets -> getting;
    copies -> copying."""
    base = verb
    if verb.endswith("ing"):
        return verb

    if verb.endswith("ies") and len(verb) > 4:
        base = f"{verb[:-3]}y"
    elif verb.endswith(("ches", "shes", "sses", "xes", "zzes", "oes")):
        base = verb[:-2]
    elif verb.endswith("s") and not verb.endswith("ss"):
        base = verb[:-1]

    if base.endswith("e") and not base.endswith(("ee", "oe", "ye")):
        return f"{base[:-1]}ing"

    is_short = len(re.findall(f"[{_VOWELS}]", base)) == 1 and len(base) > 2
    if is_short and base[-1] not in "aeiouwxy" and base[-2] in _VOWELS and base[-3] not in _VOWELS:
        return f"{base}{base[-1]}ing"

    return f"{base}ing"


def shown(value: Any) -> str:
    """A value in the form that the agent sees."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _plain(name: str) -> str:
    return name.replace("_", " ")


def find_tool_names(text: str, tools: Sequence[str]) -> list[str]:
    """The names of tools that a text contains as whole words, in any case."""
    return [
        tool
        for tool in tools
        if re.search(rf"(?<![\w-]){re.escape(tool)}(?![\w-])", text, re.IGNORECASE)
    ]


def values_left_out(text: str, scenario: Scenario) -> list[str]:
    """The values that the agent needs and that are missing from the text."""
    values = [value for step in scenario.steps for value in step.required_values.values()]
    return [shown(value) for value in values if not tells_value(text, value)]


def tells_value(text: str, value: Any) -> bool:
    """Whether a text contains a value, or all plain values within a list or an object."""
    if contains(shown(value), text):
        return True
    parts = value.values() if isinstance(value, dict) else value
    return isinstance(value, (dict, list)) and all(tells_value(text, part) for part in parts)


def gives_away(text: str, scenario: Scenario) -> bool:
    """Whether the text says what the agent has to find."""
    if scenario.answer is not None and contains(scenario.answer, text):
        return True

    stated_values = {
        shown(value) for step in scenario.steps for value in step.required_values.values()
    }
    found_values = [shown(step.arguments[name]) for step in scenario.steps for name in step.found]
    if stated_values.intersection(found_values):
        return True
    return any(len(value) > 2 and contains(value, text) for value in found_values)


def contains(value: str, text: str) -> bool:
    """Whether a text contains a value as whole words, in any case."""
    return bool(re.search(rf"(?<!\w){re.escape(value)}(?!\w)", text, re.IGNORECASE))
