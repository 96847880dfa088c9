"""A node's identity and its private network's key: two small files that are created once and kept."""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass
from pathlib import Path

from libp2p.crypto.ed25519 import Ed25519PrivateKey
from libp2p.crypto.keys import KeyPair
from libp2p.peer.id import ID

from cost_model.errors import InputError

SEED_BYTES = NETWORK_KEY_BYTES = 32
IDENTITY_FILE = "identity.key"


@dataclass(frozen=True)
class Identity:
    """An Ed25519 key pair. The peer id contains the public key, so it suffices to check a signature."""

    key_pair: KeyPair

    @property
    def peer_id(self) -> str:
        """The id by which other nodes know this one: the encoded public key."""
        return str(ID.from_pubkey(self.key_pair.public_key))

    def sign(self, content: bytes) -> bytes:
        """The Ed25519 signature of these bytes."""
        return self.key_pair.private_key.sign(content)


def new_identity() -> Identity:
    """A new identity, not saved anywhere."""
    return _identity(secrets.token_bytes(SEED_BYTES))


def load_identity(path: str | Path) -> Identity:
    """Load the identity in this file, or in IDENTITY_FILE of this folder; create it (mode 0600) if missing.

    Raises
    ------
    InputError : the file is not an identity, or cannot be read or created
    """
    path = Path(path)
    if path.is_dir():
        path = path / IDENTITY_FILE
    if not path.exists():
        _write_secret(path, secrets.token_hex(SEED_BYTES), "identity")
    return _identity(_read_secret(path, SEED_BYTES, "identity", "delete it for a new identity"))


def new_network_key(path: str | Path | None = None) -> bytes:
    """Create the key of a private network (32 bytes) and write it to `path` (hex, mode 0600) if given.

    Raises
    ------
    InputError : the file exists already, or cannot be written
    """
    key = secrets.token_bytes(NETWORK_KEY_BYTES)
    if path is not None:
        _write_secret(Path(path), key.hex(), "network key")
    return key


def load_network_key(path: str | Path) -> bytes:
    """The 32 bytes of a network key file.

    Raises
    ------
    InputError : the file is missing, or is not 64 hexadecimal digits
    """
    return _read_secret(Path(path), NETWORK_KEY_BYTES, "network key", "copy the file from a node that has it")


def _identity(seed: bytes) -> Identity:
    private_key = Ed25519PrivateKey.new(seed)
    return Identity(KeyPair(private_key, private_key.get_public_key()))


def _read_secret(path: Path, size_bytes: int, what: str, remedy: str) -> bytes:
    try:
        text = path.read_text(encoding="ascii").strip()
    except OSError as error:
        raise InputError(str(path), "", f"cannot read this {what}: {error.strerror}", remedy) from error
    except UnicodeDecodeError as error:
        raise InputError(str(path), "", f"is not a {what} (not text)", remedy) from error
    try:
        secret = bytes.fromhex(text)
    except ValueError:
        secret = b""
    if len(secret) != size_bytes:
        raise InputError(str(path), "", f"is not a {what} ({2 * size_bytes} hexadecimal digits)", remedy)
    return secret


def _write_secret(path: Path, text: str, what: str) -> None:
    """Create the file atomically, readable only by its owner."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(part, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(text + "\n")
        try:
            os.link(part, path)  # unlike a rename, fails if the file exists by now
        finally:
            part.unlink()
    except OSError as error:
        problem = f"cannot write a new {what} here: {error.strerror}"
        raise InputError(str(path), "", problem, "choose another file") from error
