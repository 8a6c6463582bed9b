"""Writes golden.json: forty talks, and the prompts that transformers makes of them.

    pip install transformers jinja2
    python make_golden.py

The templates are those of Qwen/Qwen2.5-7B-Instruct, Qwen/Qwen3-0.6B and
mistralai/Mistral-Nemo-Instruct-2407 on https://huggingface.co under Apache 2.0. Others, such as
Llama 3.1's with a licence of its own, are compared with what the program renders of them by

    python make_golden.py --program PATH/leasehold-serve TEMPLATE.jinja ...
"""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
import tempfile

from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

HERE = pathlib.Path(__file__).parent
TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": {"__type": "AddedToken", "content": "<pad>"}}


def tool(name: str, about: str, required: list[str], **properties: object) -> dict:
    parameters = {"type": "object", "properties": properties, "required": required}
    function = {"name": name, "description": about, "parameters": parameters}
    return {"type": "function", "function": function}


WEATHER = tool("get_weather", "Weather of a city, in °C & \"words\".", ["city"],
               city={"type": "string", "description": "The city's <name>"},
               unit={"enum": ["C", "F"], "type": "string"})  # fmt: skip
ADD = tool("add", "Adds two numbers", ["b", "a"], b={"type": "number", "default": 1e-7},
           a={"type": "number", "minimum": -1.5, "maximum": 1e16})  # fmt: skip
PLAIN = tool("now", "The time", [])


def says(role: str, content: object, **more: object) -> dict:
    return {"role": role, "content": content, **more}


def calls(*named: tuple[str, dict], content: str | None = "", **more: object) -> dict:
    all_calls = [
        {"id": f"call{at}{len(name):04}", "type": "function",
         "function": {"name": name, "arguments": arguments}}
        for at, (name, arguments) in enumerate(named)
    ]  # fmt: skip
    return says("assistant", content, tool_calls=all_calls, **more)


def answers(content: str, at: int = 0, name: str = "add") -> dict:
    return says("tool", content, tool_call_id=f"call{at}{len(name):04}", name=name)


def talks() -> list[dict]:
    """Messages, and tools, of each talk."""
    system = says("system", "Be brief. Don't guess <ids> & \"quotes\".")
    hello, bye = says("user", "Hello"), says("user", "Bye!\n\n  Two lines, äöü 你好 🙂")
    hi = says("assistant", "Hi.\n")
    think = "<think>\nThey greet.\n</think>\n\nHello there"
    plain = [
        [hello],
        [system, hello],
        [hello, hi, bye],
        [system, hello, hi, bye],
        [hello, says("assistant", think), bye],
        [system, hello, says("assistant", think), bye, hi, hello],
        [hello, says("assistant", "Fine", reasoning_content="\nHow am I?\n"), bye],
        [hello, says("assistant", "Fine", reasoning="Older name"), bye],
        [says("user", "  spaces around  "), says("assistant", "  too\n\n"), says("user", "\tx\n")],
        [says("user", "")],
        [says("user", "{{ messages }} {% raw %} <|im_end|> [INST] </s>")],
        [says("system", ""), hello],
        [hello, hi],
        [hello, says("assistant", "Hi", prefix=None, name=None), bye],
        [says("user", "Is 3 < 4 & 5 > 2? Don't say 'no'.", name="Ann")],
        [hello, hi] * 3 + [bye],
    ]
    add = ("add", {"b": 2, "a": 1.5})
    weather = ("get_weather", {"city": "São Paulo", "unit": None})
    odd = ("add", {"b": 1e22, "a": -0.0, "more": [True, {"z": [], "a": {}}], "é": "</s>'\""})
    used = [
        [says("user", "1.5 + 2?"), calls(add), answers("3.5")],
        [system, says("user", "1.5 + 2?"), calls(add), answers("3.5"), says("assistant", "3.5"), bye],
        [hello, calls(weather, content=None), answers('{"temp": 3.0}', name="get_weather")],
        [hello, calls(add, weather), answers("3.5"), answers("rain", 1, "get_weather")],
        [hello, calls(odd), answers("{\"result\": [1, 2]}"), says("assistant", "Done"), bye],
        [hello, calls(add, content="I add"), answers("3.5")],
        [hello, calls(add), answers("3.5"), calls(add), answers("4")],
        [hello, calls(add, reasoning_content="Add them"), answers("3.5")],
    ]
    made = [{"messages": messages} for messages in plain]
    sets = [[WEATHER], [ADD, WEATHER], [PLAIN, ADD, WEATHER]]
    made += [{"messages": m, "tools": sets[at % 3]} for at, m in enumerate(used)]
    made += [{"messages": m, "tools": sets[at % 3]} for at, m in enumerate(plain[:8])]
    made += [{"messages": m} for m in used[:4]]
    made += [
        {"messages": plain[3], "enable_thinking": False},
        {"messages": used[1], "tools": sets[1], "enable_thinking": False},
        {"messages": plain[0], "documents": [{"title": "A river", "text": "It's <long>"}]},
        {"messages": plain[2], "tools": []},
    ]
    assert len(made) == 40, len(made)
    return made


def renderer(source: str):
    """transformers, with a tokenizer of one word."""
    folder = tempfile.mkdtemp()
    Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "<pad>": 2}, "<s>")).save(f"{folder}/tokenizer.json")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **TOKENS}
    pathlib.Path(folder, "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.chat_template = source

    def render(talk: dict) -> str | None:
        """The prompt, or nothing where the template refuses the talk."""
        more = {**talk, "tools": talk.get("tools") or None}
        try:
            return tokenizer.apply_chat_template(
                more.pop("messages"), tokenize=False, add_generation_prompt=True, **more
            )
        except Exception as why:
            print(f"  refused: {type(why).__name__}: {why}"[:150], file=sys.stderr)
            return None

    return render


def compare(program: str, paths: list[str]) -> None:
    wrong = 0
    tokens = {name: token if isinstance(token, str) else token["content"] for name, token in TOKENS.items()}
    for path in paths:
        source = pathlib.Path(path).read_text()
        render = renderer(source)
        for at, talk in enumerate(talks()):
            task = json.dumps({"source": source, "values": {**tokens, **talk}})
            done = subprocess.run([program, "--render-chat"], input=task.encode(), capture_output=True)
            found = done.stdout.decode() if done.returncode == 0 else None
            wanted = render(talk)
            if found != wanted:
                wrong += 1
                print(f"{path} {at}: {wanted!r}\n  found {found!r}\n  {done.stderr.decode()}")
    sys.exit(wrong)


def main() -> None:
    if sys.argv[1:2] == ["--program"]:
        compare(sys.argv[2], sys.argv[3:])
    texts = {}
    for path in sorted(HERE.glob("*.jinja")):
        print(path.name, file=sys.stderr)
        render = renderer(path.read_text())
        texts[path.stem] = [render(talk) for talk in talks()]
    golden = {"tokens": TOKENS, "talks": talks(), "texts": texts}
    text = json.dumps(golden, ensure_ascii=False, indent=0)
    (HERE / "golden.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
