"""Compares the command's tokens and logits on a device with every golden model of `models/llama/tests/models`.

    goldens.py LEASEHOLD DEVICE [OPTION of run ...]

Each case runs launch by launch and as a graph. Tokens must be equal, and the logits after the prompt within 10⁻³ of the largest.
"""

import json
import os
import subprocess
import sys

MODELS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "models", "llama", "tests", "models")


def main():
    leasehold, device, options = sys.argv[1], sys.argv[2], sys.argv[3:]
    cases, failed = 0, 0
    for name in sorted(os.listdir(MODELS)):
        golden = os.path.join(MODELS, name, "golden.json")
        if not os.path.exists(golden):
            continue
        with open(golden) as file:
            golden = json.load(file)["cases"]
        for case in golden:
            for mode in ("eager", "graph"):
                ids = ",".join(map(str, case["prompt_ids"]))
                command = [leasehold, "run", "--model", os.path.join(MODELS, name), "--prompt-ids", ids, "--tokens", str(len(case["greedy_24"]))]
                command += ["--device", device, "--mode", mode, "--json", "--logits", *options]
                done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
                cases += 1
                if done.returncode != 0:
                    failed += 1
                    print(f"FAIL {name}, {len(case['prompt_ids'])} tokens, {mode}: {done.stderr.strip()[-300:]}")
                    continue
                result = json.loads(done.stdout)
                largest = max(map(abs, case["last_logits"]))
                error = max(abs(a - b) for a, b in zip(result["last_logits"], case["last_logits"], strict=True)) / largest
                if result["output_ids"] != case["greedy_24"] or error > 1e-3:
                    failed += 1
                    print(f"FAIL {name}, {len(case['prompt_ids'])} tokens, {mode}: logits {error:.1e}, {result['output_ids']}")
    print(f"{cases - failed} of {cases} cases are golden on {device} {' '.join(options)}")
    return failed


if __name__ == "__main__":
    sys.exit(main())
