"""KV caches on their way between the paged pools of two workers: see base.py."""

from runtime.engine.kv.receiver import KvReceiver
from runtime.engine.kv.sender import KvSender

__all__ = ["KvReceiver", "KvSender"]
