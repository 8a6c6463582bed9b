"""The server, seen by OpenAI's client: texts, streams, chats, errors, clients that go, sleep, its end.

    python test_openai.py SERVER MODEL

SERVER is the program, MODEL the directory of the bundled model.
"""

from __future__ import annotations

import http.client
import json
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import unittest

import openai

SERVER, MODEL = sys.argv[1], pathlib.Path(sys.argv[2])
PROMPT = "def read_lines(path):\n    "


class Server:
    """A server on a port of the system's choice."""

    def __init__(self, *arguments: str) -> None:
        command = [SERVER, "--listen", "127.0.0.1:0", *arguments]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        line = self.process.stdout.readline()
        assert line.startswith("listening on "), line
        self.host, port = line.split()[-1].rsplit(":", 1)
        self.port = int(port)
        base = f"http://{self.host}:{self.port}/v1"
        self.client = openai.OpenAI(base_url=base, api_key="none", max_retries=0, timeout=50)

    def connect(self) -> socket.socket:
        return socket.create_connection((self.host, self.port), timeout=30)

    def send(self, data: bytes) -> tuple[int, dict]:
        """Sends bytes, and reads an answer."""
        with self.connect() as connection:
            connection.sendall(data)
            answer = http.client.HTTPResponse(connection)
            answer.begin()
            return answer.status, json.loads(answer.read() or b"{}")

    def post(self, body: object, path: str = "/v1/completions") -> tuple[int, dict]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: test\r\nContent-Length: {len(data)}\r\n\r\n"
        return self.send(head.encode() + data)

    def health(self) -> dict:
        status, body = self.send(b"GET /health HTTP/1.1\r\nHost: test\r\n\r\n")
        assert status == 200, body
        return body

    def wait(self, key: str, wanted: int) -> None:
        """Waits until the engine's status has this number."""
        end = time.monotonic() + 20
        while self.health()[key] != wanted:
            assert time.monotonic() < end, self.health()
            time.sleep(0.01)

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(timeout=30)
        self.process.stdout.close()
        return code


