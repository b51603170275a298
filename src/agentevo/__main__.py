"""`python -m agentevo` is the `agentevo` command."""

import sys

from agentevo.cli.main import main

sys.exit(main())
