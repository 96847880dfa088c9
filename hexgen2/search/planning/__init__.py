"""The parallel strategy of each group: its stages and their tensor parallelism (HexGen-2, section 3.3)."""
