"""Seeds that make a request poisonous where faults are planted."""

AT_START, IN_SAMPLING, KILLS = 666_001, 666_002, 666_003
