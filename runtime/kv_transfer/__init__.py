"""KV caches on their way between the paged pools of two workers: see base.py."""

from runtime.kv_transfer.receiver import KvReceiver
from runtime.kv_transfer.sender import KvSender

__all__ = ["KvReceiver", "KvSender"]
