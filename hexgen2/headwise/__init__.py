"""Decode attention divided by heads between devices: what it takes, who takes which heads, what moves."""
