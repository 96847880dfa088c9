"""Exports to Kubernetes, checked against Kubernetes' published schemas and by running what a pod would
run."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import jsonschema
import pytest
import yaml
from by_hand import by_hand
from leader_worker_set import SCHEMA

from cost_model.errors import InputError
from hexgen2.export.kubernetes import kubernetes_files
from hexgen2.placement import Placement

NODES = {
    "big": "H100:8",
    "left": "A100-80GB:4",
    "mid": "A100-80GB:4",
    "right": "L40:4",
    "Odd_Node.1": "L40:2",
}
SHAPES = {
    "prefill-0": [("big/0 big/1", 32)],
    "decode-0": [("big/2 big/3", 20), ("left/0", 12)],
    "decode-1": [("left/1 left/2", 16), ("mid/2", 16)],
    "decode-2": [("right/3", 32)],
    "decode-3": [("Odd_Node.1/0", 32)],
}
ROUTES = tuple(("prefill-0", name) for name in SHAPES if name != "prefill-0")


def exported(placement: Placement, **more: str) -> dict[str, str]:
    options = {"model": None, "image": None, "accelerator_label": None, **more}
    return kubernetes_files(placement, source="test", **options)


def manifests(files: dict[str, str]) -> list[dict]:
    return list(yaml.safe_load_all(files["hexgen2.yaml"]))


def templates(manifest: dict) -> list[dict]:
    """The pod templates of a manifest; the leader of a LeaderWorkerSet comes first."""
    if manifest["kind"] == "LeaderWorkerSet":
        both = manifest["spec"]["leaderWorkerTemplate"]
        return [both["leaderTemplate"], both["workerTemplate"]]
    return [manifest["spec"]["template"]] if "template" in manifest.get("spec", {}) else []


@pytest.fixture(scope="module")
def files():
    return exported(by_hand(NODES, SHAPES, ROUTES))


def test_every_manifest_is_valid_by_the_schemas_of_kubernetes(files):
    validate = pytest.importorskip("kubernetes_validate")
    version = validate.latest_version()
    for manifest in manifests(files):
        if manifest["kind"] == "LeaderWorkerSet":
            jsonschema.validate(manifest, SCHEMA)
        else:
            validate.validate(manifest, version, strict=True)
        for template in templates(manifest):
            pod = {"apiVersion": "v1", "kind": "Pod", **template}
            validate.validate(
                {**pod, "metadata": {"name": "x", **template["metadata"]}}, version, strict=True
            )


def test_selectors_and_references_meet_what_they_name(files):
    found = manifests(files)
    maps = {m["metadata"]["name"] for m in found if m["kind"] == "ConfigMap"}
    pods = [template for manifest in found for template in templates(manifest)]
    labels = [template["metadata"]["labels"] for template in pods]
    for manifest in found:
        selector = manifest.get("spec", {}).get("selector")
        if manifest["kind"] == "Service":
            assert any(selector.items() <= own.items() for own in labels), manifest["metadata"]["name"]
        elif selector is not None:
            assert selector["matchLabels"].items() <= templates(manifest)[0]["metadata"]["labels"].items()
    assert sum(own.get("seed") == "true" for own in labels) == 1
    for template in pods:
        spec = template["spec"]
        volumes = {volume["name"] for volume in spec["volumes"]}
        assert {volume["configMap"]["name"] for volume in spec["volumes"] if "configMap" in volume} <= maps
        for container in spec["containers"]:
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
            assert {"startupProbe", "readinessProbe", "livenessProbe", "resources"} <= container.keys()


def test_nodes_that_replicas_join_are_one_set_with_the_odd_one_first(files):
    sets = [m for m in manifests(files) if m["kind"] == "LeaderWorkerSet"]
    assert len(sets) == 1
    leader, worker = templates(sets[0])
    assert sets[0]["spec"]["leaderWorkerTemplate"]["size"] == 3
    asked = [t["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] for t in (leader, worker)]
    assert asked == ["4", "3"]  # "big" is used up to index 3, "left" and "mid" up to 2


def test_a_placement_travels_whole_but_for_the_record_of_its_search(files):
    text = next(m for m in manifests(files) if m["kind"] == "ConfigMap")["data"]["placement.json"]
    assert Placement.model_validate_json(text) == by_hand(NODES, SHAPES, ROUTES)


def stub(folder: Path, name: str, body: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


def run_script(tmp_path: Path, template: dict, index: int | None) -> list[str]:
    """Run the script of a pod's container with stubs for everything around it; return the words it passes
    on."""
    network, tools = tmp_path / "network", tmp_path / "tools"
    network.mkdir(exist_ok=True)
    tools.mkdir(exist_ok=True)
    (network / "peers").write_text("peer-a\npeer-b\n")
    (network / "seed").write_text("peer-a")
    stub(tools, "getent", 'test "$1 $2" = "ahostsv4 hexgen2-seed" && echo "10.9.8.7 STREAM x"')
    stub(tools, "hexgen2", 'printf "%s\\n" "$@"')
    container = template["spec"]["containers"][0]
    script = container["command"][2].replace("/etc/hexgen2/network", str(network))
    environment = {each["name"]: each.get("value", "10.0.0.5") for each in container["env"]}
    environment["PATH"] = f"{tools}:{os.environ['PATH']}"
    if index is not None:
        environment["LWS_WORKER_INDEX"] = str(index)
    done = subprocess.run(["/bin/sh", "-ec", script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def after(words: list[str], option: str) -> list[str]:
    return [words[k + 1] for k, word in enumerate(words) if word == option]


def test_each_pod_runs_the_agent_of_its_node(tmp_path, files):
    names, seeds = [], []
    for manifest in manifests(files):
        pods = templates(manifest)
        if not pods or manifest["kind"] == "Deployment":
            continue
        size = manifest["spec"].get("leaderWorkerTemplate", {}).get("size", 1)
        for k in range(size):
            words = run_script(
                tmp_path, pods[min(k, 1)] if len(pods) > 1 else pods[0], k if size > 1 else None
            )
            assert words[0] == "node" and after(words, "--allow") == ["peer-a", "peer-b"]
            names += after(words, "--name")
            if not after(words, "--join"):
                seeds += after(words, "--name")
            else:
                assert after(words, "--join") == ["/ip4/10.9.8.7/tcp/4001/p2p/peer-a"]
            assert after(words, "--address") == ["10.0.0.5"]
    assert sorted(names) == sorted(NODES) and len(seeds) == 1


def test_the_front_end_launches_the_placement_over_the_nodes(tmp_path, files):
    front = next(m for m in manifests(files) if m["kind"] == "Deployment")
    words = run_script(tmp_path, templates(front)[0], None)
    assert words[0] == "launch" and after(words, "--launcher") == ["p2p"]
    assert after(words, "--model-path") == ["/models/llama-2-7b"]


def test_a_group_of_more_than_two_kinds_of_nodes_is_stateful_sets():
    shapes = {"colocated-0": [("a/0", 10), ("b/0", 10), ("c/0", 12)]}
    found = manifests(exported(by_hand({"a": "H100:1", "b": "A100-80GB:1", "c": "L40:1"}, shapes)))
    assert [m["kind"] for m in found].count("StatefulSet") == 3
    assert "LeaderWorkerSet" not in [m["kind"] for m in found]


def test_one_unlike_node_leads_those_that_are_alike():
    shapes = {"colocated-0": [("a/0", 10), ("b/0", 10), ("c/0", 12)]}
    found = manifests(exported(by_hand({"a": "L40:1", "b": "H100:1", "c": "L40:1"}, shapes)))
    group = next(m for m in found if m["kind"] == "LeaderWorkerSet")
    jsonschema.validate(group, SCHEMA)
    cards = [t["spec"]["nodeSelector"]["hexgen2/accelerator"] for t in templates(group)]
    assert cards == ["H100", "L40"]


def test_options_and_devices_reach_the_pods():
    placement = by_hand({"box": "Core:3"}, {"colocated-0": [("box/2", 32)]})
    files = exported(placement, model="/data/m", image="registry/x:1", accelerator_label="gpu/kind")
    node = next(m for m in manifests(files) if m["kind"] == "StatefulSet")
    spec = templates(node)[0]["spec"]
    assert spec["nodeSelector"] == {"gpu/kind": "Core"} and spec["containers"][0]["image"] == "registry/x:1"
    assert spec["containers"][0]["resources"] == {"requests": {"cpu": "3", "memory": "6Gi"}}
    assert "gpu/kind" in files["README.md"] and "/data/m" in files["README.md"]


def test_a_placement_too_large_for_a_config_map_is_refused():
    placement = by_hand({"a": "H100:1"}, {"colocated-0": [("a/0", 32)]})
    large = placement.model_copy(update={"bottlenecks": ["x" * 1_100_000]})
    with pytest.raises(InputError, match="ConfigMap"):
        exported(large)
