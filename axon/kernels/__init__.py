"""Operations with more than one implementation: one folder each, a plain reference beside every fast path."""
