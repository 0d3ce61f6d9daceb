"""Locust users with streamed chats. Time to first token and time between tokens are separate Locust requests.

    MODEL=smollm2 locust -f loadtest/recipes/locustfile.py --host http://127.0.0.1:8000 --headless -u 8 -r 4 -t 60s

API_KEY, OUTPUT_TOKENS (default 64) and THINK_S (default 1) may be set too.
"""

import json
import os
import random
import time
from typing import Any

from locust import HttpUser, between, task

SUBJECTS = ("lighthouses", "bread", "glaciers", "chess", "bees", "bridges", "tea", "comets")


class Chatter(HttpUser):
    """A user that sends a prompt, reads the whole answer and waits the think time."""

    wait_time = between(0.0, 2 * float(os.environ.get("THINK_S", "1")))

    @task
    def chat(self) -> None:
        """Requests one streamed answer."""
        body: dict[str, Any] = {
            "model": os.environ.get("MODEL", "smollm2"),
            "messages": [{"role": "user", "content": f"Tell me about {random.choice(SUBJECTS)}."}],
            "max_tokens": int(os.environ.get("OUTPUT_TOKENS", "64")),
            "stream": True,
            "ignore_eos": True,
        }
        headers = {"authorization": f"Bearer {os.environ['API_KEY']}"} if "API_KEY" in os.environ else {}
        begin = last = time.perf_counter()
        path, tokens, finished = "/v1/chat/completions", 0, False
        with self.client.post(path, json=body, headers=headers, stream=True, catch_response=True) as response:
            if response.status_code != 200:
                response.failure(f"{response.status_code}: {response.text[:200]}")
                return
            for line in response.iter_lines():
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    response.failure(event["error"]["message"])
                    return
                for choice in event["choices"]:
                    finished = finished or choice["finish_reason"] is not None
                    if choice["delta"].get("content"):
                        now = time.perf_counter()
                        self._fire("first token" if not tokens else "between tokens", now - (last if tokens else begin))
                        tokens, last = tokens + 1, now
            if not finished:
                response.failure("the stream ended without a finish reason")

    def _fire(self, name: str, seconds: float) -> None:
        self.environment.events.request.fire(
            request_type="SSE", name=name, response_time=1e3 * seconds, response_length=0, exception=None, context={}
        )
