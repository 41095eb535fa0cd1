"""The tokenizer: a byte-level BPE of about 2,000 words, learnt from scene captions and emoji names."""

import json
from typing import Any

from tokenizers import trainers
from tokenizers.pre_tokenizers import ByteLevel
from transformers import CLIPTokenizer

from data.embedded import common, scenes
from stages.harness.samples import sample_items

# Characters that end a word. The trainer numbers them in a random order, and the numbers decide between equally
# frequent pairs: two runs gave two vocabularies. Stated here, the result is always the same.
_ENDINGS = "-ltrksayodgpmenhi)'3fxcwb12u,0z(!"


def learn(captions: list[str], vocabulary: int, length: int) -> CLIPTokenizer:
    """A CLIPTokenizer of `vocabulary` words at most that pads and cuts to `length` tokens."""
    # CLIPTokenizer brings CLIP's normaliser and splitting; only the words are learnt here.
    backend = CLIPTokenizer().backend_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<|startoftext|>", "<|endoftext|>", *_bytes(), *(f"{end}</w>" for end in _ENDINGS)],
        end_of_word_suffix="</w>",
        show_progress=False,
    )
    backend.train_from_iterator(captions, trainer)
    model: dict[str, Any] = json.loads(backend.to_str())["model"]
    # Every single byte must also exist as the end of a word, or unknown endings become <|endoftext|>.
    vocab = dict(sorted(model["vocab"].items(), key=lambda item: item[1]))
    for symbol in _bytes():
        vocab.setdefault(f"{symbol}</w>", len(vocab))
    merges = [tuple(merge) for merge in model["merges"]]
    return CLIPTokenizer(vocab=vocab, merges=merges, model_max_length=length)


def captions_of(seed: int, count: int) -> list[str]:
    """The captions of the first `count` scenes, and all emoji names several times so that their words count.

    The names of the sample subset are among them: words that people will use should be words. Nothing else of the
    base ever sees them.
    """
    drawn = [scenes.scene(seed, index)[1] for index in range(count)]
    named = [caption for _, caption in scenes.emoji_items()] + [caption for _, _, caption in sample_items()]
    return drawn + named * 10


def _bytes() -> list[str]:
    return sorted(ByteLevel.alphabet())


def main() -> None:
    """Write data/embedded/tiny-sd/tokenizer."""
    params = common.start()
    section = params["tokenizer"]
    captions = captions_of(params["seed"], section["scenes"])
    tokenizer = learn(captions, section["vocabulary"], section["length"])
    tokenizer.save_pretrained(common.SD / "tokenizer")
    lengths = [len(ids) for ids in tokenizer(sorted(set(captions)))["input_ids"]]
    print(f"{len(tokenizer)} words; the longest of {len(lengths)} captions has {max(lengths)} tokens")


if __name__ == "__main__":
    main()
