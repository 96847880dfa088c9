"""The texts in an export to Kubernetes: container scripts and instructions."""

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
"""Starts the agent of a node. The LeaderWorkerSet controller sets LWS_WORKER_INDEX, 0 for the leader."""

FRONT = f"""{_NETWORK}{_JOIN}exec hexgen2 launch /etc/hexgen2/placement/placement.json --launcher p2p "$@" \\
    --identity "$network/front.identity" --model-path "$MODEL_PATH" --host 0.0.0.0 --port 8000
"""

NETWORK_SCRIPT = """#!/bin/sh
# Creates the keys of the private network and stores them only in the Secret {secret}. Run it once, on a
# machine with kubectl and hexgen2 (with its extra p2p).
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

`hexgen2.yaml` runs a pod with `hexgen2 node` for each node of the placement, and a front end, `hexgen2 launch
--launcher p2p`, that starts the replicas in these pods and serves the OpenAI API at the Service `hexgen2`,
port 8000. Nodes that share replicas form one LeaderWorkerSet (leaderworkerset.x-k8s.io/v1; its controller
must be installed and support `restartPolicy: None`). Other nodes, and groups with more than two kinds of
nodes, are StatefulSets.

| node | pod | replicas of its group |
| --- | --- | --- |
{rows}

A pod requests all GPUs up to the highest index that the placement uses on its node.

Before `kubectl apply -f hexgen2.yaml`:
1. Build the image `{image}` with hexgen2 and its extras runtime and p2p (`--image` chooses another name).
2. Label the machines with the accelerators in the table above: `kubectl label node NAME {label}=ACCELERATOR`.
   `--accelerator-label` chooses another label. If the placement has regions, they are matched against
   `topology.kubernetes.io/region`.
3. Put the checkpoint into the PersistentVolumeClaim `{claim}`, so that pods find it in `{folder}`. All pods
   mount it read-only (access mode ReadOnlyMany or ReadWriteMany).
4. Run `./make-network.sh`. It creates the Secret `{network}` with the network key and the node identities.
5. Run `kubectl create secret generic {api_key} --from-literal=api-key=...` to set the API key that clients
   must send. Without it, anyone who can reach the Service can use it. If a Secret `{token}` (key `token`)
   exists, it is passed to the nodes.

Each GPU is assumed to need {cpu} CPUs and {memory} GiB of memory. The front end is ready as long as it
answers; it does not wait for `/health` to say "ok", because that turns "degraded" as soon as one replica is
lost, while the others still serve.

Unlike vLLM pods, these pods support tensor-parallel degrees that differ by stage, decode pipelines (which
NixlConnector lacks), and replicas whose nodes hold unequal shares of their GPUs.
"""
