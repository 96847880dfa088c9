"""What goes into an export to Kubernetes as text: the containers' scripts, and the instructions."""

from __future__ import annotations

_NETWORK = """network=/etc/hexgen2/network
set -- --network-key "$network/network.key"
while read -r peer; do set -- "$@" --allow "$peer"; done < "$network/peers"
"""
_JOIN = """seed=$(getent ahostsv4 hexgen2-seed | awk 'NR == 1 { print $1 }')
set -- "$@" --join "/ip4/$seed/tcp/4001/p2p/$(cat "$network/seed")"
"""

AGENT = f"""{_NETWORK}index=${{LWS_WORKER_INDEX:-0}}
name=$(echo "$NODE_NAMES" | cut -d ' ' -f $((index + 1)))
label=$(echo "$NODE_LABELS" | cut -d ' ' -f $((index + 1)))
if [ "$label" != "$SEED" ]; then
{_JOIN}fi
exec hexgen2 node "$@" --name "$name" --identity "$network/$label.identity" \\
    --listen "/ip4/$POD_IP/tcp/4001" --address "$POD_IP" --model-path "$MODEL_PATH"
"""
"""A node's agent. Within a LeaderWorkerSet the controller sets LWS_WORKER_INDEX, 0 for the leader."""

FRONT = f"""{_NETWORK}{_JOIN}exec hexgen2 launch /etc/hexgen2/placement/placement.json --launcher p2p "$@" \\
    --identity "$network/front.identity" --model-path "$MODEL_PATH" --host 0.0.0.0 --port 8000
"""

NETWORK_SCRIPT = """#!/bin/sh
# Makes the keys of the private network and stores them as the Secret {secret}; run it once, where kubectl and
# hexgen2 (with its extra p2p) are installed. The keys stay in the Secret only.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 - "$folder" {labels} <<'PYTHON'
import sys
from pathlib import Path

from runtime.p2p.membership.identity import load_identity, new_network_key

folder, *nodes = sys.argv[1:]
new_network_key(Path(folder, "network.key"))
peers = {{name: load_identity(Path(folder, name + ".identity")).peer_id for name in (*nodes, "front")}}
Path(folder, "peers").write_text("".join(peer + "\\n" for peer in peers.values()))
Path(folder, "seed").write_text(peers[nodes[0]])
PYTHON
kubectl create secret generic {secret} --from-file="$folder"
"""

README = """# {model} on {cluster}, in Kubernetes

`hexgen2.yaml` has a pod with `hexgen2 node` for each node of the placement, and a front end, `hexgen2 launch
--launcher p2p`, that starts the replicas in them and serves the OpenAI API at the Service `hexgen2`, port
8000. Nodes that replicas join are one LeaderWorkerSet (leaderworkerset.x-k8s.io/v1: its controller must be
installed, and know `restartPolicy: None`); others, and groups with more than two kinds of nodes, are
StatefulSets.

| node | pod | replicas of its group |
| --- | --- | --- |
{rows}

A pod asks for the GPUs up to the highest index that the placement uses on its node.

Before `kubectl apply -f hexgen2.yaml`:
1. Build the image `{image}` with hexgen2 and its extras runtime and p2p in it (`--image` names another).
2. Label the machines: `kubectl label node NAME {label}=ACCELERATOR`, as the placement names them (above).
   This label is an assumption; `--accelerator-label` names another. Regions, where the placement has them,
   are looked for in `topology.kubernetes.io/region`.
3. Put the checkpoint into the PersistentVolumeClaim `{claim}`, so that pods find it in `{folder}`. All pods
   mount it read-only (access mode ReadOnlyMany, or ReadWriteMany).
4. Run `./make-network.sh`: it makes the Secret `{network}` with the network's key and the nodes' identities.
5. `kubectl create secret generic {api_key} --from-literal=api-key=...`: what clients must send. Without it,
   whoever reaches the Service may use it. A Secret `{token}` (key `token`) is passed to the nodes if there
   is one.

Assumed: {cpu} CPUs and {memory} GiB of memory for each GPU. The front end counts as ready as long as it
answers, not only while `/health` says "ok": that is "degraded" as soon as one replica is lost, and the
others still serve.

What a pod with vLLM could not run, and these pods can: tensor-parallel degrees that differ by stage, decode
pipelines (NixlConnector has none), replicas whose nodes hold unequal shares of their GPUs.
"""
