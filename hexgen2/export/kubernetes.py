"""Exports a placement to Kubernetes: one pod with a node agent per node, and a front end that controls them.

The pods run `hexgen2 node`, the front end `hexgen2 launch --launcher p2p`. This supports every placement,
including tensor-parallel degrees that differ by stage and decode pipelines, which vLLM pods cannot run. Nodes
that share replicas form one LeaderWorkerSet (leaderworkerset.x-k8s.io/v1), other nodes a StatefulSet each.
The front end restarts replicas, not Kubernetes: a restarted pod is a node that joins again.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from cost_model.errors import InputError
from hexgen2.export.groups import Group, Node, groups_of
from hexgen2.export.kubernetes_texts import AGENT, FRONT, NETWORK_SCRIPT, README
from hexgen2.export.labels import safe_names
from hexgen2.placement import Placement

IMAGE, ACCELERATOR_LABEL, MODELS = "hexgen2:latest", "hexgen2/accelerator", "/models"
AGENT_PORT, API_PORT = 4001, 8000
LARGEST_CONFIG_BYTES = 1_000_000
CPU_PER_GPU, MEMORY_GIB_PER_GPU = 4, 32
"""Host resources that an agent needs per GPU for loading weights and staging KV caches (assumed)."""
NETWORK, API_KEY, HF_TOKEN, MODEL_CLAIM = (
    "hexgen2-network",
    "hexgen2-api-key",
    "hexgen2-hf-token",
    "hexgen2-model",
)
Manifest = dict[str, Any]


def kubernetes_files(
    placement: Placement, model: str | None, source: str, image: str | None, accelerator_label: str | None
) -> dict[str, str]:
    """File name -> text.

    Parameters
    ----------
    model : folder of the checkpoint in the pods; None: the model's name under MODELS
    image : container image; None: IMAGE
    accelerator_label : the label of cluster nodes that holds the placement's name of their GPUs

    Raises
    ------
    InputError : the torch engine cannot run the placement, or it does not fit into a ConfigMap
    """
    groups = groups_of(placement)
    folder = model or f"{MODELS}/{placement.model.name}"
    writer = _Writer(groups, folder, image or IMAGE, accelerator_label or ACCELERATOR_LABEL)
    if placement.attention_workers:
        problem = "only the local launcher starts them"
        raise InputError(source, "attention_workers", problem, "use `hexgen2 launch` on one machine")
    documents = [
        ("The placement to serve.", _placement_map(placement, source)),
        ("The service for clients.", _service("hexgen2", {"app": "hexgen2", "part": "front"}, API_PORT)),
        ("The seed node, through which starting nodes find the others.", writer.seed_service()),
        ("DNS names for the pods of the nodes.", writer.nodes_service()),
        (
            "Workers do not encrypt their traffic, so only pods of this placement reach them.",
            _policy(),
        ),
        *((f"Replicas {', '.join(g.replicas)}.", each) for g in groups for each in writer.nodes(g)),
        ("The front end: API and router; starts the replicas on the nodes.", writer.front()),
    ]
    labels = writer.labels
    return {
        "hexgen2.yaml": "---\n".join(_document(*document) for document in documents),
        "make-network.sh": NETWORK_SCRIPT.format(labels=" ".join(labels.values()), secret=NETWORK),
        "README.md": README.format(
            model=placement.model.name,
            cluster=placement.cluster.name,
            folder=folder,
            claim=MODEL_CLAIM,
            image=writer.image,
            label=writer.accelerator_label,
            network=NETWORK,
            api_key=API_KEY,
            token=HF_TOKEN,
            cpu=CPU_PER_GPU,
            memory=MEMORY_GIB_PER_GPU,
            rows="\n".join(_row(group, node) for group in groups for node in group.nodes),
        ),
    }


def _row(group: Group, node: Node) -> str:
    return f"| {node.name} | {node.devices} {node.accelerator} | {', '.join(group.replicas)} |"


def _document(comment: str, manifest: Manifest) -> str:
    return f"# {comment}\n{yaml.dump(manifest, Dumper=_Plain, sort_keys=False, width=110)}"


class _Plain(yaml.SafeDumper):
    """Writes multi-line strings as blocks, and no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_text(self, text: str) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Plain.add_representer(str, _Plain.represent_text)


