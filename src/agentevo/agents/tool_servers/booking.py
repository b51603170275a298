"""A booking office: hotel rooms, bookings that are made and cancelled, and a check whether the
guests got the rooms that they wanted.

    metadata: {
      "rooms": [{"room": 12, "city": "Rome", "kind": "double", "price": 90}, ...],
      "bookings": [{"room": 12, "guest": "Ann", "nights": 2}, ...],
      "wanted": [{"guest": "Bob", "city": "Rome", "kind": "double", "nights": 3}, ...]
    }

`bookings` exist before the attempt. The attempt scores 1 if exactly the bookings of `wanted` exist
at its end, else 0. Each must be in the room that it had before, or in the cheapest room of that
kind and city that was free and has no other booking. A task without `wanted` has no outcome.

With the option `rooms`, a task without its own rooms gets an office with that number of random
rooms, some of them taken. The rooms depend on `world` in the task's metadata (default 0). So any
client can use the server, even without a task for it. In such an office, a city without a hotel is
an error.
"""

from __future__ import annotations

import random
from typing import Any

import msgspec

from agentevo.config.tools import tool
from agentevo.errors import ConfigError, EnvironmentFailure, ToolError
from agentevo.types import Task

MAX_NIGHTS = 30
MAX_NAME = 100
MAX_ROOMS = 1000
CITIES = ("Bonn", "Cairo", "Delhi", "Lima", "Oslo", "Quito", "Rome", "Seoul")
KINDS = ("single", "double", "family")
GUESTS = ("Abe", "Bea", "Cy", "Dot", "Ed", "Fay")
"""The guests of a random office. CITIES and KINDS are the cities and kinds of its rooms."""


class BookableRoom(msgspec.Struct, frozen=True, kw_only=True):
    """A room, for one guest at a time."""

    room: int
    city: str
    kind: str
    price: int


class Booking(msgspec.Struct, frozen=True, kw_only=True):
    """A room with a guest."""

    room: int
    guest: str
    nights: int


class WantedStay(msgspec.Struct, frozen=True, kw_only=True):
    """A stay that a guest wants."""

    guest: str
    city: str
    kind: str
    nights: int


class _BookingWorld(msgspec.Struct, kw_only=True):
    rooms: list[BookableRoom] = []
    bookings: list[Booking] = []
    wanted: list[WantedStay] | None = None


