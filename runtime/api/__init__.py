"""The OpenAI API of a launched placement."""
