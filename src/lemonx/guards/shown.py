"""Text of others, made fit to be shown: names of files and tensors, values of a config, messages of other libraries.

Whoever names a file can put escape sequences in it, which a terminal obeys; characters that turn the direction of
what follows; line ends, which make one line two. All of these are shown as Python writes them in a string.
"""

from __future__ import annotations

import json
import re
import unicodedata

# Longer than any sentence of ours; a name in a header may have a hundred million characters.
LONGEST = 1500
# Controls, formats (these turn the direction of text), surrogates, private and unassigned characters, line ends.
_HIDDEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}


def shown(text: object, limit: int | None = LONGEST) -> str:
    r"""The text in one line, without a character that is not seen; what is longer than `limit` is cut in its middle.

    >>> print(shown("a\x1b[31m red\nb\u202e"))
    a\x1b[31m red\nb\u202e
    >>> shown("0123456789" * 9, 40)
    '01234 (80 characters cut) 56789'
    """
    raw = str(text)
    kept = raw if limit is None or len(raw) <= limit else _cut(raw, limit)
    return _escaped(kept)


def shown_lines(text: str) -> str:
    r"""The same for a text of several lines, which stay; nothing is cut.

    >>> shown_lines("a\n\tb\x07")
    'a\n\\tb\\x07'
    """
    return "\n".join(_escaped(line) for line in text.split("\n"))


def _escaped(text: str) -> str:
    if text.isprintable():  # most of all text, and this is fast
        return text
    return "".join(_escape(c) if unicodedata.category(c) in _HIDDEN else c for c in text)


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def _cut(text: str, limit: int) -> str:
    """The beginning and the end: a message names the file first and says last what to do."""
    left = (limit - 30) // 2
    return f"{text[:left]} ({len(text) - 2 * left} characters cut) {text[-left:]}"


def as_code(text: object) -> str:
    """The text as Markdown's code, in which nothing has a meaning: no link, no HTML, no mention.

    >>> print(as_code("a`b``c"), as_code("`"))
    ```a`b``c``` `` ` ``
    """
    plain = shown(text, 200)
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", plain)), default=0))
    room = " " if plain.startswith("`") or plain.endswith("`") or not plain.strip() else ""
    return f"{fence}{room}{plain}{room}{fence}"


def as_yaml(text: object) -> str:
    r"""The text as a string of YAML.

    >>> print(as_yaml('a: "b"\n---'))
    "a: \"b\"\\n---"
    """
    return json.dumps(shown(text, 200), ensure_ascii=False)