@tool("booking")
class BookingOffice:
    """The office of one attempt."""

    def __init__(self, task: Task, rooms: int = 0) -> None:
        """`rooms`: the number of rooms if the task names none. Raises EnvironmentFailure for a task
        with an invalid world, and ConfigError for too many rooms."""
        if not 0 <= rooms <= MAX_ROOMS:
            raise ConfigError(f"booking: rooms={rooms}: give 0 to {MAX_ROOMS}")

        names = _BookingWorld.__struct_fields__
        facts = {name: task.metadata[name] for name in names if name in task.metadata}
        self._names_cities = bool(rooms) and "rooms" not in facts
        if self._names_cities:
            facts |= _drawn_world(rooms, task.metadata.get("world", 0))

        try:
            world = msgspec.convert(facts, _BookingWorld)
        except msgspec.ValidationError as error:
            raise EnvironmentFailure(f"the task {task.id!r}: metadata: {error}") from error

        self._rooms = {room.room: room for room in world.rooms}
        self._bookings = {booking.room: booking for booking in world.bookings}
        if len(self._rooms) < len(world.rooms) or not self._bookings.keys() <= self._rooms.keys():
            raise EnvironmentFailure(
                f"the task {task.id!r}: metadata: each room needs a different number, and a "
                "booking needs the number of a room"
            )

        self._wanted = world.wanted
        self._first = dict(self._bookings)

    def find_rooms(self, city: str, kind: str) -> str:
        """Lists free rooms, the cheapest first.

        Args:
            city: Where, such as Rome.
            kind: single, double or family.
        """
        cities = sorted({room.city for room in self._rooms.values()})
        if self._names_cities and city.strip().lower() not in map(str.lower, cities):
            city_list = f"{', '.join(cities[:-1])} or {cities[-1]}" if cities[1:] else cities[0]
            raise ToolError(f"no hotel is in {city[:MAX_NAME]}; city: {city_list}")

        free = [
            room
            for room in self._rooms.values()
            if room.city.lower() == city.strip().lower()
            and room.kind.lower() == kind.strip().lower()
            and room.room not in self._bookings
        ]
        lines = [
            f"room {room.room} for {room.price} a night" for room in sorted(free, key=_cheapest)
        ]
        return "\n".join(lines[:20]) or "No such room is free."

    def find_bookings(self, guest: str) -> str:
        """Lists what a guest has booked.

        Args:
            guest: The guest's name.
        """
        name = guest.strip().lower()
        lines = [
            f"room {booking.room} in {self._rooms[booking.room].city}, "
            f"{self._rooms[booking.room].kind}, "
            f"{booking.nights} nights"
            for booking in self._bookings.values()
            if booking.guest.lower() == name
        ]
        return "\n".join(lines[:20]) or f"{guest[:MAX_NAME]} has no bookings."

    def book(self, room: int, guest: str, nights: int) -> str:
        """Books a free room for a guest.

        Args:
            room: Its number.
            guest: The guest's name.
            nights: For how many nights.
        """
        if room not in self._rooms:
            raise ToolError(f"there is no room {str(room)[:20]}")
        if room in self._bookings:
            raise ToolError(f"room {room} is taken")
        if not 1 <= nights <= MAX_NIGHTS or not 1 <= len(guest.strip()) <= MAX_NAME:
            raise ToolError(f"give 1 to {MAX_NIGHTS} nights and a guest's name")

        self._bookings[room] = Booking(room=room, guest=guest.strip(), nights=nights)
        return f"Booked room {room} for {guest.strip()}, {nights} nights."

    def cancel(self, room: int) -> str:
        """Cancels the booking of a room.

        Args:
            room: Its number.
        """
        if room not in self._bookings:
            raise ToolError(f"room {str(room)[:20]} is not booked")
        guest = self._bookings.pop(room).guest
        return f"Cancelled the booking of room {room} for {guest}."

    def outcome(self) -> float | None:
        """1 if exactly the wanted bookings exist, each in its cheapest room, else 0."""
        if self._wanted is None:
            return None
        remaining = dict(self._bookings)
        return float(
            all(self._take_booking(stay, remaining) for stay in self._wanted) and not remaining
        )

    def _take_booking(self, stay: WantedStay, remaining: dict[int, Booking]) -> bool:
        """Whether `remaining` has the wanted booking. If so, removes it."""
        mine = [
            booking
            for booking in remaining.values()
            if (booking.guest.lower(), booking.nights) == (stay.guest.lower(), stay.nights)
            and self._is_asked_for(self._rooms[booking.room], stay)
        ]
        if not mine:
            return False

        has = remaining.pop(mine[0].room)
        if self._first.get(has.room) == has:
            return True

        prices = [
            room.price
            for number, room in self._rooms.items()
            if self._is_asked_for(room, stay)
            and number not in self._first
            and (number == has.room or number not in self._bookings)
        ]
        return has.room not in self._first and self._rooms[has.room].price == min(prices)

    @staticmethod
    def _is_asked_for(room: BookableRoom, stay: WantedStay) -> bool:
        return (room.city.lower(), room.kind.lower()) == (stay.city.lower(), stay.kind.lower())


def _cheapest(room: BookableRoom) -> Any:
    return room.price, room.room


def _drawn_world(num_rooms: int, world: Any) -> dict[str, Any]:
    """Random rooms and bookings in the form of the metadata, the same for the same number and
    `world`."""
    draw = random.Random(f"booking-{num_rooms}-{world}")
    cities = draw.sample(CITIES, min(len(CITIES), max(1, num_rooms // 3)))
    rooms = [
        {
            "room": number,
            "city": draw.choice(cities),
            "kind": draw.choice(KINDS),
            "price": draw.randint(20, 99),
        }
        for number in draw.sample(range(1, max(10, num_rooms + 1)), num_rooms)
    ]
    guests = draw.sample(GUESTS, min(len(GUESTS), num_rooms // 3))
    taken = zip(draw.sample(rooms, len(guests)), guests, strict=True)
    bookings = [
        {"room": room["room"], "guest": guest, "nights": draw.randint(1, 9)}
        for room, guest in taken
    ]
    return {"rooms": rooms, "bookings": bookings}