def _placement_map(placement: Placement, source: str) -> Manifest:
    """The placement as a ConfigMap, without the search trace, which serving does not need."""
    short = placement.model_copy(update={"search": placement.search.model_copy(update={"trace": []})})
    text = short.to_json()
    if len(text) > LARGEST_CONFIG_BYTES:
        problem = f"is {len(text)} bytes, and a ConfigMap holds {LARGEST_CONFIG_BYTES}"
        raise InputError(source, "", problem, "launch it from a volume, with `hexgen2 launch --launcher p2p`")
    return _manifest("v1", "ConfigMap", "hexgen2-placement", data={"placement.json": text})


def _manifest(api: str, kind: str, name: str, labels: dict[str, str] | None = None, **body: Any) -> Manifest:
    metadata = {"name": name, "labels": labels} if labels else {"name": name}
    return {"apiVersion": api, "kind": kind, "metadata": metadata, **body}


def _service(name: str, selector: dict[str, str], port: int, **more: Any) -> Manifest:
    ports = [{"name": "main", "port": port, "targetPort": port}]
    spec = {"selector": selector, "ports": ports, **more}
    return _manifest("v1", "Service", name, {"app": "hexgen2"}, spec=spec)


def _policy() -> Manifest:
    ours = {"podSelector": {"matchLabels": {"app": "hexgen2"}}}
    spec = {
        "podSelector": {"matchLabels": {"app": "hexgen2", "part": "node"}},
        "policyTypes": ["Ingress"],
        "ingress": [{"from": [ours]}],
    }
    return _manifest("networking.k8s.io/v1", "NetworkPolicy", "hexgen2-nodes", spec=spec)


