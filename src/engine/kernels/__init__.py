"""Operations that touch the KV cache. `reference` is the specification; the other backends must agree with it."""
