"""Valid API requests, and the expected shape of each error."""

from __future__ import annotations

from served import MODEL

JSON = {"Content-Type": "application/json"}
MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "which route?"}]
COMPLETION = {"model": MODEL, "prompt": "the", "max_tokens": 4}
CHAT = {"model": MODEL, "messages": MESSAGES, "max_tokens": 4}


def check_error(response, status, code):
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"] and error["code"] == code
