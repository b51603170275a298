"""The histories of one conversation as a tree of messages. `find` finds the place of a request in
the tree.

A node is one message, and its parents are the messages before it. Each answer of the policy has its
own node and turn, even if two answers have the same text. `find` walks down the messages of a
request and returns the deepest answer on the way:

    the recorded part of a request = the path to that answer, whose token ids are reused
    the new part                   = the messages after it

A message matches a node if it equals one of the node's forms. Answers that were passed on to a
client (`recognise`) also match by the rules of equivalence.py. After the first such answer,
messages that the policy did not write match by these rules too. If several answers match, the
deepest one wins. Ties are broken by exactly the same form, then by tool-call ids that are in the
request, then by age, the newest first.

Finding a request takes one step per message, and more only for messages with several equivalents.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from agentevo.inference.conversations.equivalence import compatible, key_of, names_calls, places_of
from agentevo.models.chat.chat_template import OWN_VALUES, TemplateValues, ToolSchemas
from agentevo.types import Message


class HistoryNode:
    """One message of a history. Its parent is the message before it; a root has no parent."""

    __slots__ = (
        "_by_call", "_by_form", "_by_key", "_is_keyed", "_num_keyed", "came", "children", "forms",
        "is_given", "is_lost", "parent", "place", "size", "tools", "turn", "values",
    )  # fmt: skip

    def __init__(
        self, tools: ToolSchemas, values: TemplateValues, parent: HistoryNode | None = None
    ) -> None:
        self.tools = tools
        self.values = values
        """The values that the requests give to variables of the chat template."""
        self.parent = parent
        self.size: int = 0 if parent is None else parent.size + 1
        """The number of messages up to and including this one."""
        self.forms: list[Message] = []
        """The forms of the message: first the form that the policy wrote or that a request first
        had, then the forms that were passed on to a client."""
        self.place = -1
        """The index of the call that a tool's result answers, see equivalence.places_of."""
        self.turn: int | None = None
        """The turn that produced it."""
        self.is_given = False
        """Whether it is an answer that was passed on to a client."""
        self.is_lost = False
        """Whether it is an answer that was not delivered."""
        self.came: Message | None = None
        """The last form in which a request had the message, if it differs from the known forms."""
        self.children: list[HistoryNode] = []
        self._by_call: dict[str, HistoryNode] = {}
        """Id of a tool call -> the child with that call."""
        self._by_form: dict[Message, list[HistoryNode]] = {}
        self._by_key: dict[Hashable, list[HistoryNode]] = {}
        """Key -> children. It has only the first `_num_keyed` children. Others are added when they
        are needed, because most are never looked up by key."""
        self._num_keyed = 0
        self._is_keyed = False

    def add(self, message: Message, place: int) -> HistoryNode:
        """Adds a child."""
        child = HistoryNode(self.tools, self.values, self)
        child.place = place
        self.children.append(child)
        self._write(child, message)
        return child

    def recognise(self, message: Message) -> None:
        """Adds another form of this node's message."""
        if self.parent is not None:
            self.parent._write(self, message)

    def _write(self, child: HistoryNode, form: Message) -> None:
        child.forms.append(form)
        self._by_form.setdefault(form, []).append(child)
        self._by_call |= {call.id: child for call in form.tool_calls if call.id}
        if child._is_keyed:
            self._by_key.setdefault(key_of(form, child.place), []).append(child)

    def exact_children(self, message: Message) -> list[HistoryNode]:
        """The children that have this form, the oldest first."""
        if len(self.children) == 1:
            only = self.children[0]
            return self.children if message in only.forms else []
        return self._by_form.get(message, [])

    def equivalent_children(self, message: Message, place: int) -> list[HistoryNode]:
        """The children that mean the same, in any form."""
        if len(self.children) == 1 and self.children[0].came == message:
            return self.children

        for child in self.children[self._num_keyed :]:
            child._is_keyed = True
            for form in child.forms:
                self._by_key.setdefault(key_of(form, child.place), []).append(child)

        self._num_keyed = len(self.children)
        similar = self._by_key.get(key_of(message, place), ())
        named = (self._by_call.get(call.id) for call in message.tool_calls)
        by_name = [
            child
            for child in named
            if child is not None and any(names_calls(form, message) for form in child.forms)
        ]
        return [
            child for child in dict.fromkeys([*similar, *by_name]) if child._is_equivalent(message)
        ]

    def matches(self, message: Message, place: int, *, serves_clients: bool) -> bool:
        """Whether the message matches this node. `serves_clients`: messages match in any form."""
        if message in self.forms:
            return True

        key = key_of(message, place)
        return (
            serves_clients
            and any(
                key_of(form, self.place) == key or names_calls(form, message) for form in self.forms
            )
            and self._is_equivalent(message)
        )

    def _is_equivalent(self, message: Message) -> bool:
        """Whether a message with the same key, or with calls of the same ids, matches."""
        return (self.turn is None or self.is_given) and compatible(self.forms, message)

    def path(self) -> list[HistoryNode]:
        """The nodes of the history, the first message first."""
        nodes: list[HistoryNode] = []
        node = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


