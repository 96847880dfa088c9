"""Messages from the workers of a stage to an attention worker, on a connection with the purpose "heads".

Each connection is for the KV heads of one worker of a stage (a lane), numbered from 0, and has blocks of its
own on the attention worker, of which each holds one head of one request in all layers of the stage. The
attention worker answers in order, with the bytes of tensors and nothing else: both ends know their shapes.
"""

from __future__ import annotations

import msgspec

from runtime.protocol.message import Message


class OpenHeads(Message, frozen=True):
    """First message: what a block holds, in a format of KV caches (`kv_cache/formats.py`); `width` below is
    that of a head in it. Layers are those of the stage, numbered as in the model."""

    first_layer: int
    end_layer: int
    head_dim: int
    query_heads: int
    dtype: str
    kv_format: str


class HeadKey(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """One KV head of a request."""

    request_id: str
    head: int


class HeadBlocks(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Further blocks for a KV head of a request."""

    key: HeadKey
    blocks: tuple[int, ...]


class GrantHeads(Message, frozen=True):
    """Forget these requests; then these heads have further blocks."""

    forgotten: tuple[str, ...]
    granted: tuple[HeadBlocks, ...]


class HeadRows(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """The new tokens [first, first + count) of a head in a step."""

    key: HeadKey
    first_token: int
    count: int


class HeadStep(Message, frozen=True):
    """What each AttendHeads from now on is about: heads that decode, which have one token each, and heads of
    prompts, over which the stage attends by itself."""

    decodes: tuple[HeadRows, ...]
    prompts: tuple[HeadRows, ...]


class AttendHeads(Message, frozen=True):
    """One layer of a step. Followed by the queries [decodes, query_heads, head_dim] and by keys, then values
    of all new tokens, [decodes, then prompts token by token, head_dim].

    The attention worker stores keys and values. It answers with what the decodes attend to, of the shape of
    the queries, and with the keys and values [2, tokens, width] of the tokens before each prompt's.
    """

    layer: int
    window: int | None


class PutHead(Message, frozen=True):
    """A head moves here: further blocks for it, and its tokens [first, end). Followed by keys and values
    [layers, 2, tokens, width]. With first_token 0, what was known of this head is outdated."""

    key: HeadKey
    first_token: int
    end_token: int
    blocks: tuple[int, ...]


class TakeHead(Message, frozen=True):
    """Answered with keys and values of a head's tokens [first, end), [layers, 2, tokens, width]."""

    key: HeadKey
    first_token: int
    end_token: int


ToAttentionWorker = OpenHeads | GrantHeads | HeadStep | AttendHeads | PutHead | TakeHead
