"""The objects under rollout.weights.url other than the weights, and which run they belong to. Needs
no package."""

CONFIG_FILE = "config.yaml"
"""The run's configuration."""
WRITER_FILE = "writer.json"
"""An id that is also in the folder of the run's trainer, in ID_FILE."""
ID_FILE = "weights/writer"


def is_others(stored_id: str, writer_id: str) -> bool:
    """Whether the id in WRITER_FILE is another run's. False if there is no id yet, or only the
    beginning of ours, from an upload that broke off."""
    return bool(stored_id) and not writer_id.startswith(stored_id)


def others_weights(url: str) -> str:
    """The message for that case."""
    return (
        f"rollout.weights.url={url} has the weights of another run: use another address for this "
        "run, or delete those weights if that run has ended"
    )
