"""The load generator behind `hexgen2 bench`: sends requests to an OpenAI-compatible server and measures."""
