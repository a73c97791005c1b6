"""A file without a tokenizer (`no_vocab`): its model takes token ids, and text is refused with a reason."""

from __future__ import annotations

import pytest

from motley.errors import TokenizerError
from motley.text import Tokenizer


def test_a_file_without_a_vocabulary_has_a_tokenizer_that_refuses_text() -> None:
    tokenizer = Tokenizer.from_metadata({"tokenizer.ggml.model": "no_vocab"})
    with pytest.raises(TokenizerError, match="no tokenizer"):
        tokenizer.encode("Hello")
    assert tokenizer.eog_ids == frozenset()
    assert tokenizer.decode([1, 2, 3]) == ""
    assert tokenizer.token_id("<s>") is None
    assert (tokenizer.token_text(1), tokenizer.token_bytes(1)) == ("", b"")
