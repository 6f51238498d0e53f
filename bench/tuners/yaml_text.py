"""The text of a YAML file with other values: what does not change stays as it is written,
comments, order and blank lines included."""

import itertools
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

WIDTH = 96


def edited(text: str, wanted: Mapping[str, Any]) -> str:
    """`text`, which holds a mapping, changed so that it holds `wanted`.

    Raises:
      ValueError: it is written in a way that cannot be changed so.
    """
    for _ in itertools.repeat(None, 10_000):
        root = yaml.compose(text, yaml.SafeLoader)
        if not isinstance(root, yaml.MappingNode):
            break
        change = _first_change(text, root, wanted)
        if change is None:
            return text
        start, end, new = change
        text = text[:start] + new + text[end:]
    raise ValueError("the YAML text cannot be changed to what is wanted")


type Change = tuple[int, int, str]  # from, to, what comes there


def _first_change(text: str, node: yaml.Node, wanted: Any) -> Change | None:
    """The first change that is needed inside `node`; None where it holds `wanted`."""
    if _value(node) == wanted:
        return None
    if isinstance(node, yaml.MappingNode) and isinstance(wanted, Mapping):
        if wanted and node.value and not node.flow_style:
            return _change_of_mapping(text, node, wanted)
    if isinstance(node, yaml.SequenceNode) and isinstance(wanted, Sequence):
        if wanted and not node.flow_style:
            if change := _change_of_sequence(text, node, wanted):
                return change
    return node.start_mark.index, _end(text, node), _inline(wanted)


def _change_of_mapping(text: str, node: yaml.MappingNode, wanted) -> Change | None:
    pairs = {_value(key): (key, value) for key, value in node.value}
    for name, (key, value) in pairs.items():
        if name not in wanted:
            return *_lines(text, key.start_mark.index, _end(text, value)), ""
        block = isinstance(wanted[name], Mapping | list) and not _fits(value, wanted[name])
        if block and _value(value) != wanted[name]:
            return key.start_mark.index, _end(text, value), _pair(key, name, wanted[name])
        if change := _first_change(text, value, wanted[name]):
            return change
    first, before = node.value[0][0], None
    for name, value in wanted.items():
        if name in pairs:
            before = pairs[name][1]
            continue
        new = _pair(first, name, value)
        if before is None:
            at = first.start_mark.index
            return at, at, f"{new}\n{' ' * first.start_mark.column}"
        at = _line_end(text, _end(text, before))
        return at, at, f"\n{' ' * first.start_mark.column}{new}"
    return None


def _fits(node: yaml.Node, wanted: Any) -> bool:
    """Whether `wanted` can be reached within a collection as it is written."""
    kind = yaml.MappingNode if isinstance(wanted, Mapping) else yaml.SequenceNode
    if not isinstance(node, kind) or not node.value:
        return False
    if node.flow_style:
        return not any(isinstance(x, Mapping | list) for x in _items(wanted))
    return isinstance(node, yaml.MappingNode) or _is_shorter(node, wanted)


def _items(wanted) -> list[Any]:
    return list(wanted.values() if isinstance(wanted, Mapping) else wanted)


def _is_shorter(node: yaml.SequenceNode, wanted: Sequence[Any]) -> bool:
    return 0 < len(wanted) <= len(node.value)


def _change_of_sequence(text: str, node: yaml.SequenceNode, wanted) -> Change | None:
    """An item that goes, or a change inside one."""
    if not _is_shorter(node, wanted):
        return None
    values = [_value(item) for item in node.value]
    if len(values) > len(wanted):
        gone = next((i for i, x in enumerate(values) if i >= len(wanted) or x != wanted[i]))
        item = node.value[gone]
        return *_lines(text, item.start_mark.index, _end(text, item)), ""
    changes = (_first_change(text, *pair) for pair in zip(node.value, wanted, strict=True))
    return next(filter(None, changes), None)


def _value(node: yaml.Node) -> Any:
    loader = yaml.SafeLoader("")
    try:
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _end(text: str, node: yaml.Node) -> int:
    """Where the text of a node ends, without the comments and blank lines behind it."""
    if isinstance(node, yaml.CollectionNode) and node.value and not node.flow_style:
        last = node.value[-1]
        return _end(text, last[1] if isinstance(last, tuple) else last)
    end = node.end_mark.index
    while end > node.start_mark.index and text[end - 1].isspace():
        end -= 1
    return end


def _lines(text: str, start: int, end: int) -> tuple[int, int]:
    """The whole lines from `start` to `end`, with the last one's line break."""
    return text.rfind("\n", 0, start) + 1, min(_line_end(text, end) + 1, len(text))


def _line_end(text: str, at: int) -> int:
    end = text.find("\n", at)
    return len(text) if end < 0 else end


def _inline(value: Any) -> str:
    return yaml.safe_dump(
        [value], default_flow_style=True, sort_keys=False, allow_unicode=True, width=10**6
    ).strip()[1:-1]


def _pair(at: yaml.Node, name: str, value: Any) -> str:
    """`name: value` where the key `at` stands, from its column on."""
    pair = yaml.safe_dump({name: value}, sort_keys=False, allow_unicode=True, width=WIDTH)
    return textwrap.indent(pair.rstrip(), " " * at.start_mark.column).lstrip()
