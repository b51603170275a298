"""The names of objects under rollout.weights.url other than the weights, and the check of which run
they belong to. Imports no other package."""

CONFIG_FILE = "config.yaml"
"""The run's configuration."""
WRITER_FILE = "writer.json"
"""An id that is also in ID_FILE, in the folder of the run's trainer."""
ID_FILE = "weights/writer"


def is_others(stored_id: str, writer_id: str) -> bool:
    """Whether the id in WRITER_FILE belongs to another run. False if there is no id yet, or only a
    prefix of this run's id, from an interrupted upload."""
    return bool(stored_id) and not writer_id.startswith(stored_id)


def others_weights(url: str) -> str:
    """The error message if the weights belong to another run."""
    return (
        f"rollout.weights.url={url} has the weights of another run: use another address for this "
        "run, or delete those weights if that run has ended"
    )
