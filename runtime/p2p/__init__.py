"""Peers over libp2p: frames, peers and node records; nothing of the runtime's replicas or messages."""
