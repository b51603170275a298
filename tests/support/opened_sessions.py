"""Sessions that an agent outside opens and plays, over HTTP."""

from __future__ import annotations

ASK = {"model": "policy", "messages": [{"role": "user", "content": "left or right ?"}]}
TASK = {"id": "maze", "query": "left or right ?", "metadata": {"size": 4}}


def bearer(session):
    return {"Authorization": f"Bearer {session['key']}"}


async def opened(gateway, **body):
    answer = await gateway.http.post("/sessions", json=body)
    assert answer.status_code == 201, answer.text
    return answer.json()


async def asked(gateway, session, messages=ASK["messages"]):
    body = ASK | {"messages": messages}
    url = f"{session['base_url']}/chat/completions"
    answer = await gateway.http.post(url, json=body, headers=bearer(session))
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]
