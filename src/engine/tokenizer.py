"""Text to token ids and back, whole or one token at a time.

A token need not be whole characters: an emoji may be spread over several. `TextStream` therefore hands out only text
that later tokens cannot change, and what it hands out adds up to exactly what decoding all tokens at once gives.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
REPLACEMENT = "\ufffd"  # what an incomplete or invalid UTF-8 sequence decodes to


class Tokenizer:
    """A model's tokenizer and chat template."""

    def __init__(self, tokenizer: Any, directory: Path) -> None:
        self._tokenizer = tokenizer
        self._directory = directory

    @classmethod
    def load(cls, directory: Path) -> "Tokenizer | None":
        """The tokenizer in `directory`, or None when it has none. Code in the directory is never executed."""
        if not any((directory / name).exists() for name in TOKENIZER_FILES):
            return None
        from transformers import AutoTokenizer

        return cls(AutoTokenizer.from_pretrained(directory, trust_remote_code=False, local_files_only=True), directory)

    def encode(self, text: str) -> list[int]:
        """Token ids of a plain prompt, with the special tokens that the model expects around one."""
        return self._tokenizer.encode(text)

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation in the model's chat template, ending where the assistant's answer begins.

        ValueError when the model has no chat template or its template refuses the messages.
        """
        from jinja2 import TemplateError

        if self._tokenizer.chat_template is None:
            raise ValueError(f"{self._directory} has no chat template; send plain prompts to this model")
        try:
            text = self._tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        except TemplateError as error:
            raise ValueError(f"the chat template of {self._directory} refuses {messages}: {error}") from error
        return self._tokenizer.encode(text, add_special_tokens=False)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of token ids; special tokens are left out."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


class TextStream:
    """The text of one request's output, as it becomes final.

    Pushed texts and the flushed one add up to `tokenizer.decode(all ids)`, cut before the first stop string to be
    completed. Text that may be the beginning of a stop string waits for the next token. Exact for byte-level tokenizers
    (Llama 3, Qwen, SmolLM); where a tokenizer decodes a run of byte tokens as a whole (Llama 2), a run that is invalid
    in part keeps the characters already handed out.
    """

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop = stop
        self._ids: list[int] = []  # tokens since the last text became final, after those that give them context
        self._num_context = 0
        self._held = ""  # final text that may be the beginning of a stop string
        self.stopped = False

    def push(self, token_id: int) -> str:
        """The text that became final with this token; nothing after a stop string."""
        if self.stopped:
            return ""
        self._ids.append(token_id)
        text = self._new_text()
        if not text or text.endswith(REPLACEMENT):
            return ""
        # The newest tokens are context for the next ones: some tokenizers drop a leading space of what they decode.
        del self._ids[:self._num_context]
        self._num_context = len(self._ids)
        return self._release(text)

    def flush(self) -> str:
        """What is still held back; call once, after the last token."""
        if self.stopped:
            return ""
        text = self._release(self._new_text()) + self._held
        self._held, self._ids, self._num_context = "", [], 0
        return text

    def _new_text(self) -> str:
        """The text of the tokens after the context."""
        context = self._tokenizer.decode(self._ids[:self._num_context]) if self._num_context else ""
        return self._tokenizer.decode(self._ids)[len(context):] if self._ids else ""

    def _release(self, text: str) -> str:
        """`text` joins what is held; returns as much as no stop string can begin in, and notes a completed one."""
        text = self._held + text
        found = [(start + len(stop), start) for stop in self._stop if (start := text.find(stop)) >= 0]
        if found:
            # The first to be completed, so that the result does not depend on how text falls into tokens.
            self.stopped, self._held = True, ""
            return text[:min(found)[1]]
        num_held = max((length for stop in self._stop for length in range(1, len(stop))
                        if text.endswith(stop[:length])), default=0)
        self._held = text[len(text) - num_held:]
        return text[:len(text) - num_held]
