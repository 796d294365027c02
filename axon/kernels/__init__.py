"""Operations with more than one implementation: one folder each, with a plain reference for every fast path."""
