"""The check that a teacher's tokenizer is the policy's, before a run begins (section
`distillation`). A teacher reads the policy's token ids, so each id must be the same text to both.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from agentevo.config import RunConfig
from agentevo.config.remote_models import RemoteModelSection
from agentevo.errors import ConfigError, ModelError, UnknownNameError, shown
from agentevo.models.files.load import load_tokenizer
from agentevo.models.files.resolve import saved_folder, split_run


def check_tokenizers(config: RunConfig, policy: PreTrainedTokenizerBase) -> None:
    """Raises ConfigError for a teacher whose tokenizer has another text for an id of the policy's,
    or can't be found on this machine. A teacher may know more ids."""
    for name in dict.fromkeys(config.distillation.teachers.values()):
        section = config.remote_models[name]
        where = f"distillation.teachers: the tokenizer of remote_models.{name}"
        vocabulary = _vocabulary_of(where, name, section)
        different = _find_different(policy.get_vocab(), vocabulary)
        if different:
            token, token_id = different[0]
            theirs = next((text for text, number in vocabulary.items() if number == token_id), None)
            raise ConfigError(
                f"{where} is not the policy's: {len(different)} tokens differ, for example id "
                f"{token_id}, which is {shown(token)} to the policy and "
                f"{'unknown' if theirs is None else shown(theirs)} to the teacher: choose a "
                f"teacher with the tokenizer of {shown(config.model.name)}"
            )


def _find_different(policy: Mapping[str, int], teacher: Mapping[str, int]) -> list[tuple[str, int]]:
    """The policy's tokens, with their ids, that have another id or none in the teacher's
    vocabulary, by id."""
    different = [item for item in policy.items() if teacher.get(item[0]) != item[1]]
    return sorted(different, key=lambda item: item[1])


def _vocabulary_of(where: str, name: str, section: RemoteModelSection) -> dict[str, int]:
    """Token -> id. A tokenizer's folder need not hold a model."""
    source = section.tokenizer or section.model
    remedy = (
        f"give remote_models.{name}.tokenizer, a folder on this machine with the teacher's "
        "tokenizer, or the name of its model"
    )
    try:
        own_folder = Path(source).expanduser()
        is_folder = section.tokenizer is not None and os.path.isdir(own_folder)
        is_run = split_run(own_folder)[0] is not None
        folder = own_folder if is_folder and not is_run else saved_folder(source)
    except (ModelError, UnknownNameError) as error:
        raise ConfigError(f"{where} can't be compared with the policy's: {error}: {remedy}") from (
            error
        )

    if folder is None:
        raise ConfigError(f"{where} is not on this machine ({shown(source)}): {remedy}")
    return load_tokenizer(f"remote_models.{name}", folder).get_vocab()
