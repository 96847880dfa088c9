"""A tokenizer for models without one: each token shows in the text as its number."""

from __future__ import annotations

import re

_NAMES = re.compile(r"(?:t\d{1,9} )+", re.ASCII)


class NumberTokenizer:
    """Token 123 is "t123 ". In a prompt, what is not such names is its bytes, one token each.

    Parameters
    ----------
    vocabulary : tokens of the model
    """

    stop_token_ids: tuple[int, ...] = ()

    def __init__(self, vocabulary: int) -> None:
        self._vocabulary = vocabulary
        self.token_bytes = len("t123456789 ")

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""
        ids, at = list[int](), 0
        for found in _NAMES.finditer(text):
            ids += self._bytes(text[at : found.start()])
            ids += [int(name[1:]) for name in found[0].split()]
            at = found.end()
        return ids + self._bytes(text[at:])

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        """Token ids of a chat: a line per message."""
        return self.encode("".join(f"{each['role']}: {each['content']}\n" for each in messages))

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids; none is special."""
        return "".join(map(self.token_text, ids))

    def token_text(self, token: int) -> str:
        """The text of one token."""
        return f"t{token} "

    def _bytes(self, text: str) -> list[int]:
        return [byte % self._vocabulary for byte in text.encode()]