class Test(unittest.TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        # A directory with another chat template.
        cls.dir = tempfile.TemporaryDirectory()
        model = pathlib.Path(cls.dir.name, "chatty")
        model.mkdir()
        for name in ("config.json", "tokenizer.json", "model.safetensors"):
            shutil.copy(MODEL / name, model)
        template = "{% for m in messages %}{% if m.role == 'loop' %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}{% endif %}{{ m.content.strip() }}\n{% endfor %}"
        (model / "chat_template.jinja").write_text(template)
        cls.server = Server("--model", str(model), "--slots", "2")
        cls.client = cls.server.client

    @classmethod
    def tearDownClass(cls) -> None:
        code = cls.server.end()
        cls.dir.cleanup()
        assert code == 0, code

    def complete(self, **more: object):
        asked = {"model": "chatty", "prompt": PROMPT, "max_tokens": 24, "temperature": 0, **more}
        return self.client.completions.create(**asked)

    def test_several_texts_with_log_probabilities(self) -> None:
        answer = self.complete(prompt=[PROMPT, "import os"], logprobs=2, max_tokens=4)
        self.assertEqual([choice.index for choice in answer.choices], [0, 1])
        for choice in answer.choices:
            self.assertEqual("".join(choice.logprobs.tokens), choice.text)
        asked = {"model": "chatty", "messages": [{"role": "user", "content": PROMPT}]}
        answer = self.client.chat.completions.create(
            n=2, temperature=1, seed=1, max_tokens=4, logprobs=True, top_logprobs=2, **asked
        )
        self.assertEqual([len(choice.logprobs.content) for choice in answer.choices], [4, 4])

    def test_models(self) -> None:
        self.assertEqual([model.id for model in self.client.models.list()], ["chatty"])
        self.assertEqual(self.client.models.retrieve("chatty").id, "chatty")

    def test_a_stream_is_the_whole_text(self) -> None:
        whole = self.complete()
        self.assertEqual(whole.choices[0].finish_reason, "length")
        self.assertEqual(whole.usage.completion_tokens, 24)
        pieces = list(self.complete(stream=True, stream_options={"include_usage": True}))
        self.assertEqual(pieces.pop().usage, whole.usage)
        self.assertEqual("".join(p.choices[0].text for p in pieces), whole.choices[0].text)
        self.assertEqual(pieces[-1].choices[0].finish_reason, "length")
        self.assertGreater(len(pieces), 2)

    def test_a_seed_gives_the_same_text(self) -> None:
        one, same, other = (
            self.complete(temperature=1, seed=seed).choices[0].text for seed in (1, 1, 2)
        )
        self.assertEqual(one, same)
        self.assertNotEqual(one, other)
        # So small a part leaves the largest logit alone.
        greedy = self.complete().choices[0].text
        self.assertEqual(self.complete(temperature=1, seed=1, top_p=1e-6).choices[0].text, greedy)

    def test_stop_strings(self) -> None:
        text = self.complete().choices[0].text
        stop = text[5:9]
        for stream in (False, True):
            answer = self.complete(stop=[stop, "never in it"], stream=stream)
            choices = [p.choices[0] for p in answer] if stream else answer.choices
            self.assertEqual("".join(c.text for c in choices), text[: text.index(stop)])
            self.assertEqual(choices[-1].finish_reason, "stop")

    def test_chat(self) -> None:
        messages = [{"role": "user", "content": "  " + PROMPT}]
        asked = {"model": "chatty", "messages": messages, "max_tokens": 8, "temperature": 0}
        text = self.client.chat.completions.create(**asked).choices[0].message.content
        prompt = PROMPT.strip() + "\n"
        self.assertEqual(text, self.complete(prompt=prompt, max_tokens=8).choices[0].text)
        pieces = list(self.client.chat.completions.create(stream=True, **asked))
        self.assertEqual(pieces[0].choices[0].delta.role, "assistant")
        self.assertEqual("".join(p.choices[0].delta.content for p in pieces), text)

    def test_errors_have_openais_shape(self) -> None:
        for status, words, body in (
            (400, "line 1 column", b"{broken"),
            (400, "tool_choice", {"prompt": "a", "tools": [{"type": "function"}]}),
            (400, "maximum", {"prompt": "a", "maximum": 1}),
            (400, "invalid type", {"prompt": "a", "max_tokens": "many"}),
            (400, "nonzero", {"prompt": "a", "max_tokens": 0}),
            (400, "give a prompt", {}),
            (400, "give a prompt", {"messages": []}),
            (400, "vocabulary", {"prompt": [99999]}),
            (400, "is empty", {"prompt": []}),
            (400, "context length is 1024", {"prompt": "a " * 5000}),
            (400, "temperature", {"prompt": "a", "temperature": -1}),
            (400, "top_p", {"prompt": "a", "top_p": 0}),
            (400, "stop string is empty", {"prompt": "a", "stop": [""]}),
            (400, "4 stop strings", {"prompt": "a", "stop": list("abcde")}),
            (404, "the only model is chatty", {"prompt": "a", "model": "another"}),
            (413, "length limit", b'{"prompt": "' + b"a" * (1 << 20) + b'"}'),
        ):
            for stream in (False, True):
                if isinstance(body, dict):
                    body["stream"] = stream
                found, answer = self.server.post(body)
                self.assertEqual(found, status, answer)
                self.assertEqual(answer["error"]["type"], "invalid_request_error")
                self.assertIn(words, answer["error"]["message"])
        for path in ("/v1/nothing", "/v1/models"):
            self.assertEqual(self.server.post({}, path)[0], 404)
        for content, role, words in ((None, "user", "undefined"), ("a", "loop", "fuel")):
            body = {"messages": [{"role": role, "content": content}]}
            found, answer = self.server.post(body, "/v1/chat/completions")
            self.assertEqual(found, 400, answer)
            self.assertIn("the chat template", answer["error"]["message"])
            self.assertIn(words, answer["error"]["message"])
        with self.assertRaises(openai.BadRequestError) as caught:
            self.complete(prompt="a " * 5000)
        self.assertEqual(caught.exception.code, "context_length_exceeded")
        with self.assertRaises(openai.NotFoundError):
            self.client.models.retrieve("another")
        self.assertEqual(self.complete(max_tokens=2).usage.completion_tokens, 2)

    def test_a_text_ends_where_the_positions_do(self) -> None:
        prompt = [221] * 1020
        answer = self.complete(prompt=prompt, max_tokens=None)
        self.assertEqual(answer.choices[0].finish_reason, "length")
        self.assertEqual(answer.usage.completion_tokens, 5)

    def test_what_does_not_end_is_ended(self) -> None:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: test\r\nTransfer-Encoding: chunked\r\n\r\n"
        with self.server.connect() as connection:
            connection.sendall(head)
            with self.assertRaises(OSError):
                while True:
                    connection.sendall(b"10000\r\n" + b"a" * 0x10000 + b"\r\n")
        many = b"GET /health HTTP/1.1\r\n" + b"".join(b"x-%d: 1\r\n" % n for n in range(200)) + b"\r\n"
        long = b"GET /health HTTP/1.1\r\nx: " + b"a" * (1 << 18) + b"\r\n\r\n"
        for data in (many, long):
            try:
                self.assertEqual(self.server.send(data)[0], 431)
            except ConnectionError:
                pass  # The connection ended while the rest was sent.
        self.server.health()

    def test_a_client_that_goes_frees_its_slot(self) -> None:
        for stream in (False, True):
            body = json.dumps({"prompt": PROMPT, "max_tokens": 990, "stream": stream}).encode()
            head = f"POST /v1/completions HTTP/1.1\r\nHost: test\r\nContent-Length: {len(body)}\r\n\r\n"
            connection = self.server.connect()
            connection.sendall(head.encode() + body)
            self.server.wait("running", 1)
            begin = time.monotonic()
            connection.close()
            self.server.wait("running", 0)
            # The text would take longer than ten of its tokens.
            self.assertLess(time.monotonic() - begin, 2)

    def test_weights_sleep_and_wake(self) -> None:
        text = self.complete().choices[0].text
        status, before = self.server.post({}, "/wake")
        self.assertEqual(status, 200)
        self.assertGreater(before["weight_bytes"], 0)
        for wake in (True, False):
            self.assertEqual(self.server.post({}, "/sleep"), (200, {"running": 0, "weight_bytes": 0}))
            # Once more changes nothing.
            self.assertEqual(self.server.post({}, "/sleep")[0], 200)
            if wake:
                self.assertEqual(self.server.post({}, "/wake"), (200, before))
            self.assertEqual(self.complete().choices[0].text, text)
            self.assertEqual(self.server.health()["weight_bytes"], before["weight_bytes"])
        stream = self.complete(max_tokens=900, stream=True)
        next(iter(stream))
        status, answer = self.server.post({}, "/sleep")
        self.assertEqual(status, 409, answer)
        stream.close()

    def test_a_full_queue_refuses(self) -> None:
        # Two slots, and two requests that wait.
        results: list[object] = []

        def ask() -> None:
            try:
                self.complete(max_tokens=200)
                results.append("done")
            except openai.InternalServerError as why:
                full = "queue is full" in str(why) and why.response.headers["retry-after"] == "1"
                results.append((why.status_code, full))

        threads = [threading.Thread(target=ask) for _ in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=50)
        self.assertEqual(set(results), {"done", (503, True)})
        self.assertGreaterEqual(results.count("done"), 4)
        self.server.wait("running", 0)

    def test_idle_weights_leave_and_sigterm_lets_a_text_end(self) -> None:
        # After a second without a request, the weights leave the device.
        server = Server("--idle", "1")
        self.addCleanup(server.process.kill)
        server.wait("weight_bytes", 0)
        stream = server.client.completions.create(
            model="demo-model", prompt=PROMPT, max_tokens=100, temperature=0, stream=True
        )
        first = next(iter(stream))
        server.process.send_signal(signal.SIGTERM)
        rest = list(stream)
        self.assertIn(rest[-1].choices[0].finish_reason, ("length", "stop"))
        self.assertTrue(first.choices[0].text)
        self.assertEqual(server.end(), 0)
        with self.assertRaises(ConnectionRefusedError):
            server.connect()


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