@dataclass(slots=True)
class _ReachedNode:
    """A node that a request's messages lead to."""

    node: HistoryNode
    num_restyled: int = 0
    """The number of messages on the path in another form than recorded."""
    num_named: int = 0
    """The number of answers on the path whose tool-call ids are in the request."""
    restyled: _HistoryStep | None = None
    """The last message on the path in another form than recorded."""

    def rank(self) -> tuple[bool, bool, int, int, int]:
        turn = -1 if self.node.turn is None else self.node.turn
        return turn >= 0, not self.node.is_lost, -self.num_restyled, self.num_named, turn


class _HistoryStep(NamedTuple):
    """A message in another form than recorded, and the step before it."""

    node: HistoryNode
    number: int
    before: _HistoryStep | None


@dataclass(frozen=True, slots=True)
class HistoryMatch:
    """The place of a request in the tree."""

    answer: HistoryNode | None
    """The deepest recorded answer on the path."""
    root: HistoryNode
    serves_clients: bool
    """Whether messages match in any form."""
    messages: Sequence[Message]
    places: list[int]
    num_matched: int
    """The number of the request's messages that follow a recorded history."""
    ends: list[HistoryNode]
    """The nodes that those messages lead to, the newest last."""
    restyled: list[tuple[HistoryNode, int]]
    """The messages up to the answer that have another form than recorded, in reverse order: their
    nodes, and their numbers in the request from 0."""

    @property
    def known(self) -> int:
        """The number of messages up to the answer."""
        return 0 if self.answer is None else self.answer.size


@dataclass(slots=True)
class Histories:
    """The histories of one conversation. See the module."""

    roots: dict[tuple[ToolSchemas, TemplateValues], HistoryNode] = field(default_factory=dict)
    """Tools and template values of the requests -> the root of their histories."""
    serves_clients: bool = False
    """Whether any answer was passed on to a client."""

    def find(
        self,
        tools: ToolSchemas,
        messages: Sequence[Message],
        values: TemplateValues = OWN_VALUES,
    ) -> HistoryMatch:
        """Finds the place of a request, and adds nothing. The last message counts as new, unless
        its role is assistant: a client may ask to continue an answer, such as one that was cut off,
        without a new message."""
        root = self.roots.get((tools, values)) or HistoryNode(tools, values)
        places = places_of(messages)
        goes_on = bool(messages) and messages[-1].role == "assistant"

        answer: HistoryNode | None = None
        restyled: _HistoryStep | None = None
        reached = [_ReachedNode(root)]
        matched = 0
        for number, message in enumerate(messages if goes_on else messages[:-1]):
            first = reached[0].node
            if len(reached) == len(first.children) == 1 and first.exact_children(message):
                reached[0].node = first.children[0]
            else:
                following = [
                    step
                    for candidate in reached
                    for step in self._steps(candidate, message, number, places)
                ]
                if not following:
                    break

                if len(following) > 1:
                    _count_named(following, messages, number)
                    following.sort(key=_ReachedNode.rank)

                reached = following

            matched = number + 1
            if reached[-1].node.turn is not None:
                answer = reached[-1].node
                restyled = reached[-1].restyled

        return HistoryMatch(
            answer=answer,
            root=root,
            serves_clients=self.serves_clients,
            messages=messages,
            places=places,
            num_matched=matched,
            ends=[candidate.node for candidate in reached],
            restyled=list(_steps_back(restyled)),
        )

    def _steps(
        self, reached: _ReachedNode, message: Message, number: int, places: list[int]
    ) -> Iterator[_ReachedNode]:
        node = reached.node
        before = reached
        exact = node.exact_children(message)
        for child in exact:
            yield _ReachedNode(child, before.num_restyled, before.num_named, before.restyled)

        if self.serves_clients and len(exact) < len(node.children):
            for child in node.equivalent_children(message, places[number]):
                if child not in exact:
                    step = _HistoryStep(child, number, before.restyled)
                    yield _ReachedNode(child, before.num_restyled + 1, before.num_named, step)

    def add(self, match: HistoryMatch) -> HistoryNode:
        """Adds all messages of the request, and returns the node of the last one."""
        node = match.answer or self.roots.setdefault(
            (match.root.tools, match.root.values), match.root
        )
        for message, place in zip(
            match.messages[match.known :], match.places[match.known :], strict=True
        ):
            matches = node.exact_children(message)
            if not matches and self.serves_clients:
                matches = node.equivalent_children(message, place)
            node = matches[-1] if matches else node.add(message, place)

        return node


def _count_named(reached: Sequence[_ReachedNode], messages: Sequence[Message], number: int) -> None:
    """Increments `num_named` of each answer whose tool-call ids are in the message or in a result
    after it."""
    ids = {call.id for call in messages[number].tool_calls}
    for result in messages[number + 1 :]:
        if result.role != "tool":
            break
        ids.add(result.tool_call_id or "")

    for candidate in reached:
        if candidate.node.turn is not None:
            candidate.num_named += any(
                call.id and call.id in ids
                for form in candidate.node.forms
                for call in form.tool_calls
            )


def _steps_back(step: _HistoryStep | None) -> Iterator[tuple[HistoryNode, int]]:
    while step is not None:
        yield step.node, step.number
        step = step.before
