"""Trains the byte-level BPE tokenizer on the corpus and writes it in the format AutoTokenizer reads."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from corpus import training_exchanges
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"]
VOCABULARY = 2048
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def train(texts: list[str]) -> Tokenizer:
    """Digits stay single, so that carrying is the same at every length of a number."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the target checkpoint")
    parser.add_argument("--exchanges", type=int, default=60_000)
    args = parser.parse_args()
    tokenizer = train(
        [text for e in training_exchanges(7, args.exchanges) for text in (e.prompt, e.reply)]
        + ["user\n", "assistant\n", "system\n"] * 1000
    )
    assert tokenizer.get_vocab_size() == VOCABULARY
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(args.out / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<|endoftext|>",
        "eos_token": "<|im_end|>",
        "mask_token": "<|mask|>",
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        "model_max_length": 4096,
        "clean_up_tokenization_spaces": False,
    }
    (args.out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    (args.out / "chat_template.jinja").write_text(CHAT_TEMPLATE)


if __name__ == "__main__":
    main()
