"""KV heads on an attention worker, as the worker of a stage sees them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from runtime.engine.torch.headwise.pages import Key, Rows, bytes_of, receive_tensor
from runtime.kv_cache.pool import CacheShape
from runtime.protocol.codec import encode
from runtime.protocol.framing import Connection
from runtime.protocol.message import Message
from runtime.protocol.to_attention_workers import (
    AttendHeads,
    GrantHeads,
    HeadBlocks,
    HeadKey,
    HeadRows,
    HeadStep,
    OpenHeads,
    PutHead,
    TakeHead,
)

DEADLINE_S = 10.0
"""An attention worker that takes longer for a layer counts as lost."""


class RemoteHeads:
    """The heads of one lane on an attention worker. Every method raises OSError once that is lost.

    Parameters
    ----------
    shape : what a block there holds for each token
    query_heads : for each KV head
    """

    def __init__(self, connection: Connection, shape: CacheShape, query_heads: int) -> None:
        connection.set_deadline(DEADLINE_S)
        self._connection, self._shape, self._query_heads = connection, shape, query_heads
        self._granted: dict[Key, list[int]] = {}
        self._forgotten: list[str] = []
        part = shape.part
        self._send(
            OpenHeads(
                first_layer=part.first_layer,
                end_layer=part.end_layer,
                head_dim=shape.head_dim,
                query_heads=query_heads,
                dtype=str(shape.dtype).removeprefix("torch."),
                kv_format=shape.format.name,
            )
        )

    def close(self) -> None:
        """Give up the connection."""
        self._connection.close()

    def grant(self, key: Key, blocks: Sequence[int]) -> None:
        """Give a head further blocks, told with `tell`."""
        self._granted.setdefault(key, []).extend(blocks)

    def forget(self, request_id: str, heads: int) -> None:
        """Forget the heads of a request, told with `tell`."""
        for head in range(heads):
            self._granted.pop((request_id, head), None)
        self._forgotten.append(request_id)

    def tell(self) -> None:
        """Send what was granted and forgotten."""
        if self._granted or self._forgotten:
            granted = tuple(
                HeadBlocks(key=_key(key), blocks=tuple(blocks)) for key, blocks in self._granted.items()
            )
            self._send(GrantHeads(forgotten=tuple(self._forgotten), granted=granted))
            self._granted.clear()
            self._forgotten.clear()

    def take(self, key: Key, first_token: int, end_token: int) -> torch.Tensor:
        """As HeadPages.take."""
        self._send(TakeHead(key=_key(key), first_token=first_token, end_token=end_token))
        return self._receive_kv(self._shape.layers, 2, end_token - first_token)

    def put(
        self, key: Key, first_token: int, end_token: int, blocks: Sequence[int], kv: torch.Tensor
    ) -> None:
        """As HeadPages.put."""
        told = PutHead(key=_key(key), first_token=first_token, end_token=end_token, blocks=tuple(blocks))
        self._send(told, kv)

    def begin(self, decodes: Rows, prompts: Rows) -> None:
        """Say which heads the layers of a step are about."""
        self._send(HeadStep(decodes=_rows(decodes), prompts=_rows(prompts)))

    def ask(
        self, layer: int, window: int | None, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """Send queries of the decodes, [decodes, query_heads, head_dim], with keys and values of all new
        tokens, [tokens, head_dim]."""
        self._send(AttendHeads(layer=layer, window=window), query, key, value)

    def attended(self, decodes: int) -> torch.Tensor:
        """The answer for decodes: [decodes, query_heads, head_dim]."""
        return self._receive(decodes, self._query_heads, self._shape.head_dim)

    def before(self, tokens: int) -> torch.Tensor:
        """The answer for a prompt: keys and values of the tokens before its own, [2, tokens, width]."""
        return self._receive_kv(2, tokens)

    def _send(self, message: Message, *tensors: torch.Tensor) -> None:
        buffers = [memoryview(encode(message)), *(bytes_of(tensor) for tensor in tensors)]
        self._connection.send_buffers([buffer for buffer in buffers if buffer.nbytes])

    def _receive(self, *shape: int) -> torch.Tensor:
        return receive_tensor(self._connection, shape, self._shape.dtype, self._shape.device)

    def _receive_kv(self, *shape: int) -> torch.Tensor:
        """Keys and values as the caches store them, [*shape, width]."""
        width, dtype = self._shape.width, self._shape.stored_dtype
        return receive_tensor(self._connection, (*shape, width), dtype, self._shape.device)


def _key(key: Key) -> HeadKey:
    return HeadKey(request_id=key[0], head=key[1])


def _rows(rows: Rows) -> tuple[HeadRows, ...]:
    return tuple(HeadRows(key=_key(key), first_token=first, count=count) for key, first, count in rows)
