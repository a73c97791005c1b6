"""Text: what goes into a model and what comes out of it.

vocab           `tokenizer.ggml.*` of a GGUF file, checked
pretokenizers   how each family of BPE vocabularies cuts words
special         special tokens that are written out in text
sentencepiece   text ↔ ids with merges by score (llama)
bpe             text ↔ ids with merges by rank (gpt2, gemma4)
tokenizer       all of the above as `Tokenizer`
detokenizer     ids one by one → text without half characters
stops           stop strings in text that comes in pieces
template        chat templates
marked          text that knows which of its characters a template wrote
sandbox         Jinja for untrusted templates
meter           limits on what one rendering may cost
tools/          tool calls and reasoning: markers from templates, parser, grammars
costly          template operations whose cost is charged in advance
"""

from __future__ import annotations

from motley.text.detokenizer import DetokenizerStream
from motley.text.meter import TemplateLimits
from motley.text.stops import StopChecker
from motley.text.template import ChatTemplate, template_names
from motley.text.tokenizer import Tokenizer

__all__ = [
    "ChatTemplate",
    "DetokenizerStream",
    "StopChecker",
    "TemplateLimits",
    "Tokenizer",
    "template_names",
]
