"""Worlds in messages, drawn as grids by what they say of their symbols."""

from __future__ import annotations

from agentevo.environments import make
from agentevo.environments.frozen_lake import FrozenLakeConfig
from agentevo.environments.sokoban import SokobanConfig
from agentevo.observability.pages.grid_worlds import legend_of, pieces


def kinds(text: str, legend: dict[str, str] | None = None) -> dict[str, str]:
    return {
        symbol: kind
        for piece in pieces(text, legend or {})
        for row in piece.rows
        for symbol, kind in row
    }


def test_the_same_sign_is_a_hole_in_one_world_and_a_target_in_another() -> None:
    lake = make(FrozenLakeConfig())
    room = make(SokobanConfig())
    of_lake = legend_of([lake.instructions])
    of_room = legend_of([room.instructions])
    assert (of_lake["O"], of_room["O"]) == ("hole", "goal")
    assert (of_lake["X"], of_room["X"]) == ("lost", "box")  # the player in a hole
    assert (of_lake["√"], of_room["√"], of_room["S"]) == ("done", "done", "player")

    grid = "P_O\n__G\n___"
    assert kinds(f"{lake.instructions}\n{grid}")["O"] == "hole"
    assert kinds(grid, of_lake)["O"] == "hole"  # a later message, which has no legend
    assert kinds(grid)["O"] == "goal"


def test_texts_of_all_pieces_are_the_message_and_a_hostile_legend_is_none() -> None:
    text = "Symbols: <b> wall, , P player P, O hole" + "x" * 9 + "\n####\n#PO#\n####\nGo."
    assert "\n".join(piece.text for piece in pieces(text)) == text
    assert kinds(text)["P"] == "player"
    assert legend_of(["Symbols: " + "a" * 10**6]) == {}
