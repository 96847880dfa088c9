"""Kubernetes: a pod with a node agent for each node of the placement, and the front end that leads them.

The pods run `hexgen2 node`, and the front end `hexgen2 launch --launcher p2p`: this runs whatever a placement
says, also tensor-parallel degrees that differ by stage and decode pipelines, which a pod with vLLM cannot.
Nodes that replicas join are one LeaderWorkerSet (leaderworkerset.x-k8s.io/v1), others a StatefulSet.
Replicas are started again by the front end, not by Kubernetes: a pod that comes back is a node that joins
again.
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
"""Assumed: what an agent needs of the host for each GPU (loading weights, staging KV caches)."""
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
    """Texts by file name.

    Parameters
    ----------
    model : the checkpoint's folder in the pods; None: the model's name under MODELS
    image : of all containers; None: IMAGE
    accelerator_label : of cluster nodes, whose value is the placement's name of their GPUs

    Raises
    ------
    InputError : the placement is larger than a ConfigMap may be
    """
    groups = groups_of(placement)
    folder = model or f"{MODELS}/{placement.model.name}"
    writer = _Writer(groups, folder, image or IMAGE, accelerator_label or ACCELERATOR_LABEL)
    if placement.attention_workers:
        raise InputError(
            source, "attention_workers", "the torch engine cannot run them", "choose another strategy"
        )
    documents = [
        ("What is served.", _placement_map(placement, source)),
        ("Clients come here.", _service("hexgen2", {"app": "hexgen2", "part": "front"}, API_PORT)),
        ("Where a node that starts finds the others.", writer.seed_service()),
        ("Names for the nodes' pods.", writer.nodes_service()),
        ("Between workers nothing is encrypted: only pods of this placement reach them.", _policy()),
        *((f"Replicas {', '.join(g.replicas)}.", each) for g in groups for each in writer.nodes(g)),
        ("The front end: API, router, and head of the nodes.", writer.front()),
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
    """Texts of several lines as such, and nothing by reference."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_text(self, text: str) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Plain.add_representer(str, _Plain.represent_text)


def _placement_map(placement: Placement, source: str) -> Manifest:
    """Without the record of the search, which nothing that serves reads."""
    short = placement.model_copy(update={"search": placement.search.model_copy(update={"trace": []})})
    text = short.to_json()
    if len(text) > LARGEST_CONFIG_BYTES:
        problem = f"is {len(text)} bytes, and a ConfigMap holds {LARGEST_CONFIG_BYTES}"
        raise InputError(source, "", problem, "launch it from a volume, with `hexgen2 launch --launcher p2p`")
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "hexgen2-placement"},
        "data": {"placement.json": text},
    }


def _service(name: str, selector: dict[str, str], port: int, **more: Any) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "labels": {"app": "hexgen2"}},
        "spec": {"selector": selector, "ports": [{"name": "main", "port": port, "targetPort": port}], **more},
    }


def _policy() -> Manifest:
    ours = {"podSelector": {"matchLabels": {"app": "hexgen2"}}}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": "hexgen2-nodes"},
        "spec": {
            "podSelector": {"matchLabels": {"app": "hexgen2", "part": "node"}},
            "policyTypes": ["Ingress"],
            "ingress": [{"from": [ours]}],
        },
    }


def _probes(probe: Manifest, start_s: int) -> Manifest:
    """Startup, readiness and liveness by the same question; loading weights may take start_s."""
    return {
        "startupProbe": {**probe, "periodSeconds": 5, "failureThreshold": start_s // 5},
        "readinessProbe": {**probe, "periodSeconds": 5, "failureThreshold": 2, "timeoutSeconds": 3},
        "livenessProbe": {**probe, "periodSeconds": 10, "failureThreshold": 6, "timeoutSeconds": 5},
    }


def _label_value(text: str) -> str:
    """A label's value: at most 63 of A-Z, a-z, 0-9, "-", "_" and ".", alphanumeric at both ends."""
    return re.sub("[^A-Za-z0-9._-]+", "-", text)[:63].strip("-_.")


class _Writer:
    """Manifests of pods, with what they have in common."""

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
        """One LeaderWorkerSet, or a StatefulSet for each node: where a node is alone, or where the templates
        of a LeaderWorkerSet, one for the leader and one for the others, are not enough."""
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
        return {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": "hexgen2", "labels": labels},
            "spec": {
                "replicas": 1,
                "strategy": {"type": "Recreate"},
                "selector": {"matchLabels": labels},
                "template": {"metadata": {"labels": labels}, "spec": spec},
            },
        }

    def _stateful_set(self, node: Node) -> Manifest:
        labels = {"app": "hexgen2", "part": "node", "node": self.labels[node.name]}
        return {
            "apiVersion": "apps/v1",
            "kind": "StatefulSet",
            "metadata": {"name": f"hexgen2-{self.labels[node.name]}", "labels": labels},
            "spec": {
                "replicas": 1,
                "serviceName": "hexgen2-nodes",
                "selector": {"matchLabels": labels},
                "template": self._template([node], node, labels),
            },
        }

    def _leader_worker_set(self, group: Group) -> Manifest:
        names = list(group.nodes)
        label = self.labels[names[0].name]
        labels = {"app": "hexgen2", "part": "node", "group": label}
        return {
            "apiVersion": "leaderworkerset.x-k8s.io/v1",
            "kind": "LeaderWorkerSet",
            "metadata": {"name": f"hexgen2-{label}", "labels": labels},
            "spec": {
                "replicas": 1,
                "startupPolicy": "LeaderCreated",
                "rolloutStrategy": {"type": "RollingUpdate"},
                "networkConfig": {"subdomainPolicy": "Shared"},
                "leaderWorkerTemplate": {
                    "size": len(names),
                    "restartPolicy": "None",
                    "leaderTemplate": self._template(names, names[0], labels),
                    "workerTemplate": self._template(names, names[1], labels),
                },
            },
        }

    def _template(self, names: list[Node], node: Node, labels: dict[str, str]) -> Manifest:
        """The pod of a node of a group, whose index in `names` it learns from LeaderWorkerSet."""
        environment: list[Manifest] = [
            {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            {"name": "NODE_NAMES", "value": " ".join(each.name for each in names)},
            {"name": "NODE_LABELS", "value": " ".join(self.labels[each.name] for each in names)},
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
