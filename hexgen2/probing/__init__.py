"""Measures the devices and links of this machine and writes them as a cluster spec."""
