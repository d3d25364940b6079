"""The model: where it comes from (source), its shape and forward (decoder, rope) and its weights."""
