"""Text that is safe to show."""

# What steers a terminal that shows a file; lines and tabs stay
CONTROL = dict.fromkeys({*range(32), *range(127, 160)} - {*b"\n\t"})
