"""`python problems.py` writes the word problems of the recipe: train.jsonl and held_out.jsonl. No
problem is in both."""

from __future__ import annotations

import json
import random
from pathlib import Path

NAMES = ("Ann", "Tom", "Mia", "Ben", "Eva", "Leo", "Kim", "Sam")
THINGS = ("apples", "books", "coins", "stamps", "pens", "cards", "shells", "plates")
FORMS = (
    "{name} has {a} {things} and buys {b} more. How many {things} does {name} have now?",
    "{name} has {a} {things} and gives away {few}. How many {things} are left?",
    "There are {a} boxes with {n} {things} in each. How many {things} are there in all?",
    "{name} shares {shared} {things} equally among {n} friends. How many {things} does each get?",
    "A shop sells {n} {things} for {a} dollars each. How many dollars does the shop get?",
    "{name} collects {a} {things} on Monday and {b} on Tuesday. How many {things} is that in all?",
)


def draw_problem(rng: random.Random) -> dict[str, object]:
    a, b, n = rng.randint(21, 99), rng.randint(21, 99), rng.randint(3, 19)
    few, each = rng.randint(3, a - 3), rng.randint(11, 49)
    answers = (a + b, a - few, a * n, each, n * a, a + b)
    form = rng.randrange(len(FORMS))
    query = FORMS[form].format(
        name=rng.choice(NAMES), things=rng.choice(THINGS), a=a, b=b, n=n, few=few, shared=each * n
    )
    return {"query": query, "answer": answers[form], "form": form}


def main() -> None:
    rng = random.Random(1)
    problems = {problem["query"]: problem for problem in (draw_problem(rng) for _ in range(1200))}
    rows = list(problems.values())
    for name, part in (("held_out", rows[:128]), ("train", rows[128:640])):
        lines = "".join(json.dumps(row) + "\n" for row in part)
        (Path(__file__).parent / f"{name}.jsonl").write_text(lines, encoding="utf-8")


if __name__ == "__main__":
    main()
