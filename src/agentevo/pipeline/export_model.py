"""`python -m agentevo.pipeline.export_model SOURCE OUT`: copies a model's files, without its
training state, into a folder that is created atomically."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from agentevo.errors import AgentEvoError, ConfigError
from agentevo.files import atomic_folder, must_write
from agentevo.models.checkpoint_manifest import OF_TRAINING, verify_model


def export_model(source: Path, out: Path) -> None:
    """Raises ConfigError for a source that is not a model's folder, and TornError for a checkpoint
    that changed after it was saved."""
    names = {path.name for path in source.iterdir()} if source.is_dir() else set()
    if not names & {"config.json", "adapter_config.json"}:
        raise ConfigError(f"{source}: there is no model: give the folder of a checkpoint")

    verify_model(source)
    with must_write(out), atomic_folder(out) as staging:
        for path in source.iterdir():
            if path.name in OF_TRAINING:
                continue
            if path.is_dir():
                shutil.copytree(path, staging / path.name)
            else:
                shutil.copy2(path, staging / path.name)


def main(words: list[str]) -> int:
    try:
        export_model(Path(words[0]), Path(words[1]))
    except AgentEvoError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    print(f"the model is in {words[1]}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
