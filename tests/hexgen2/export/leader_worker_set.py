"""Rules of leaderworkerset.x-k8s.io/v1 for the fields that an export writes.

They come from the published types: kubernetes-sigs/lws, api/leaderworkerset/v1/leaderworkerset_types.go at
commit 024af0845195be26fb4a0847c37d7209849d69da (its kubebuilder markers give enumerations and defaults). Pod
templates are those of Kubernetes itself, and are checked as Pods.
"""

from __future__ import annotations

_TEMPLATE = {
    "type": "object",
    "properties": {"metadata": {"type": "object"}, "spec": {"type": "object"}},
    "required": ["spec"],
    "additionalProperties": False,
}
INT32 = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}

SCHEMA = {
    "type": "object",
    "additionalProperties": False,
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "properties": {
        "apiVersion": {"const": "leaderworkerset.x-k8s.io/v1"},
        "kind": {"const": "LeaderWorkerSet"},
        # its name becomes part of pod and StatefulSet names, which are DNS labels
        "metadata": {
            "type": "object",
            "required": ["name"],
            "properties": {"name": {"pattern": "^[a-z0-9]([a-z0-9-]{0,51}[a-z0-9])?$"}},
        },
        "spec": {
            "type": "object",
            "additionalProperties": False,
            "required": ["leaderWorkerTemplate"],
            "properties": {
                "replicas": INT32,
                "startupPolicy": {"enum": ["LeaderCreated", "LeaderReady"]},
                "rolloutStrategy": {
                    "type": "object",
                    "additionalProperties": False,
                    "required": ["type"],
                    "properties": {"type": {"const": "RollingUpdate"}},
                },
                "networkConfig": {
                    "type": "object",
                    "additionalProperties": False,
                    "required": ["subdomainPolicy"],
                    "properties": {"subdomainPolicy": {"enum": ["Shared", "UniquePerReplica"]}},
                },
                "leaderWorkerTemplate": {
                    "type": "object",
                    "additionalProperties": False,
                    "required": ["workerTemplate"],
                    "properties": {
                        "size": {**INT32, "minimum": 1},
                        "restartPolicy": {
                            "enum": ["RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"]
                        },
                        "leaderTemplate": _TEMPLATE,
                        "workerTemplate": _TEMPLATE,
                    },
                },
            },
        },
    },
}
