"""Binary multiples of a byte, in which sizes are printed."""

MIB = 1 << 20
GIB = 1 << 30
