"""Text that is safe to show."""

# Control characters that could steer a terminal; newlines and tabs are kept
CONTROL = dict.fromkeys({*range(32), *range(127, 160)} - {*b"\n\t"})
