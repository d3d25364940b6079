"""Text streams: what they hand out is final, adds up to the whole, and ends at a stop string."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models
from transformers import PreTrainedTokenizerFast

from engine.tokenizer import TextStream, Tokenizer
from tiny_models import make_tokenizer

VOCAB_SIZE = 320
MESSAGES = [{"role": "user", "content": "hello"}]
texts = st.text(alphabet=st.sampled_from("ab😀é日 👩\u200d\ufffd"), max_size=12)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(directory)
    loaded = Tokenizer.load(directory)
    assert loaded is not None
    return loaded


class Letters:
    """A tokenizer whose token ids are code points."""

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(map(chr, token_ids))


def stream_of(stream: TextStream, token_ids: Sequence[int]) -> list[str]:
    return [*[stream.push(token_id) for token_id in token_ids], stream.flush()]


@given(token_ids=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=30))
def test_a_stream_of_any_tokens_adds_up_to_decoding_them_at_once(tokenizer: Tokenizer, token_ids: list[int]) -> None:
    assert "".join(stream_of(TextStream(tokenizer), token_ids)) == tokenizer.decode(token_ids)


@given(text=texts)
def test_text_survives_its_characters_being_spread_over_tokens(tokenizer: Tokenizer, text: str) -> None:
    parts = stream_of(TextStream(tokenizer), tokenizer.encode(text))
    assert "".join(parts) == text
    assert "\ufffd" in text or not any("\ufffd" in part for part in parts)


def test_an_emoji_of_several_tokens_is_handed_out_with_its_last_one(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode("🦀")
    assert len(token_ids) > 2
    assert stream_of(TextStream(tokenizer), token_ids) == [*[""] * (len(token_ids) - 1), "🦀", ""]


@given(token_ids=st.lists(st.integers(0, 5), max_size=12))
def test_tokenizers_that_strip_a_leading_space_stream_exactly_too(token_ids: list[int]) -> None:
    vocabulary = {token: i for i, token in enumerate(("<unk>", "</s>", "▁", "▁a", "b", "▁▁"))}
    backend = Backend(models.WordLevel(vocabulary, "<unk>"))
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    llama2_like = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>"), Path("llama2"))
    assert "".join(stream_of(TextStream(llama2_like), token_ids)) == llama2_like.decode(token_ids)


def cut(text: str, stop: tuple[str, ...]) -> tuple[str, bool]:
    """Read letter by letter: the text before the first stop string to be completed, and whether there was one."""
    for end in range(len(text) + 1):
        ending = [word for word in stop if text[:end].endswith(word)]
        if ending:
            return text[:end - max(map(len, ending))], True
    return text, False


@given(text=st.text("ab", max_size=20), stop=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3).map(tuple))
def test_a_stream_is_cut_before_the_first_stop_string_to_be_completed(text: str, stop: tuple[str, ...]) -> None:
    stream = TextStream(Letters(), stop)
    parts = stream_of(stream, [ord(letter) for letter in text])
    assert ("".join(parts), stream.stopped) == cut(text, stop)


@given(stop=st.lists(st.sampled_from(["o", "ox", "fox j", "the ", "😀", "日"]), max_size=3).map(tuple))
def test_where_a_stream_is_cut_does_not_depend_on_how_text_falls_into_tokens(
        tokenizer: Tokenizer, stop: tuple[str, ...]) -> None:
    text = "the quick brown fox jumps 日本語 😀"
    assert "".join(stream_of(TextStream(tokenizer, stop), tokenizer.encode(text))) == cut(text, stop)[0]


def test_text_that_may_begin_a_stop_string_waits() -> None:
    assert stream_of(TextStream(Letters(), ("abc",)), list(map(ord, "xabyab"))) == ["x", "", "", "aby", "", "", "ab"]


def test_the_chat_template_ends_where_the_answer_begins(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode_chat(MESSAGES)
    assert token_ids[0] == 1
    assert tokenizer.decode(token_ids) == "user: helloassistant: "


def test_a_model_without_chat_template_says_so(tmp_path: Path) -> None:
    make_tokenizer(tmp_path, chat_template=None)
    with pytest.raises(ValueError, match="no chat template"):
        Tokenizer.load(tmp_path).encode_chat(MESSAGES)


def test_a_chat_template_that_refuses_the_messages_is_named(tmp_path: Path) -> None:
    make_tokenizer(tmp_path, chat_template="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ValueError, match="roles must alternate"):
        Tokenizer.load(tmp_path).encode_chat(MESSAGES)


def test_a_directory_without_tokenizer_files_has_no_tokenizer(tmp_path: Path) -> None:
    assert Tokenizer.load(tmp_path) is None
