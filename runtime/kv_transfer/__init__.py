"""Transfers of KV caches between the paged pools of two workers; `transports/base.py` has the interface."""

from runtime.kv_transfer.receiver import KvReceiver
from runtime.kv_transfer.sender import KvSender

__all__ = ["KvReceiver", "KvSender"]
