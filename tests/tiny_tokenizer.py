"""A small byte-level BPE tokenizer folder, as Hugging Face writes them, to pair with a tiny random model."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as HuggingFaceTokenizer

TEMPLATES = Path(__file__).parent / "data" / "templates"
VOCAB_SIZE = 384

_QWEN_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_QWEN_PLAIN = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
_LLAMA_SPECIAL = [
    "<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|pad|>",
]  # fmt: skip
_MISTRAL_SPECIAL = [
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]",
    "[TOOL_RESULTS]", "[/TOOL_RESULTS]",
]  # fmt: skip

# template: (special tokens, added tokens that are ordinary text, bos, eos, pad, all end tokens)
_FAMILIES = {
    "chatml": (_QWEN_SPECIAL, _QWEN_PLAIN, None, "<|im_end|>", "<|endoftext|>", ["<|im_end|>", "<|endoftext|>"]),
    "qwen25": (_QWEN_SPECIAL, _QWEN_PLAIN, None, "<|im_end|>", "<|endoftext|>", ["<|im_end|>", "<|endoftext|>"]),
    "qwen3": (_QWEN_SPECIAL, _QWEN_PLAIN, None, "<|im_end|>", "<|endoftext|>", ["<|im_end|>", "<|endoftext|>"]),
    "llama3": (
        _LLAMA_SPECIAL, [], "<|begin_of_text|>", "<|eot_id|>", "<|pad|>", ["<|end_of_text|>", "<|eot_id|>"],
    ),
    "mistral": (_MISTRAL_SPECIAL, [], "<s>", "</s>", "<unk>", ["</s>"]),
}  # fmt: skip

_TEXT = [
    "The quick brown fox jumps over the lazy dog, and the dog does not mind at all.",
    "Please send three boxes of apples to the office in Berlin before Friday, and write the bill to me.",
    "What is the capital of France? The capital of France is Paris. You are a helpful assistant.",
    '{"name": "get_weather", "arguments": {"city": "Oslo", "unit": "celsius"}}',
    "def add(first, second):\n    return first + second\n\n\nprint(add(1, 22))\n",
    "Äpfel, über, naïve, 你好, 12,345.67 €, 😀 and other things that are not plain letters.",
    "system user assistant tool function answer question think about it, then answer step by step.",
]


def write_tiny_tokenizer(folder: str | Path, template: str = "chatml", vocab_size: int = VOCAB_SIZE) -> int:
    """Write tokenizer.json and the files around it into `folder` (created if missing).

    Args:
        folder: may already hold a model's config.json and weights.
        template: one of chatml, qwen25, qwen3, llama3, mistral: the chat template and its special tokens. llama3 and
            mistral put a begin token in front of plain text, the others do not.
        vocab_size: entries, special tokens included.

    Returns:
        The number of entries, always `vocab_size`.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    special, plain, bos, eos, pad, ends = _FAMILIES[template]
    tokenizer = _train(vocab_size - len(plain), special)
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in plain])
    if bos is not None:
        begin = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
        tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), begin])
    assert tokenizer.get_vocab_size() == vocab_size
    tokenizer.save(str(folder / "tokenizer.json"))

    names = {"bos_token": bos, "eos_token": eos, "pad_token": pad}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 131072,
        **names,
    }
    generation = {"eos_token_id": [tokenizer.token_to_id(token) for token in ends], "do_sample": False}
    _write(folder / "tokenizer_config.json", config)
    _write(folder / "special_tokens_map.json", {name: token for name, token in names.items() if token})
    _write(folder / "generation_config.json", generation)
    (folder / "chat_template.jinja").write_bytes((TEMPLATES / f"{template}.jinja").read_bytes())
    return vocab_size


def _train(vocab_size: int, special: list[str]) -> HuggingFaceTokenizer:
    tokenizer = HuggingFaceTokenizer(models.BPE())
    # Words, numbers of up to three digits, punctuation and newlines, and blanks apart: the split of Llama 3 and Qwen.
    pattern = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in special],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT * 2, trainer)
    return tokenizer


def _write(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
