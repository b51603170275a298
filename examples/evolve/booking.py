"""A tiny policy and a booking office that it knows nothing of: `agentevo evolve` makes the tasks,
shows some, and lets it learn from the state that its calls leave.

    python booking.py --out runs/evolve_booking
"""

from __future__ import annotations

import sys

from tiny import arguments, evolve, rows_of

OFFICE = {"type": "function", "name": "booking", "options": {"rooms": 9}}
TASKS = {"worlds": 1000, "max_calls": 2, "kinds": ["state"], "max_difficulty": 3}

if __name__ == "__main__":
    given = arguments(__doc__ or "", "runs/evolve_booking").parse_args()
    sys.exit(evolve(given, [OFFICE], TASKS, rows_of(OFFICE, TASKS)))