def _probes(probe: Manifest, start_s: int) -> Manifest:
    """The same probe for startup, readiness and liveness; start-up may take start_s seconds."""
    return {
        "startupProbe": {**probe, "periodSeconds": 5, "failureThreshold": start_s // 5},
        "readinessProbe": {**probe, "periodSeconds": 5, "failureThreshold": 2, "timeoutSeconds": 3},
        "livenessProbe": {**probe, "periodSeconds": 10, "failureThreshold": 6, "timeoutSeconds": 5},
    }


def _label_value(text: str) -> str:
    """A valid label value: at most 63 characters of A-Z, a-z, 0-9, "-", "_", ".", alphanumeric at both
    ends."""
    return re.sub("[^A-Za-z0-9._-]+", "-", text)[:63].strip("-_.")


class _Writer:
    """Builds the manifests of the pods and the services in front of them."""

    def __init__(self, groups: list[Group], folder: str, image: str, accelerator_label: str) -> None:
        self.folder, self.image, self.accelerator_label = folder, image, accelerator_label
        self.labels = safe_names(node.name for group in groups for node in group.nodes)
        self._seed = groups[0].nodes[0].name

    def seed_service(self) -> Manifest:
        selector = {"app": "hexgen2", "seed": "true"}
        return _service("hexgen2-seed", selector, AGENT_PORT, publishNotReadyAddresses=True)

    def nodes_service(self) -> Manifest:
        selector = {"app": "hexgen2", "part": "node"}
        headless = {"clusterIP": "None", "publishNotReadyAddresses": True}
        return _service("hexgen2-nodes", selector, AGENT_PORT, **headless)

    def nodes(self, group: Group) -> list[Manifest]:
        """One LeaderWorkerSet; or a StatefulSet per node if a node is alone, or if the two templates of a
        LeaderWorkerSet (leader and workers) are not enough."""
        if len(group.nodes) == 1 or not group.uniform:
            return [self._stateful_set(node) for node in group.nodes]
        return [self._leader_worker_set(group)]

    def front(self) -> Manifest:
        labels = {"app": "hexgen2", "part": "front"}
        environment = [
            _from_secret("HEXGEN2_API_KEY", API_KEY, "api-key", optional=True),
            {"name": "MODEL_PATH", "value": self.folder},
        ]
        container = self._container("front", FRONT, environment)
        container["ports"] = [{"name": "api", "containerPort": API_PORT}]
        container |= _probes({"httpGet": {"path": "/live", "port": API_PORT}}, 3600)
        container["resources"] = {"requests": {"cpu": "2", "memory": "4Gi"}}
        container["volumeMounts"].append(
            {"name": "placement", "mountPath": "/etc/hexgen2/placement", "readOnly": True}
        )
        spec = self._pod_spec(container)
        spec["volumes"].append({"name": "placement", "configMap": {"name": "hexgen2-placement"}})
        deployment = {
            "replicas": 1,
            "strategy": {"type": "Recreate"},
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": spec},
        }
        return _manifest("apps/v1", "Deployment", "hexgen2", labels, spec=deployment)

    def _stateful_set(self, node: Node) -> Manifest:
        labels = {"app": "hexgen2", "part": "node", "node": self.labels[node.name]}
        spec = {
            "replicas": 1,
            "serviceName": "hexgen2-nodes",
            "selector": {"matchLabels": labels},
            "template": self._template([node], node, labels),
        }
        return _manifest("apps/v1", "StatefulSet", f"hexgen2-{labels['node']}", labels, spec=spec)

    def _leader_worker_set(self, group: Group) -> Manifest:
        nodes = list(group.nodes)
        labels = {"app": "hexgen2", "part": "node", "group": self.labels[nodes[0].name]}
        spec = {
            "replicas": 1,
            "startupPolicy": "LeaderCreated",
            "rolloutStrategy": {"type": "RollingUpdate"},
            "networkConfig": {"subdomainPolicy": "Shared"},
            "leaderWorkerTemplate": {
                "size": len(nodes),
                "restartPolicy": "None",
                "leaderTemplate": self._template(nodes, nodes[0], labels),
                "workerTemplate": self._template(nodes, nodes[1], labels),
            },
        }
        name = f"hexgen2-{labels['group']}"
        return _manifest("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet", name, labels, spec=spec)

    def _template(self, nodes: list[Node], node: Node, labels: dict[str, str]) -> Manifest:
        """The pod template of `node`; a pod learns from LeaderWorkerSet which of `nodes` it is."""
        environment: list[Manifest] = [
            {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            {"name": "NODE_NAMES", "value": " ".join(each.name for each in nodes)},
            {"name": "NODE_LABELS", "value": " ".join(self.labels[each.name] for each in nodes)},
            {"name": "SEED", "value": self.labels[self._seed]},
            {"name": "MODEL_PATH", "value": self.folder},
            _from_secret("HF_TOKEN", HF_TOKEN, "token", optional=True),
        ]
        container = self._container("node", AGENT, environment)
        container["ports"] = [{"name": "peers", "containerPort": AGENT_PORT}]
        container |= _probes({"tcpSocket": {"port": AGENT_PORT}}, 300)
        container["resources"] = _resources(node)
        container["volumeMounts"].append({"name": "shm", "mountPath": "/dev/shm"})
        spec = self._pod_spec(container)
        spec["volumes"].append({"name": "shm", "emptyDir": {"medium": "Memory"}})
        selector = {self.accelerator_label: _label_value(node.accelerator)}
        if node.region:
            selector["topology.kubernetes.io/region"] = _label_value(node.region)
        spec["nodeSelector"] = selector
        if not node.cpu:
            spec["tolerations"] = [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
        seed = {"seed": "true"} if node.name == self._seed else {}
        return {"metadata": {"labels": {**labels, **seed}}, "spec": spec}

    def _container(self, name: str, script: str, environment: list[Manifest]) -> Manifest:
        return {
            "name": name,
            "image": self.image,
            "command": ["/bin/sh", "-ec", script],
            "env": environment,
            "volumeMounts": [
                {"name": "network", "mountPath": "/etc/hexgen2/network", "readOnly": True},
                {"name": "model", "mountPath": MODELS, "readOnly": True},
            ],
            "securityContext": {"allowPrivilegeEscalation": False},
        }

    def _pod_spec(self, container: Manifest) -> Manifest:
        return {
            "automountServiceAccountToken": False,
            "containers": [container],
            "volumes": [
                {"name": "network", "secret": {"secretName": NETWORK, "defaultMode": 0o400}},
                {"name": "model", "persistentVolumeClaim": {"claimName": MODEL_CLAIM, "readOnly": True}},
            ],
        }


def _from_secret(variable: str, secret: str, key: str, optional: bool) -> Manifest:
    reference = {"name": secret, "key": key, "optional": optional}
    return {"name": variable, "valueFrom": {"secretKeyRef": reference}}


def _resources(node: Node) -> Manifest:
    if node.cpu:
        needs = {"cpu": str(node.devices), "memory": f"{max(round(node.devices * node.memory_gib), 1)}Gi"}
        return {"requests": needs}
    return {
        "requests": {
            "cpu": str(CPU_PER_GPU * node.devices),
            "memory": f"{MEMORY_GIB_PER_GPU * node.devices}Gi",
        },
        "limits": {"nvidia.com/gpu": str(node.devices)},
    }
