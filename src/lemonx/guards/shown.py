"""Makes text from others safe to print: names of files and tensors, config values, messages of other libraries.

A file name can contain escape sequences, which a terminal obeys, characters that reverse the direction of the text
after them, and line ends, which turn one line into two. All of these are printed as Python escapes them in a string.
"""

from __future__ import annotations

import re
import unicodedata

# Longer than any sentence of ours; a name in a header may have a hundred million characters.
LONGEST = 1500
# Controls, formats (these turn the direction of text), surrogates, private and unassigned characters, line ends.
_HIDDEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}


def shown(text: object, limit: int | None = LONGEST) -> str:
    r"""The text in one line, with invisible characters escaped; if longer than `limit`, it is cut in the middle.

    >>> print(shown("a\x1b[31m red\nb\u202e"))
    a\x1b[31m red\nb\u202e
    >>> shown("0123456789" * 9, 40)
    '01234 (80 characters cut) 56789'
    """
    raw = str(text)
    kept = raw if limit is None or len(raw) <= limit else _cut(raw, limit)
    return _escaped(kept)


def shown_lines(text: str) -> str:
    r"""The same for a text of several lines: line ends stay, and nothing is cut.

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


def one_line(text: object, limit: int = 240) -> str:
    r"""An error or message of another library in one line, without its full stop, cut behind a word at `limit`.

    >>> one_line("No such\n  host.")
    'No such host'
    >>> one_line("No such host is known", 12)
    'No such ...'
    """
    line = " ".join(str(text).split()).rstrip(".:")
    return line if len(line) <= limit else f"{line[:limit].rpartition(' ')[0] or line[:limit]} ..."


def _cut(text: str, limit: int) -> str:
    """The beginning and the end: a message names the file first and says last what to do."""
    left = (limit - 30) // 2
    return f"{text[:left]} ({len(text) - 2 * left} characters cut) {text[-left:]}"


def as_code(text: object) -> str:
    """The text as code in Markdown, so that nothing in it acts as a link, as HTML or as a mention.

    >>> print(as_code("a`b``c"), as_code("`"))
    ```a`b``c``` `` ` ``
    """
    plain = shown(text, 200)
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", plain)), default=0))
    room = " " if plain.startswith("`") or plain.endswith("`") or not plain.strip() else ""
    return f"{fence}{room}{plain}{room}{fence}"
