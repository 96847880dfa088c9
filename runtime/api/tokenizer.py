"""The model's own tokenizer: texts and chats to token ids and back, and which tokens end an answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol, TypeVar

from cost_model.errors import InputError

LONG_TEXT = 2000
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
Result = TypeVar("Result")


class NoChatTemplate(Exception):
    """The tokenizer defines no chat template."""


class BadChat(Exception):
    """The chat template refuses these messages."""


class Tokenizer(Protocol):
    """What the API needs: texts and chats to token ids and back, and which tokens end an answer."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]: ...

    async def encode(self, text: str) -> list[int]: ...

    async def encode_chat(self, messages: list[dict[str, str]]) -> list[int]: ...

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
    """A Hugging Face tokenizer with what the API needs of it. Long texts are encoded in a thread."""

    def __init__(self, hugging_face: Any, stop_token_ids: tuple[int, ...]) -> None:
        self._hugging_face = hugging_face
        self._core = hugging_face.backend_tokenizer
        self._core.no_truncation()
        self._core.no_padding()
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")
        self.stop_token_ids = stop_token_ids

    @classmethod
    def load(cls, folder: Path) -> ModelTokenizer:
        """Load from a model folder; slow (imports transformers).

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
                str(folder), "tokenizer", "has no tokenizer.json form", "convert it to a fast one"
            )
        return cls(tokenizer, _stop_token_ids(folder, tokenizer.eos_token_id))

    async def encode(self, text: str) -> list[int]:
        """Token ids of a text, with the special tokens that the model begins with."""
        return await self._run(len(text), lambda: self._core.encode(text).ids)

    async def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        """Token ids of a chat up to where the assistant's answer begins.

        Raises
        ------
        NoChatTemplate, BadChat
        """
        size = sum(len(message["content"]) for message in messages)
        return await self._run(size, lambda: self._encode_chat(messages))

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids."""
        return self._core.decode(ids, skip_special_tokens=skip_special_tokens)

    def token_text(self, token: int) -> str:
        """The text of one token alone, special tokens included."""
        return self._core.decode([token], skip_special_tokens=False)

    def _encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        if not self._hugging_face.chat_template:
            raise NoChatTemplate
        from jinja2 import TemplateError

        try:
            text = self._hugging_face.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
        except TemplateError as error:
            raise BadChat(str(error)) from error
        return self._core.encode(text, add_special_tokens=False).ids

    async def _run(self, size: int, work: Callable[[], Result]) -> Result:
        if size < LONG_TEXT:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def _stop_token_ids(folder: Path, tokenizer_eos: int | None) -> tuple[int, ...]:
    """Every end-of-sequence token that the model's files name."""
    found = [tokenizer_eos]
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        if path.is_file():
            try:
                named = json.loads(path.read_text()).get("eos_token_id")
            except (OSError, ValueError, AttributeError) as error:
                remedy = "restore the file, or remove it if the model came without"
                raise InputError(str(path), "", f"cannot be read ({error})", remedy) from error
            found += named if isinstance(named, list) else [named]
    return tuple(sorted({token for token in found if isinstance(token, int)}))
