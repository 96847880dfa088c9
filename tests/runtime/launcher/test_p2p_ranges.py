"""Ranges of layers on two nodes of a network: activations go from one node's worker to the other's."""

import httpx
from p2p_fleet import Head, Node
from range_fleet import ranges_placement
from served import SECONDS, until_idle


def test_requests_pass_both_nodes(model_folder, reference, tmp_path):
    ranges = {"left": (0, 3), "right": (2, 4)}
    placement = ranges_placement(model_folder, ranges, {("left", "right"): 1.0}, partial=True)
    placement.save(tmp_path / "placement.json")
    processes = [Node("left", tmp_path, model_folder, [])]
    try:
        processes.append(Node("right", tmp_path, model_folder, [processes[0]]))
        head = Head(tmp_path, tmp_path / "placement.json", model_folder, processes[0])
        processes.append(head)
        head.until_serving()
        body = {"model": "tiny", "prompt": "the quick", "max_tokens": 24, "temperature": 0}
        with httpx.Client(base_url=head.url, timeout=SECONDS) as http:
            answer = http.post("/v1/completions", json=body | {"ignore_eos": True})
            assert answer.json()["choices"][0]["text"] == reference.text("the quick")
            assert answer.headers["x-hexgen2-path"] == "left>right"
            until_idle(http)
    finally:
        for process in reversed(processes):
            process.close()
