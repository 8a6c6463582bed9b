"""Models, texts and operators: on the CPU, with the model of `models/llama/demo-model`."""

from __future__ import annotations

import array
import json
import math
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest
from typing import Any

import leasehold
from leasehold import ops

TINY = pathlib.Path(__file__).parents[3] / "models/llama/demo-model"
PROMPT = "def read_lines(path):\n    "


@unittest.skipUnless(TINY.exists(), "the project's own model is not there")
class Texts(unittest.TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        cls.model = leasehold.Model(TINY)

    def test_the_tokens_are_those_of_transformers(self) -> None:
        golden = json.loads((TINY / "golden.json").read_text())
        checked = 0
        for case in golden["cases"]:
            prompt = self.model.decode(case["prompt_ids"])
            if self.model.encode(prompt) != case["prompt_ids"]:
                continue
            want = self.model.decode(case["prompt_ids"] + case["greedy_48"])
            tokens = len(case["greedy_48"])
            got = leasehold.generate(self.model, prompt, tokens=tokens, stop_at_eos=False)
            self.assertEqual(prompt + got, want)
            checked += 1
        self.assertGreater(checked, 0)

    def test_a_batch_is_what_each_prompt_gives_alone(self) -> None:
        prompts = [PROMPT, "import os\n", "class A:\n", "for i in", "x = ["]
        alone = [leasehold.generate(self.model, prompt, tokens=12) for prompt in prompts]
        self.assertTrue(all(isinstance(text, str) and text for text in alone))
        for batch in (None, 1, 2, 5):
            self.assertEqual(
                leasehold.generate(self.model, prompts, tokens=12, batch=batch), alone
            )
        self.assertEqual(leasehold.generate(self.model, [], tokens=12), [])
        self.assertEqual(leasehold.generate(str(TINY), PROMPT, tokens=12), alone[0])

    def test_pieces_come_one_by_one(self) -> None:
        want = leasehold.generate(self.model, PROMPT, tokens=20)
        pieces = leasehold.stream_text(self.model, PROMPT, tokens=20)
        first = next(pieces)
        self.assertTrue(want.startswith(first) and first != want)
        self.assertEqual(first + "".join(pieces), want)
        several = list(leasehold.stream_text(self.model, [PROMPT, "import os\n"], tokens=20))
        self.assertEqual("".join(text for at, text in several if at == 0), want)
        self.assertEqual({at for at, _ in several}, {0, 1})
        # An iterator that is dropped in the middle.
        pieces = leasehold.stream_text(self.model, PROMPT, tokens=200)
        next(pieces)
        del pieces

    def test_sampling(self) -> None:
        how: dict[str, Any] = dict(tokens=16, temperature=0.8, top_k=50, top_p=0.95, min_p=0.01)
        one = leasehold.generate(self.model, PROMPT, seed=1, **how)
        self.assertEqual(leasehold.generate(self.model, PROMPT, seed=1, **how), one)
        others = {leasehold.generate(self.model, PROMPT, seed=seed, **how) for seed in range(2, 6)}
        self.assertNotEqual(others, {one})

    def test_one_prompt_several_times_gives_several_texts(self) -> None:
        how: dict[str, Any] = dict(tokens=16, temperature=1.0, seed=7)
        several = leasehold.generate(self.model, [PROMPT] * 4, **how)
        self.assertEqual(len(set(several)), 4)
        self.assertEqual(several[0], leasehold.generate(self.model, PROMPT, **how))
        self.assertEqual(leasehold.generate(self.model, [PROMPT] * 4, batch=2, **how), several)
        self.assertEqual(len(set(leasehold.generate(self.model, [PROMPT] * 4, tokens=16))), 1)

    def test_defaults_have_rules_that_keep_tokens_back(self) -> None:
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name, "model")
            shutil.copytree(TINY, folder)

            def text(prompts: Any, **settings: Any) -> Any:
                (folder / "generation_config.json").write_text(json.dumps(settings))
                return leasehold.generate(folder, prompts, tokens=12, defaults=True)

            plain = text(PROMPT)
            self.assertEqual(plain, leasehold.generate(self.model, PROMPT, tokens=12))
            first = self.model.encode(PROMPT + plain)[len(self.model.encode(PROMPT))]
            for key in ("suppress_tokens", "begin_suppress_tokens"):
                other = text(PROMPT, **{key: [first]})
                self.assertNotEqual(other[:4], plain[:4])
                self.assertEqual(text([PROMPT, "import"], **{key: [first]})[0], other)
            penalised = text(PROMPT, repetition_penalty=1000.0)
            self.assertNotEqual(penalised, plain)
            for key, value in (("bad_words_ids", [[1]]), ("num_beams", 4), ("new_setting", 1)):
                with self.assertRaisesRegex(leasehold.UnsupportedError, key):
                    text(PROMPT, **{key: value})

    def test_stop_texts(self) -> None:
        whole = leasehold.generate(self.model, PROMPT, tokens=40)
        stop = whole[10:14]
        got = leasehold.generate(self.model, PROMPT, tokens=40, stop=stop)
        self.assertEqual(got, whole[: whole.index(stop)])
        self.assertEqual(leasehold.generate(self.model, PROMPT, tokens=40, stop=[stop, "§"]), got)

    def test_in_bfloat16(self) -> None:
        model = leasehold.Model(TINY, device="cpu:0", dtype="bfloat16")
        self.assertTrue(leasehold.generate(model, PROMPT, tokens=4))
        self.assertEqual((model.device.name, model.context), ("cpu:0", self.model.context))

    def test_what_is_refused(self) -> None:
        long = "import os\n" * 2000
        refused = leasehold.InvalidArgumentError
        for error, text, call in [
            (refused, "prompt 1: .*context", lambda: leasehold.generate(self.model, ["a", long])),
            (refused, "prompt 0: .*empty", lambda: leasehold.generate(self.model, "")),
            (refused, "prompt 0: .*context", lambda: leasehold.generate(self.model, "a", tokens=10**6)),
            (refused, "at least one", lambda: leasehold.generate(self.model, "a", tokens=0)),
            (refused, "tokens", lambda: leasehold.generate(self.model, "a", tokens="many")),  # type: ignore[call-overload]
            (refused, "batch", lambda: leasehold.generate(self.model, "a", batch=0)),
            (refused, "temperature", lambda: leasehold.generate(self.model, "a", temperature=-1.0)),
            (refused, "top_p", lambda: leasehold.generate(self.model, "a", top_p=2.0)),
            (refused, "stop string", lambda: leasehold.generate(self.model, "a", stop="")),
            (refused, "generation_config", lambda: leasehold.generate(self.model, "a", defaults=True)),
            (refused, "list of texts", lambda: leasehold.generate(self.model, [1])),  # type: ignore[list-item]
            (refused, "list of texts", lambda: leasehold.generate(self.model, ["a"], stop=5)),  # type: ignore[call-overload]
            (refused, "not a text", lambda: self.model.decode("12")),  # type: ignore[arg-type]
            (refused, "float32 or bfloat16", lambda: leasehold.Model(TINY, dtype="float16")),
            (refused, "path", lambda: leasehold.Model(5)),  # type: ignore[arg-type]
            (leasehold.UnavailableError, "config.json", lambda: leasehold.generate("no-such-model", "a")),
            (refused, "list of texts", lambda: leasehold.generate(self.model, ["a"], stop=5)),  # type: ignore[call-overload]
            (refused, "not a text", lambda: self.model.decode("12")),  # type: ignore[arg-type]
            (leasehold.UnavailableError, "nothing is downloaded: 'hf download meta-llama/x", lambda: leasehold.Model("meta-llama/x")),
            (TypeError, "no option", lambda: leasehold.stream_text(self.model, "a", token=1)),
            # At once, not with the first piece.
            (refused, "top_p", lambda: leasehold.stream_text(self.model, "a", top_p=2.0)),
        ]:
            with self.subTest(text), self.assertRaisesRegex(error, text):
                call()

    def test_a_length_that_lies(self) -> None:
        class Lies(list):  # type: ignore[type-arg]
            def __len__(self) -> int:
                return 1 << 60

        ids = self.model.encode(PROMPT)
        self.assertEqual(self.model.decode(Lies(ids)), PROMPT)
        self.assertEqual(self.model.decode(iter(ids)), PROMPT)  # type: ignore[arg-type]
        want = leasehold.generate(self.model, [PROMPT], tokens=4)
        self.assertEqual(leasehold.generate(self.model, Lies([PROMPT]), tokens=4), want)
        self.assertEqual(leasehold.generate(self.model, [PROMPT], tokens=4, stop=Lies(["§"])), want)
        with self.assertRaisesRegex(leasehold.InvalidArgumentError, "more than .* tokens"):
            self.model.decode(range(1 << 40))

    def test_directories_that_are_no_models(self) -> None:
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name, "model")
            shutil.copytree(TINY, folder)
            (folder / "tokenizer.json").unlink()
            with self.assertRaisesRegex(leasehold.UnavailableError, "tokenizer.json"):
                leasehold.Model(folder)
            shutil.copy(TINY / "tokenizer.json", folder)
            config = json.loads((TINY / "config.json").read_text())
            (folder / "config.json").write_text(json.dumps({**config, "model_type": "mamba"}))
            with self.assertRaisesRegex(leasehold.Error, "mamba"):
                leasehold.Model(folder)
            (folder / "config.json").write_text(json.dumps(config))
            weights = (folder / "model.safetensors").read_bytes()
            (folder / "model.safetensors").write_bytes(weights[:-1000])
            with self.assertRaisesRegex(leasehold.InvalidArgumentError, "model.safetensors"):
                leasehold.Model(folder)
            pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:4f\nsize 4976698672\n"
            (folder / "model.safetensors").write_bytes(pointer)
            with self.assertRaisesRegex(leasehold.InvalidArgumentError, "Git LFS"):
                leasehold.Model(folder)
            # No weights are read before their header is checked: this is more than a host has.
            with open(folder / "model.safetensors", "wb") as file:
                file.truncate(1 << 43)
            with self.assertRaisesRegex(leasehold.InvalidArgumentError, "empty where it should begin"):
                leasehold.Model(folder)
            (folder / "model.safetensors").write_bytes(weights)
            model = leasehold.Model(folder)
            want = leasehold.generate(model, PROMPT, tokens=8)
            # The files were read: what happens to them now is nothing to the model.
            with open(folder / "model.safetensors", "r+b") as file:
                file.truncate(100)
            self.assertEqual(leasehold.generate(model, PROMPT, tokens=8), want)

    def test_the_example(self) -> None:
        program = pathlib.Path(__file__).parents[3] / "examples/python/generate.py"
        done = subprocess.run(
            [sys.executable, program, TINY], capture_output=True, text=True, timeout=120
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn(leasehold.generate(self.model, PROMPT, tokens=12), done.stdout)


class Operators(unittest.TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        cls.device = leasehold.Device("cpu:0")

    def setUp(self) -> None:
        self.stream = leasehold.Stream(self.device)

    def matrix(self, rows: list[list[float]]) -> leasehold.Buffer:
        flat = array.array("f", [x for row in rows for x in row])
        return self.device.upload(flat).view(shape=(len(rows), len(rows[0])))

    def rows(self, buffer: leasehold.Buffer) -> list[list[float]]:
        values = list(memoryview(buffer.tobytes()).cast("f"))
        columns = buffer.shape[-1]
        return [values[i : i + columns] for i in range(0, len(values), columns)]

    def close(self, got: leasehold.Buffer, want: list[list[float]]) -> None:
        for a, b in zip(self.rows(got), want):
            self.assertEqual(len(a), len(b))
            for x, y in zip(a, b):
                self.assertAlmostEqual(x, y, places=4)
        self.assertEqual(got.shape, (len(want), len(want[0])))

    def test_each_operator(self) -> None:
        s, a = self.stream, [[1.0, -2.0, 3.0], [0.5, 0.0, -1.0]]
        b = [[2.0, 2.0, 0.5], [1.0, -1.0, 4.0]]
        x, y = self.matrix(a), self.matrix(b)
        pairs = lambda f: [[f(p, q) for p, q in zip(*rows)] for rows in zip(a, b)]
        silu = lambda v: v / (1 + math.exp(-v))
        self.close(ops.add(s, x, y), pairs(lambda p, q: p + q))
        self.close(ops.mul(s, x, y), pairs(lambda p, q: p * q))
        self.close(ops.silu_mul(s, x, y), pairs(lambda p, q: silu(p) * q))
        total = [sum(math.exp(v) for v in row) for row in a]
        self.close(ops.softmax(s, x), [[math.exp(v) / t for v in row] for row, t in zip(a, total)])
        places = ops.argmax(s, x)
        self.assertEqual((places.dtype, list(memoryview(places))), ("int32", [2, 0]))
        weight = [1.0, 2.0, 3.0]
        norm = lambda rows: [
            [v / math.sqrt(sum(w * w for w in row) / 3 + 1e-6) * g for v, g in zip(row, weight)]
            for row in rows
        ]
        gains = self.matrix([weight]).view(shape=3)
        self.close(ops.rms_norm(s, x, gains), norm(a))
        h = self.matrix(a)
        self.close(ops.add_rms_norm(s, h, y, gains), norm(pairs(lambda p, q: p + q)))
        self.close(h, pairs(lambda p, q: p + q))
        matrix = [[1.0, 0.0, 2.0], [0.0, 1.0, -1.0], [3.0, 3.0, 3.0], [0.0, 0.0, 1.0]]
        product = [[sum(p * q for p, q in zip(row, w)) for w in matrix] for row in a]
        w = self.matrix(matrix)
        got = ops.linear(s, x, w)
        self.close(got, product)
        bias = self.matrix([[1.0, 2.0, 3.0, 4.0]]).view(shape=4)
        with_bias = [[v + g for v, g in zip(row, (1, 2, 3, 4))] for row in product]
        self.close(ops.linear(s, x, w, bias), with_bias)
        self.assertIs(ops.linear_add(s, x, w, got), got)
        self.close(got, [[2 * v for v in row] for row in product])
        ids = self.device.upload(array.array("i", [3, 0]))
        self.close(ops.embedding(s, ids, w), [matrix[3], matrix[0]])
        half = ops.cast(s, x, self.device.empty((2, 3), "bfloat16"))
        self.close(ops.cast(s, half, self.device.empty((2, 3), "float32")), a)

    def test_operators_are_recorded(self) -> None:
        x, out = self.matrix([[1.0, 2.0]]), self.matrix([[0.0, 0.0]])
        with self.device.record() as recording:
            ops.add(recording, x, x, out=out)
            ops.mul(recording, out, x, out=out)
        self.close(out, [[0.0, 0.0]])
        x.fill(3.0)
        recording.graph.launch(self.stream)
        self.close(out, [[18.0, 18.0]])

    def test_what_is_refused(self) -> None:
        s, x = self.stream, self.matrix([[1.0, 2.0], [3.0, 4.0]])
        y, ids = self.matrix([[1.0, 2.0, 3.0]]), self.device.zeros(1, "int32")
        for call in (
            lambda: ops.add(s, x, y),
            lambda: ops.add(s, x, b"1234"),  # type: ignore[arg-type]
            lambda: ops.add("s", x, x),  # type: ignore[arg-type]
            lambda: ops.add(s, x, self.device.zeros((2, 2), "int64")),
            lambda: ops.add(s, x, self.device.zeros((2, 2), "int32")),
            lambda: ops.add(s, x, self.device.zeros((1, 2, 2), "float32")),
            lambda: ops.add(s, 5, x),  # type: ignore[arg-type]
            lambda: ops.linear(s, x, y),
            lambda: ops.linear(s, x, x.view(shape=4)),
            lambda: ops.embedding(s, ids, 5),  # type: ignore[arg-type]
            lambda: ops.rms_norm(s, x, y),
            lambda: ops.rms_norm(s, x, x.view(shape=2), eps="small"),  # type: ignore[arg-type]
            lambda: ops.embedding(s, x, x),
            lambda: ops.argmax(s, x, out=ids),
            lambda: ops.softmax(s, x, out=y),
        ):
            with self.assertRaises(leasehold.InvalidArgumentError):
                call()
        with self.assertRaisesRegex(TypeError, "Device.empty"):
            ops.cast(s, x, "float16")  # type: ignore[arg-type]
        self.close(ops.add(s, x, x), [[2.0, 4.0], [6.0, 8.0]])


if __name__ == "__main__":
    unittest.main()
