"""`python -m agentevo` is the `agentevo` command."""

import sys

from agentevo.cli import main

sys.exit(main())
