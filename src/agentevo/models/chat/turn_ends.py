"""The tokens that end a message of the assistant, as a chat template writes them."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from agentevo.errors import ModelError
from agentevo.models.chat.chat_template import ChatTemplate
from agentevo.models.tool_calls import find_parser
from agentevo.models.tool_calls.families import GEMMA, GLM
from agentevo.models.tool_calls.harmony import ENDS as HARMONY_ENDS
from agentevo.models.tool_calls.parser import HARMONY
from agentevo.types import Message

PROBE_ANSWER = "probefirst"
"""The text in the place of an answer whose surroundings are to be found."""
PROBE_USER = Message("user", "probequestion")
ENDS_BY_FAMILY = {
    HARMONY: ("<|return|>", "<|call|>"),
    GEMMA: ("<|tool_response>",),
    GLM: ("<|user|>", "<|observation|>"),
}
"""Parser -> the tokens that end answers in its family, beside the declared ones."""


def next_role_id(template: ChatTemplate) -> int | None:
    """The special token right after an assistant's message that another message follows, in a
    template that ends the last message with nothing. None for other templates."""
    tokenizer = template.tokenizer
    conversation = [PROBE_USER, Message("assistant", PROBE_ANSWER)]
    if after(PROBE_ANSWER, template.render(conversation, prompt=False)).strip():
        return None

    text = after(PROBE_ANSWER, template.render([*conversation, PROBE_USER], prompt=True))
    ids = tokenizer.encode(text, add_special_tokens=False)
    return ids[0] if ids and ids[0] in special_ids(tokenizer) else None


def next_role_marks(template: ChatTemplate) -> tuple[str, str] | None:
    """The tokens that end an answer and a message with tool calls, in a family whose template
    leaves the end of a message to the beginning of the next one. None for other templates."""
    if find_parser(str(template.tokenizer.get_chat_template())).name != GLM:
        return None
    answer, calls = ENDS_BY_FAMILY[GLM]
    known = ids_of_marks(template.tokenizer, answer, calls)
    return (answer, calls) if len(known) == 2 and next_role_id(template) in known else None


def end_of_turn_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The first special token after an assistant's message. It must be the same whether or not
    another message follows. Raises ModelError if there is none."""
    last, in_history = turn_ends(ChatTemplate(tokenizer))
    if last != in_history:
        raise ModelError(
            refusal("it ends an assistant's message differently once another message follows")
        )
    return last


def turn_ends(template: ChatTemplate) -> tuple[int, int]:
    """The first special tokens after an assistant's message: after the last message, and after one
    that others follow. Only Harmony's templates may have different ones. Raises ModelError for
    other templates with different tokens, and for templates without such a token."""
    tokenizer = template.tokenizer

    def after_answer(messages: list[Message], *, prompt: bool) -> list[int]:
        text = template.render(
            [PROBE_USER, Message("assistant", PROBE_ANSWER), *messages], prompt=prompt
        )
        return list(tokenizer.encode(after(PROBE_ANSWER, text), add_special_tokens=False))

    special = special_ids(tokenizer)
    last = after_answer([], prompt=False)
    end = next((position for position, token in enumerate(last) if token in special), None)
    if end is None:
        raise ModelError(
            refusal(
                "it puts no special token at the end of an assistant's message, so the end of a "
                "turn can't be found"
            )
        )

    followed = after_answer([PROBE_USER], prompt=True)[: end + 1]
    is_harmony = find_parser(str(tokenizer.get_chat_template())).name == HARMONY
    harmony_ends = ids_of_marks(tokenizer, *HARMONY_ENDS) if is_harmony else []
    if followed != last[: end + 1] and not (
        followed[:end] == last[:end] and {*followed[end:], last[end]} <= set(harmony_ends)
    ):
        raise ModelError(
            refusal("it ends an assistant's message differently once another message follows")
        )

    return last[end], followed[end]


def ids_of_marks(tokenizer: PreTrainedTokenizerBase, *texts: str) -> list[int]:
    """The ids of those marks that this tokenizer has as tokens."""
    vocabulary = tokenizer.get_vocab()
    return [vocabulary[text] for text in texts if text in vocabulary]


def special_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """The ids of all special tokens, including those that were added without a role."""
    added = (i for i, token in tokenizer.added_tokens_decoder.items() if token.special)
    return {*tokenizer.all_special_ids, *added}


def after(sentinel: str, text: str) -> str:
    """The text after the sentinel. Raises ModelError if the template dropped the sentinel."""
    _, sentinel_kept, after = text.partition(sentinel)
    if not sentinel_kept:
        raise ModelError(refusal("it drops or changes earlier assistant messages"))
    return after


def refusal(why: str) -> str:
    """The message about a template with which conversations can't be continued."""
    return (
        f"the chat template can't be continued turn by turn: {why}. Use a model whose "
        "template only appends, or edit its template"
    )
