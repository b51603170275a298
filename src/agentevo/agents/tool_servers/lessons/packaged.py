"""The lessons, one for each tool that ships."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

from agentevo.agents.tool_servers.calculator import calculator
from agentevo.agents.tool_servers.lessons.lesson import Lesson, LessonCall

DONE = "Done."

_WORDS = {"*": "times", "+": "plus", "-": "minus"}


class Arithmetic(Lesson):
    """Sums of small numbers, for the calculator; the answer is the number."""

    tool = "calculator"
    instructions = "Compute with the calculator. Then answer with the number alone."
    rewards = ("numeric",)

    def draw(self, draw: random.Random) -> dict[str, Any]:
        first, second, third = (draw.randint(2, 9) for _ in range(3))
        first_sign = draw.choice("*+-")
        second_sign = draw.choice("+-")
        expression = f"{first} {first_sign} {second} {second_sign} {third}"
        query = f"What is {first} {_WORDS[first_sign]} {second} {_WORDS[second_sign]} {third}?"
        return {"query": query, "answer": calculator(expression), "expression": expression}

    def step(self, task: Mapping[str, Any], results: Sequence[str]) -> LessonCall | str:
        return (
            results[0] if results else LessonCall("calculator", {"expression": task["expression"]})
        )


FILES = [
    "amber", "birch", "cedar", "delta", "ember", "frost", "grove", "haven", "iris", "juniper",
    "kelp", "lilac", "maple", "north", "olive", "petal",
]  # fmt: skip
WORDS = [
    "anchor", "basket", "candle", "drum", "engine", "feather", "guitar", "hammer",
]  # fmt: skip


class Copying(Lesson):
    """Notes in files, for `files`: a word must be copied into a new file. The word is in a note,
    or in the file that the note names. The reward depends on the final state."""

    tool = "files"
    instructions = "Do what is asked with the files, then say so."

    def draw(self, draw: random.Random) -> dict[str, Any]:
        note, second_note, target = (f"{name}.txt" for name in draw.sample(FILES, 3))
        words = draw.sample(WORDS, 2)
        files = {note: f"The word is {words[0]}.", second_note: f"The word is {words[1]}."}
        word = words[0]
        if draw.random() < 0.5:
            files[note] = f"Look into {second_note}."
            word = words[1]

        query = f"Write the word that {note} leads to into {target}."
        return {"query": query, "files": files, "expected": {target: word}, "note": note}

    def step(self, task: Mapping[str, Any], results: Sequence[str]) -> LessonCall | str:
        newest = results[-1] if results else f"Look into {task['note']}."
        if newest.startswith("Wrote"):
            return DONE

        leads = re.fullmatch(r"Look into (.*)\.", newest)
        if leads:
            return LessonCall("read_file", {"path": leads[1]})

        word = newest.removeprefix("The word is ").removesuffix(".")
        (target,) = task["expected"]
        return LessonCall("write_file", {"path": target, "text": word})


_ENDS = ("dra", "lin", "mo", "nar", "ris")
FIRST = [start + ending for start in ("A", "Be", "Co", "Do") for ending in _ENDS]
LAST = [start + ending for start in ("Pe", "Qui", "Ro", "Sa") for ending in _ENDS]
CITIES = [
    "Arlon", "Bremo", "Calva", "Dorin", "Elsen", "Forta", "Galen", "Hoven", "Istra", "Jarno",
    "Kelso", "Lindo",
]  # fmt: skip
GOODS = [
    "bells", "boats", "books", "boots", "cheese", "clocks", "glass", "gloves", "hats", "honey",
    "knives", "lace",
]  # fmt: skip
WORLD = 17
"""The seed of the world, which is the same for all tasks."""
_LIVES = re.compile(r"lives in (\w+)")
_KNOWN = re.compile(r"known for (\w+)")


class Facts(Lesson):
    """Questions about an invented world, for `search`: where a person lives, or what that city
    is known for. The second kind needs two searches. The answer is a word."""

    tool = "search"
    instructions = "Search for what you need to know. Then answer with one word."
    rewards = ("exact_match",)

    def __init__(self) -> None:
        draw = random.Random(WORLD)
        self._homes = {
            f"{first_name} {last_name}": draw.choice(CITIES)
            for first_name in FIRST
            for last_name in LAST
        }
        self._goods = dict(zip(CITIES, draw.sample(GOODS, len(CITIES)), strict=True))

    def draw(self, draw: random.Random) -> dict[str, Any]:
        person = draw.choice(list(self._homes))
        city = self._homes[person]
        if draw.random() < 0.5:
            query = f"In which city does {person} live?"
            answer = city
        else:
            query = f"What is the city known for where {person} lives?"
            answer = self._goods[city]

        return {"query": query, "answer": answer, "person": person}

    def step(self, task: Mapping[str, Any], results: Sequence[str]) -> LessonCall | str:
        if not results:
            return LessonCall("search", {"query": task["person"]})

        match = _KNOWN.search(results[-1]) or _LIVES.search(results[-1])
        if match is None:
            return "nothing"
        if len(results) == 1 and task["query"].startswith("What"):
            return LessonCall("search", {"query": f"{match[1]} known"})
        return match[1]

    def corpus(self) -> list[dict[str, str]]:
        people = [
            {"title": person, "text": f"{person} lives in {city}."}
            for person, city in self._homes.items()
        ]
        cities = [
            {"title": city, "text": f"{city} is known for {thing}."}
            for city, thing in self._goods.items()
        ]
        rows = people + cities
        return [{"id": str(number), **row} for number, row in enumerate(rows)]


GUESTS = ("Ada", "Ben", "Cleo", "Dan", "Eve", "Finn", "Gus", "Hana", "Ivo", "Jane", "Kim", "Leo")
HOTEL_CITIES = (
    "Bonn", "Cairo", "Delhi", "Geneva", "Lima", "Oslo", "Porto", "Quito", "Rome", "Seoul",
)  # fmt: skip
KINDS = ("single", "double", "family")


class Hotel(Lesson):
    """Guests of hotels, for the booking office: a room of a kind is booked, or a booking is
    cancelled. The reward depends on the final state."""

    tool = "booking"
    instructions = "Do what the guest asks for, in the cheapest room there is. Then say so."

    def draw(self, draw: random.Random) -> dict[str, Any]:
        guest, second_guest = draw.sample(GUESTS, 2)
        city = draw.choice(HOTEL_CITIES)
        kind = draw.choice(KINDS)
        nights = draw.randint(1, 9)
        numbers = draw.sample(range(1, 10), 6)
        rooms = [
            {"room": number, "city": city, "kind": kind, "price": price}
            for number, price in zip(numbers[:4], draw.sample(range(20, 100), 4), strict=True)
        ]

        distant_room = {"city": draw.choice(HOTEL_CITIES), "kind": draw.choice(KINDS), "price": 15}
        rooms += [{"room": number, **distant_room} for number in numbers[4:]]
        rooms = draw.sample(rooms, len(rooms))

        taken = {"room": numbers[0], "guest": second_guest, "nights": draw.randint(1, 9)}
        stays = {"guest": second_guest, "city": city, "kind": kind, "nights": taken["nights"]}
        new = {"guest": guest, "city": city, "kind": kind, "nights": nights}
        if draw.random() < 0.5:
            query = f"Book a {kind} room in {city} for {guest}, {nights} nights."
            expected = [stays, new]
        else:
            query = f"Cancel the {kind} room in {city} of {second_guest}, {taken['nights']} nights."
            expected = []

        return {"query": query, "rooms": rooms, "bookings": [taken], "wanted": expected}

    def step(self, task: Mapping[str, Any], results: Sequence[str]) -> LessonCall | str:
        if len(results) == 2:
            return DONE

        if task["wanted"]:
            new = task["wanted"][-1]
            if not results:
                return LessonCall("find_rooms", {"city": new["city"], "kind": new["kind"]})
            guest = new["guest"]
            nights = new["nights"]
            return LessonCall("book", {"room": _room(results[0]), "guest": guest, "nights": nights})

        if not results:
            return LessonCall("find_bookings", {"guest": task["bookings"][0]["guest"]})

        return LessonCall("cancel", {"room": _room(results[0])})


def _room(result: str) -> int:
    (number,) = re.findall(r"\Aroom (\d+)", result)
    return int(number)


THINGS = [
    "apple", "bread", "cheese", "egg", "fig", "honey", "lemon", "melon", "onion", "pear",
    "plum", "rice", "salt", "soup", "sugar", "tea",
]  # fmt: skip


class Shop(Lesson):
    """A shop's prices, for the database: a price is set to a number, or to the price of another
    item, which must be read first. The reward depends on the final state."""

    tool = "database"
    instructions = "The table goods has the columns name and price. Do what is asked, then say so."

    def draw(self, draw: random.Random) -> dict[str, Any]:
        names = draw.sample(THINGS, 4)
        prices = draw.sample(range(1, 10), 4)
        rows = ", ".join(f"('{name}', {price})" for name, price in zip(names, prices, strict=True))
        setup = f"CREATE TABLE goods (name TEXT, price INT); INSERT INTO goods VALUES {rows};"

        name, other_item = names[:2]
        if draw.random() < 0.5:
            price = draw.choice([number for number in range(1, 10) if number != prices[0]])
            query = f"Set the price of {name} to {price}."
        else:
            price = prices[1]
            query = f"Give {name} the price of {other_item}."

        solution = f"UPDATE goods SET price = {price} WHERE name = '{name}'"
        return {"query": query, "setup": setup, "solved_by": solution, "other": other_item}

    def step(self, task: Mapping[str, Any], results: Sequence[str]) -> LessonCall | str:
        changed = any(result.startswith("Done") for result in results)
        if changed:
            return DONE
        if task["query"].startswith("Give") and not results:
            sql = f"SELECT price FROM goods WHERE name = '{task['other']}'"
            return LessonCall("query", {"sql": sql})
        return LessonCall("execute", {"sql": task["solved_by"]})


LESSONS: dict[str, Lesson] = {
    lesson.tool: lesson for lesson in (Hotel(), Arithmetic(), Shop(), Copying(), Facts())
}
"""The lessons by the name of their tool."""
