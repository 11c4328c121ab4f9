"""Mutated files against the commands that read them: each answers with its result, or with a sentence and a code."""
