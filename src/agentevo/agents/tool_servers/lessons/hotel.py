"""Guests of hotels, for the booking office: a room of a kind is booked, or a booking is cancelled.
The reward depends on the final state."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

from agentevo.agents.tool_servers.lessons.lesson import LessonCall

GUESTS = ("Ada", "Ben", "Cleo", "Dan", "Eve", "Finn", "Gus", "Hana", "Ivo", "Jane", "Kim", "Leo")
CITIES = ("Bonn", "Cairo", "Delhi", "Geneva", "Lima", "Oslo", "Porto", "Quito", "Rome", "Seoul")
KINDS = ("single", "double", "family")
DONE = "Done."


class Hotel:
    """See the module."""

    tool = "booking"
    instructions = "Do what the guest asks for, in the cheapest room there is. Then say so."
    rewards: tuple[str, ...] = ()

    def draw(self, draw: random.Random) -> dict[str, Any]:
        """See Lesson.draw."""
        guest, second_guest = draw.sample(GUESTS, 2)
        city = draw.choice(CITIES)
        kind = draw.choice(KINDS)
        nights = draw.randint(1, 9)
        numbers = draw.sample(range(1, 10), 6)
        rooms = [
            {"room": number, "city": city, "kind": kind, "price": price}
            for number, price in zip(numbers[:4], draw.sample(range(20, 100), 4), strict=True)
        ]

        elsewhere_room = {"city": draw.choice(CITIES), "kind": draw.choice(KINDS), "price": 15}
        rooms += [{"room": number, **elsewhere_room} for number in numbers[4:]]
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
        """See Lesson.step."""
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

    def corpus(self) -> list[dict[str, str]]:
        """See Lesson.corpus."""
        return []


def _room(result: str) -> int:
    (number,) = re.findall(r"\Aroom (\d+)", result)
    return int(number)
