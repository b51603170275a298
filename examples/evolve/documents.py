"""A tiny policy and a folder of documents that it has never read: `agentevo evolve` asks for what
stands in them, shows how some of it is looked up, and lets the policy learn to look.

    python documents.py --out runs/evolve_documents

The documents are a register of stations, drawn by a seed: a file for each, with sentences whose
names and numbers are its own.
"""

from __future__ import annotations

import asyncio
import random
import sys
from pathlib import Path
from typing import Any

from agentevo.config.tools import FunctionToolSection
from agentevo.rollout.task_files import write_rows
from agentevo_evolve.task_making.demonstrations import show_lookups
from agentevo_evolve.task_making.document_files import read_documents
from agentevo_evolve.task_making.documents import tasks_from_gaps
from tiny import arguments, evolve

FIRST = ("Alder", "Birch", "Cedar", "Dune", "Ember", "Falcon", "Glen", "Heron", "Iris", "Juniper")
SECOND = ("Bay", "Cross", "Field", "Gate", "Hill", "Mill", "Point", "Ridge", "Vale", "Wharf")
NAMES = ("Ada", "Bela", "Cleo", "Dora", "Emil", "Femi", "Gus", "Hana", "Ivo", "Jana")
SEARCH = {"top_k": 1}
FAMILIES = ("Adler", "Brandt", "Conti", "Dahl", "Egger", "Fuchs", "Grau", "Holm", "Ilic", "Jensen")


def documents(folder: Path, seed: int, count: int) -> None:
    """A file for each station."""
    draw = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    places = draw.sample([f"{one} {other}" for one in FIRST for other in SECOND], count)
    for place in places:
        keeper = f"{draw.choice(NAMES)} {draw.choice(FAMILIES)}"
        text = (
            f"The station of {place} was opened in {draw.randint(1850, 1999)}. "
            f"The keeper of {place} is called {keeper}. "
            f"The bridge at {place} is {draw.randint(20, 99)} metres long."
        )
        (folder / f"{place.lower().replace(' ', '_')}.txt").write_text(f"{text}\n")


def reading(folder: Path, corpus: Path) -> list[dict[str, Any]]:
    """Conversations that have all words of the documents."""
    passages = read_documents([folder]).passages
    rows = [{"id": one.id, "title": one.title, "text": one.text} for one in passages]
    write_rows(rows, corpus)
    made = tasks_from_gaps(passages, train=10_000, held_out=10_000, per_passage=100, seed=999)
    search = FunctionToolSection(name="search", options={**SEARCH, "corpus": str(corpus)})
    asked = [*made.train, *made.held_out]
    found, _ = asyncio.run(show_lookups(asked, passages, [search], count=4 * len(asked), seed=999))
    return found


if __name__ == "__main__":
    parser = arguments(__doc__ or "", "runs/evolve_documents")
    parser.add_argument("--stations", type=int, default=100)
    parser.add_argument("--register", type=int, default=0, help="the seed of the documents")
    given = parser.parse_args()
    folder = (given.out / "stations").absolute()
    documents(folder, given.register, given.stations)
    tool = {"type": "function", "name": "search", "options": SEARCH}
    rows = reading(folder, (given.out / "corpus.jsonl").absolute())
    sys.exit(evolve(given, [tool], {"per_passage": 4}, rows, documents=[str(folder)]))
