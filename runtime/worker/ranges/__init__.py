"""Workers that hold a range of layers (Helix): steps of what arrives on many paths, and where it goes
next."""
