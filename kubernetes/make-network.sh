#!/bin/sh
# Creates the keys of the private network and stores them only in the Secret hexgen2-network. Run it once, on a
# machine with kubectl and hexgen2 (with its extra p2p).
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 - "$folder" h100-1 a100-1 a6000-1 a6000-2 l40-1 l40-2 a100-2 <<'PYTHON'
import sys
from pathlib import Path

from runtime.p2p.membership.identity import load_identity, new_network_key

folder, *nodes = sys.argv[1:]
new_network_key(Path(folder, "network.key"))
peers = {name: load_identity(Path(folder, name + ".identity")).peer_id for name in (*nodes, "front")}
Path(folder, "peers").write_text("".join(peer + "\n" for peer in peers.values()))
Path(folder, "seed").write_text(peers[nodes[0]])
PYTHON
kubectl create secret generic hexgen2-network --from-file="$folder"
