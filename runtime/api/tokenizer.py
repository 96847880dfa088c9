"""The model's tokenizer: texts and chats to token ids and back, and the tokens that end an answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Protocol

from cost_model.errors import InputError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")


class NoChatTemplate(Exception):
    """The tokenizer defines no chat template."""


class BadChat(Exception):
    """The chat template refuses these messages."""


class Tokenizer(Protocol):
    """What the API needs: texts and chats to token ids and back, the tokens that end an answer, and the most
    bytes of text that one token stands for. It may be used from several threads."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]: ...

    @property
    def token_bytes(self) -> int: ...

    def encode(self, text: str) -> list[int]: ...

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]: ...

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str: ...

    def token_text(self, token: int) -> str: ...


def check_tokenizer_files(folder: Path) -> None:
    """Refuse a folder without a tokenizer.

    Raises
    ------
    InputError
    """
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        remedy = "add the model's tokenizer files (tokenizer.json, tokenizer_config.json)"
        raise InputError(str(folder), "", "has no tokenizer", remedy)


class ModelTokenizer:
    """A Hugging Face tokenizer behind the interface that the API uses."""

    def __init__(self, hugging_face: Any, stop_token_ids: tuple[int, ...]) -> None:
        self._hugging_face = hugging_face
        self._core = hugging_face.backend_tokenizer
        self._core.no_truncation()
        self._core.no_padding()
        self.stop_token_ids = stop_token_ids
        self.token_bytes = max((len(token.encode()) for token in self._core.get_vocab()), default=1)

    @classmethod
    def load(cls, folder: Path) -> ModelTokenizer:
        """Load the tokenizer from a model folder; slow, as it imports transformers.

        Raises
        ------
        InputError : the files are missing or unreadable
        """
        check_tokenizer_files(folder)
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        except (OSError, ValueError, KeyError, TypeError) as error:
            remedy = "restore the model's tokenizer files"
            raise InputError(str(folder), "tokenizer", f"cannot be read ({error})", remedy) from error
        if not tokenizer.is_fast:
            raise InputError(
                str(folder), "tokenizer", "has no tokenizer.json", "convert it to a fast tokenizer"
            )
        return cls(tokenizer, _stop_token_ids(folder, tokenizer.eos_token_id))

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, with the special tokens that start a sequence."""
        return self._ids(text)

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        """Token ids of a chat up to where the assistant's answer begins.

        Raises
        ------
        NoChatTemplate, BadChat
        """
        if not self._hugging_face.chat_template:
            raise NoChatTemplate
        from jinja2 import TemplateError

        try:
            text = self._hugging_face.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
        except TemplateError as error:
            raise BadChat(str(error)) from error
        return self._ids(text, add_special_tokens=False)

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids."""
        return self._core.decode(ids, skip_special_tokens=skip_special_tokens)

    def token_text(self, token: int) -> str:
        """The text of one token alone, special tokens included."""
        return self._core.decode([token], skip_special_tokens=False)

    def _ids(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Like the core's `encode`, which would hold the interpreter lock while it runs."""
        (encoding,) = self._core.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoding.ids


def _stop_token_ids(folder: Path, tokenizer_eos: int | None) -> tuple[int, ...]:
    """Every end-of-sequence token that the model's files name."""
    found = [tokenizer_eos]
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        if path.is_file():
            try:
                named = json.loads(path.read_text()).get("eos_token_id")
            except (OSError, ValueError, AttributeError) as error:
                remedy = "restore the file, or remove it if the model came without it"
                raise InputError(str(path), "", f"cannot be read ({error})", remedy) from error
            found += named if isinstance(named, list) else [named]
    return tuple(sorted({token for token in found if isinstance(token, int)}))
